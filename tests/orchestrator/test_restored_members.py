"""An orchestrator that is killed and started again: whose layers are whose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import InvalidRequest, NotAuthorized
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import HEARTBEAT_S, OFFLINE_AFTER_MISSED, RESTORED_GRACE_S
from tessella_p2p.ledger.assignments import Assignment
from tessella_p2p.model.coverage import walk
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.member import (
    ASSIGNED,
    Deregistered,
    KeepAssignment,
    MemberEffect,
    MemberState,
    RaiseSerialFloor,
    SendAnswer,
    TimePassed,
)
from tessella_p2p.orchestrator.members import Members
from tessella_p2p.orchestrator.terms import ServedModel
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import Deregister
from tests.orchestrator.paper_workers import (
    CONTRACT,
    LAYERS,
    MODEL,
    MODEL_ID,
    NOW,
    ORCHESTRATOR,
    RECIPE,
    ROOT,
    TERMS,
    PaperWorker,
    key_of,
    lease_of,
)

MINUTE = 60_000
DAY = 24 * 60 * MINUTE
GRACE_MS = int(RESTORED_GRACE_S * 1000)
OFFLINE_MS = int(HEARTBEAT_S * OFFLINE_AFTER_MISSED * 1000)
STAGES = 3


@dataclass
class Disk:
    """What is durable: the effects that were written."""

    floor: int = 0
    rows: dict[PeerId, Assignment] = field(default_factory=dict)

    def write(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case RaiseSerialFloor(value):
                    self.floor = max(self.floor, value)
                case KeepAssignment(peer, None):
                    del self.rows[peer]
                case KeepAssignment(peer, assignment):
                    assert assignment is not None
                    self.rows[peer] = assignment

    def start(
        self, now_ms: int, key: NodeKey = ORCHESTRATOR, model: ServedModel = MODEL, min_stages: int = STAGES
    ) -> Members:
        members = Members(key, Catalogue([model]), min_stages=min_stages, serial_floor=self.floor)
        self.write(members.restore(self.rows, now_ms))
        return members


def running(count: int = STAGES) -> tuple[Disk, list[PaperWorker]]:
    """Workers that serve under an orchestrator that dies now; what it leaves."""
    disk = Disk()
    members = disk.start(NOW)
    workers = [PaperWorker(members, f"worker {i}") for i in range(count)]
    for worker in workers:
        disk.write(worker.register())
    for worker in workers:
        disk.write(worker.ready())
    return disk, workers


def restart(disk: Disk, workers: list[PaperWorker], now_ms: int) -> Members:
    members = disk.start(now_ms)
    for worker in workers:
        worker.members = members
    return members


def state_of(members: Members, worker: PaperWorker) -> MemberState | None:
    member = members.get(worker.peer)
    return None if member is None else member.state


# ---- One restart ----


@pytest.mark.parametrize("index", range(STAGES))
def test_a_worker_that_registers_first_after_a_restart_gets_its_own_range(index: int) -> None:
    """The others serve and have not been heard yet; this one lost everything with its process."""
    disk, workers = running()
    before = [worker.layers for worker in workers]
    members = restart(disk, workers, NOW + 2000)
    workers[index].register(NOW + 2000)
    assert workers[index].layers == before[index]
    for worker in workers:
        worker.ready(NOW + 3000)
    assert [worker.layers for worker in workers] == before
    assert members.coverage(ROOT, RECIPE).health == "healthy"


def test_a_stranger_that_registers_first_after_a_restart_gets_what_nobody_holds() -> None:
    disk, workers = running()
    disk.write(workers[1].members.handle(Deregistered(workers[1].peer, Deregister()), NOW))
    gap = workers[1].layers
    members = restart(disk, workers, NOW + 2000)
    stranger = PaperWorker(members, "stranger")
    stranger.register(NOW + 2000)
    assert stranger.layers == gap


def test_a_restored_range_is_taken_for_the_allocator_and_a_hole_for_coverage() -> None:
    disk, workers = running()
    members = restart(disk, workers, NOW + 2000)
    assert {member.state for member in members.members()} == {MemberState.PENDING_LOAD}
    assert members.coverage(ROOT, RECIPE).holes == (LayerRange(0, LAYERS),)
    assert members.listed(ROOT, NOW + 2000) == ()


def test_a_restored_worker_that_stays_silent_loses_its_range_and_gets_it_again_while_it_is_free() -> None:
    disk, workers = running()
    members = restart(disk, workers, NOW + 2000)
    silent, *alive = workers
    for now_ms in range(NOW + 3000, NOW + 2000 + GRACE_MS, 5000):
        for worker in alive:
            worker.announce(now_ms)
    members.handle(TimePassed(), NOW + 2000 + GRACE_MS - 1)
    assert state_of(members, silent) is MemberState.PENDING_LOAD
    members.handle(TimePassed(), NOW + 2000 + GRACE_MS)
    assert state_of(members, silent) is MemberState.OFFLINE
    before = silent.layers
    silent.register(NOW + 3000 + GRACE_MS)
    assert silent.layers == before


def test_a_mesh_that_was_complete_does_not_wait_again() -> None:
    disk, workers = running()
    for worker in workers[1:]:
        disk.write(worker.members.handle(Deregistered(worker.peer, Deregister()), NOW))
    members = restart(disk, workers, NOW + 2000)
    workers[0].announce(NOW + 3000)
    assert state_of(members, workers[0]) is MemberState.HEALTHY


def test_a_mesh_that_was_not_complete_waits_on() -> None:
    disk, workers = running(STAGES - 1)
    members = restart(disk, workers, NOW + 2000)
    for worker in workers:
        worker.announce(NOW + 3000)
    assert {member.state for member in members.members()} == {MemberState.READY}
    PaperWorker(members, "last").register(NOW + 3000)
    assert [state_of(members, worker) for worker in workers] == [MemberState.HEALTHY] * 2


def test_leases_that_ran_out_in_an_outage_still_hold_their_layers() -> None:
    disk, workers = running()
    before = [worker.layers for worker in workers]
    later = NOW + 60 * MINUTE
    restart(disk, workers, later)
    workers[2].register(later)
    for worker in workers[:2]:
        worker.announce(later + 5000)
    assert [worker.layers for worker in workers] == before
    assert all(worker.members.coverage(ROOT, RECIPE).holes == (before[2],) for worker in workers)


def test_a_worker_that_was_loading_goes_on_loading() -> None:
    disk = Disk()
    worker = PaperWorker(disk.start(NOW), "worker")
    disk.write(worker.register())
    layers = worker.layers
    members = restart(disk, [worker], NOW + 2000)
    worker.announce(NOW + 4000, "loading", with_record=False)
    assert state_of(members, worker) is MemberState.PENDING_LOAD
    worker.ready(NOW + 9000)
    assert worker.layers == layers


def test_most_heartbeats_change_nothing_on_disk() -> None:
    _, workers = running()
    effects = [effect for worker in workers for effect in worker.announce(NOW + 5000)]
    assert len(effects) == STAGES
    assert all(isinstance(effect, SendAnswer) for effect in effects)


def test_an_assignment_is_durable_before_its_answer_and_gone_with_its_lease() -> None:
    disk = Disk()
    worker = PaperWorker(disk.start(NOW), "worker")
    effects = worker.register()
    kinds = [type(effect) for effect in effects]
    assert kinds.index(KeepAssignment) < kinds.index(SendAnswer)
    disk.write(effects)
    assert disk.rows[worker.peer].lease == worker.lease
    for now_ms in (NOW + MINUTE, NOW + 10 * MINUTE):
        disk.write(worker.members.handle(TimePassed(), now_ms))
    assert disk.rows == {}


# ---- Rows that certify nothing ----


@pytest.mark.parametrize(
    "start",
    [
        lambda disk: disk.start(NOW + 2000, key=key_of("another orchestrator")),
        lambda disk: disk.start(NOW + 2000, model=ServedModel(MODEL_ID, bytes(32), CONTRACT, LAYERS, MODEL.terms)),
        lambda disk: disk.start(NOW + 2000, model=ServedModel("renamed", ROOT, CONTRACT, LAYERS, MODEL.terms)),
        lambda disk: disk.start(
            NOW + 2000, model=ServedModel(MODEL_ID, ROOT, CONTRACT, LAYERS, {("int4", "*"): TERMS})
        ),
        lambda disk: disk.start(NOW + DAY + 10 * MINUTE),
    ],
    ids=["another key", "another root", "another model", "another recipe", "long over"],
)
def test_a_row_that_certifies_nothing_any_more_is_forgotten(start: Callable[[Disk], Members]) -> None:
    disk, _ = running()
    assert start(disk).members() == ()
    assert disk.rows == {}


def test_rows_that_lie_restore_nobody() -> None:
    disk, (first, second, third) = running()
    good = disk.rows[third.peer]
    disk.rows = {
        first.peer: disk.rows[second.peer],
        second.peer: good.model_copy(update={"lease": bytes([*good.lease[:-1], good.lease[-1] ^ 1])}),
        third.peer: good.model_copy(update={"lease": b"junk"}),
        key_of("fourth").peer_id: good.model_copy(update={"lease": first.record()}),
    }
    assert disk.start(NOW).members() == ()
    assert disk.rows == {}


def test_the_number_of_restored_members_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessella_p2p.orchestrator.members.MAX_MEMBERS", 2)
    disk = Disk()
    members = disk.start(NOW)
    monkeypatch.undo()
    for i in range(STAGES):
        disk.write(PaperWorker(members, f"worker {i}").register())
    monkeypatch.setattr("tessella_p2p.orchestrator.members.MAX_MEMBERS", 2)
    assert len(disk.start(NOW).members()) == len(disk.rows) == 2


# ---- Restarts at any point ----

Act = Literal[
    "register", "announce", "drain", "leave", "wait", "restart", "die before the write", "die before the answer"
]
ACTS: list[Act] = [
    "register",
    "announce",
    "drain",
    "leave",
    "wait",
    "restart",
    "die before the write",
    "die before the answer",
]


class Mesh:
    """Workers with ample claims and an orchestrator that may die at any point; what must hold is checked at each step."""

    def __init__(self) -> None:
        self.now_ms = NOW
        self.disk = Disk()
        self.members = self.disk.start(NOW)
        self.workers = [PaperWorker(self.members, f"worker {i}") for i in range(5)]
        self.heard: dict[PeerId, int] = {}

    def taken(self) -> dict[PeerId, LayerRange]:
        return {member.peer_id: member.layers for member in self.members.members() if member.state in ASSIGNED}

    def restart(self, taken: dict[PeerId, LayerRange]) -> None:
        self.members = restart(self.disk, self.workers, self.now_ms)
        assert self.taken() == taken
        # Heartbeats could not arrive while nobody listened.
        self.heard = dict.fromkeys(self.heard, self.now_ms)

    def do(self, act: Act, worker: PaperWorker, seconds: int) -> None:
        before = self.taken()
        match act:
            case "register":
                self.register(worker)
            case "announce" | "drain":
                self.announce(worker, "draining" if act == "drain" else "ready")
            case "leave":
                self.disk.write(self.members.handle(Deregistered(worker.peer, Deregister()), self.now_ms))
                self.heard.pop(worker.peer, None)
                worker.lease = b""
            case "wait":
                for _ in range(0, seconds, 5):
                    self.now_ms += 5000
                    self.disk.write(self.members.handle(TimePassed(), self.now_ms))
            case "restart":
                self.restart(before)
            case "die before the write":
                lease = worker.lease
                worker.register(self.now_ms)
                worker.lease = lease
                self.restart(before)
            case "die before the answer":
                lease = worker.lease
                self.disk.write(worker.register(self.now_ms))
                worker.lease = lease
                self.restart(self.taken())

    def register(self, worker: PaperWorker) -> None:
        others = {peer: layers for peer, layers in self.taken().items() if peer != worker.peer}
        own = self.taken().get(worker.peer)
        self.disk.write(worker.register(self.now_ms))
        if own is not None and not walk([*others.values(), own], LAYERS).holes:
            assert worker.layers == own
        if walk(others.values(), LAYERS).holes:
            for peer, layers in others.items():
                is_live = self.now_ms - self.heard.get(peer, 0) < OFFLINE_MS
                assert not (is_live and worker.layers.overlaps(layers))
        self.heard[worker.peer] = self.now_ms

    def announce(self, worker: PaperWorker, state: str) -> None:
        if not worker.lease:
            return
        layers = worker.layers
        try:
            self.disk.write(worker.announce(self.now_ms, state))
        except (NotAuthorized, InvalidRequest):
            self.register(worker)
        else:
            assert worker.layers == layers
            self.heard[worker.peer] = self.now_ms

    def check(self) -> None:
        """The disk says what the members are: which lease is each one's newest, and who holds its range."""
        assert {peer for peer, row in self.disk.rows.items() if row.holds_range} == set(self.taken())
        for member in self.members.members():
            if member.state is not MemberState.LEFT:
                assert self.disk.rows[member.peer_id].lease == member.lease
                assert LayerRange(*lease_of(member.lease).layers) == member.layers


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 4), st.integers(1, 90)), max_size=30))
def test_a_restart_at_any_point_leaves_everybody_what_they_had(acts: list[tuple[Act, int, int]]) -> None:
    mesh = Mesh()
    for act, index, seconds in acts:
        mesh.do(act, mesh.workers[index], seconds)
        mesh.check()
