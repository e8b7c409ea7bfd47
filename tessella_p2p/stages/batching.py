"""Which ready steps run together in the next turn of a stage (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tessella_p2p.base.limits import MAX_PREFILL_ROWS_PER_TURN, PREFILL_ROWS_BESIDE_DECODES
from tessella_p2p.stages.engine import SessionKey


@dataclass(frozen=True, slots=True)
class Take:
    """Run the next ``rows`` rows of the ready step at ``index``."""

    index: int
    rows: int


def singles_per_turn(stages_of_decoding: Collection[int]) -> int:
    """How many single rows a turn may have, so that the stages of a route work at the same time.

    A turn with the rows of every session would send all of them on together, and this stage would be idle until they have been
    round the route. So the sessions that decode are cut into as many groups as the longest route has stages.

    Args:
        stages_of_decoding: for each session that decodes, how many stages its route has.
    """
    return max(1, -(-len(stages_of_decoding) // max(stages_of_decoding, default=1)))


def plan_turn(
    ready: Iterable[tuple[SessionKey, int]], *, decoding: bool = False, max_singles: int | None = None
) -> list[Take]:
    """Choose from steps that wait, oldest first.

    Every session's oldest step is a candidate. Single rows go in first: they are cheap, and somebody reads along. Prompt rows fill
    what is left of a bound, first come, first served; a step that does not fit is cut, which leaves no trace in its bits. The
    bound is lower while sessions decode, because they wait for the whole turn.

    Args:
        ready: per step its session and the rows that are left of it.
        decoding: some session decodes, though its next row may still be on its way round the route.
        max_singles: see `singles_per_turn`; None for no bound.
    """
    heads: dict[SessionKey, Take] = {}
    for index, (key, rows) in enumerate(ready):
        heads.setdefault(key, Take(index, rows))
    turn = [take for take in heads.values() if take.rows == 1][:max_singles]
    room = PREFILL_ROWS_BESIDE_DECODES if turn or decoding else MAX_PREFILL_ROWS_PER_TURN
    for take in heads.values():
        if take.rows > 1 and room > 0:
            turn.append(Take(take.index, min(take.rows, room)))
            room -= turn[-1].rows
    return turn
