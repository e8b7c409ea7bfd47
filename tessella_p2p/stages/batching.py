"""Which ready steps run together in the next turn of a stage (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tessella_p2p.base.limits import MAX_PREFILL_ROWS_PER_TURN, PREFILL_ROWS_BESIDE_DECODES
from tessella_p2p.stages.engine import SessionKey


@dataclass(frozen=True, slots=True)
class Take:
    """Run the next ``rows`` rows of the ready step at ``index``."""

    index: int
    rows: int


def plan_turn(ready: Iterable[tuple[SessionKey, int]], *, decoding: bool = False) -> list[Take]:
    """Choose from steps that wait, oldest first.

    Every session's oldest step is a candidate. All single rows go in: they are cheap, and somebody reads along. Prompt rows fill
    what is left of a bound, first come, first served; a step that does not fit is cut, which leaves no trace in its bits. The
    bound is lower while sessions decode, because they wait for the whole turn.

    Args:
        ready: per step its session and the rows that are left of it.
        decoding: some session decodes, though its next row may still be on its way round the route.
    """
    heads: dict[SessionKey, Take] = {}
    for index, (key, rows) in enumerate(ready):
        heads.setdefault(key, Take(index, rows))
    turn = [take for take in heads.values() if take.rows == 1]
    room = PREFILL_ROWS_BESIDE_DECODES if turn or decoding else MAX_PREFILL_ROWS_PER_TURN
    for take in heads.values():
        if take.rows > 1 and room > 0:
            turn.append(Take(take.index, min(take.rows, room)))
            room -= turn[-1].rows
    return turn
