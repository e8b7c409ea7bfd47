"""The node as its HTTP surface sees it: answers from memory, refreshed in the background (shell)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog
import trio

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import StorageError, TessellaError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import DEFAULT_MAX_SESSIONS, MAX_HOP_BYTES, MIB
from tessella_p2p.bridge.node_view import (
    Assignment,
    Credits,
    DeviceHealth,
    NodeStatus,
    OrchestratorView,
    PeerStatus,
    PeerView,
    ProofCounts,
)
from tessella_p2p.bridge.stage_view import LoopView, StageView
from tessella_p2p.dht.swarm_view import StageStatus
from tessella_p2p.ledger.blocking import RunBlocking
from tessella_p2p.ledger.proof_log import ProofLog
from tessella_p2p.node.assembly import NodeRoles
from tessella_p2p.stages.service import StageService
from tessella_p2p.wire import messages as m
from tessella_p2p.worker.service import Worker

log = structlog.get_logger(__name__)

_REFRESH_S = 10.0
_STATUS_OF: dict[str, PeerStatus] = {"live": "Healthy", "stale": "Stale", "offline": "Offline"}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What does not change while a node runs."""

    peer_id: PeerId
    model_id: str
    recipe: str
    hidden_size: int
    context_length: int
    device: str
    orchestrator: PeerId | None
    hop_timeout_s: float
    max_input_tokens: int | None
    conversions: Mapping[str, str]


class LiveNodeView:
    """Implements `bridge.node_view.NodeView` over a node's roles."""

    def __init__(
        self, facts: NodeFacts, roles: NodeRoles, clock: WallClock, proof_log: ProofLog, run_blocking: RunBlocking
    ) -> None:
        self._facts = facts
        self._roles = roles
        self._clock = clock
        self._log = proof_log
        self._run_blocking = run_blocking
        self._proofs = ProofCounts()
        self._credits: Credits | None = None

    async def run(self) -> None:
        """Keep proof counts and the balance fresh until cancelled: at each change, and now and then."""
        read_at = -math.inf
        while True:
            changed = self._roles.proofs.changed
            counts = await self._count_proofs()
            if counts.settled != self._proofs.settled or trio.current_time() >= read_at + _REFRESH_S:
                await self._read_credits()  # first, so that what shows as settled is in the balance that shows
                read_at = trio.current_time()
            self._proofs = counts
            with trio.move_on_after(_REFRESH_S):
                await changed.wait()

    async def _count_proofs(self) -> ProofCounts:
        """How many proofs are in which state; as last time, when the log cannot be read."""
        try:
            counts = await self._run_blocking(self._log.counts)
        except StorageError as error:
            log.error("the proof log cannot be read", reason=str(error))
            return self._proofs
        return ProofCounts(
            open=counts.open, pending=counts.pending, settled=counts.settled, held=counts.held, refused=counts.refused
        )

    async def _read_credits(self) -> None:
        if self._roles.client is None:
            return
        try:
            answer = await self._roles.client.ask(m.ReadCredits(), m.Credits)
        except TessellaError as error:
            log.debug("the balance is not known", reason=str(error))
            return
        self._credits = Credits(micro_credits=answer.micro_credits, tier=answer.tier)

    def status(self) -> NodeStatus:
        """The node now."""
        facts, worker = self._facts, self._roles.worker
        assigned = worker.assignment if worker is not None else None
        ranges = (assigned.layers,) if assigned is not None else ()
        assignment = None
        if assigned is not None:
            assignment = Assignment(
                model_repo=facts.model_id,
                layer_ranges=ranges,
                serial=assigned.serial,
                expires_at_ms=assigned.expires_at,
            )
        stage = worker.stage if worker is not None else None
        measured = stage.engine.max_positions if stage is not None else facts.context_length
        return NodeStatus(
            peer_id=facts.peer_id,
            state=_state(worker),
            model=facts.model_id,
            layer_ranges=ranges if stage is not None else (),
            assignment=assignment,
            recipe=facts.recipe,
            conversions=facts.conversions,
            hidden_size=facts.hidden_size,
            queue_depth=worker.hops.open_sessions if worker is not None else 0,
            max_input_tokens=facts.max_input_tokens or measured,
            max_input_tokens_source="declared" if facts.max_input_tokens else "measured",
            hop_timeout_secs=facts.hop_timeout_s,
            max_concurrent_hop_bodies=stage.engine.max_sessions if stage is not None else DEFAULT_MAX_SESSIONS,
            hop_bodies_in_flight=worker.hops.open_sessions if worker is not None else 0,
            max_hop_body_bytes=MAX_HOP_BYTES,
            device=_device(facts.device, stage),
            orchestrator=OrchestratorView(
                peer_id=facts.orchestrator,
                reachable=self._roles.discovery.view.orchestrator_reachable,
                outage_s=self._roles.entry.outage_s,
                tickets_held=self._roles.entry.tickets_held,
            ),
            credits=self._credits,
            proofs=self._proofs,
            peer_failures=dict(self._roles.entry.peer_failures),
            addresses=self._roles.addresses,
            stage=_stage_view(stage) if stage is not None else None,
            total_layers=self._roles.entry.codec.total_layers,
            readiness=self._roles.entry.readiness(),
            event_loop=self._loop_view(),
        )

    def _loop_view(self) -> LoopView:
        watchdog = self._roles.watchdog
        if watchdog is None:
            return LoopView()
        return LoopView(watchdog.num_stalls, watchdog.longest_s * 1000, watchdog.total_s * 1000)

    def peers(self, model_id: str | None) -> Sequence[PeerView]:
        """The peers of ``model_id``, or of every model."""
        return [
            PeerView(
                peer_id=seen.stage.peer_id,
                model_id=seen.stage.model_id,
                layer_ranges=(seen.stage.layers,),
                status=_peer_status(seen),
                queue_depth=seen.stage.queue_depth,
                recipe=seen.stage.recipe,
                addresses=seen.stage.addresses,
                canary=seen.stage.canary,
            )
            for seen in self._roles.discovery.view.statuses(self._clock.unix_ms())
            if model_id is None or seen.stage.model_id == model_id
        ]


def _peer_status(seen: StageStatus) -> PeerStatus:
    if seen.liveness == "live" and seen.stage.state != "ready":
        return "Draining" if seen.stage.state == "draining" else "Saturated"
    return _STATUS_OF[seen.liveness]


def _state(worker: Worker | None) -> str:
    """The node's state; a worker that is ready says what its stage is doing."""
    if worker is None:
        return "entry"
    return worker.stage.state if worker.state == "ready" and worker.stage is not None else worker.state


def _device(kind: str, stage: StageService | None) -> DeviceHealth:
    if stage is None:
        return DeviceHealth(kind=kind, healthy=True)
    return DeviceHealth(
        kind=kind,
        healthy=stage.accepts,
        oom_streak=stage.recent_failures,
        memory_used_mb=stage.memory_bytes // MIB,
    )


def _stage_view(stage: StageService) -> StageView:
    return StageView(
        state=stage.state,
        sessions=stage.num_sessions,
        waiting=stage.num_waiting,
        crashes=stage.crashes,
        recent_failures=stage.recent_failures,
        memory_bytes=stage.memory_bytes,
        kv=stage.kv,
    )
