"""One moment of the mesh as the dashboard draws it; pure.

``GET /events`` sends a picture each second: which stages hold which layers, where nobody does, which requests are on their way over
which hops, and how many tokens a second came of it. Everything is bounded, whatever the size of the mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import (
    MAX_PICTURED_ENDED,
    MAX_PICTURED_FLIGHTS,
    MAX_PICTURED_RECIPES,
    MAX_PICTURED_STAGES,
    MICRO_PER_CREDIT,
    PICTURED_RATE_S,
)
from tessella_p2p.bridge.node_view import NodeStatus, PeerStatus, PeerView
from tessella_p2p.entry.api import Caller, HopReport
from tessella_p2p.entry.readiness import ModelReadiness
from tessella_p2p.entry.requests import RequestRecord
from tessella_p2p.model.coverage import walk

_MOMENT_S = 0.001
"""Tokens that came closer than this came at once: a clock says no more."""
FlightState = Literal["waiting", "reading", "answering", "ended"]
_SERVING: frozenset[PeerStatus] = frozenset({"Healthy", "Saturated"})
"""What holds its layers for new sessions: a saturated stage makes them wait, and is no hole."""
_BY_USE: tuple[PeerStatus, ...] = ("Healthy", "Saturated", "Draining", "PendingLoad", "Stale", "Offline")
_RATE_NOW_S = 3
"""The rate of now is the mean over so many seconds: one second alone jumps with the phase of the steps."""


@dataclass(frozen=True, slots=True)
class Flight:
    """One request, as far as it may be shown: its way and its counts, never its text.

    Attributes:
        caller: who asked; nobody else is told the id.
        state: ``waiting`` for a place, ``reading`` the prompt, ``answering``, ``ended``.
        num_tokens: that were sampled so far.
        reroutes: how often it went on over another route.
        age_s: since the request came.
        first_token_age_s: since its first token; None without one. ``last_token_age_s``: since its newest one.
        end: ``stop``, ``length``, ``cancelled`` or an error's code; None while it lasts.
    """

    request_id: str
    caller: str
    tier: str | None
    state: FlightState
    num_tokens: int
    reroutes: int
    age_s: float
    route: tuple[HopReport, ...] = ()
    first_token_age_s: float | None = None
    last_token_age_s: float | None = None
    end: str | None = None


@dataclass(frozen=True, slots=True)
class _Stage:
    peer_id: PeerId
    layers: LayerRange
    status: PeerStatus
    recipe: str
    queue_depth: int
    canary: bool
    own: bool

    @property
    def serves(self) -> bool:
        return self.status in _SERVING and not self.canary


def flight_of(record: RequestRecord, now_ms: int) -> Flight:
    """What is shown of a request; ``now_ms`` in Unix milliseconds."""
    age_s = (now_ms - record.began_at_ms) / 1000
    state: FlightState = "answering" if record.num_tokens else "reading" if record.placed_ms is not None else "waiting"
    return Flight(
        request_id=record.request_id,
        caller=record.caller,
        tier=record.tier,
        state=state if record.end is None else "ended",
        num_tokens=record.num_tokens,
        reroutes=max(len(record.epochs) - 1, 0),
        age_s=age_s,
        route=record.epochs[-1].route if record.epochs else (),
        first_token_age_s=None if record.first_token_ms is None else age_s - record.first_token_ms / 1000,
        last_token_age_s=None if record.last_token_ms is None else age_s - record.last_token_ms / 1000,
        end=record.end,
    )


def mesh_json(
    status: NodeStatus, peers: Sequence[PeerView], models: Sequence[str], flights: Sequence[Flight], now_ms: int
) -> dict[str, Any]:
    """What ``GET /events`` sends to everybody; `flights_json` is what is told to each caller.

    Args:
        status: of this node.
        peers: every peer that the node knows; those of other models are left out.
        models: that this entry answers for right now.
        flights: requests of the last minutes.
        now_ms: Unix milliseconds.
    """
    stages = _stages_of(status, peers)
    total = status.total_layers or max((stage.layers.end for stage in stages), default=0)
    rates = token_rates(flights)
    return {
        "at_ms": now_ms,
        "node": {
            "peer_id": status.peer_id,
            "state": status.state,
            "layer_ranges": [layers.as_tuple() for layers in status.layer_ranges],
            "device": asdict(status.device),
            "sessions": status.queue_depth,
            "max_sessions": status.max_concurrent_hop_bodies,
            "stalls": status.event_loop.stalls,
            "longest_stall_ms": status.event_loop.longest_ms,
        },
        "model": {"id": status.model, "total_layers": total, "readiness": asdict(_readiness(status, models))},
        "coverage": _coverages(stages, total, status.recipe),
        "stages": [_stage_json(stage) for stage in _drawn(stages)],
        "num_stages": len(stages),
        "statuses": Counter(stage.status for stage in stages),
        "tokens_per_s": {
            "now": round(sum(rates[:_RATE_NOW_S]) / _RATE_NOW_S, 2),
            "history": [round(rate, 2) for rate in reversed(rates)],
        },
        "credits": None
        if status.credits is None
        else {"credits": status.credits.micro_credits / MICRO_PER_CREDIT, "tier": status.credits.tier},
        "proofs": asdict(status.proofs),
        "orchestrator": asdict(status.orchestrator),
    }


def flights_json(flights: Sequence[Flight], caller: Caller) -> dict[str, Any]:
    """What ``GET /events`` sends to ``caller`` of the requests: in flight oldest first, ended newest first, as given."""
    in_flight = [flight for flight in flights if flight.end is None]
    ended = [flight for flight in flights if flight.end is not None]
    return {
        "flights": [_flight_json(flight, caller) for flight in in_flight[:MAX_PICTURED_FLIGHTS]],
        "num_flights": len(in_flight),
        "ended": [_flight_json(flight, caller) for flight in ended[:MAX_PICTURED_ENDED]],
    }


def token_rates(flights: Iterable[Flight], seconds: int = PICTURED_RATE_S) -> list[float]:
    """Tokens of each of the last ``seconds`` seconds, the newest first.

    A request's tokens are spread evenly between its first and its newest one, so nothing has to watch while nobody looks, and the
    sum over all seconds is the number of tokens that they saw.
    """
    rates = [0.0] * seconds
    for flight in flights:
        first, last = flight.first_token_age_s, flight.last_token_age_s
        if first is None or last is None or flight.num_tokens < 1:
            continue
        first, last = max(first, 0.0), max(last, 0.0)
        span_s = first - last
        if span_s < _MOMENT_S or flight.num_tokens == 1:
            if last < seconds:
                rates[int(last)] += flight.num_tokens
            continue
        per_s = flight.num_tokens / span_s
        for second in range(int(last), min(int(first) + 1, seconds)):
            rates[second] += per_s * (min(first, second + 1) - max(last, second))
    return rates


def _readiness(status: NodeStatus, models: Sequence[str]) -> ModelReadiness:
    """What the entry knows; a node that does not tell is taken at the word of its list of models."""
    if status.readiness is not None:
        return status.readiness
    return ModelReadiness("ready" if status.model in models else "unproven")


def _stages_of(status: NodeStatus, peers: Sequence[PeerView]) -> list[_Stage]:
    """The stages of the node's model; its own too, before its record has come round."""
    stages = [
        _Stage(
            peer.peer_id,
            layers,
            peer.status,
            peer.recipe,
            peer.queue_depth,
            peer.canary,
            own=peer.peer_id == status.peer_id,
        )
        for peer in peers
        if peer.model_id == status.model
        for layers in peer.layer_ranges
    ]
    if not any(stage.own for stage in stages):
        own_status: PeerStatus = "Healthy" if status.state == "ready" else "PendingLoad"
        stages += [
            _Stage(status.peer_id, layers, own_status, status.recipe or "", status.queue_depth, canary=False, own=True)
            for layers in status.layer_ranges
        ]
    return stages


def _drawn(stages: Iterable[_Stage]) -> list[_Stage]:
    """As many as are drawn, by their use to the mesh: what is left out serves least, or is one of the most held stretches."""
    by_use = sorted(stages, key=_use)
    replicas: Counter[tuple[bool, LayerRange]] = Counter()
    ranked = []
    for stage in by_use:
        replicas[stage.serves, stage.layers] += 1
        ranked.append((not stage.serves, replicas[stage.serves, stage.layers], stage))
    ranked.sort(key=lambda each: each[:2])
    return sorted((stage for _, _, stage in ranked[:MAX_PICTURED_STAGES]), key=_use)


def _use(stage: _Stage) -> tuple[object, ...]:
    return (not stage.serves, _BY_USE.index(stage.status), stage.layers, stage.peer_id)


def _coverages(stages: Sequence[_Stage], total: int, own_recipe: str | None) -> list[dict[str, Any]]:
    """For each recipe, since no route mixes them, who holds what; the most complete first, and this node's own among equals."""
    if total < 1:
        return []
    recipes = {stage.recipe for stage in stages if stage.serves} or {own_recipe or ""}
    found = []
    for recipe in sorted(recipes):
        ranges = [stage.layers for stage in stages if stage.serves and stage.recipe == recipe]
        coverage = walk(ranges, total)
        drawn = {
            "recipe": recipe,
            "health": coverage.health,
            "num_stages": len(ranges),
            "holes": [hole.as_tuple() for hole in coverage.holes],
            "segments": _segments(ranges, total),
        }
        found.append(((-coverage.num_covered, recipe != own_recipe, recipe), drawn))
    return [drawn for _, drawn in sorted(found, key=lambda each: each[0])][:MAX_PICTURED_RECIPES]


def _segments(ranges: Sequence[LayerRange], total: int) -> list[dict[str, Any]]:
    """How many replicas hold each stretch of layers, from 0 to ``total``."""
    changes: dict[int, int] = {0: 0, total: 0}
    for layers in ranges:
        if layers.end <= total:
            changes[layers.start] = changes.get(layers.start, 0) + 1
            changes[layers.end] = changes.get(layers.end, 0) - 1
    edges = sorted(changes)
    segments, replicas = [], 0
    for start, end in pairwise(edges):
        replicas += changes[start]
        segments.append({"layers": (start, end), "replicas": replicas})
    return segments


def _stage_json(stage: _Stage) -> dict[str, Any]:
    return {
        "peer_id": stage.peer_id,
        "layers": stage.layers.as_tuple(),
        "status": stage.status,
        "recipe": stage.recipe,
        "queue_depth": stage.queue_depth,
        "canary": stage.canary,
        "own": stage.own,
    }


def _flight_json(flight: Flight, caller: Caller) -> dict[str, Any]:
    span_s = (flight.first_token_age_s or 0.0) - (flight.last_token_age_s or 0.0)
    return {
        "request_id": flight.request_id if flight.caller == caller.name else None,
        "tier": flight.tier,
        "state": flight.state,
        "tokens": flight.num_tokens,
        "tokens_per_s": round((flight.num_tokens - 1) / span_s, 2) if span_s > 0 else None,
        "reroutes": flight.reroutes,
        "age_s": round(flight.age_s, 2),
        "end": flight.end,
        "route": [
            {
                "peer_id": hop.peer_id,
                "layers": hop.layers.as_tuple(),
                "hop_ms": hop.hop_ms,
                "compute_ms": hop.compute_ms,
            }
            for hop in flight.route
        ],
    }
