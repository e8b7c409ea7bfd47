"""Where the cuts of a chain are, so that the fewest layers have to be loaded (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

from tessella_p2p.base.ids import LayerRange

_MAX_POSITIONS = 256
"""Up to so many layers every cut is looked at; beyond, those that are cuts now, and those that full stages give."""


class Part(Protocol):
    """Who may hold a range."""

    @property
    def layers(self) -> LayerRange:
        """What it holds now."""
        ...

    def reach(self, start: int, end: int, most: int) -> int:
        """See `waves.Holder.reach`."""
        ...


PartT = TypeVar("PartT", bound=Part)
_Way = tuple[int, int, tuple[int, ...]]
"""Layers to load, workers that move, and the ends of the ranges so far; the least is the best."""


def lay_out(scopes: Sequence[LayerRange], members: Sequence[PartT], most: int) -> list[tuple[PartT, LayerRange]] | None:
    """One range for each of ``members``, in their order, that cover ``scopes`` at a cost of no more than ``most`` each.

    Of all such splits the one that has the fewest layers to be loaded, then the fewest workers to move.

    Args:
        scopes: ascending and disjoint; no range crosses from one into the next.
        members: each gets exactly one range.
        most: the bound on a range's cost.

    Returns:
        None where the order, the claims or the bound do not allow it.
    """
    ends = _ends(scopes, members, most)
    ways: dict[int, _Way] = {scopes[0].start: (0, 0, ())}
    for member in members:
        following: dict[int, _Way] = {}
        for start, (loaded, moved, path) in ways.items():
            scope = next(scope for scope in scopes if scope.start <= start < scope.end)
            reach = member.reach(start, scope.end, most)
            for end in ends:
                if not start < end <= reach:
                    continue
                part = LayerRange(start, end)
                new = len(part) - _overlap(part, member.layers)
                way = (loaded + new, moved + (part != member.layers), (*path, end))
                position = _next_start(scopes, end)
                if position not in following or way < following[position]:
                    following[position] = way
        ways = {position: way for position, way in following.items() if position < scopes[-1].end}
        done = following.get(scopes[-1].end)
        if done is not None and member is members[-1]:
            return list(zip(members, _ranges(scopes, done[2]), strict=True))
    return None


def _ends(scopes: Sequence[LayerRange], members: Sequence[Part], most: int) -> list[int]:
    """Where a range may end."""
    if scopes[-1].end <= _MAX_POSITIONS:
        return [end for scope in scopes for end in range(scope.start + 1, scope.end + 1)]
    found = {edge for member in members for edge in (member.layers.start, member.layers.end)}
    position = scopes[0].start
    for index, member in enumerate(members):
        scope = next((scope for scope in scopes if scope.start <= position < scope.end), None)
        if scope is None:
            break
        even = position + -(-(scope.end - position) // (len(members) - index))
        found.update((even, member.reach(position, scope.end, most)))
        position = _next_start(scopes, max(position + 1, member.reach(position, scope.end, most)))
    found.update(scope.end for scope in scopes)
    return sorted(end for end in found if any(scope.start < end <= scope.end for scope in scopes))


def _next_start(scopes: Sequence[LayerRange], end: int) -> int:
    """Where the range after one that ends at ``end`` starts."""
    for scope, following in pairwise(scopes):
        if scope.end == end:
            return following.start
    return end


def _ranges(scopes: Sequence[LayerRange], ends: Sequence[int]) -> list[LayerRange]:
    start, found = scopes[0].start, []
    for end in ends:
        found.append(LayerRange(start, end))
        start = _next_start(scopes, end)
    return found


def _overlap(one: LayerRange, other: LayerRange) -> int:
    return max(0, min(one.end, other.end) - max(one.start, other.start))
