"""The worker role (shell): register, load, serve, announce; and the same again when the assignment changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import structlog
import trio

from tessella_p2p.base.errors import (
    LocalProtocolError,
    NotAuthorized,
    RemoteProtocolError,
    TessellaError,
    TransportError,
)
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import GOSSIP_TICK_MAX_S, HEARTBEAT_S, RECORD_TTL_S
from tessella_p2p.dht.service import Discovery
from tessella_p2p.ledger.client import OrchestratorPort
from tessella_p2p.stages.opening import StageIdentity
from tessella_p2p.stages.service import StageService
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import open_envelope, seal
from tessella_p2p.worker.context import StageContext
from tessella_p2p.worker.hop_server import HopServer
from tessella_p2p.worker.proofs import ProofWriter

log = structlog.get_logger(__name__)

State = Literal["registering", "loading", "ready", "draining"]

_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 15.0
_LOAD_RETRY_S = 30.0
_GOODBYE_S = 2.0
DRAIN_GRACE_S = 10.0
"""Sessions that are open when the layers change may take this much longer."""
LEAVE_GRACE_S = 3.0
"""Sessions that are open when the node stops may take this much longer."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What this node offers to hold."""

    model_id: str
    manifest_root: bytes
    contract_hash: bytes
    total_layers: int
    recipe: str
    claim_mb: int
    device: str
    layers: LayerRange | None = None
    api_url: str | None = None
    canary: m.CanaryMode = "off"
    """How it answers instead of truly, where this node is a canary: its engine does so (see ``load``), its lease and records say so."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the orchestrator granted: the layers, and the lease that certifies them."""

    layers: LayerRange
    serial: int
    lease: bytes
    expires_at: int


class Worker:
    """One node's work for one model.

    Args:
        load: loads a range and returns its `StageService`, not yet running; it must not block the event loop.
    """

    def __init__(
        self,
        context: StageContext,
        offer: Offer,
        client: OrchestratorPort,
        discovery: Discovery,
        proofs: ProofWriter,
        load: Callable[[LayerRange], Awaitable[StageService]],
    ) -> None:
        self._context = context
        self._offer = offer
        self._client = client
        self._discovery = discovery
        self._proofs = proofs
        self._load_stage = load
        self.hops = HopServer(context)
        self.stage: StageService | None = None
        self.assignment: Assignment | None = None
        self.state: State = "registering"
        self.last_refusal: str | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Then open sessions end with their proofs written, and the orchestrator is told."""
        async with trio.open_nursery() as nursery:
            hops = await nursery.start(_outliving, self.hops.run)
            nursery.start_soon(self._proofs.run)
            self._discovery.publish(self._make_record, self._offer.manifest_root)
            task_status.started()
            try:
                while True:
                    self.state = "registering"
                    assignment = await self._register()
                    stage = await self._load(assignment)
                    if stage is not None:
                        await self._serve(stage, assignment)
            finally:
                self.state = "draining"
                with trio.move_on_after(_GOODBYE_S, shield=True):
                    await self._tell(m.Deregister())
                hops.cancel()

    async def _tell(self, body: m.Deregister) -> None:
        try:
            await self._client.call(body)
        except TessellaError as error:
            log.info("the orchestrator was not told", kind=body.kind, reason=str(error))

    # ---- registration ----

    async def _register(self) -> Assignment:
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                assignment = self._accept(await self._client.ask(self._registration(), m.Assigned))
            except TessellaError as error:
                self._discovery.orchestrator_reachable(not isinstance(error, TransportError))
                self.last_refusal = str(error)
                log.warning("not registered yet", retry_s=retry_s, code=error.code, reason=str(error))
                await trio.sleep(retry_s)
                retry_s = min(retry_s * 2, _LAST_RETRY_S)
            else:
                self.last_refusal = None
                self._discovery.orchestrator_reachable(True)
                return assignment

    def _registration(self) -> m.Register:
        offer = self._offer
        return m.Register(
            addresses=self._context.network.addresses,
            api_url=offer.api_url,
            canary=offer.canary,
            claim_mb=offer.claim_mb,
            device=offer.device,
            model_id=offer.model_id,
            total_layers=offer.total_layers,
            manifest_root=offer.manifest_root,
            contract_hash=offer.contract_hash,
            recipe=offer.recipe,
            layers=offer.layers.as_tuple() if offer.layers else None,
        )

    def _accept(self, assigned: m.Assigned) -> Assignment:
        """Check a lease before anything is done with it: it is what peers will check too."""
        envelope = open_envelope(assigned.lease, m.LEASE, now_ms=self._context.clock.unix_ms())
        if envelope.signer not in self._client.orchestrators:
            raise RemoteProtocolError(f"a lease of {envelope.signer}, which this node does not pin")
        lease = envelope.message(m.Lease)
        offer = self._offer
        granted = (lease.peer_id, lease.model_id, lease.manifest_root, lease.recipe, lease.layers, lease.canary)
        own, canary = self._context.key.peer_id, offer.canary != "off"
        expected = (own, offer.model_id, offer.manifest_root, offer.recipe, assigned.layers, canary)
        if granted != expected or lease.layers[1] > offer.total_layers:
            raise RemoteProtocolError("the orchestrator's lease is for something else than was asked for")
        self._discovery.observe(assigned.records, "orchestrator")
        return Assignment(LayerRange(*lease.layers), lease.serial, assigned.lease, envelope.expires_at)

    # ---- loading ----

    async def _load(self, assignment: Assignment) -> StageService | None:
        """The stage of an assignment, or None, a while after it could not be loaded: the node stays an entry, and tries again."""
        self.assignment, self.state = assignment, "loading"
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._say_loading, assignment)
                try:
                    return await self._load_stage(assignment.layers)
                finally:
                    nursery.cancel_scope.cancel()
        except Exception as error:  # native loaders raise what they like; the node stays an entry
            reason = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            self.assignment, self.last_refusal = None, f"layers {assignment.layers} cannot be loaded: {reason}"
            log.error("a stage cannot be loaded", layers=str(assignment.layers), exc_info=reason)
        await self._tell(m.Deregister())
        await trio.sleep(_LOAD_RETRY_S)
        return None

    async def _say_loading(self, assignment: Assignment) -> None:
        """Heartbeats while a range loads, which may take minutes."""
        while True:
            await trio.sleep(HEARTBEAT_S)
            try:
                await self._client.call(m.Announce(serial=assignment.serial, queue_depth=0, state="loading"))
            except TessellaError as error:
                log.info("the orchestrator was not told", state="loading", reason=str(error))

    # ---- serving ----

    async def _serve(self, stage: StageService, assignment: Assignment) -> None:
        """Serve one loaded range until another one is assigned; then drain."""
        async with trio.open_nursery() as nursery:
            running = await nursery.start(_outliving, stage.run)
            self.stage = stage
            self._attach(stage, assignment)
            self.state = "ready"
            log.info("stage loaded", layers=str(assignment.layers), recipe=self._offer.recipe)
            nursery.start_soon(self._publish_changes, stage)
            is_leaving = True
            try:
                await self._announce(stage, assignment)
                is_leaving = False
            finally:
                self.state = "draining"
                with trio.CancelScope(shield=True):
                    await self._drain(LEAVE_GRACE_S if is_leaving else DRAIN_GRACE_S)
                self.stage = None
                running.cancel()
                nursery.cancel_scope.cancel()

    async def _publish_changes(self, stage: StageService) -> None:
        """Publish the stage's record now, and at once when it stops taking sessions, or takes them again."""
        published: m.StageState | None = None
        while True:
            changed, state = stage.changed, self._record_state(stage)
            if state != published:
                published = state
                await self._discovery.publish_now()
            with trio.move_on_after(HEARTBEAT_S):  # the end of a saturation is no event
                await changed.wait()

    async def _drain(self, grace_s: float) -> None:
        """Tell the mesh, and let the open sessions end."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._say_draining)
            await self.hops.drain(grace_s)

    async def _say_draining(self) -> None:
        with trio.move_on_after(_GOODBYE_S):
            await self._discovery.publish_now()
            if self._context.network.connected_peers():
                await trio.sleep(GOSSIP_TICK_MAX_S)  # until the neighbours have it

    def _attach(self, stage: StageService, assignment: Assignment) -> None:
        offer = self._offer
        identity = StageIdentity(
            peer_id=self._context.key.peer_id,
            manifest_root=offer.manifest_root,
            recipe=offer.recipe,
            layers=assignment.layers,
            total_layers=offer.total_layers,
            max_positions=stage.engine.max_positions,
            pins=frozenset(self._client.orchestrators),
            lease=assignment.lease,
        )
        self.assignment = assignment
        self.hops.attach(stage, identity)

    async def _announce(self, stage: StageService, assignment: Assignment) -> None:
        """Heartbeats to the orchestrator, for as long as it leaves this node its layers.

        Serving goes on whatever it answers, or does not: only another range ends it.
        """
        announced_ready = False
        while True:
            pause_s = HEARTBEAT_S
            try:
                answer = await self._client.call(self._heartbeat(assignment, announced_ready=announced_ready))
                announced_ready = True
                self._discovery.orchestrator_reachable(True)
                renewed = self._accept(answer) if isinstance(answer, m.Assigned) else assignment
            except NotAuthorized as error:
                log.warning("the orchestrator does not know this stage any more", code=error.code, reason=str(error))
                renewed, announced_ready, pause_s = await self._register(), False, 0.0
            except TransportError as error:
                renewed, announced_ready = assignment, False
                self._discovery.orchestrator_reachable(False)
                log.info("the orchestrator cannot be reached; serving goes on", reason=str(error))
            except TessellaError as error:
                renewed = assignment
                log.warning("the orchestrator's answer is not accepted", code=error.code, reason=str(error))
            if renewed.layers != assignment.layers:
                log.info("another range is assigned", layers=str(renewed.layers))
                return
            if renewed is not assignment:
                assignment = renewed
                self._attach(stage, assignment)
            await self._pause(stage, pause_s)

    async def _pause(self, stage: StageService, pause_s: float) -> None:
        """Wait until the next heartbeat is due: earlier, where the stage stops taking sessions or takes them again."""
        accepted = stage.accepts
        with trio.move_on_after(pause_s):
            while stage.accepts == accepted:
                await stage.changed.wait()

    def _heartbeat(self, assignment: Assignment, *, announced_ready: bool) -> m.Ready | m.Announce:
        record = self._make_record()
        if record is None:
            raise LocalProtocolError("a serving worker has a record")
        if not announced_ready:
            return m.Ready(serial=assignment.serial, record=record)
        saturated = self.stage is not None and not self.stage.accepts
        return m.Announce(
            serial=assignment.serial,
            queue_depth=self.hops.open_sessions,
            state="saturated" if saturated else "ready",
            record=record,
        )

    def _record_state(self, stage: StageService) -> m.StageState:
        if self.state != "ready":
            return "draining"
        return "ready" if stage.accepts else "saturated"

    def _make_record(self) -> bytes | None:
        stage, assignment, offer = self.stage, self.assignment, self._offer
        if stage is None or assignment is None:
            return None
        record = m.StageRecord(
            addresses=self._context.network.addresses,
            model_id=offer.model_id,
            manifest_root=offer.manifest_root,
            recipe=offer.recipe,
            layers=assignment.layers.as_tuple(),
            total_layers=offer.total_layers,
            lease=assignment.lease,
            queue_depth=self.hops.open_sessions,
            state=self._record_state(stage),
            max_positions=stage.engine.max_positions,
            canary=offer.canary != "off",
        )
        now_ms = self._context.clock.unix_ms()
        return seal(
            self._context.key,
            m.STAGE_RECORD,
            record,
            sequence=self._context.sequencer.next(m.STAGE_RECORD, now_ms),
            now_ms=now_ms,
            ttl_ms=int(RECORD_TTL_S * 1000),
        )


async def _outliving(
    run: Callable[..., Awaitable[None]], task_status: trio.TaskStatus[trio.CancelScope] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run a service through a cancellation of the worker, so that sessions end in order; the scope that it starts with ends it."""
    with trio.CancelScope(shield=True) as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(run)
            task_status.started(scope)
