"""Which stages serve a session (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tessella_p2p.base.errors import NoRoute
from tessella_p2p.base.ids import PeerId
from tessella_p2p.dht.stage_records import VerifiedStage
from tessella_p2p.model.coverage import walk

_STAGE_COST = 1.0
"""A stage more costs a hop more; in units of one queued session."""
_SATURATED_COST = 1e6
"""A saturated stage most likely refuses: it is asked only where nobody else has its layers."""


@dataclass(frozen=True, slots=True)
class Route:
    """Serving stages of one recipe whose ranges follow each other from layer 0 to the last."""

    stages: tuple[VerifiedStage, ...]

    @property
    def recipe(self) -> str:
        """The one recipe of every stage."""
        return self.stages[0].recipe

    @property
    def max_positions(self) -> int:
        """Positions that every stage can hold."""
        return min(stage.max_positions for stage in self.stages)


def choose_route(
    stages: Iterable[VerifiedStage], total_layers: int, penalties: Mapping[PeerId, float], own: PeerId
) -> Route | None:
    """The cheapest chain over ``[0, total_layers)``, or None when there is none.

    The cost of a stage is its queue, one for the hop, and its penalty (recent failures); the entry's own stage costs no hop. A
    saturated stage is the last resort, a canary none at all. A peer serves one stage of a route. Ties go to the smaller peer id, so
    that the choice is a function of its arguments.
    """
    serving = sorted((s for s in stages if is_serving(s)), key=lambda s: (s.layers.start, s.peer_id))
    best: dict[int, tuple[float, tuple[str, ...], tuple[VerifiedStage, ...]]] = {0: (0.0, (), ())}
    for stage in serving:  # by start, so every way to a start is known before it is left
        so_far = best.get(stage.layers.start)
        if so_far is None or stage.layers.end > total_layers or any(s.peer_id == stage.peer_id for s in so_far[2]):
            continue
        hop = 0.0 if stage.peer_id == own else _STAGE_COST
        saturated = _SATURATED_COST if stage.state == "saturated" else 0.0
        cost = so_far[0] + hop + stage.queue_depth + penalties.get(stage.peer_id, 0.0) + saturated
        way = (cost, (*so_far[1], stage.peer_id), (*so_far[2], stage))
        known = best.get(stage.layers.end)
        if known is None or way[:2] < known[:2]:
            best[stage.layers.end] = way
    found = best.get(total_layers)
    return Route(found[2]) if found is not None else None


def no_route(model_id: str, stages: Iterable[VerifiedStage], total_layers: int) -> NoRoute:
    """The error that says which layers are missing."""
    coverage = walk((stage.layers for stage in stages if is_serving(stage)), total_layers)
    if coverage.holes:
        words = ", ".join(str(hole) for hole in coverage.holes)
        holes = tuple(hole.as_tuple() for hole in coverage.holes)
        return NoRoute(
            f"no ready chain renders layers {words} of {model_id}; try again when a worker has joined", holes
        )
    return NoRoute(f"every layer of {model_id} is served, but by peers that failed just now; try again soon")


def is_serving(stage: VerifiedStage) -> bool:
    """Whether a route may go over a stage."""
    return stage.state != "draining" and not stage.canary
