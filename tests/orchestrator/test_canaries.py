"""Canaries: copies of ranges that others hold, which fill no hole, count nowhere and get no route."""

from __future__ import annotations

import pytest

from tessella_p2p.base.errors import ClaimTooSmall, InvalidSignature, NotAuthorized, Overloaded
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.orchestrator.allocator import allocate_copy
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.member import Announced, Deregistered, KeepAssignment, Loaded, MemberState
from tessella_p2p.orchestrator.members import Members
from tessella_p2p.wire.messages import Announce, Deregister, Ready
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


class PaperCanary(PaperWorker):
    """A canary that says what it is, unless it is told not to."""

    says_so = True

    def record(self, now_ms: int = NOW) -> bytes:
        self.sequence += 1
        return stage_record(self.key, self.lease, now_ms=now_ms, sequence=self.sequence, canary=self.says_so)


def mesh(min_stages: int = 2, count: int = 2) -> tuple[Members, list[PaperWorker]]:
    members = Members(ORCHESTRATOR, Catalogue([MODEL]), min_stages=min_stages)
    workers = [PaperWorker(members, f"worker {i}") for i in range(count)]
    for worker in workers:
        worker.register()
    for worker in workers:
        worker.ready()
    return members, workers


def canary_of(members: Members, name: str = "canary") -> PaperCanary:
    canary = PaperCanary(members, name)
    canary.register(canary="scale")
    return canary


def test_a_canary_gets_exactly_a_range_that_a_worker_holds_and_a_lease_that_says_what_it_is() -> None:
    members, workers = mesh()
    first, second = canary_of(members), canary_of(members, "second canary")
    assert {first.layers, second.layers} == {worker.layers for worker in workers}
    assert lease_of(first.lease).canary
    assert not lease_of(workers[0].lease).canary
    member = members.get(first.peer)
    assert member is not None
    assert (member.canary, member.is_canary) == ("scale", True)


def test_a_canary_fills_no_hole() -> None:
    members, workers = mesh()
    members.handle(Deregistered(workers[1].peer, Deregister()), NOW)
    canary = canary_of(members)
    assert canary.layers == workers[0].layers
    canary.ready()
    assert members.coverage(ROOT, RECIPE).holes == (workers[1].layers,)


def test_a_canary_waits_until_there_is_something_to_copy() -> None:
    members = Members(ORCHESTRATOR, Catalogue([MODEL]))
    with pytest.raises(Overloaded, match="try again later"):
        canary_of(members)
    assert members.members() == ()


def test_a_canary_makes_no_mesh_complete_and_covers_nothing() -> None:
    members, (worker,) = mesh(min_stages=2, count=1)
    canary = canary_of(members)
    canary.ready()
    assert {member.state for member in members.members()} == {MemberState.READY}
    PaperWorker(members, "second").register()
    members.handle(Deregistered(worker.peer, Deregister()), NOW)
    held = members.get(canary.peer)
    assert held is not None
    assert held.state is MemberState.HEALTHY
    assert members.coverage(ROOT, RECIPE).num_covered == 0


def test_a_canary_is_no_replica_for_the_allocator() -> None:
    members, workers = mesh()
    canary = canary_of(members)
    members.handle(Deregistered(workers[0].peer, Deregister()), NOW)
    heir = PaperWorker(members, "heir")
    heir.register()
    assert heir.layers == workers[0].layers == canary.layers


def test_a_canary_is_listed_for_who_looks_for_it() -> None:
    members, _ = mesh()
    canary = canary_of(members)
    canary.ready()
    member = members.get(canary.peer)
    assert member is not None
    assert member.record in members.listed(ROOT, NOW)


@pytest.mark.parametrize("lies", [True, False])
def test_a_record_that_says_another_thing_than_its_lease_is_refused(lies: bool) -> None:
    """Hostile twins: a canary that hides among the workers, and a worker that poses as a canary."""
    members, (worker, _) = mesh()
    canary = canary_of(members)
    canary.says_so = False
    liar: PaperWorker = canary
    if not lies:
        liar = worker
        record = stage_record(worker.key, worker.lease, sequence=9, canary=True)
    else:
        record = canary.record()
    before = members.members()
    for event in (
        Loaded(liar.peer, Ready(serial=liar.serial, record=record)),
        Announced(liar.peer, Announce(serial=liar.serial, queue_depth=0, state="ready", record=record)),
    ):
        with pytest.raises(InvalidSignature, match="canary"):
            members.handle(event, NOW)
    assert members.members() == before


def test_a_canary_keeps_its_range_when_it_registers_again_while_somebody_holds_it() -> None:
    members, workers = mesh()
    canary = canary_of(members)
    other = next(worker for worker in workers if worker.layers != canary.layers)
    before = canary.layers
    canary.register(NOW + 1000, canary="scale")
    assert canary.layers == before
    copied = next(worker for worker in workers if worker is not other)
    members.handle(Deregistered(copied.peer, Deregister()), NOW)
    canary.register(NOW + 2000, canary="scale")
    assert canary.layers == other.layers


def test_who_was_a_canary_registers_as_a_worker_like_anybody() -> None:
    members, _ = mesh()
    canary = canary_of(members)
    canary.register(NOW + 1000)
    member = members.get(canary.peer)
    assert member is not None
    assert not member.is_canary
    assert not lease_of(canary.lease).canary


def test_a_canary_is_one_after_a_restart_too() -> None:
    members, workers = mesh()
    canary = PaperCanary(members, "canary")
    effects = [effect for worker in workers for effect in worker.register(NOW + 1)]
    effects += canary.register(NOW + 2, canary="echo")
    rows = {e.peer: e.assignment for e in effects if isinstance(e, KeepAssignment) and e.assignment is not None}
    restarted = Members(ORCHESTRATOR, Catalogue([MODEL]), min_stages=2, serial_floor=5000)
    assert restarted.restore(rows, NOW + 1000) == []
    member = restarted.get(canary.peer)
    assert member is not None
    assert member.canary == "echo"
    lying = {canary.peer: rows[canary.peer].model_copy(update={"canary": "off"})}
    assert Members(ORCHESTRATOR, Catalogue([MODEL])).restore(lying, NOW) == [KeepAssignment(canary.peer, None)]


def test_a_forgotten_canary_has_to_say_again_how_it_answers() -> None:
    members, _ = mesh()
    canary = canary_of(members)
    canary.members = Members(ORCHESTRATOR, Catalogue([MODEL]), serial_floor=5000)
    with pytest.raises(NotAuthorized, match="register again"):
        canary.announce(NOW + 5000)


def test_the_range_with_the_fewest_canaries_is_copied_and_the_claim_decides_which_can_be() -> None:
    low, high = LayerRange(0, 10), LayerRange(10, 30)
    ample = TERMS.claim_mb(high)
    assert allocate_copy(TERMS, [low, high], [], ample) == low
    assert allocate_copy(TERMS, [low, high], [low], ample) == high
    assert allocate_copy(TERMS, [low, high, high], [low, high], ample) == low
    assert allocate_copy(TERMS, [low, high], [low], TERMS.claim_mb(low)) == low
    assert allocate_copy(TERMS, [low, high], [], ample, wanted=LayerRange(5, 30)) == high
    with pytest.raises(ClaimTooSmall, match=f"{TERMS.claim_mb(low)} MB is the least"):
        allocate_copy(TERMS, [low, high], [], TERMS.claim_mb(low) - 1)
    with pytest.raises(Overloaded):
        allocate_copy(TERMS, [low], [], ample, wanted=LayerRange(5, 30))
