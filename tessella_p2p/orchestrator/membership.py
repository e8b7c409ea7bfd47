"""The members on the network and on disk (shell): their requests, the time that passes, and who is told of what changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import structlog
import trio

from tessella_p2p.base.errors import Blacklisted, InvalidRequest, Overloaded, StorageError
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import HEARTBEAT_S, MAX_MEMBERS, REPORT_BURST, REPORT_RATE_PER_S
from tessella_p2p.dht.rate_limit import RateLimit
from tessella_p2p.ledger.assignments import Assignment
from tessella_p2p.ledger.revocation import Revocation
from tessella_p2p.model.coverage import Coverage
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.context import Handlers, OrchestratorContext
from tessella_p2p.orchestrator.member import (
    ASSIGNED,
    Announced,
    Deregistered,
    Excluded,
    KeepAssignment,
    KeepRevocation,
    Loaded,
    Member,
    MemberEffect,
    MemberEvent,
    MemberState,
    MoveOrdered,
    RaiseSerialFloor,
    Registered,
    SendAnswer,
    SendOrder,
    TimePassed,
    TopologyChanged,
)
from tessella_p2p.orchestrator.members import Members
from tessella_p2p.orchestrator.suspicion import Suspicion
from tessella_p2p.wire import messages as m

_LOG: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Membership:
    """The workers of every served model.

    Args:
        members: the core.
    """

    def __init__(self, context: OrchestratorContext, catalogue: Catalogue, members: Members) -> None:
        self._context = context
        self._catalogue = catalogue
        self.core = members
        # One write at a time. An assignment and its serial are durable before the lease leaves.
        self._lock = trio.Lock()
        self._owed: dict[PeerId, Assignment | None] = {}
        self._owed_revocations: dict[PeerId, Revocation | None] = {}
        self._owed_floor = 0
        self._num_exclusions = 0
        self._is_unwritable = False
        self.changed = trio.Event()
        """Set, and replaced, whenever a member's state or range is another one."""
        self.reported_failures: Counter[PeerId] = Counter()
        """How often each worker was reported as failing, by others: a counter, not a verdict."""
        self.suspicion = Suspicion()
        """Who is reported by several workers at a time; see there for what follows, which is little."""
        self._reports: RateLimit[PeerId] = RateLimit(REPORT_RATE_PER_S, REPORT_BURST)

    def handlers(self) -> Handlers:
        """What this part answers."""
        return {
            m.Register: lambda peer, request: self._asked(Registered(peer, request)),
            m.Ready: lambda peer, request: self._asked(Loaded(peer, request)),
            m.Announce: lambda peer, request: self._asked(Announced(peer, request)),
            m.Deregister: lambda peer, request: self.handle(Deregistered(peer, request)),
            m.ListStages: self._list_stages,
            m.ReportFailure: self._report_failure,
        }

    async def run(self) -> None:
        """Let time pass for the members until cancelled."""
        while True:
            await trio.sleep(HEARTBEAT_S)
            try:
                await self.handle(TimePassed())
            except StorageError as error:
                # Requests that need the disk are refused meanwhile.
                _LOG.error("ledger_unwritable", reason=str(error))

    # ---- What it knows ----

    def members(self) -> tuple[Member, ...]:
        """Every worker that is remembered."""
        return self.core.members()

    def coverage(self, manifest_root: bytes, recipe: str | None = None) -> Coverage:
        """The walk over the healthy stages of a model.

        Raises:
            UnknownModel: it is not served here.
        """
        return self.core.coverage(manifest_root, recipe or self._context.recipe)

    def stages(self, manifest_root: bytes) -> m.Stages:
        """What is listed of a model, and what is missing.

        Raises:
            UnknownModel: it is not served here.
        """
        coverage = self.coverage(manifest_root)
        revoked = self.core.revocations.listed(self._context.clock.unix_ms())
        return m.Stages(
            records=self.core.listed(manifest_root, self._context.clock.unix_ms()),
            health=coverage.health,
            missing=tuple(LayerRange.as_tuple(hole) for hole in coverage.holes),
            issuer=self._context.key.peer_id if revoked else None,
            revoked=revoked,
        )

    # ---- Events ----

    async def handle(self, event: MemberEvent) -> m.OrchestratorAnswer:
        """Take one event in; what it makes durable is so before this returns.

        Raises:
            RefusalError, RemoteProtocolError: as `Members.handle`.
            StorageError: the ledger cannot be written; the effects stay owed.
        """
        effects = await self._take(event)
        return next((effect.body for effect in effects if isinstance(effect, SendAnswer)), m.Acknowledged())

    async def exclude(self, peer: PeerId) -> None:
        """Take a peer that was put on the blacklist out of the mesh, and its leases away; it is not taken in again while it is there.

        Raises:
            StorageError: the ledger cannot be written; the effects stay owed.
        """
        self._num_exclusions += 1
        await self._take(Excluded(peer))

    async def order(self, event: MoveOrdered) -> SendOrder:
        """The order that tells a worker to serve other layers; its lease is durable.

        Raises:
            RefusalError, LocalProtocolError, StorageError: as `handle`.
        """
        effects = await self._take(event)
        return next(effect for effect in effects if isinstance(effect, SendOrder))

    async def _asked(self, event: Registered | Loaded | Announced) -> m.OrchestratorAnswer:
        """`handle`, for what a worker asks: not while it is on the blacklist. A member's heartbeats are not looked up each time."""
        peer, store = event.peer, self._context.store
        member = self.core.get(peer)
        is_member = isinstance(event, Announced) and member is not None and member.state in ASSIGNED
        while not is_member:
            exclusions = self._num_exclusions
            if await self._context.run_blocking(lambda: store.is_blacklisted(peer)):
                raise Blacklisted(f"{peer} is on the blacklist here: only the operator can take it off")
            if exclusions == self._num_exclusions:  # else it may have been put there since it was looked up
                break
        return await self.handle(event)

    async def _take(self, event: MemberEvent) -> Sequence[MemberEffect]:
        """Take one event in, wait until its effects are durable, and tell of what changed."""
        if self._is_unwritable:
            await self._written()  # nothing is built on what the disk refuses
        effects = self.core.handle(event, self._context.clock.unix_ms())
        self._owe(effects)
        await self._written()
        changes = [effect for effect in effects if isinstance(effect, TopologyChanged)]
        for change in changes:
            if change.before is not change.after:
                _LOG.info("member_changed", peer=change.peer, before=change.before, after=change.after)
        revoked = [each for each in effects if isinstance(each, KeepRevocation) and each.revocation is not None]
        for each in revoked:
            _LOG.warning("leases_revoked", peer=each.peer)
        if changes or revoked:
            self.changed.set()
            self.changed = trio.Event()
        return effects

    async def restore(self) -> None:
        """Take up the assignments of the process before; call it once, first.

        Raises:
            StorageError: they cannot be read.
        """
        context = self._context
        assignments = await context.run_blocking(context.store.assignments)
        self.core.revocations.restore(await context.run_blocking(context.store.revocations))
        async with self._lock:
            self._owe(self.core.restore(assignments, context.clock.unix_ms()))
        if assignments:
            _LOG.info("members_restored", known=len(self.core.members()), forgotten=len(self._owed))

    def _owe(self, effects: Sequence[MemberEffect]) -> None:
        """Note what has to be durable before any of the effects counts; the core counts on it from here on."""
        for effect in effects:
            match effect:
                case RaiseSerialFloor(value):
                    self._owed_floor = value
                case KeepAssignment(peer, assignment):
                    self._owed[peer] = assignment
                case KeepRevocation(peer, revocation):
                    self._owed_revocations[peer] = revocation

    @property
    def _owes(self) -> bool:
        return bool(self._owed or self._owed_floor or self._owed_revocations)

    async def _written(self) -> None:
        """Wait until everything that is owed by now is durable. What events owe while one write goes on, the next write has all of.

        Raises:
            StorageError: the ledger cannot be written; it stays owed.
        """
        if not self._owes and not self._lock.locked():
            return
        async with self._lock:  # whoever is first writes for those behind it
            if not self._owes:
                return
            owed, floor, revoked = self._owed, self._owed_floor, self._owed_revocations
            self._owed, self._owed_floor, self._owed_revocations = {}, 0, {}
            store = self._context.store
            try:
                with trio.CancelScope(shield=True):
                    await self._context.run_blocking(lambda: store.keep_assignments(owed, floor, revoked))
            except BaseException as error:  # whatever it was: what is not written stays owed
                self._owed, self._owed_floor = {**owed, **self._owed}, max(floor, self._owed_floor)
                self._owed_revocations = {**revoked, **self._owed_revocations}
                self._is_unwritable = isinstance(error, StorageError)
                raise
            self._is_unwritable = False

    # ---- Other requests ----

    async def _list_stages(self, _: PeerId, request: m.ListStages) -> m.OrchestratorAnswer:
        root = request.manifest_root
        if root is None:
            models = self._catalogue.models()
            if len(models) != 1:
                raise InvalidRequest("several models are served here: name one", param="manifest_root")
            root = models[0].manifest_root
        return self.stages(root)

    async def _report_failure(self, peer: PeerId, request: m.ReportFailure) -> m.OrchestratorAnswer:
        """Count a report. Anybody can make one up, so nothing follows from one. What is no worker here takes no room."""
        if not self._reports.allows(peer, trio.current_time()):
            raise Overloaded("you report failures faster than they are counted: wait")
        failed = PeerId(request.peer_id)
        if failed == peer or self.core.get(failed) is None:
            return m.Acknowledged()
        if failed not in self.reported_failures and len(self.reported_failures) >= MAX_MEMBERS:
            for gone in [each for each in self.reported_failures if self.core.get(each) is None]:
                del self.reported_failures[gone]
        self.reported_failures[failed] += 1
        reporter = self.core.get(peer)
        if reporter is not None and reporter.state is MemberState.HEALTHY:
            self.suspicion.report(failed, peer, trio.current_time())
        _LOG.info("failure_reported", peer=failed, by=peer, code=request.code)
        return m.Acknowledged()
