"""The worker role (shell): register, load, serve, announce; and the same again when the assignment changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import structlog
import trio

from tessella_p2p.base.errors import (
    LocalProtocolError,
    RefusalError,
    RemoteProtocolError,
    TessellaError,
    TransportError,
)
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import HEARTBEAT_S, RECORD_TTL_S
from tessella_p2p.dht.service import Discovery
from tessella_p2p.ledger.client import OrchestratorClient
from tessella_p2p.stages.opening import StageIdentity
from tessella_p2p.stages.service import StageService
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import open_envelope, seal
from tessella_p2p.worker.hop_server import HopServer
from tessella_p2p.worker.proofs import ProofWriter
from tessella_p2p.worker.stage_session import StageContext

log = structlog.get_logger(__name__)

State = Literal["registering", "loading", "ready", "draining"]

_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 15.0
DRAIN_GRACE_S = 10.0


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
        client: OrchestratorClient,
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
            await nursery.start(self.hops.run)
            nursery.start_soon(self._proofs.run)
            self._discovery.publish(self._make_record, self._offer.manifest_root)
            task_status.started()
            try:
                while True:
                    assigned = await self._register()
                    await self._serve(assigned)
            finally:
                self.state = "draining"
                with trio.move_on_after(2.0, shield=True):
                    await self._tell(m.Deregister())

    async def _tell(self, body: m.Deregister) -> None:
        try:
            await self._client.call(body)
        except TessellaError as error:
            log.info("the orchestrator was not told", kind=body.kind, reason=str(error))

    # ---- registration ----

    async def _register(self) -> Assignment:
        self.state, retry_s = "registering", _FIRST_RETRY_S
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
        envelope = open_envelope(
            assigned.lease, m.LEASE, now_ms=self._context.clock.unix_ms(), signer=self._client.orchestrator
        )
        lease = envelope.message(m.Lease)
        offer = self._offer
        granted = (lease.peer_id, lease.model_id, lease.manifest_root, lease.recipe, lease.layers)
        expected = (self._context.key.peer_id, offer.model_id, offer.manifest_root, offer.recipe, assigned.layers)
        if granted != expected or lease.layers[1] > offer.total_layers:
            raise RemoteProtocolError("the orchestrator's lease is for something else than was asked for")
        self._discovery.observe(assigned.records, "orchestrator")
        return Assignment(LayerRange(*lease.layers), lease.serial, assigned.lease, envelope.expires_at)

    # ---- serving ----

    async def _serve(self, assignment: Assignment) -> None:
        """Load and serve one range until another one is assigned or the membership is lost."""
        self.assignment, self.state = assignment, "loading"
        stage = await self._load_stage(assignment.layers)
        async with trio.open_nursery() as nursery:
            await nursery.start(stage.run)
            self.stage = stage
            self._attach(stage, assignment)
            self.state = "ready"
            log.info("stage loaded", layers=str(assignment.layers), recipe=self._offer.recipe)
            await self._discovery.publish_now()
            try:
                await self._announce(stage, assignment)
            finally:
                self.state, self.stage = "draining", None
                with trio.CancelScope(shield=True):
                    await self.hops.drain(DRAIN_GRACE_S if not nursery.cancel_scope.cancel_called else 0.0)
            nursery.cancel_scope.cancel()

    def _attach(self, stage: StageService, assignment: Assignment) -> None:
        offer = self._offer
        identity = StageIdentity(
            peer_id=self._context.key.peer_id,
            manifest_root=offer.manifest_root,
            recipe=offer.recipe,
            layers=assignment.layers,
            total_layers=offer.total_layers,
            max_positions=stage.engine.max_positions,
            pins=frozenset({self._client.orchestrator}),
            lease=assignment.lease,
        )
        self.assignment = assignment
        self.hops.attach(stage, identity)

    async def _announce(self, stage: StageService, assignment: Assignment) -> None:
        """Heartbeats to the orchestrator, for as long as it leaves this node its layers."""
        announced_ready = False
        while True:
            try:
                record = self._make_record()
                if record is None:
                    raise LocalProtocolError("a ready worker has a record")
                if announced_ready:
                    answer = await self._client.call(
                        m.Announce(
                            serial=assignment.serial, queue_depth=self.hops.open_sessions, state="ready", record=record
                        )
                    )
                else:
                    answer = await self._client.call(m.Ready(serial=assignment.serial, record=record))
                announced_ready = True
                self._discovery.orchestrator_reachable(True)
                if isinstance(answer, m.Assigned):
                    renewed = self._accept(answer)
                    if renewed.layers != assignment.layers:
                        log.info("another range is assigned", layers=str(renewed.layers))
                        return
                    assignment = renewed
                    self._attach(stage, assignment)
            except TransportError as error:
                announced_ready = False
                self._discovery.orchestrator_reachable(False)
                log.info("the orchestrator cannot be reached; serving goes on", reason=str(error))
            except RefusalError as error:
                log.warning("the orchestrator does not know this stage any more", code=error.code, reason=str(error))
                reassigned = await self._register()
                self.state = "ready"
                if reassigned.layers != assignment.layers:
                    return
                assignment, announced_ready = reassigned, False
                self._attach(stage, assignment)
                continue
            except RemoteProtocolError as error:
                log.warning("the orchestrator's answer is not accepted", code=error.code, reason=str(error))
            await trio.sleep(HEARTBEAT_S)

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
            state="ready" if self.state == "ready" else "draining",
            max_positions=stage.engine.max_positions,
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
