"""The workers of the mesh: who holds which layers, under which lease, in which state.

    register ──▶ PENDING_LOAD ──ready──▶ READY ──min_stages registered──▶ HEALTHY ◀──announce── OFFLINE
                      │                    │                                │  ▲                    ▲
                      └── missed announces ┴────────────────────────────────┤  └─ready─ DRAINING    │
                                                                            └── missed announces ───┘
    deregister, from any state ──▶ LEFT (remembered until its lease is over, so that it may get its range again)
    restart of the orchestrator ──▶ PENDING_LOAD or, where the range was not held, OFFLINE

Only HEALTHY members are listed. PENDING_LOAD counts as assigned for the allocator and as a hole for coverage; OFFLINE and LEFT are
holes for both. Each lease has a serial; serials rise for ever, over restarts too: `RaiseSerialFloor` is to be durable before the answer
that follows it leaves. So is `KeepAssignment`: an assignment outlives the orchestrator's process, and `restore` takes it up again.
Until a restored member is heard it keeps its range, as one that loads; so nobody who registers first gets the layers of a worker that
serves.

A member that is ordered elsewhere (`MoveOrdered`) holds what it has until it shows the lease that came with the order: with a
heartbeat while it loads, or with its `Ready`. Both ranges count as taken until then, and the order is forgotten after `MOVE_TIMEOUT_S`;
a worker that carries it out later is taken in by its lease where no newer one was issued to it, and else has to register. A canary
holds a copy of another member's range: it is listed, marked as what it is, and counts nowhere else.

The core does no I/O and knows no clock: `handle(event, now_ms)` returns effects, in the order in which they are to be run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from tessella_p2p.base.errors import InvalidRequest, LocalProtocolError, NotAuthorized, Overloaded
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import MAX_MEMBERS, MOVE_TIMEOUT_S
from tessella_p2p.ledger.assignments import Assignment
from tessella_p2p.model.coverage import Coverage
from tessella_p2p.orchestrator.admission import (
    OFFLINE_MS,
    MemberRules,
    check_addresses,
    check_api_url,
    check_instance,
    check_key,
    check_model,
)
from tessella_p2p.orchestrator.allocator import allocate, allocate_copy, fits
from tessella_p2p.orchestrator.assignments import restored
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.leases import LEASE_TTL_MS, Leases
from tessella_p2p.orchestrator.member import (
    ASSIGNED,
    Announced,
    Deregistered,
    Excluded,
    KeepAssignment,
    Loaded,
    Member,
    MemberEffect,
    MemberEvent,
    MemberState,
    Move,
    MoveAbandoned,
    MoveOrdered,
    Registered,
    SendAnswer,
    SendOrder,
    TimePassed,
)
from tessella_p2p.orchestrator.revocations import Revocations
from tessella_p2p.orchestrator.roster import Roster, mesh_of
from tessella_p2p.orchestrator.stage_records import LeasedStage, verify_stage_record
from tessella_p2p.orchestrator.terms import ModelTerms, ServedModel
from tessella_p2p.orchestrator.transitions import (
    deadline,
    is_news,
    known,
    may_keep,
    moved,
    readmitted,
    registered,
    with_record,
)
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import Acknowledged, Announce, Assigned, Ready, Register, UpdateAssignment

_MOVE_MS = int(MOVE_TIMEOUT_S * 1000)


class Members:
    """The members of all served models.

    Args:
        key: signs the leases.
        catalogue: what may be served.
        min_stages: how many workers have to register before one is listed, and into how many stages a model is split at least.
        rules: what else is asked of workers.
        serial_floor: the durable floor of lease serials.
        lease_issuers: other orchestrators, by whose leases a worker is taken in too; it gets one of this orchestrator at once.
    """

    def __init__(
        self,
        key: NodeKey,
        catalogue: Catalogue,
        *,
        min_stages: int = 1,
        rules: MemberRules | None = None,
        serial_floor: int = 0,
        lease_issuers: frozenset[PeerId] = frozenset(),
    ) -> None:
        self._catalogue = catalogue
        self.min_stages = min_stages
        self._rules = rules or MemberRules()
        self._leases = Leases(key, serial_floor)
        self._issuers = lease_issuers | {key.peer_id}
        self._roster = Roster()
        self.revocations = Revocations()
        """Leases that were taken away before their time."""

    def trust_leases_of(self, others: frozenset[PeerId]) -> None:
        """Replace the other orchestrators by whose leases a worker is taken in; who is in stays."""
        self._issuers = others | {self._leases.issuer}

    def restore(self, assignments: Mapping[PeerId, Assignment], now_ms: int) -> list[MemberEffect]:
        """Take up what was durable when the orchestrator's process before ended; call it once, before the first event.

        Args:
            assignments: by peer, as `KeepAssignment` kept them.
            now_ms: from here on a restored member has `RESTORED_GRACE_S` to say a word.

        Returns:
            what is to be forgotten: rows of another key, of a model that is not served any more, of leases that are long over.
        """
        effects: list[MemberEffect] = []
        for peer, assignment in assignments.items():
            member = restored(peer, assignment, self._catalogue, self._leases.issuer, now_ms)
            if member is None or len(self._roster) >= MAX_MEMBERS:
                effects.append(KeepAssignment(peer, None))
            else:
                self._roster.restore(member, assignment)
        return effects

    def handle(self, event: MemberEvent, now_ms: int) -> list[MemberEffect]:
        """Take one event in; an event that is refused changes nothing.

        Raises:
            RefusalError: `InvalidRequest`, `UnknownModel`, `ClaimTooSmall`, `KeyInUse`, `NotAuthorized` (for an announce or a ready:
                register again) or `Overloaded`.
            RemoteProtocolError: a stage record that is not the worker's own, is stale, or carries another lease.
        """
        match event:
            case Registered():
                return self._register(event.peer, event.request, now_ms)
            case Loaded():
                return self._ready(event.peer, event.request, now_ms)
            case Announced():
                return self._announce(event.peer, event.request, now_ms)
            case Deregistered():
                return [*self._leave(event.peer, now_ms), SendAnswer(Acknowledged())]
            case Excluded():
                return self._exclude(event.peer, now_ms)
            case MoveOrdered():
                return self._order(event, now_ms)
            case MoveAbandoned():
                return self._abandon(event.peer)
            case TimePassed():
                return self._pass_time(now_ms)

    # ---- What it knows ----

    def members(self) -> tuple[Member, ...]:
        """Every member that is remembered, in the order of registration."""
        return self._roster.members()

    def get(self, peer: PeerId) -> Member | None:
        """One member."""
        return self._roster.get(peer)

    def in_mesh(self, manifest_root: bytes, recipe: str) -> tuple[Member, ...]:
        """The members that serve one manifest under one published recipe."""
        return self._roster.of((manifest_root, recipe))

    def meshes(self) -> tuple[tuple[bytes, str], ...]:
        """Manifest root and published recipe of every mesh that has a member."""
        return self._roster.meshes()

    def coverage(self, manifest_root: bytes, recipe: str) -> Coverage:
        """The walk over the healthy stages of a model.

        Args:
            manifest_root: the model.
            recipe: a published recipe; or a recipe's own name, for the drift class of it that renders the most layers.

        Raises:
            UnknownModel: nobody may serve it here.
        """
        total_layers = self._catalogue.by_root(manifest_root).total_layers
        return self._roster.coverage(manifest_root, recipe, total_layers)

    def listed(self, manifest_root: bytes | None, now_ms: int) -> tuple[bytes, ...]:
        """Sealed stage records of the healthy members, unexpired, bounded in number and bytes; a None lists every model's."""
        return self._roster.listed(manifest_root, now_ms)

    def count(self) -> Counter[MemberState]:
        """How many members are in each state."""
        return self._roster.count()

    def preview(self, model: ServedModel, recipe: str, terms: ModelTerms, claim_mb: int) -> LayerRange:
        """Which range a claim of a new worker would get now.

        Raises:
            ClaimTooSmall: not one layer fits.
        """
        taken = self._roster.taken((model.manifest_root, recipe))
        return allocate(terms, taken, claim_mb, min_stages=self.min_stages)

    # ---- Registration ----

    def _register(self, peer: PeerId, request: Register, now_ms: int) -> list[MemberEffect]:
        model = check_model(self._catalogue, request)
        check_addresses(request.addresses, self._rules)
        check_api_url(request.api_url)
        before = self._roster.get(peer)
        check_key(before, request.instance, request.addresses, now_ms)
        self._check_room(before)
        layers = self._allocate(peer, request, model, before)
        issued = self._leases.issue(peer, model, request.recipe, layers, canary=request.canary != "off", now_ms=now_ms)
        member = registered(peer, request, model, layers, issued, now_ms, self._rules.grace_ms)
        effects = [*issued.effects, *self._roster.put(member), *self._complete_mesh(member)]
        return [*effects, self._assigned(member, now_ms)]

    def _check_room(self, before: Member | None) -> None:
        if before is None and len(self._roster) >= MAX_MEMBERS:
            raise Overloaded(f"{MAX_MEMBERS} workers are registered already; try again later")

    def _allocate(self, peer: PeerId, request: Register, model: ServedModel, before: Member | None) -> LayerRange:
        terms = model.terms_for(request.recipe, request.device)
        wanted = None if request.layers is None else LayerRange(*request.layers)
        mesh = (model.manifest_root, request.recipe)
        others = self._roster.taken(mesh, peer)
        keeps = (
            before is not None
            and mesh_of(before) == mesh
            and before.is_canary == (request.canary != "off")
            and fits(terms, before.layers, request.claim_mb)
            and (wanted is None or wanted.contains(before.layers))
        )
        if request.canary != "off":
            if before is not None and keeps and before.layers in others:
                return before.layers
            canaries = [one.layers for one in self._roster.of(mesh) if one.is_canary and one.peer_id != peer]
            return allocate_copy(terms, others, canaries, request.claim_mb, wanted=wanted)
        if before is not None and keeps and may_keep(before, others, model.total_layers):
            return before.layers
        return allocate(terms, others, request.claim_mb, min_stages=self.min_stages, wanted=wanted)

    # ---- Heartbeats ----

    def _ready(self, peer: PeerId, request: Ready, now_ms: int) -> list[MemberEffect]:
        """A ready is an announce that has to bring its record; after a restart of the orchestrator it readmits too."""
        member = self._roster.get(peer)
        announce = Announce(
            serial=request.serial,
            queue_depth=0 if member is None else member.queue_depth,
            state="ready",
            record=request.record,
            instance=request.instance,
        )
        return self._announce(peer, announce, now_ms)

    def _announce(self, peer: PeerId, request: Announce, now_ms: int) -> list[MemberEffect]:
        member = self._announcing(peer, request, now_ms)
        move = member.move
        if move is not None and request.prepared == move.serial:
            move = replace(move, prepared=True)
        member = replace(
            member,
            last_seen=now_ms,
            # The grace is for what is loaded: it is over with the first word of a stage that serves.
            silent_until=max(member.silent_until if request.state == "loading" else 0, now_ms + OFFLINE_MS),
            state=self._announced_state(member, request),
            queue_depth=request.queue_depth,
            instance=request.instance or member.instance,
            move=move,
        )
        effects: list[MemberEffect] = []
        renewed = member.lease_expires_at - now_ms < LEASE_TTL_MS // 2
        if renewed:
            member, effects = self._renewed(member, now_ms)
        effects += [*self._roster.put(member), *self._complete_mesh(member)]
        # A worker that missed the answer with its newest lease gets it again.
        behind = request.serial != member.serial
        return [*effects, self._assigned(member, now_ms) if renewed or behind else SendAnswer(Acknowledged())]

    def _announcing(self, peer: PeerId, request: Announce, now_ms: int) -> Member:
        """Whose heartbeat it is: a member's, one's that has carried out its order, or one's that this orchestrator forgot."""
        member = self._roster.get(peer)
        if member is not None:
            check_instance(member, request.instance)
        if member is not None and member.move is not None and request.serial == member.move.serial:
            member = moved(member, member.move)
        elif request.record is not None and is_news(member, request.serial, now_ms):
            return self._readmitted(peer, member, request.record, now_ms)
        else:
            member = known(peer, member, request.serial, now_ms)
        if request.record is not None and request.state != "loading":
            return self._with_record(member, request.record, now_ms)
        return member

    def _announced_state(self, member: Member, request: Announce) -> MemberState:
        if request.state == "draining":
            return MemberState.DRAINING
        if request.state == "loading":
            return MemberState.PENDING_LOAD
        if member.record is None:
            return member.state
        return MemberState.HEALTHY if self._roster.is_complete(mesh_of(member)) else MemberState.READY

    def _readmitted(self, peer: PeerId, before: Member | None, record: bytes, now_ms: int) -> Member:
        """A serving worker that this orchestrator does not remember, taken in by its lease: after a restart nobody reloads."""
        found = self._verified(record, peer, now_ms)
        model = self._catalogue.by_root(found.lease.manifest_root)
        is_own = found.issuer == self._leases.issuer
        if is_own and self.revocations.covers(peer, found.lease.serial):
            raise NotAuthorized(f"lease {found.lease.serial} of {peer} was taken away: register again")
        if before is not None and is_own and before.serial > found.lease.serial:
            raise NotAuthorized(f"lease {found.lease.serial} is not the newest lease of {peer}: register again")
        if found.lease.canary and (before is None or not before.is_canary):
            raise NotAuthorized(f"{peer} is a canary, and how it answers is not known any more: register again")
        self._check_room(before)
        if found.stage.total_layers != model.total_layers:
            raise InvalidRequest("the stage record states another number of layers", param="total_layers")
        return readmitted(found, model, before, now_ms)

    def _with_record(self, member: Member, record: bytes, now_ms: int) -> Member:
        """The member with ``record``, unless it has that one or a newer one."""
        if record == member.record:
            return member
        found = self._verified(record, member.peer_id, now_ms)
        return with_record(member, found)

    def _verified(self, record: bytes, peer: PeerId, now_ms: int) -> LeasedStage:
        found = verify_stage_record(record, peer, self._issuers, now_ms)
        check_addresses(found.stage.addresses, self._rules)
        return found

    def _renewed(self, member: Member, now_ms: int) -> tuple[Member, list[MemberEffect]]:
        model = self._catalogue.by_root(member.manifest_root)
        issued = self._leases.issue(
            member.peer_id, model, member.recipe, member.layers, canary=member.is_canary, now_ms=now_ms
        )
        newest = replace(member, serial=issued.serial, lease=issued.sealed, lease_expires_at=issued.expires_at)
        return newest, list(issued.effects)

    # ---- Orders ----

    def _order(self, event: MoveOrdered, now_ms: int) -> list[MemberEffect]:
        """The order to serve other layers; the same one again where it is under way."""
        member = self._roster.get(event.peer)
        if member is None or member.state not in ASSIGNED or member.is_canary or not member.addresses:
            raise NotAuthorized(f"{event.peer} is in no state to be ordered to other layers")
        model = self._catalogue.by_root(member.manifest_root)
        terms = None if member.device is None else model.terms_for(member.recipe, member.device)
        if terms is None or not fits(terms, event.layers, member.claim_mb):
            raise LocalProtocolError(f"layers {event.layers} are beyond the claim of {event.peer}")
        effects: list[MemberEffect] = []
        move = member.move
        under_way = move is not None and move.layers == event.layers
        # A lease of the layers before may have been renewed since; then the order's is not the newest, and counts for nobody.
        if move is None or not under_way or move.serial < member.serial:
            issued = self._leases.issue(member.peer_id, model, member.recipe, event.layers, canary=False, now_ms=now_ms)
            effects += issued.effects
            prepared = under_way and move is not None and move.prepared
            move = Move(event.layers, issued.serial, issued.sealed, issued.expires_at, now_ms + _MOVE_MS, prepared)
        effects += self._roster.put(replace(member, move=move))
        body = UpdateAssignment(
            model_id=member.model_id,
            layers=move.layers.as_tuple(),
            lease=move.lease,
            reason=event.reason,
            beside=event.beside,
        )
        return [*effects, SendOrder(member.peer_id, member.addresses, body)]

    def _abandon(self, peer: PeerId) -> list[MemberEffect]:
        member = self._roster.get(peer)
        return [] if member is None or member.move is None else self._roster.put(replace(member, move=None))

    # ---- The end ----

    def _leave(self, peer: PeerId, now_ms: int) -> list[MemberEffect]:
        member = self._roster.get(peer)
        if member is None:
            return []
        return self._roster.put(replace(member, state=MemberState.LEFT, last_seen=now_ms, record=None, move=None))

    def _exclude(self, peer: PeerId, now_ms: int) -> list[MemberEffect]:
        """It may hold leases that are not remembered here any more, so whatever was issued until now is taken away."""
        return [*self._leave(peer, now_ms), *self.revocations.revoke(peer, self._leases.newest, now_ms)]

    def _pass_time(self, now_ms: int) -> list[MemberEffect]:
        effects: list[MemberEffect] = [*self.revocations.pass_time(now_ms)]
        for member in self._roster.members():
            if member.move is not None and member.move.until <= now_ms:
                member = replace(member, move=None)
                effects += self._roster.put(member)
            if deadline(member) > now_ms:
                continue
            if member.state in (MemberState.OFFLINE, MemberState.LEFT):
                effects += self._roster.remove(member.peer_id)
            else:
                effects += self._roster.put(replace(member, state=MemberState.OFFLINE))
        return effects

    # ---- Parts ----

    def _complete_mesh(self, member: Member) -> list[MemberEffect]:
        """Once `min_stages` workers have registered, whoever is ready becomes healthy; it stays so."""
        mesh = mesh_of(member)
        if self._roster.is_complete(mesh):
            return []
        members = [one for one in self._roster.of(mesh) if one.state in ASSIGNED]
        if sum(not one.is_canary for one in members) < self.min_stages:
            return []
        self._roster.complete(mesh)
        effects: list[MemberEffect] = []
        for one in members:
            is_ready = one.state is MemberState.READY
            effects += self._roster.put(replace(one, state=MemberState.HEALTHY) if is_ready else one)
        return effects

    def _assigned(self, member: Member, now_ms: int) -> SendAnswer:
        return SendAnswer(
            Assigned(
                model_id=member.model_id,
                layers=member.layers.as_tuple(),
                lease=member.lease,
                records=self.listed(member.manifest_root, now_ms),
            )
        )
