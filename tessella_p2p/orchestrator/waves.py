"""In which order workers move, so that the mesh stays covered meanwhile (pure).

Moves come in waves. A wave leaves the mesh as covered as it was, also while its workers load: who moves in it has a replica, and of a
range that many hold, no more than a quarter move at a time. Where nobody has a replica, the rest move together: each loads its new
layers beside the old ones, where its claim has room for both, and all of them change over at once. Only workers without that room
leave a hole while they load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.model.coverage import walk
from tessella_p2p.orchestrator.allocator import fits
from tessella_p2p.orchestrator.terms import ModelTerms

_COPIES_PER_MOVE = 4
"""Of so many copies of a range one may move at a time."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker of one mesh, as the planner sees it.

    Attributes:
        layers: what it holds, or loads.
        claim_mb: its claim.
        terms: of the model on its device; None where they are not known, and it stays.
        bound: its own bound on its layers, for which it stays too.
    """

    peer: PeerId
    layers: LayerRange
    claim_mb: int
    terms: ModelTerms | None
    bound: LayerRange | None = None

    @property
    def may_move(self) -> bool:
        """Whether the planner may give it other layers."""
        return self.terms is not None and self.bound is None

    def fits(self, layers: LayerRange) -> bool:
        """Whether it can hold ``layers``."""
        return self.terms is not None and fits(self.terms, layers, self.claim_mb)

    def fits_both(self, one: LayerRange, other: LayerRange) -> bool:
        """Whether it can hold both ranges at a time, each loaded as a stage of its own, in one process."""
        if self.terms is None:
            return False
        terms = self.terms
        used_mb = terms.overhead_mb + sum(
            len(layers) * terms.mem_per_layer_mb + terms.global_tensor_mb(layers) for layers in (one, other)
        )
        return used_mb * 100 <= self.claim_mb * terms.usable_pct

    def cost(self, layers: LayerRange) -> int:
        """The relative time of one step over ``layers``; 0 where that is not known."""
        return 0 if self.terms is None else self.terms.cost(layers)

    def reach(self, start: int, end: int, most: int) -> int:
        """Where the longest range from ``start`` ends that it can hold at no more than the cost ``most``; ``start`` for none."""
        low = start
        while low < end:
            middle = (low + end + 1) // 2
            layers = LayerRange(start, middle)
            if self.fits(layers) and self.cost(layers) <= most:
                low = middle
            else:
                end = middle - 1
        return low


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """One worker's range before and after; ``beside``: its claim has room for both at a time."""

    peer: PeerId
    before: LayerRange
    after: LayerRange
    beside: bool


@dataclass(frozen=True, slots=True)
class Wave:
    """Moves at the same time. ``together``: they change over at once, once those are loaded that can load beside what they serve."""

    moves: tuple[PlannedMove, ...]
    together: bool


def order_moves(total_layers: int, holders: Sequence[Holder], after: Mapping[PeerId, LayerRange]) -> tuple[Wave, ...]:
    """The moves from what ``holders`` hold to ``after``, in waves; see the module's words."""
    left = [
        PlannedMove(holder.peer, holder.layers, after[holder.peer], holder.fits_both(holder.layers, after[holder.peer]))
        for holder in holders
        if after[holder.peer] != holder.layers
    ]
    ranges = Counter(holder.layers for holder in holders)
    waves: list[Wave] = []
    while left:
        safe = _safe_moves(total_layers, ranges, left)
        waves.append(Wave(tuple(safe or left), together=not safe))
        for move in waves[-1].moves:
            _take(ranges, move.before)
            ranges[move.after] += 1
        moved = {move.peer for move in waves[-1].moves}
        left = [move for move in left if move.peer not in moved]
    return tuple(waves)


def _safe_moves(total_layers: int, ranges: Counter[LayerRange], left: Sequence[PlannedMove]) -> list[PlannedMove]:
    """Moves whose layers the others cover while they load, all of them at the same time."""
    rest = ranges.copy()
    gained: Counter[LayerRange] = Counter()
    covered = covered_by(total_layers, ranges)
    moves: list[PlannedMove] = []
    leaving: Counter[LayerRange] = Counter()
    for move in sorted(
        left, key=lambda move: ranges[move.after]
    ):  # what is new first: a whole new chain sets the old one free
        at_a_time = max(1, ranges[move.before] // _COPIES_PER_MOVE)
        if leaving[move.before] == at_a_time or not is_spare(total_layers, rest, move.before, covered):
            continue
        _take(rest, move.before)
        if (
            covered_by(total_layers, [*rest, *gained, move.after]) < covered
        ):  # a range that chains worse may stand in another's way
            rest[move.before] += 1
            continue
        leaving[move.before] += 1
        gained[move.after] += 1
        moves.append(move)
    return moves


def is_spare(total_layers: int, ranges: Counter[LayerRange], layers: LayerRange, covered: int) -> bool:
    """Whether one copy of ``layers`` less leaves ``covered`` layers covered."""
    if ranges[layers] > 1:
        return True
    return covered_by(total_layers, (other for other in ranges if other != layers)) >= covered


def covered_by(total_layers: int, ranges: Iterable[LayerRange]) -> int:
    """How many layers chains of ``ranges`` render."""
    return walk(ranges, total_layers).num_covered


def _take(ranges: Counter[LayerRange], layers: LayerRange) -> None:
    ranges[layers] -= 1
    if not ranges[layers]:
        del ranges[layers]
