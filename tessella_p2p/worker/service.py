"""The worker role (shell): register, load, serve, announce; and the same again when the assignment changes.

An order for other layers is carried out without a restart. Where both ranges fit the claim, the new one is loaded beside the one that
serves and takes its place at once; sessions that are open on the old one end there. Where they do not, the old one drains first.
Either way a session that outlives the grace is rerouted by its entry, and its answer is the same, byte for byte.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

import structlog
import trio

from tessella_p2p.base.errors import (
    KeyInUse,
    LocalProtocolError,
    NotAuthorized,
    Overloaded,
    TessellaError,
    TransportError,
)
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import GOSSIP_TICK_MAX_S, HEARTBEAT_S, RECORD_TTL_S
from tessella_p2p.dht.service import Discovery
from tessella_p2p.ledger.client import OrchestratorPort
from tessella_p2p.stages.opening import StageIdentity
from tessella_p2p.stages.service import StageService
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import seal
from tessella_p2p.worker.context import StageContext
from tessella_p2p.worker.hop_server import HopServer
from tessella_p2p.worker.orders import OrderServer
from tessella_p2p.worker.proofs import ProofWriter
from tessella_p2p.worker.registration import Assignment, Offer, Registration
from tessella_p2p.worker.successor import Successor

log = structlog.get_logger(__name__)

State = Literal["registering", "loading", "ready", "draining"]

_LOAD_RETRY_S = 30.0
_GOODBYE_S = 2.0
DRAIN_GRACE_S = 10.0
"""Sessions that are open when the layers change may take this much longer."""
LEAVE_GRACE_S = 3.0
"""Sessions that are open when the node stops may take this much longer."""


class Worker:
    """One node's work for one model.

    Args:
        load: loads a range and returns its `StageService`, not yet running; it must not block the event loop.
        instance: 16 random bytes of this process, by which the orchestrator tells that a key is used twice; None leaves them out.
    """

    def __init__(
        self,
        context: StageContext,
        offer: Offer,
        client: OrchestratorPort,
        discovery: Discovery,
        proofs: ProofWriter,
        load: Callable[[LayerRange], Awaitable[StageService]],
        instance: bytes | None = None,
    ) -> None:
        self._context = context
        self._offer = offer
        self._client = client
        self._discovery = discovery
        self._proofs = proofs
        self._load_stage = load
        self._registration = Registration(context, offer, client, discovery, instance)
        self._successor = Successor(load, self._hurry, self._end_serving)
        self._lives: trio.Nursery | None = None  # what outlives one range: old stages, and those that are loaded beside
        self._serving = trio.CancelScope()
        self._pausing = trio.CancelScope()
        self.hops = HopServer(context)
        self.orders = OrderServer(context, frozenset(client.orchestrators), self._take_order)
        self.stage: StageService | None = None
        self.assignment: Assignment | None = None
        self.state: State = "registering"

    @property
    def last_refusal(self) -> str | None:
        """Why this node serves no layers; None where it does."""
        return self._registration.last_refusal

    @property
    def has_layers_beside(self) -> bool:
        """Whether it holds, or is loading, other layers beside those that it serves."""
        return self._successor.is_expected

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Then open sessions end with their proofs written, and the orchestrator is told."""
        async with trio.open_nursery() as nursery:
            self._lives = nursery
            hops = await nursery.start(_outliving, self.hops.run)
            nursery.start_soon(self._proofs.run)
            self._discovery.publish(self._make_record, self._offer.manifest_root)
            self.orders.serve()
            task_status.started()
            try:
                while True:
                    ordered = self._successor.take()
                    assignment, stage = ordered or (await self._register(), None)
                    stage = stage or await self._load(assignment, was_ordered=ordered is not None)
                    if stage is not None:
                        await self._serve(nursery, stage, assignment)
            finally:
                self._lives = None
                self.state = "draining"
                with trio.move_on_after(_GOODBYE_S, shield=True):
                    await self._tell(m.Deregister())
                hops.cancel()

    async def _register(self) -> Assignment:
        self.state = "registering"
        return await self._registration.register()

    async def _tell(self, body: m.Announce | m.Deregister) -> None:
        try:
            await self._client.call(body)
        except TessellaError as error:
            log.info("the orchestrator was not told", kind=body.kind, reason=str(error))

    async def _take_order(self, order: m.UpdateAssignment, signer: PeerId) -> None:
        """Take an order for other layers.

        Raises:
            Overloaded: this node serves nothing now.
            RemoteProtocolError, RefusalError: see `Registration.accept_order`.
        """
        if self.state != "ready" or self.assignment is None or self._lives is None:
            raise Overloaded(f"this node is {self.state}: order it again when it serves")
        assignment = self._registration.accept_order(order, signer, self.assignment)
        log.info("other layers are ordered", layers=str(assignment.layers), beside=order.beside, reason=order.reason)
        if order.beside:
            self._successor.prepare(assignment, self._lives)
        else:
            self._successor.order(assignment)

    def _hurry(self) -> None:
        """Send the next heartbeat at once."""
        self._pausing.cancel()

    def _end_serving(self) -> None:
        """End what is served, for what comes after it."""
        self._serving.cancel()

    # ---- loading ----

    async def _load(self, assignment: Assignment, *, was_ordered: bool) -> StageService | None:
        """The stage of an assignment, or None, a while after it could not be loaded: the node stays an entry, and tries again."""
        self.assignment, self.state = assignment, "loading"
        try:
            async with trio.open_nursery() as nursery:
                # Who has just registered was heard; who was ordered here has been busy.
                nursery.start_soon(self._say, assignment, "loading", 0.0 if was_ordered else HEARTBEAT_S)
                try:
                    return await self._load_stage(assignment.layers)
                finally:
                    nursery.cancel_scope.cancel()
        except Exception as error:  # native loaders raise what they like; the node stays an entry
            reason = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            self.assignment = None
            self._registration.last_refusal = f"layers {assignment.layers} cannot be loaded: {reason}"
            log.error("a stage cannot be loaded", layers=str(assignment.layers), exc_info=reason)
        await self._tell(m.Deregister())
        await trio.sleep(_LOAD_RETRY_S)
        return None

    async def _say(self, assignment: Assignment, state: Literal["loading", "draining"], delay_s: float = 0.0) -> None:
        """Heartbeats while a range loads or drains, which may take minutes, until cancelled."""
        await trio.sleep(delay_s)
        while True:
            instance, depth = self._registration.instance, self.hops.open_sessions
            await self._tell(m.Announce(serial=assignment.serial, queue_depth=depth, state=state, instance=instance))
            await trio.sleep(HEARTBEAT_S)

    # ---- serving ----

    async def _serve(self, lives: trio.Nursery, stage: StageService, assignment: Assignment) -> None:
        """Serve one loaded range until another one is assigned; then make room for it, or let it take over."""
        running = await lives.start(_outliving, stage.run)
        self.stage = stage
        self._attach(stage, assignment)
        self.state = "ready"
        log.info("stage loaded", layers=str(assignment.layers), recipe=self._offer.recipe)
        is_leaving = True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._publish_changes, stage)
                with trio.CancelScope() as self._serving:
                    await self._announce(stage, assignment)
                is_leaving = False
                nursery.cancel_scope.cancel()
        finally:
            if is_leaving or not self._successor.takes_over:
                self.state = "draining"
                with trio.CancelScope(shield=True):
                    await self._drain(None if is_leaving else self.assignment)
                self.stage = None
                running.cancel()
            else:
                lives.start_soon(self._retire, stage, running)

    async def _retire(self, stage: StageService, running: trio.CancelScope) -> None:
        """Let the sessions of a stage end that another one has taken the place of."""
        with trio.CancelScope(shield=True):
            await self.hops.retire(stage, DRAIN_GRACE_S)
        running.cancel()

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

    async def _drain(self, left: Assignment | None) -> None:
        """Tell the mesh, and let the open sessions end; ``left`` is served no more, where this node goes on with other layers."""
        async with trio.open_nursery() as heartbeats:
            if left is not None:
                heartbeats.start_soon(self._say, left, "draining")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._say_draining)
                await self.hops.drain(LEAVE_GRACE_S if left is None else DRAIN_GRACE_S)
            heartbeats.cancel_scope.cancel()

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
                renewed = self._registration.accept(answer) if isinstance(answer, m.Assigned) else assignment
            except KeyInUse as error:
                # Whoever registers again takes the layers from the other process, and so on for ever.
                renewed = assignment
                log.error("this node's key is used by another process too", reason=str(error))
            except NotAuthorized as error:
                log.warning("the orchestrator does not know this stage any more", code=error.code, reason=str(error))
                renewed, announced_ready, pause_s = await self._registration.register(), False, 0.0
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
        with trio.move_on_after(pause_s) as self._pausing:
            while stage.accepts == accepted:
                await stage.changed.wait()

    def _heartbeat(self, assignment: Assignment, *, announced_ready: bool) -> m.Ready | m.Announce:
        record = self._make_record()
        if record is None:
            raise LocalProtocolError("a serving worker has a record")
        instance = self._registration.instance
        if not announced_ready:
            return m.Ready(serial=assignment.serial, record=record, instance=instance)
        saturated = self.stage is not None and not self.stage.accepts
        return m.Announce(
            serial=assignment.serial,
            queue_depth=self.hops.open_sessions,
            state="saturated" if saturated else "ready",
            record=record,
            prepared=self._successor.prepared,
            instance=instance,
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
