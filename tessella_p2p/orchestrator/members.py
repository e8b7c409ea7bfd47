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

The core does no I/O and knows no clock: `handle(event, now_ms)` returns effects, in the order in which they are to be run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tessella_p2p.base.errors import InvalidRequest, NotAuthorized, Overloaded
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import (
    HEARTBEAT_S,
    LEASE_SERIAL_BLOCK,
    LEASE_TTL_S,
    MAX_LISTED_BYTES,
    MAX_LISTED_STAGES,
    MAX_MEMBERS,
    OFFLINE_AFTER_MISSED,
    REGISTRATION_GRACE_S,
)
from tessella_p2p.ledger.assignments import Assignment
from tessella_p2p.model.coverage import Coverage, walk
from tessella_p2p.model.recipe import base_name
from tessella_p2p.orchestrator.allocator import allocate, fits
from tessella_p2p.orchestrator.assignments import ASSIGNED, kept, restored
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.member import (
    Announced,
    Deregistered,
    KeepAssignment,
    Loaded,
    Member,
    MemberEffect,
    MemberEvent,
    MemberState,
    RaiseSerialFloor,
    Registered,
    SendAnswer,
    TimePassed,
    TopologyChanged,
)
from tessella_p2p.orchestrator.stage_records import verify_stage_record
from tessella_p2p.orchestrator.terms import ServedModel
from tessella_p2p.wire.envelope import seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import LEASE, Acknowledged, Announce, Assigned, Lease, Ready, Register

_LEASE_TTL_MS = int(LEASE_TTL_S * 1000)
_GRACE_MS = int(REGISTRATION_GRACE_S * 1000)
_OFFLINE_MS = int(HEARTBEAT_S * OFFLINE_AFTER_MISSED * 1000)


class Members:
    """The members of all served models.

    Args:
        key: signs the leases.
        catalogue: what may be served.
        min_stages: how many workers have to register before one is listed, and into how many stages a model is split at least.
        serial_floor: the durable floor of lease serials.
    """

    def __init__(self, key: NodeKey, catalogue: Catalogue, *, min_stages: int = 1, serial_floor: int = 0) -> None:
        self._key = key
        self._catalogue = catalogue
        self._min_stages = min_stages
        self._serial = serial_floor
        self._durable_floor = serial_floor
        self._members: dict[PeerId, Member] = {}
        self._kept: dict[PeerId, Assignment] = {}
        self._complete: set[tuple[bytes, str]] = set()

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
            member = restored(peer, assignment, self._catalogue, self._key.peer_id, now_ms)
            if member is None or len(self._members) >= MAX_MEMBERS:
                effects.append(KeepAssignment(peer, None))
                continue
            self._members[peer] = member
            self._kept[peer] = assignment
            if assignment.mesh_complete:
                self._complete.add((member.manifest_root, member.recipe))
        return effects

    def handle(self, event: MemberEvent, now_ms: int) -> list[MemberEffect]:
        """Take one event in; an event that is refused changes nothing.

        Raises:
            RefusalError: `InvalidRequest`, `UnknownModel`, `ClaimTooSmall`, `NotAuthorized` (for an announce or a ready: register
                again) or `Overloaded`.
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
            case TimePassed():
                return self._pass_time(now_ms)

    def next_deadline(self) -> int | None:
        """When the next member will have been silent for too long, or its lease be forgotten (Unix milliseconds)."""
        return min((_deadline(member) for member in self._members.values()), default=None)

    def members(self) -> tuple[Member, ...]:
        """Every member that is remembered, in the order of registration."""
        return tuple(self._members.values())

    def get(self, peer: PeerId) -> Member | None:
        """One member."""
        return self._members.get(peer)

    def coverage(self, manifest_root: bytes, recipe: str) -> Coverage:
        """The walk over the healthy stages of a model.

        Args:
            manifest_root: the model.
            recipe: a published recipe; or a recipe's own name, for the drift class of it that renders the most layers.

        Raises:
            UnknownModel: nobody may serve it here.
        """
        total_layers = self._catalogue.by_root(manifest_root).total_layers
        healthy: dict[str, list[LayerRange]] = {}
        for member in self._members.values():
            is_meant = recipe in (member.recipe, base_name(member.recipe))
            if is_meant and member.manifest_root == manifest_root and member.state is MemberState.HEALTHY:
                healthy.setdefault(member.recipe, []).append(member.layers)
        walks = [walk(ranges, total_layers) for ranges in healthy.values()]
        return max(walks, key=lambda coverage: coverage.num_covered, default=walk((), total_layers))

    def listed(self, manifest_root: bytes | None, now_ms: int) -> tuple[bytes, ...]:
        """Sealed stage records of the healthy members, unexpired, bounded in number and bytes; a None lists every model's."""
        records: list[bytes] = []
        size_bytes = 0
        for member in self._members.values():
            if member.state is not MemberState.HEALTHY or member.record is None or member.record_expires_at <= now_ms:
                continue
            if manifest_root is not None and member.manifest_root != manifest_root:
                continue
            size_bytes += len(member.record)
            if len(records) == MAX_LISTED_STAGES or size_bytes > MAX_LISTED_BYTES:
                break
            records.append(member.record)
        return tuple(records)

    # ---- Requests ----

    def _register(self, peer: PeerId, request: Register, now_ms: int) -> list[MemberEffect]:
        model = self._catalogue.by_root(request.manifest_root)
        for name, got, expected in (
            ("model_id", request.model_id, model.model_id),
            ("contract_hash", request.contract_hash, model.contract_hash),
            ("total_layers", request.total_layers, model.total_layers),
        ):
            if got != expected:
                raise InvalidRequest(f"{name} is not that of {model.model_id} as it is served here", param=name)
        if not request.addresses:
            raise InvalidRequest("a worker needs an address at which its peers can dial it", param="addresses")
        if peer not in self._members and len(self._members) >= MAX_MEMBERS:
            raise Overloaded(f"{MAX_MEMBERS} workers are registered already; try again later")
        layers = self._allocate(peer, request, model)
        effects, serial, lease = self._lease(peer, model, request.recipe, layers, now_ms)
        member = Member(
            peer_id=peer,
            model_id=model.model_id,
            manifest_root=model.manifest_root,
            recipe=request.recipe,
            layers=layers,
            state=MemberState.PENDING_LOAD,
            serial=serial,
            lease=lease,
            lease_expires_at=now_ms + _LEASE_TTL_MS,
            last_seen=now_ms,
            silent_until=now_ms + max(_GRACE_MS, _OFFLINE_MS),
            addresses=request.addresses,
            claim_mb=request.claim_mb,
            api_url=request.api_url,
        )
        effects += self._put(member)
        effects += self._complete_mesh(member)
        return [*effects, self._assigned(member, now_ms)]

    def _allocate(self, peer: PeerId, request: Register, model: ServedModel) -> LayerRange:
        terms = model.terms_for(request.recipe, request.device)
        wanted = None if request.layers is None else LayerRange(*request.layers)
        others = [
            member.layers
            for member in self._of(model.manifest_root, request.recipe)
            if member.peer_id != peer and member.state in ASSIGNED
        ]
        before = self._members.get(peer)
        if (
            before is not None
            and (before.manifest_root, before.recipe) == (model.manifest_root, request.recipe)
            and fits(terms, before.layers, request.claim_mb)
            and (wanted is None or wanted.contains(before.layers))
            and _may_keep(before, others, model.total_layers)
        ):
            return before.layers
        return allocate(terms, others, request.claim_mb, min_stages=self._min_stages, wanted=wanted)

    def _ready(self, peer: PeerId, request: Ready, now_ms: int) -> list[MemberEffect]:
        """A ready is an announce that has to bring its record; after a restart of the orchestrator it readmits too."""
        member = self._members.get(peer)
        queue_depth = 0 if member is None else member.queue_depth
        announce = Announce(serial=request.serial, queue_depth=queue_depth, state="ready", record=request.record)
        return self._announce(peer, announce, now_ms)

    def _announce(self, peer: PeerId, request: Announce, now_ms: int) -> list[MemberEffect]:
        if self._is_forgotten(peer, now_ms) and request.record is not None:
            member = self._readmitted(peer, request.record, now_ms)
        else:
            member = self._known(peer, request.serial, now_ms)
            if request.record is not None and request.state != "loading":
                member = self._with_record(member, request.record, now_ms)
        member = replace(
            _seen(member, now_ms),
            state=self._announced_state(member, request),
            queue_depth=request.queue_depth,
        )
        effects: list[MemberEffect] = []
        renewed = member.lease_expires_at - now_ms < _LEASE_TTL_MS // 2
        if renewed:
            model = self._catalogue.by_root(member.manifest_root)
            effects, serial, lease = self._lease(peer, model, member.recipe, member.layers, now_ms)
            member = replace(member, serial=serial, lease=lease, lease_expires_at=now_ms + _LEASE_TTL_MS)
        effects += self._put(member)
        effects += self._complete_mesh(member)
        # A worker that missed the answer with its newest lease gets it again.
        behind = request.serial != member.serial
        return [*effects, self._assigned(member, now_ms) if renewed or behind else SendAnswer(Acknowledged())]

    def _announced_state(self, member: Member, request: Announce) -> MemberState:
        if request.state == "draining":
            return MemberState.DRAINING
        if request.state == "loading":
            return MemberState.PENDING_LOAD
        return member.state if member.record is None else self._serving_state(member)

    def _readmitted(self, peer: PeerId, record: bytes, now_ms: int) -> Member:
        """A serving worker that this orchestrator does not remember, taken in by its lease: after a restart nobody reloads."""
        found = verify_stage_record(record, peer, self._key.peer_id, now_ms)
        before = self._members.get(peer)
        model = self._catalogue.by_root(found.lease.manifest_root)
        if before is not None and before.serial > found.lease.serial:
            raise NotAuthorized(f"lease {found.lease.serial} is not the newest lease of {peer}: register again")
        if before is None and len(self._members) >= MAX_MEMBERS:
            raise Overloaded(f"{MAX_MEMBERS} workers are registered already; try again later")
        if found.stage.total_layers != model.total_layers:
            raise InvalidRequest("the stage record states another number of layers", param="total_layers")
        return Member(
            peer_id=peer,
            model_id=model.model_id,
            manifest_root=model.manifest_root,
            recipe=found.lease.recipe,
            layers=found.layers,
            state=MemberState.READY,
            serial=found.lease.serial,
            lease=found.stage.lease,
            lease_expires_at=0,  # so that it gets a lease of its own right away
            last_seen=now_ms,
            silent_until=now_ms,
            addresses=found.stage.addresses,
            record=found.raw,
            record_sequence=found.sequence,
            record_expires_at=found.expires_at,
        )

    def _leave(self, peer: PeerId, now_ms: int) -> list[MemberEffect]:
        member = self._members.get(peer)
        if member is None:
            return []
        return self._put(replace(member, state=MemberState.LEFT, last_seen=now_ms, record=None))

    def _pass_time(self, now_ms: int) -> list[MemberEffect]:
        effects: list[MemberEffect] = []
        for member in list(self._members.values()):
            if _deadline(member) > now_ms:
                continue
            if member.state in (MemberState.OFFLINE, MemberState.LEFT):
                del self._members[member.peer_id]
                effects += self._keep(member.peer_id, None)
            else:
                effects += self._put(replace(member, state=MemberState.OFFLINE))
        return effects

    # ---- Parts ----

    def _of(self, manifest_root: bytes, recipe: str) -> list[Member]:
        return [m for m in self._members.values() if (m.manifest_root, m.recipe) == (manifest_root, recipe)]

    def _is_forgotten(self, peer: PeerId, now_ms: int) -> bool:
        member = self._members.get(peer)
        return member is None or (member.state is not MemberState.LEFT and member.lease_expires_at <= now_ms)

    def _known(self, peer: PeerId, serial: int, now_ms: int) -> Member:
        member = self._members.get(peer)
        if member is None or member.state is MemberState.LEFT:
            raise NotAuthorized(f"{peer} is not a member: register again")
        if serial > member.serial or member.lease_expires_at <= now_ms:
            raise NotAuthorized(f"lease {serial} of {peer} is not in force: register again")
        return member

    def _serving_state(self, member: Member) -> MemberState:
        complete = (member.manifest_root, member.recipe) in self._complete
        return MemberState.HEALTHY if complete else MemberState.READY

    def _with_record(self, member: Member, record: bytes, now_ms: int) -> Member:
        """The member with ``record``, unless it has that one or a newer one."""
        if record == member.record:
            return member
        found = verify_stage_record(record, member.peer_id, self._key.peer_id, now_ms)
        assigned = (member.manifest_root, member.recipe, member.layers)
        if (found.stage.manifest_root, found.stage.recipe, found.layers) != assigned:
            raise InvalidRequest(
                f"the stage record is not for layers {member.layers}, which are assigned", param="record"
            )
        if found.sequence <= member.record_sequence:
            return member
        return replace(
            member,
            record=found.raw,
            record_sequence=found.sequence,
            record_expires_at=found.expires_at,
            addresses=found.stage.addresses,
        )

    def _lease(
        self, peer: PeerId, model: ServedModel, recipe: str, layers: LayerRange, now_ms: int
    ) -> tuple[list[MemberEffect], int, bytes]:
        self._serial += 1
        effects: list[MemberEffect] = []
        if self._serial > self._durable_floor:
            self._durable_floor = self._serial + LEASE_SERIAL_BLOCK
            effects.append(RaiseSerialFloor(self._durable_floor))
        lease = Lease(
            serial=self._serial,
            peer_id=peer,
            model_id=model.model_id,
            manifest_root=model.manifest_root,
            recipe=recipe,
            layers=layers.as_tuple(),
        )
        sealed = seal(self._key, LEASE, lease, sequence=self._serial, now_ms=now_ms, ttl_ms=_LEASE_TTL_MS)
        return effects, self._serial, sealed

    def _complete_mesh(self, member: Member) -> list[MemberEffect]:
        """Once `min_stages` workers have registered, whoever is ready becomes healthy; it stays so."""
        group = (member.manifest_root, member.recipe)
        if group in self._complete:
            return []
        members = [m for m in self._of(*group) if m.state in ASSIGNED]
        if len(members) < self._min_stages:
            return []
        self._complete.add(group)
        effects: list[MemberEffect] = []
        for one in members:
            is_ready = one.state is MemberState.READY
            effects += self._put(replace(one, state=MemberState.HEALTHY) if is_ready else one)
        return effects

    def _put(self, member: Member) -> list[MemberEffect]:
        before = self._members.get(member.peer_id)
        self._members[member.peer_id] = member
        complete = (member.manifest_root, member.recipe) in self._complete
        effects = self._keep(member.peer_id, kept(member, mesh_complete=complete))
        if before is None or before.state is not member.state:
            effects.append(TopologyChanged(member.peer_id, None if before is None else before.state, member.state))
        return effects

    def _keep(self, peer: PeerId, assignment: Assignment | None) -> list[MemberEffect]:
        """Keep what differs from what is kept already: most heartbeats change nothing on disk."""
        if assignment == self._kept.get(peer):
            return []
        if assignment is None:
            del self._kept[peer]
        else:
            self._kept[peer] = assignment
        return [KeepAssignment(peer, assignment)]

    def _assigned(self, member: Member, now_ms: int) -> SendAnswer:
        return SendAnswer(
            Assigned(
                model_id=member.model_id,
                layers=member.layers.as_tuple(),
                lease=member.lease,
                records=self.listed(member.manifest_root, now_ms),
            )
        )

    def count(self) -> Counter[MemberState]:
        """How many members are in each state."""
        return Counter(member.state for member in self._members.values())


def _seen(member: Member, now_ms: int) -> Member:
    return replace(member, last_seen=now_ms, silent_until=max(member.silent_until, now_ms + _OFFLINE_MS))


def _may_keep(before: Member, others: Sequence[LayerRange], total_layers: int) -> bool:
    """Whether a worker that registers again gets its range again.

    It does when nobody else has that, and while the range counts as its own; but a replica goes where a hole needs it.
    """
    if any(hole.contains(before.layers) for hole in walk(others, total_layers).holes):
        return True
    return before.state in ASSIGNED and not walk([*others, before.layers], total_layers).holes


def _deadline(member: Member) -> int:
    if member.state in (MemberState.OFFLINE, MemberState.LEFT):
        return max(member.lease_expires_at, member.last_seen + _OFFLINE_MS)
    return member.silent_until
