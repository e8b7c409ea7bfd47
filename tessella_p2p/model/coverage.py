"""The coverage walk: which layers of a model a chain of ready stages renders, and which nobody serves.

A chain hands over at exact boundaries: a stage follows another only if its range starts where the other's ends. So the walk goes
over boundaries, not over a union of layers: ``[0, 10)`` and ``[8, 20)`` share layers and still render only a prefix of 10.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tessella_p2p.base.ids import LayerRange

Health = Literal["healthy", "degraded", "incomplete"]


@dataclass(frozen=True, slots=True)
class Coverage:
    """The outcome of a walk.

    Attributes:
        health: ``healthy``: a chain renders the whole model; ``degraded``: there are gaps, with shards above each of them;
            ``incomplete``: the walk runs out before the last layer (no stage at all, or a lost tail).
        covered: what chains render, ascending and disjoint.
        holes: the rest, ascending and disjoint; together with ``covered`` every layer once.
        total_layers: layers of the whole model.
    """

    health: Health
    covered: tuple[LayerRange, ...]
    holes: tuple[LayerRange, ...]
    total_layers: int

    @property
    def num_covered(self) -> int:
        """Layers that chains render."""
        return sum(len(layers) for layers in self.covered)


def walk(ranges: Iterable[LayerRange], total_layers: int) -> Coverage:
    """Walk over the ranges of ready stages, from layer 0 up.

    Args:
        ranges: what ready stages of one model and one recipe serve; replicas may repeat a range. Ranges that go beyond the model
            are left out.
        total_layers: layers of the whole model, at least 1.
    """
    edges = sorted({(r.start, r.end) for r in ranges if r.end <= total_layers})
    covered: list[LayerRange] = []
    holes: list[LayerRange] = []
    position = 0
    while position < total_layers:
        start = min((start for start, _ in edges if start >= position), default=total_layers)
        if start > position:
            holes.append(LayerRange(position, start))
        position = start
        if position < total_layers:
            position = _farthest(edges, start)
            covered.append(LayerRange(start, position))
    if not holes:
        health: Health = "healthy"
    elif holes[-1].end == total_layers:
        health = "incomplete"
    else:
        health = "degraded"
    return Coverage(health, tuple(covered), tuple(holes), total_layers)


def _farthest(edges: list[tuple[int, int]], start: int) -> int:
    """The farthest boundary that chains from ``start`` reach; ``edges`` ascend."""
    reached = {start: True}
    for first, end in edges:
        if first in reached:
            reached[end] = True
    return max(reached)
