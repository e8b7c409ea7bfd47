"""What ``/status``, ``/peers`` and ``/metrics`` ask of the node: a snapshot, taken without waiting. The node floor implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import MICRO_PER_CREDIT
from tessella_p2p.bridge.stage_view import LoopView, StageView, loop_json, stage_json
from tessella_p2p.entry.readiness import ModelReadiness

PeerStatus = Literal["PendingLoad", "Healthy", "Draining", "Saturated", "Stale", "Offline"]
"""Clients use peers that are Healthy."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the orchestrator granted, and by which lease."""

    model_repo: str
    layer_ranges: tuple[LayerRange, ...]
    serial: int
    expires_at_ms: int


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """The device that computes. ``oom_streak`` counts the engine's failures within ``streak_window_secs``."""

    kind: str
    healthy: bool
    oom_streak: int = 0
    memory_used_mb: int | None = None
    memory_total_mb: int | None = None


@dataclass(frozen=True, slots=True)
class ProofCounts:
    """The proofs of this node, by what became of them."""

    open: int = 0
    pending: int = 0
    settled: int = 0
    held: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Credits:
    """The balance that the orchestrator last told, in integer micro-credits."""

    micro_credits: int
    tier: str


@dataclass(frozen=True, slots=True)
class OrchestratorView:
    """The pinned orchestrator, whether it answered last, for how long it has not, and the tickets that are held for that."""

    peer_id: PeerId | None
    reachable: bool
    outage_s: float = 0.0
    tickets_held: int = 0


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One moment of this node. Fields are None where the node has none: an entry without a stage has no hidden size.

    ``conversions`` names, by the type that a matrix is stored in, the form that a stage keeps it in, where that is another one.
    """

    peer_id: PeerId
    state: str
    model: str | None
    layer_ranges: tuple[LayerRange, ...]
    assignment: Assignment | None
    recipe: str | None
    hidden_size: int | None
    queue_depth: int
    max_input_tokens: int | None
    max_input_tokens_source: Literal["declared", "measured"]
    hop_timeout_secs: float
    max_concurrent_hop_bodies: int
    hop_bodies_in_flight: int
    max_hop_body_bytes: int
    device: DeviceHealth
    orchestrator: OrchestratorView
    credits: Credits | None = None
    proofs: ProofCounts = field(default_factory=ProofCounts)
    peer_failures: Mapping[PeerId, int] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()
    conversions: Mapping[str, str] = field(default_factory=dict)
    stage: StageView | None = None
    total_layers: int | None = None
    """Of the whole model."""
    readiness: ModelReadiness | None = None
    event_loop: LoopView = field(default_factory=LoopView)


@dataclass(frozen=True, slots=True)
class PeerView:
    """One peer of a model, as this node's swarm view has it."""

    peer_id: PeerId
    model_id: str
    layer_ranges: tuple[LayerRange, ...]
    status: PeerStatus
    queue_depth: int
    recipe: str
    addresses: tuple[str, ...]
    http_api_url: str | None = None
    canary: bool = False


class NodeView(Protocol):
    """The node, as its HTTP surface sees it. Both methods answer from memory."""

    def status(self) -> NodeStatus:
        """The node now."""
        ...

    def peers(self, model_id: str | None) -> Sequence[PeerView]:
        """The peers of ``model_id``, or of every model where it is None; a model nobody serves gives none."""
        ...


def status_json(status: NodeStatus, version: str, models: Sequence[str]) -> dict[str, Any]:
    """``GET /status``. ``gpu`` is the manual's name of ``device``, whatever the device is."""
    device = asdict(status.device)
    return {
        "version": version,
        "peer_id": status.peer_id,
        "state": status.state,
        "model": status.model,
        "models": list(models),
        "readiness": _readiness_json(status.readiness),
        "layer_ranges": _ranges(status.layer_ranges),
        "assignment": _assignment_json(status.assignment),
        "recipe": status.recipe,
        "conversions": dict(status.conversions),
        "hidden_size": status.hidden_size,
        "queue_depth": status.queue_depth,
        "max_input_tokens": status.max_input_tokens,
        "max_input_tokens_source": status.max_input_tokens_source,
        "hop_timeout_secs": status.hop_timeout_secs,
        "max_concurrent_hop_bodies": status.max_concurrent_hop_bodies,
        "hop_bodies_in_flight": status.hop_bodies_in_flight,
        "max_hop_body_bytes": status.max_hop_body_bytes,
        "peer_failures": dict(status.peer_failures),
        "device": device,
        "gpu": device,
        "orchestrator": {
            "peer_id": status.orchestrator.peer_id,
            "reachable": status.orchestrator.reachable,
            "outage_secs": round(status.orchestrator.outage_s),
            "tickets_held": status.orchestrator.tickets_held,
        },
        "credits": _credits_json(status.credits),
        "proofs": asdict(status.proofs),
        "addresses": list(status.addresses),
        "stage": stage_json(status.stage) if status.stage is not None else None,
        "event_loop": loop_json(status.event_loop),
    }


def peer_json(peer: PeerView) -> dict[str, Any]:
    """One element of ``GET /peers``."""
    return {
        "peer_id": peer.peer_id,
        "model_id": peer.model_id,
        "layer_ranges": _ranges(peer.layer_ranges),
        "status": peer.status,
        "queue_depth": peer.queue_depth,
        "canary": peer.canary,
        "recipe": peer.recipe,
        "addresses": list(peer.addresses),
        "http_api_url": peer.http_api_url,
    }


def _ranges(ranges: Sequence[LayerRange]) -> list[list[int]]:
    return [[layers.start, layers.end] for layers in ranges]


def _readiness_json(readiness: ModelReadiness | None) -> dict[str, Any] | None:
    if readiness is None:
        return None
    return {
        "state": readiness.state,
        "proven_secs_ago": None if readiness.proven_ago_s is None else round(readiness.proven_ago_s, 1),
        "missing_layers": [list(layers) for layers in readiness.missing],
    }


def _assignment_json(assignment: Assignment | None) -> dict[str, Any] | None:
    if assignment is None:
        return None
    return {
        "model_repo": assignment.model_repo,
        "layer_ranges": _ranges(assignment.layer_ranges),
        "serial": assignment.serial,
        "expires_at_ms": assignment.expires_at_ms,
    }


def _credits_json(balance: Credits | None) -> dict[str, Any] | None:
    if balance is None:
        return None
    return {
        "credits": balance.micro_credits / MICRO_PER_CREDIT,
        "micro_credits": balance.micro_credits,
        "tier": balance.tier,
    }
