"""How a mesh is split anew: who gets which layers, with the least movement (pure).

What is planned, in the order of what counts:

1. coverage: no plan renders fewer layers than the mesh does now;
2. length: a complete chain keeps its number of stages, unless `min_stages` asks for more; another one gets as few as the claims allow;
3. balance: the dearest stage of the chain is as cheap as that many stages can have it;
4. movement: among such splits, the one for which the fewest layers have to be loaded;
5. replicas: whoever the chain does not need holds a copy of one of its ranges, the thinnest first.

Where nothing of this gets better, nobody moves. A worker that bounds its own layers, or whose claim nobody remembers, stays where it
is, and the others cover what it does not.

In which order they move is another question: see ``waves``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import MAX_STAGES
from tessella_p2p.model.coverage import walk
from tessella_p2p.orchestrator.allocator import balanced_cuts
from tessella_p2p.orchestrator.layout import lay_out
from tessella_p2p.orchestrator.terms import ModelTerms
from tessella_p2p.orchestrator.waves import Holder, PlannedMove, Wave, covered_by, is_spare, order_moves

_MAX_ROUNDS = 8
_SPARE_CANDIDATES = 16
"""Workers that are looked at for the chain, beyond as many as it may have stages."""


@dataclass(frozen=True)
class Plan:
    """What is to be done. ``dearest_before`` and ``dearest_after`` are the cost of the dearest stage."""

    waves: tuple[Wave, ...]
    dearest_before: int
    dearest_after: int

    @cached_property
    def moves(self) -> tuple[PlannedMove, ...]:
        """Every move, in order."""
        return tuple(move for wave in self.waves for move in wave.moves)


def plan_rebalance(total_layers: int, holders: Sequence[Holder], *, min_stages: int = 1) -> Plan:
    """The plan for one mesh.

    Args:
        total_layers: of the model.
        holders: everybody who holds layers or loads them, each once, canaries not.
        min_stages: into how many stages the model is to be split at least.
    """
    holders = sorted(holders, key=_place)
    before = {holder.peer: holder.layers for holder in holders}
    after = before
    for _ in range(_MAX_ROUNDS):  # who packs greedily may find more from where it came to
        placed = [replace(holder, layers=after[holder.peer]) for holder in holders]
        targets = _targets(total_layers, sorted(placed, key=_place), min_stages)
        if not _is_better(total_layers, holders, after, targets):
            break
        after = targets
    waves = order_moves(total_layers, holders, after)
    return Plan(waves, _dearest(holders, before), _dearest(holders, after))


def plan_repair(total_layers: int, holders: Sequence[Holder], lost: Iterable[PeerId] = ()) -> Plan:
    """The one move of a replica after which the most layers are covered; an empty plan where there is no hole, or nobody to spare.

    Args:
        total_layers: of the model.
        holders: as for `plan_rebalance`.
        lost: those of them that are not counted on; they are not moved either.
    """
    gone = frozenset(lost)
    holders = sorted((h for h in holders if h.peer not in gone), key=_place)
    ranges = Counter(holder.layers for holder in holders)
    coverage = walk(ranges, total_layers)
    best: tuple[int, PlannedMove] | None = None
    for hole in coverage.holes:
        for holder in holders:
            if not holder.may_move or not is_spare(total_layers, ranges, holder.layers, coverage.num_covered):
                continue
            end = holder.reach(hole.start, hole.end, holder.cost(hole))
            if end == hole.start:
                continue
            filled = LayerRange(hole.start, end)
            covered = covered_by(total_layers, ranges - Counter([holder.layers]) + Counter([filled]))
            if covered > (coverage.num_covered if best is None else best[0]):
                both = holder.fits_both(holder.layers, filled)
                best = (covered, PlannedMove(holder.peer, holder.layers, filled, both))
    current = {holder.peer: holder.layers for holder in holders}
    dearest = _dearest(holders, current)
    if best is None:
        return Plan((), dearest, dearest)
    after = _dearest(holders, {**current, best[1].peer: best[1].after})
    return Plan((Wave((best[1],), together=False),), dearest, after)


def _place(holder: Holder) -> tuple[LayerRange, PeerId]:
    return holder.layers, holder.peer


# ---- Who gets what ----


def _targets(total_layers: int, holders: Sequence[Holder], min_stages: int) -> dict[PeerId, LayerRange]:
    """The range that everybody is to hold in the end; what it holds now where the mesh cannot be complete."""
    current = {holder.peer: holder.layers for holder in holders}
    movable = [holder for holder in holders if holder.may_move]
    fixed = Counter(holder.layers for holder in holders if not holder.may_move)
    scopes = walk(fixed, total_layers).holes
    if not movable or not scopes:
        return current
    chain = _shortest_chain(holders, total_layers)
    parts = _split(scopes, movable, chain, max(1, min_stages - len(fixed)))
    if parts is None:
        return current
    targets = {**current, **{holder.peer: part for holder, part in parts}}
    slots = [part for _, part in parts]
    chosen = {holder.peer for holder, _ in parts}
    copies = {slot: 1 + sum(n for layers, n in fixed.items() if layers.contains(slot)) for slot in slots}
    _spread(targets, [holder for holder in movable if holder.peer not in chosen], copies)
    _swap(targets, movable)
    return targets


def _split(
    scopes: Sequence[LayerRange], movable: Sequence[Holder], chain: Sequence[Holder], min_stages: int
) -> list[tuple[Holder, LayerRange]] | None:
    """The stages that cover ``scopes``, and whose they are; None where the claims do not reach.

    Args:
        scopes: what is to be covered.
        movable: who may be part of it.
        chain: those that render the whole model now, as few as possible; nobody where it is not rendered.
        min_stages: how many stages it takes at least.
    """
    most = max(_most_cost(terms, min_stages) for terms in {holder.terms for holder in movable} if terms is not None)
    own = {holder.peer for holder in chain}
    length = sum(holder.may_move for holder in chain)
    length = max(length, min_stages) if length else MAX_STAGES
    found = _pack(scopes, _candidates(movable, own, scopes, most, length), most, length)
    if found is None:  # with as few stages as do it, each as long as its claim allows
        most, length = max(holder.cost(LayerRange(0, scopes[-1].end)) for holder in movable), MAX_STAGES
        found = _pack(scopes, _candidates(movable, own, scopes, most, length), most, length)
        if found is None:
            return None
    if length == MAX_STAGES:
        length = max(len(found), min_stages)
    candidates = _candidates(movable, own, scopes, most, length)
    low = 1
    while low < most:
        middle = (low + most) // 2
        packed = _pack(scopes, _by_reach(candidates, own, scopes, middle), middle, length)
        if packed is None:
            low = middle + 1
        else:
            found, most = packed, middle
    members = [holder for holder, _ in found]
    in_place = sorted(members, key=_place)
    return lay_out(scopes, in_place, most) or lay_out(scopes, members, most) or found


def _most_cost(terms: ModelTerms, parts: int) -> int:
    cuts = balanced_cuts(terms, parts)
    return max(terms.cost(LayerRange(a, b)) for a, b in pairwise(cuts))


def _candidates(
    movable: Sequence[Holder], own: set[PeerId], scopes: Sequence[LayerRange], most: int, length: int
) -> list[Holder]:
    """Those of whom a chain of ``length`` stages may be made: who reaches the farthest; of equals, who is in it now."""
    return _by_reach(movable, own, scopes, most)[: length + _SPARE_CANDIDATES]


def _by_reach(holders: Iterable[Holder], own: set[PeerId], scopes: Sequence[LayerRange], most: int) -> list[Holder]:
    # Where a range neither begins nor ends the model it is a question of layers alone: so is who can take the most of them.
    longest = max(scopes, key=len)
    middle = longest.start + (1 if longest.start == 0 and len(longest) > 1 else 0)
    return sorted(
        holders,
        key=lambda holder: (
            -holder.reach(middle, longest.end, most),
            holder.peer not in own,
            holder.layers,
            holder.peer,
        ),
    )


def _pack(
    scopes: Sequence[LayerRange], candidates: Sequence[Holder], most: int, length: int
) -> list[tuple[Holder, LayerRange]] | None:
    """Cover ``scopes`` from the left with up to ``length`` stages of a cost of ``most``; None where that does not do.

    Each stage goes to whoever reaches the farthest; the last one of a scope to the least who can end it.
    """
    left = list(candidates)
    parts: list[tuple[Holder, LayerRange]] = []
    for scope in scopes:
        position = scope.start
        while position < scope.end:
            reaches = [(holder.reach(position, scope.end, most), index) for index, holder in enumerate(left)]
            ending = [index for end, index in reaches if end == scope.end]
            end, index = (
                (scope.end, ending[-1]) if ending else max(reaches, key=lambda r: (r[0], -r[1]), default=(0, 0))
            )
            if end <= position or len(parts) == length:
                return None
            parts.append((left.pop(index), LayerRange(position, end)))
            position = end
    return parts


def _shortest_chain(holders: Sequence[Holder], total_layers: int) -> list[Holder]:
    """As few holders as possible that render the whole model; nobody where it is not rendered."""
    best: dict[int, list[Holder]] = {0: []}
    for holder in holders:  # by start, so every way to a start is known before it is left
        way = best.get(holder.layers.start)
        known = best.get(holder.layers.end)
        if way is not None and (known is None or len(way) + 1 < len(known)):
            best[holder.layers.end] = [*way, holder]
    return best.get(total_layers, [])


def _spread(targets: dict[PeerId, LayerRange], extras: Sequence[Holder], copies: dict[LayerRange, int]) -> None:
    """Give everybody the chain does not need a copy of one of its ranges: those on one stay, the others go where it is thinnest."""
    at: dict[LayerRange, list[Holder]] = {slot: [] for slot in copies}
    for holder in extras:
        if holder.layers in at:
            at[holder.layers].append(holder)
            copies[holder.layers] += 1
    for holder in extras:
        fitting = [slot for slot in copies if holder.layers not in at and holder.fits(slot)]
        if fitting:
            thinnest = min(fitting, key=lambda slot: (copies[slot], slot))
            at[thinnest].append(holder)
            targets[holder.peer] = thinnest
            copies[thinnest] += 1
    while step := _levelling(at, copies):
        holder, origin, thinnest = step
        at[origin].remove(holder)
        at[thinnest].append(holder)
        targets[holder.peer] = thinnest
        copies[origin] -= 1
        copies[thinnest] += 1


def _levelling(
    at: Mapping[LayerRange, Sequence[Holder]], copies: Mapping[LayerRange, int]
) -> tuple[Holder, LayerRange, LayerRange] | None:
    """A copy that is worth more elsewhere: whose range has two more of them."""
    for thinnest in sorted(copies, key=lambda slot: (copies[slot], slot)):
        for origin in sorted(copies, key=lambda slot: (-copies[slot], slot)):
            if copies[origin] - copies[thinnest] < 2:
                break
            for holder in at[origin]:
                if holder.fits(thinnest):
                    return holder, origin, thinnest
    return None


def _swap(targets: dict[PeerId, LayerRange], movable: Sequence[Holder]) -> None:
    """Let whoever holds a range already be the one that is to hold it, where the other can take its part."""
    newcomers: dict[LayerRange, list[Holder]] = {}
    for holder in movable:
        if targets[holder.peer] != holder.layers:
            newcomers.setdefault(targets[holder.peer], []).append(holder)
    for holder in movable:
        target = targets[holder.peer]
        for other in newcomers.get(holder.layers, []) if target != holder.layers else []:
            if other.fits(target):
                targets[holder.peer], targets[other.peer] = holder.layers, target
                newcomers[holder.layers].remove(other)
                newcomers[target] = [other if one is holder else one for one in newcomers[target]]
                break


def _is_better(
    total_layers: int,
    holders: Sequence[Holder],
    before: Mapping[PeerId, LayerRange],
    after: Mapping[PeerId, LayerRange],
) -> bool:
    def rank(ranges: Mapping[PeerId, LayerRange]) -> tuple[int, int, int]:
        return (
            covered_by(total_layers, ranges.values()),
            -_dearest(holders, ranges),
            _thinnest(ranges.values(), total_layers),
        )

    return rank(after) > rank(before)


def _thinnest(ranges: Iterable[LayerRange], total_layers: int) -> int:
    """How many copies there are of the layer that has the fewest, and is covered."""
    changes: Counter[int] = Counter()
    for layers in ranges:
        changes[layers.start] += 1
        changes[layers.end] -= 1
    copies, least = 0, 0
    for edge in sorted(edge for edge in changes if edge < total_layers):
        copies += changes[edge]
        least = copies if least == 0 or 0 < copies < least else least
    return least


def _dearest(holders: Sequence[Holder], ranges: Mapping[PeerId, LayerRange]) -> int:
    return max((holder.cost(ranges[holder.peer]) for holder in holders), default=0)
