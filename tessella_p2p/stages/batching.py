"""Which ready steps run together in the next turn of a stage (pure).

Order. A step that arrives in turn ``t`` is due in turn ``t + SLACK_TURNS[tier]``; who is due first goes first, then who came first. So
of two that came together the higher tier goes first, and nobody starves: once a step is due, no newer one gets before it, and what is
before it is at most one step of each other session. With room for everybody the order changes nothing.

Groups. What a chain of ``k`` stages gains over one machine depends on how its ``n`` decoding sessions are cut into turns. A
discrete-event simulation (a turn of ``b`` rows takes ``2.7 + 2.26 b`` ms, an assumption; hops of 0.25 to 1 ms;
frames of one turn 0.05 ms apart; two stages) gave, as tokens per second over the same sessions on one machine:

    policy                                               1      3      8     16 sessions
    run what is ready                                  0.93   1.27   1.59   1.76
    at most ceil(n / k), never wait                    0.93   1.27   1.59   1.76
    at most ceil(n / k), 1 ms for floor(n / k)         0.93   1.27   1.69   1.81
    … and one of the sessions pauses 30 ms a token      –     1.18   1.48   1.75   (never wait: 1.54 for 8)
    1 ms for whoever shared the turn before             0.93   1.25   1.59   1.76

The cap alone does little once both stages are busy, because rows that wait coalesce; but it keeps a burst (all sessions come out of
their prompts at once) from going round as one group. A short wait for a full group mends what staggered frames break: else the first
frame of a group that meets an idle stage goes on alone, for ever. Below ``2 k`` sessions floor(n / k) is 1, and nobody waits.

Prompt rows beside decodes cost those the time of `PREFILL_ROWS_BESIDE_DECODES` rows a turn; leaving them out would starve prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tessella_p2p.base.limits import MAX_PREFILL_ROWS_PER_TURN, PREFILL_ROWS_BESIDE_DECODES
from tessella_p2p.stages.engine import SessionKey
from tessella_p2p.stages.sessions import PAGE_POSITIONS
from tessella_p2p.wire.messages import Tier

SLACK_TURNS: Final[Mapping[Tier, int]] = {"VIP": 0, "Standard": 4, "Leech": 16}
"""How many turns after its arrival a step is due."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A step that waits.

    Attributes:
        session: whose it is.
        rows: that are left of it.
        tier: of its session.
        arrived: the number of the turn in which it came.
    """

    session: SessionKey
    rows: int
    tier: Tier = "Leech"
    arrived: int = 0

    @property
    def due(self) -> int:
        """The turn from which on nothing newer gets before it."""
        return self.arrived + SLACK_TURNS[self.tier]


@dataclass(frozen=True, slots=True)
class Take:
    """Run the next ``rows`` rows of the waiting step at ``index``."""

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


def singles_worth_waiting_for(stages_of_decoding: Collection[int]) -> int:
    """With how many single rows a turn is full enough to begin at once; see the module's text.

    Args:
        stages_of_decoding: as for `singles_per_turn`.
    """
    num_stages = max(stages_of_decoding, default=1)
    return 1 if num_stages == 1 else max(1, len(stages_of_decoding) // num_stages)


def plan_turn(ready: Iterable[Waiting], *, decoding: bool = False, max_singles: int | None = None) -> list[Take]:
    """Choose from the steps that wait, given in the order of their arrival.

    Every session's oldest step is a candidate. Single rows go in first: they are cheap, and somebody reads along. Prompt rows fill
    what is left of a bound; a step that does not fit is cut to whole pages of KV, so that the rest of it may still be in the prefix
    cache. A cut leaves no trace in the bits. The bound is lower while sessions decode, because they wait for the whole turn.

    A single row is taken at most ``SLACK_TURNS[tier] + (sessions - 1) // max_singles`` turns after it became its session's oldest;
    the first row of a prompt ``SLACK_TURNS[tier]`` turns after, and one more for every `PREFILL_ROWS_BESIDE_DECODES` rows, or part of
    them, in each of the others' steps.

    Args:
        ready: the steps.
        decoding: some session decodes, though its next row may still be on its way round the route.
        max_singles: see `singles_per_turn`; None for no bound.
    """
    heads: dict[SessionKey, tuple[int, int, int]] = {}
    for index, step in enumerate(ready):
        heads.setdefault(step.session, (step.due, index, step.rows))
    in_order = [Take(index, rows) for _, index, rows in sorted(heads.values())]
    turn = [take for take in in_order if take.rows == 1][:max_singles]
    room = PREFILL_ROWS_BESIDE_DECODES if turn or decoding else MAX_PREFILL_ROWS_PER_TURN
    for take in in_order:
        rows = take.rows if take.rows <= room else room - room % PAGE_POSITIONS
        if take.rows > 1 and rows > 0:
            turn.append(Take(take.index, rows))
            room -= rows
    return turn
