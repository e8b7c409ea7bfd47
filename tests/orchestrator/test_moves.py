"""Orders to members, as the core sees them: what a worker holds, what it was ordered to, and which lease is the newest."""

from __future__ import annotations

import pytest

from tessella_p2p.base.errors import InvalidSignature, LocalProtocolError, NotAuthorized
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import MOVE_TIMEOUT_S
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.member import (
    Announced,
    Deregistered,
    KeepAssignment,
    Loaded,
    Member,
    MemberEffect,
    MemberState,
    MoveAbandoned,
    MoveOrdered,
    SendOrder,
    TimePassed,
)
from tessella_p2p.orchestrator.members import Members
from tessella_p2p.wire.messages import Announce, Deregister, Ready, UpdateAssignment
from tests.orchestrator.paper_workers import (
    MODEL,
    NOW,
    ORCHESTRATOR,
    RECIPE,
    ROOT,
    TERMS,
    PaperWorker,
    lease_of,
    stage_record,
)

MINUTE = 60_000
MOVE_MS = int(MOVE_TIMEOUT_S * 1000)
NEW = LayerRange(0, 7)


def mesh() -> tuple[Members, PaperWorker, PaperWorker]:
    members = Members(ORCHESTRATOR, Catalogue([MODEL]), min_stages=2)
    workers = [PaperWorker(members, f"worker {i}") for i in range(2)]
    for worker in workers:
        worker.register()
    for worker in workers:
        worker.ready()
    return members, workers[0], workers[1]


def order(
    members: Members, worker: PaperWorker, layers: LayerRange = NEW, *, beside: bool = False, now_ms: int = NOW
) -> UpdateAssignment:
    effects = members.handle(MoveOrdered(worker.peer, layers, beside, "a test"), now_ms)
    return body_of(effects)


def body_of(effects: list[MemberEffect]) -> UpdateAssignment:
    (sent,) = (effect for effect in effects if isinstance(effect, SendOrder))
    return sent.body


def member_of(members: Members, worker: PaperWorker) -> Member:
    member = members.get(worker.peer)
    assert member is not None
    return member


def test_an_order_brings_a_lease_of_its_own_and_changes_nothing_that_is_served() -> None:
    members, worker, _ = mesh()
    before = worker.layers
    ordered = order(members, worker, beside=True)
    assert (ordered.layers, ordered.beside) == (NEW.as_tuple(), True)
    lease = lease_of(ordered.lease)
    assert (lease.peer_id, lease.layers) == (worker.peer, NEW.as_tuple())
    assert lease.serial > worker.serial
    worker.announce(NOW + 5000)
    assert member_of(members, worker).layers == before
    assert members.coverage(ROOT, RECIPE).health == "healthy"


def test_layers_that_are_ordered_are_taken_for_who_registers_next() -> None:
    members, worker, other = mesh()
    members.handle(Deregistered(other.peer, Deregister()), NOW)
    order(members, worker, other.layers)
    late = PaperWorker(members, "late")
    late.register()
    assert late.layers != other.layers


def test_a_worker_that_shows_the_orders_lease_holds_the_new_layers() -> None:
    members, worker, _ = mesh()
    worker.lease = order(members, worker).lease
    worker.announce(NOW + 1000, "loading", with_record=False)
    loading = member_of(members, worker)
    assert (loading.layers, loading.state, loading.move) == (NEW, MemberState.PENDING_LOAD, None)
    assert members.coverage(ROOT, RECIPE).holes
    worker.ready(NOW + 2000)
    assert (member_of(members, worker).layers, member_of(members, worker).state) == (NEW, MemberState.HEALTHY)


def test_a_worker_that_changes_over_at_once_is_never_unlisted() -> None:
    members, worker, _ = mesh()
    worker.lease = order(members, worker, beside=True).lease
    effects = worker.ready(NOW + 1000)
    assert member_of(members, worker).state is MemberState.HEALTHY
    assert len(members.listed(ROOT, NOW + 1000)) == 2
    kept = [effect for effect in effects if isinstance(effect, KeepAssignment)]
    assert kept[-1].assignment is not None
    assert LayerRange(*lease_of(kept[-1].assignment.lease).layers) == NEW, "durable with the change-over"


def test_a_worker_says_that_it_has_prepared_and_the_next_order_has_the_same_lease() -> None:
    members, worker, _ = mesh()
    first = order(members, worker, beside=True)
    serial = lease_of(first.lease).serial
    body = Announce(serial=worker.serial, queue_depth=0, state="ready", record=worker.record(), prepared=serial)
    members.handle(Announced(worker.peer, body), NOW + 1000)
    move = member_of(members, worker).move
    assert move is not None
    assert move.prepared
    assert order(members, worker, now_ms=NOW + 2000).lease == first.lease


def test_a_lease_that_was_renewed_meanwhile_makes_the_order_get_a_newer_one() -> None:
    """Else what the worker shows after its move would be older than what its peers have seen of it."""
    members, worker, _ = mesh()
    first = order(members, worker, beside=True)
    for now_ms in range(NOW + 5000, NOW + 6 * MINUTE, 5000):
        worker.announce(now_ms)
    renewed = worker.serial
    assert renewed > lease_of(first.lease).serial
    second = order(members, worker, now_ms=NOW + 6 * MINUTE)
    assert lease_of(second.lease).serial > renewed


def test_who_shows_an_older_lease_of_an_order_gets_the_newest_at_once() -> None:
    members, worker, _ = mesh()
    first = order(members, worker, beside=True)
    for now_ms in range(NOW + 5000, NOW + 6 * MINUTE, 5000):
        worker.announce(now_ms)
    renewed = worker.serial
    worker.lease = first.lease
    worker.ready(NOW + 6 * MINUTE)
    assert worker.layers == NEW
    assert worker.serial > renewed


def test_an_order_is_forgotten_after_its_time_and_who_carries_it_out_later_has_to_register() -> None:
    members, worker, _ = mesh()
    ordered = order(members, worker, beside=True)
    for now_ms in range(NOW + 5000, NOW + MOVE_MS + 5000, 5000):
        worker.announce(now_ms)
        members.handle(TimePassed(), now_ms)
    assert member_of(members, worker).move is None
    before = worker.serial
    worker.lease = ordered.lease
    with pytest.raises(NotAuthorized, match="register again"):
        worker.ready(NOW + MOVE_MS)
    assert before == member_of(members, worker).serial


def test_an_abandoned_order_that_was_carried_out_is_taken_in_by_its_lease() -> None:
    members, worker, _ = mesh()
    ordered = order(members, worker)
    members.handle(MoveAbandoned(worker.peer), NOW)
    assert member_of(members, worker).move is None
    worker.lease = ordered.lease
    worker.ready(NOW + 1000)
    assert member_of(members, worker).layers == worker.layers == NEW


def test_after_a_restart_of_the_orchestrator_a_move_is_taken_in_by_its_lease() -> None:
    members, worker, other = mesh()
    rows = {}
    for one in (worker, other):
        kept = [e for e in one.register(NOW + 1) if isinstance(e, KeepAssignment) and e.assignment is not None]
        rows[one.peer] = kept[-1].assignment
    ordered = order(members, worker, now_ms=NOW + 2)
    restarted = Members(ORCHESTRATOR, Catalogue([MODEL]), min_stages=2, serial_floor=5000)
    restarted.restore({peer: row for peer, row in rows.items() if row is not None}, NOW + 1000)
    worker.members, worker.lease = restarted, ordered.lease
    worker.ready(NOW + 2000)
    member = member_of(restarted, worker)
    assert member.layers == NEW
    assert (member.claim_mb, member.device) == (10_000, "cpu"), "what it registered with is remembered"


# ---- Hostile twins ----


def test_a_record_of_other_layers_than_the_ordered_ones_moves_nobody() -> None:
    members, worker, other = mesh()
    ordered = order(members, worker)
    serial = lease_of(ordered.lease).serial
    before = members.members()
    for record in (worker.record(), stage_record(worker.key, other.lease), stage_record(other.key, ordered.lease)):
        with pytest.raises((NotAuthorized, InvalidSignature)):
            members.handle(Loaded(worker.peer, Ready(serial=serial, record=record)), NOW)
        assert members.members() == before


def test_nobody_shows_anothers_order() -> None:
    members, worker, other = mesh()
    ordered = order(members, worker)
    serial = lease_of(ordered.lease).serial
    with pytest.raises(NotAuthorized):
        members.handle(Announced(other.peer, Announce(serial=serial, queue_depth=0, state="loading")), NOW)
    assert member_of(members, other).layers == other.layers


def test_no_order_exceeds_a_claim_or_goes_to_who_is_gone() -> None:
    members, worker, other = mesh()
    small = PaperWorker(members, "small")
    small.register(claim_mb=TERMS.claim_mb(LayerRange(3, 6)))
    with pytest.raises(LocalProtocolError):
        order(members, small, LayerRange(3, 7))
    members.handle(Deregistered(other.peer, Deregister()), NOW)
    with pytest.raises(NotAuthorized):
        order(members, other)
    assert worker.layers == member_of(members, worker).layers
