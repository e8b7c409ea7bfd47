"""The life of a worker as its orchestrator sees it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tessella_p2p.base.errors import (
    ClaimTooSmall,
    Expired,
    InvalidRequest,
    InvalidSignature,
    NotAuthorized,
    Overloaded,
    UnknownModel,
)
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.member import (
    Announced,
    Deregistered,
    Loaded,
    MemberState,
    RaiseSerialFloor,
    Registered,
    TimePassed,
    TopologyChanged,
)
from tessella_p2p.orchestrator.members import Members
from tessella_p2p.orchestrator.terms import ServedModel
from tessella_p2p.wire.messages import Acknowledged, Announce, Assigned, Deregister, Ready
from tests.orchestrator.paper_workers import (
    MODEL,
    MODEL_ID,
    NOW,
    ORCHESTRATOR,
    RECIPE,
    ROOT,
    TERMS,
    PaperWorker,
    answer_in,
    key_of,
    lease_of,
    register,
    stage_record,
)

MINUTE = 60_000


def mesh(count: int, *, min_stages: int | None = None) -> tuple[Members, list[PaperWorker]]:
    """An orchestrator and so many ample workers that are loaded and ready."""
    members = Members(ORCHESTRATOR, Catalogue([MODEL]), min_stages=count if min_stages is None else min_stages)
    workers = [PaperWorker(members, f"worker {i}") for i in range(count)]
    for worker in workers:
        worker.register()
    for worker in workers:
        worker.ready()
    return members, workers


def state_of(members: Members, worker: PaperWorker) -> MemberState:
    member = members.get(worker.peer)
    assert member is not None
    return member.state


def beat(workers: list[PaperWorker], until_ms: int) -> None:
    """Announce every 5 seconds, as workers do."""
    for now_ms in range(NOW, until_ms + 1, 5_000):
        for worker in workers:
            worker.announce(now_ms)


# ---- Register, ready ----


def test_a_worker_is_assigned_a_range_with_a_lease_for_exactly_that() -> None:
    members = Members(ORCHESTRATOR, Catalogue([MODEL]))
    worker = PaperWorker(members, "worker")
    body = answer_in(worker.register(claim_mb=170))
    assert isinstance(body, Assigned)
    assert (body.model_id, body.layers) == (MODEL_ID, (0, 10))
    lease = lease_of(body.lease)
    assert (lease.peer_id, lease.layers, lease.recipe, lease.manifest_root) == (worker.peer, (0, 10), RECIPE, ROOT)
    assert state_of(members, worker) is MemberState.PENDING_LOAD


def test_a_range_that_loads_is_a_hole_for_coverage_but_assigned_for_the_allocator() -> None:
    members = Members(ORCHESTRATOR, Catalogue([MODEL]), min_stages=2)
    first, second = PaperWorker(members, "first"), PaperWorker(members, "second")
    first.register()
    assert members.coverage(ROOT, RECIPE).holes == (LayerRange(0, 30),)
    second.register()
    assert first.layers.end == second.layers.start


def test_nobody_is_listed_before_min_stages_workers_have_registered() -> None:
    members = Members(ORCHESTRATOR, Catalogue([MODEL]), min_stages=2)
    first, second = PaperWorker(members, "first"), PaperWorker(members, "second")
    first.register()
    first.ready()
    first.announce()
    assert state_of(members, first) is MemberState.READY
    assert members.listed(ROOT, NOW) == ()
    effects = second.register()
    assert TopologyChanged(first.peer, MemberState.READY, MemberState.HEALTHY) in effects
    assert len(members.listed(ROOT, NOW)) == 1


def test_ready_workers_make_the_model_healthy_and_are_listed() -> None:
    members, workers = mesh(3)
    assert members.coverage(ROOT, RECIPE).health == "healthy"
    assert len(members.listed(ROOT, NOW)) == 3
    assert sorted(layer for worker in workers for layer in worker.layers) == list(range(30))


def test_the_answer_names_the_peers_to_dial() -> None:
    members, _ = mesh(3)
    body = answer_in(PaperWorker(members, "late").register())
    assert isinstance(body, Assigned)
    assert body.records == members.listed(ROOT, NOW)


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_id", "other"), ("contract_hash", bytes(32)), ("total_layers", 29), ("addresses", ())],
)
def test_a_registration_that_does_not_fit_the_model_names_the_field(field: str, value: Any) -> None:
    members = Members(ORCHESTRATOR, Catalogue([MODEL]))
    with pytest.raises(InvalidRequest) as caught:
        PaperWorker(members, "worker").register(**{field: value})
    assert caught.value.param == field
    assert members.members() == ()


def test_a_recipe_that_is_not_served_is_refused() -> None:
    worker = PaperWorker(Members(ORCHESTRATOR, Catalogue([MODEL])), "worker")
    with pytest.raises(UnknownModel, match="recipes here: f32"):
        worker.register(recipe="int4")


def test_a_mesh_that_nobody_is_in_any_more_takes_no_room() -> None:
    """Anybody can make up drift classes, and register under one after the other."""
    model = ServedModel(MODEL_ID, ROOT, bytes(range(32, 64)), 30, {("torch-f32", "*"): TERMS})
    members = Members(ORCHESTRATOR, Catalogue([model]))
    worker = PaperWorker(members, "worker")
    for number in range(50):
        worker.register(recipe=f"torch-f32@{number}")
    assert len(members.meshes()) == 1
    assert len(members._roster._complete) == 1


def test_drift_classes_of_a_recipe_are_meshes_of_their_own_under_the_same_terms() -> None:
    """Two machines whose bits may differ never share a chain: each class gets the whole model."""
    model = ServedModel(MODEL_ID, ROOT, bytes(range(32, 64)), 30, {("torch-f32", "*"): TERMS})
    members = Members(ORCHESTRATOR, Catalogue([model]))
    one, other = PaperWorker(members, "one"), PaperWorker(members, "other")
    one.register(recipe="torch-f32@2.13.0-avx2-00000001", layers=(0, 20))
    other.register(recipe="torch-f32@2.13.0-avx512-00000002")
    assert (one.layers, other.layers) == (LayerRange(0, 20), LayerRange(0, 30))
    assert lease_of(one.lease).recipe == "torch-f32@2.13.0-avx2-00000001"
    _report_ready(one, "torch-f32@2.13.0-avx2-00000001")
    assert members.coverage(ROOT, "torch-f32").covered == (LayerRange(0, 20),)
    _report_ready(other, "torch-f32@2.13.0-avx512-00000002")
    assert members.coverage(ROOT, "torch-f32").health == "healthy"
    assert members.coverage(ROOT, "torch-f32@2.13.0-avx2-00000001").health == "incomplete"
    for refused in ("torch-f32@", "torch-f32@A b", "torch-f32@" + "a" * 80, "torch-f16@2.13.0-avx2-00000001"):
        with pytest.raises((UnknownModel, ValidationError)):
            PaperWorker(members, "third").register(recipe=refused)


def _report_ready(worker: PaperWorker, recipe: str) -> None:
    worker.sequence += 1
    record = stage_record(worker.key, worker.lease, sequence=worker.sequence, recipe=recipe)
    worker.members.handle(Loaded(worker.peer, Ready(serial=worker.serial, record=record)), NOW)


def test_a_claim_that_is_too_small_changes_nothing() -> None:
    members = Members(ORCHESTRATOR, Catalogue([MODEL]))
    with pytest.raises(ClaimTooSmall):
        PaperWorker(members, "worker").register(claim_mb=11)
    assert members.members() == ()


# ---- Serials ----


def test_serials_rise_and_are_reserved_before_they_are_used() -> None:
    members = Members(ORCHESTRATOR, Catalogue([MODEL]), serial_floor=100)
    first, second = PaperWorker(members, "first"), PaperWorker(members, "second")
    effects = first.register()
    assert isinstance(effects[0], RaiseSerialFloor)
    assert effects[0].value >= first.serial == 101
    assert not any(isinstance(effect, RaiseSerialFloor) for effect in second.register())
    assert second.serial == 102
    restarted = Members(ORCHESTRATOR, Catalogue([MODEL]), serial_floor=effects[0].value)
    third = PaperWorker(restarted, "third")
    third.register()
    assert third.serial > second.serial


# ---- Announce ----


def test_a_lease_is_renewed_when_less_than_half_of_it_is_left() -> None:
    members, (worker,) = mesh(1)
    serial = worker.serial
    beat([worker], NOW + 5 * MINUTE)
    assert worker.serial == serial
    body = answer_in(worker.announce(NOW + 5 * MINUTE + 1))
    assert isinstance(body, Assigned)
    assert worker.serial > serial
    assert isinstance(answer_in(worker.announce(NOW + 5 * MINUTE + 2)), Acknowledged)
    member = members.get(worker.peer)
    assert member is not None
    assert member.lease_expires_at == NOW + 15 * MINUTE + 1


def test_a_worker_that_missed_its_renewed_lease_gets_it_again() -> None:
    _, (worker,) = mesh(1)
    old = worker.lease
    beat([worker], NOW + 6 * MINUTE)
    renewed, worker.lease = worker.lease, old
    body = answer_in(worker.announce(NOW + 6 * MINUTE + 5))
    assert isinstance(body, Assigned)
    assert body.lease == renewed


def test_a_silent_worker_goes_offline_its_range_is_a_hole_and_it_comes_back() -> None:
    members, workers = mesh(2)
    beat(workers, NOW + MINUTE)
    silent, alive = workers
    for second in range(5, 20, 5):
        alive.announce(NOW + MINUTE + second * 1000)
    members.handle(TimePassed(), NOW + MINUTE + 14_999)
    assert state_of(members, silent) is MemberState.HEALTHY
    effects = members.handle(TimePassed(), NOW + MINUTE + 15_000)
    assert effects[-1] == TopologyChanged(silent.peer, MemberState.HEALTHY, MemberState.OFFLINE)
    assert members.coverage(ROOT, RECIPE).holes == (silent.layers,)
    assert len(members.listed(ROOT, NOW + MINUTE + 15_000)) == 1
    silent.announce(NOW + MINUTE + 20_000)
    assert state_of(members, silent) is MemberState.HEALTHY
    assert members.coverage(ROOT, RECIPE).health == "healthy"


def test_a_worker_that_loads_may_be_silent_for_the_grace() -> None:
    members = Members(ORCHESTRATOR, Catalogue([MODEL]))
    worker = PaperWorker(members, "worker")
    worker.register()
    members.handle(TimePassed(), NOW + MINUTE - 1)
    assert state_of(members, worker) is MemberState.PENDING_LOAD
    members.handle(TimePassed(), NOW + MINUTE)
    assert state_of(members, worker) is MemberState.OFFLINE


def test_a_draining_worker_is_not_listed() -> None:
    members, (worker,) = mesh(1)
    worker.announce(state="draining")
    assert state_of(members, worker) is MemberState.DRAINING
    assert members.listed(ROOT, NOW) == ()
    worker.announce()
    assert state_of(members, worker) is MemberState.HEALTHY


def test_a_saturated_worker_keeps_its_range_and_is_listed_with_the_record_that_says_so() -> None:
    members, (worker,) = mesh(1)
    worker.announce(state="saturated")
    member = members.get(worker.peer)
    assert member is not None
    assert member.queue_depth == 3
    assert member.state is MemberState.HEALTHY
    assert members.listed(ROOT, NOW) == (member.record,)
    assert not members.coverage(ROOT, member.recipe).holes


def test_a_record_that_is_over_is_not_listed() -> None:
    members, (worker,) = mesh(1)
    beat([worker], NOW + 30_000)
    for second in range(35, 100, 5):
        worker.announce(NOW + second * 1000, with_record=False)
    assert state_of(members, worker) is MemberState.HEALTHY
    assert members.listed(ROOT, NOW + 90_000) == ()


# ---- Hostile twins of records ----


def test_records_that_are_not_the_workers_own_are_refused() -> None:
    members, (worker, other) = mesh(2)
    forger = key_of("forger")
    foreign_lease = stage_record(worker.key, other.lease)
    wrong_layers = stage_record(worker.key, worker.lease, layers=(0, 29))
    wrong_recipe = stage_record(worker.key, worker.lease, recipe="int4")
    for record in (stage_record(forger, worker.lease), foreign_lease, wrong_layers, wrong_recipe):
        for event in (
            Loaded(worker.peer, Ready(serial=worker.serial, record=record)),
            Announced(worker.peer, Announce(serial=worker.serial, queue_depth=0, state="ready", record=record)),
        ):
            before = members.members()
            with pytest.raises(InvalidSignature):
                members.handle(event, NOW)
            assert members.members() == before


def test_a_record_that_expired_is_refused() -> None:
    members, (worker,) = mesh(1)
    record = stage_record(worker.key, worker.lease, sequence=99)
    with pytest.raises(Expired):
        members.handle(Loaded(worker.peer, Ready(serial=worker.serial, record=record)), NOW + MINUTE)


def test_an_older_record_does_not_replace_a_newer_one() -> None:
    members, (worker,) = mesh(1)
    newest = members.listed(ROOT, NOW)
    record = stage_record(worker.key, worker.lease, sequence=0)
    members.handle(Loaded(worker.peer, Ready(serial=worker.serial, record=record)), NOW)
    assert members.listed(ROOT, NOW) == newest


def test_a_serial_that_was_never_given_is_refused() -> None:
    members, (worker,) = mesh(1)
    event = Announced(worker.peer, Announce(serial=worker.serial + 1, queue_depth=0, state="ready"))
    with pytest.raises(NotAuthorized, match="register again"):
        members.handle(event, NOW)


def test_a_stranger_is_told_to_register() -> None:
    members, _ = mesh(1)
    event = Announced(key_of("stranger").peer_id, Announce(serial=1, queue_depth=0, state="ready"))
    with pytest.raises(NotAuthorized, match="register again"):
        members.handle(event, NOW)


# ---- Coming back ----


def test_the_same_worker_gets_its_range_again_while_it_is_free() -> None:
    members, workers = mesh(3)
    before = workers[1].layers
    workers[1].register(NOW + 1000)
    assert workers[1].layers == before
    assert state_of(members, workers[1]) is MemberState.PENDING_LOAD


def test_a_replica_that_registers_again_keeps_its_range_and_gets_a_new_lease() -> None:
    members, _ = mesh(3)
    replica = PaperWorker(members, "replica")
    replica.register(claim_mb=MODEL.terms_for(RECIPE, "cpu").claim_mb(LayerRange(2, 10)), layers=(2, 8))
    layers, serial = replica.layers, replica.serial
    replica.register(NOW + 1000)
    assert replica.layers == layers
    assert replica.serial > serial


def test_a_replica_that_registers_again_fills_a_hole() -> None:
    members, workers = mesh(3)
    replica = PaperWorker(members, "replica")
    replica.register()
    lost = next(worker for worker in workers if worker.layers != replica.layers)
    members.handle(Deregistered(lost.peer, Deregister()), NOW)
    replica.register(NOW + 1000)
    assert replica.layers == lost.layers


def test_a_worker_that_left_gets_its_range_again_while_it_is_free() -> None:
    members, workers = mesh(3)
    before = workers[1].layers
    members.handle(Deregistered(workers[1].peer, Deregister()), NOW)
    members.handle(Deregistered(workers[2].peer, Deregister()), NOW)
    assert members.coverage(ROOT, RECIPE).holes == (LayerRange(before.start, 30),)
    workers[2].register(NOW + 1000)
    workers[1].register(NOW + 1000)
    assert workers[1].layers == before


def test_a_range_that_somebody_else_holds_now_is_not_given_again() -> None:
    members, workers = mesh(2)
    members.handle(Deregistered(workers[1].peer, Deregister()), NOW)
    heir = PaperWorker(members, "heir")
    heir.register(claim_mb=MODEL.terms_for(RECIPE, "cpu").claim_mb(LayerRange(16, 18)))
    assert heir.layers.start == workers[1].layers.start
    workers[1].register(NOW + 1000)
    assert workers[1].layers.start == heir.layers.end


def test_a_worker_that_left_has_to_register_again() -> None:
    members, (worker,) = mesh(1)
    members.handle(Deregistered(worker.peer, Deregister()), NOW)
    assert members.listed(ROOT, NOW) == ()
    with pytest.raises(NotAuthorized, match="register again"):
        worker.announce(NOW + 1000)
    members.handle(TimePassed(), NOW + 10 * MINUTE)
    assert members.members() == ()


@pytest.mark.parametrize("says", ["announce", "ready"])
def test_after_a_restart_of_the_orchestrator_a_serving_worker_keeps_its_range(says: str) -> None:
    _, workers = mesh(3)
    restarted = Members(ORCHESTRATOR, Catalogue([MODEL]), min_stages=3, serial_floor=2000)
    for worker in reversed(workers):
        before = worker.layers
        worker.members = restarted
        effects = worker.announce(NOW + 5000) if says == "announce" else worker.ready(NOW + 5000)
        assert isinstance(answer_in(effects), Assigned)
        assert worker.layers == before
        assert worker.serial > 2000
    assert restarted.coverage(ROOT, RECIPE).health == "healthy"
    assert {member.state for member in restarted.members()} == {MemberState.HEALTHY}


DAY = 24 * 60 * MINUTE


def test_a_serving_worker_is_taken_in_within_the_grace_for_an_outage() -> None:
    _, (worker,) = mesh(1)
    worker.members = Members(ORCHESTRATOR, Catalogue([MODEL]), serial_floor=2000)
    worker.announce(NOW + DAY)
    assert state_of(worker.members, worker) is MemberState.HEALTHY


def test_after_the_grace_for_an_outage_a_worker_has_to_register_again() -> None:
    _, (worker,) = mesh(1)
    worker.members = Members(ORCHESTRATOR, Catalogue([MODEL]), serial_floor=2000)
    with pytest.raises(NotAuthorized, match="register again"):
        worker.announce(NOW + DAY + 10 * MINUTE)
    assert worker.members.members() == ()


def test_a_lease_of_another_orchestrator_readmits_nobody() -> None:
    _, (worker,) = mesh(1)
    other = Members(key_of("other orchestrator"), Catalogue([MODEL]))
    worker.members = other
    with pytest.raises(InvalidSignature):
        worker.announce(NOW + 5000)
    assert other.members() == ()


def test_an_older_lease_readmits_nobody_once_a_newer_one_was_seen() -> None:
    members, (worker,) = mesh(1)
    old = worker.lease
    beat([worker], NOW + 6 * MINUTE)
    worker.lease = old
    with pytest.raises(NotAuthorized, match="not the newest"):
        worker.announce(NOW + 20 * MINUTE)
    assert members.members()


# ---- Bounds ----


def test_the_number_of_members_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessella_p2p.orchestrator.members.MAX_MEMBERS", 2)
    members, workers = mesh(2)
    with pytest.raises(Overloaded, match="2 workers are registered already"):
        members.handle(Registered(key_of("third").peer_id, register()), NOW)
    workers[0].register()


def test_the_list_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    members, workers = mesh(3)
    size_bytes = len(members.listed(ROOT, NOW)[0])
    monkeypatch.setattr("tessella_p2p.orchestrator.roster.MAX_LISTED_BYTES", 2 * size_bytes + 100)
    assert len(members.listed(ROOT, NOW)) == 2
    assert len(workers) == 3
