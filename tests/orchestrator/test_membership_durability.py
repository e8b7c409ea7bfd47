"""What members are told is on disk before; requests that come together share a write, and a full disk gives nobody a lease."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType

import pytest
import trio

from tessella_p2p.base.errors import StorageError, TessellaError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.ledger.assignments import Assignment
from tessella_p2p.ledger.blocking import in_place
from tessella_p2p.ledger.revocation import Revocation
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork
from tessella_p2p.net.virtual_clock import VirtualClock, run_deterministic
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.context import OrchestratorContext
from tessella_p2p.orchestrator.member import Registered, TimePassed
from tessella_p2p.orchestrator.members import Members
from tessella_p2p.orchestrator.membership import Membership
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import ClockSequencer
from tests.orchestrator.paper_workers import MODEL, ORCHESTRATOR, RECIPE, key_of, register
from tests.orchestrator.test_orchestrator_service import VirtualWallClock

WORKERS = 20


class CountedStore(LedgerStore):
    """A ledger that counts writes of assignments, and may be unwritable."""

    writes = 0
    broken = False

    def keep_assignments(
        self,
        changed: Mapping[PeerId, Assignment | None],
        serial_floor: int = 0,
        revoked: Mapping[PeerId, Revocation | None] = MappingProxyType({}),
    ) -> None:
        self.writes += 1
        if self.broken:
            raise StorageError("the disk is full")
        super().keep_assignments(changed, serial_floor, revoked)


async def membership(clock: VirtualClock, store: LedgerStore, network: MemoryNetwork) -> Membership:
    catalogue = Catalogue([MODEL])
    wall = VirtualWallClock(clock)
    context = OrchestratorContext(network, ORCHESTRATOR, wall, store, ClockSequencer(), RECIPE, in_place)
    return Membership(context, catalogue, Members(ORCHESTRATOR, catalogue))


@pytest.fixture
def store(tmp_path: Path) -> CountedStore:
    return CountedStore(tmp_path / "ledger", 1 << 24, sync=False)


async def registrations(made: Membership) -> dict[PeerId, m.OrchestratorAnswer | TessellaError]:
    """Everybody registers at the same time."""
    answers: dict[PeerId, m.OrchestratorAnswer | TessellaError] = {}

    async def one(peer: PeerId) -> None:
        try:
            answers[peer] = await made.handle(Registered(peer, register(claim_mb=200)))
        except TessellaError as error:
            answers[peer] = error

    async with trio.open_nursery() as nursery:
        for number in range(WORKERS):
            nursery.start_soon(one, key_of(f"worker {number}").peer_id)
    return answers


def test_who_registers_at_the_same_time_shares_a_write_and_has_his_assignment_on_disk(store: CountedStore) -> None:
    clock = VirtualClock()

    async def scenario() -> None:
        async with MemoryNetwork.open(MemoryFabric(Random(1), clock), ORCHESTRATOR.peer_id) as network:
            made = await membership(clock, store, network)
            answers = await registrations(made)
            assert all(isinstance(answer, m.Assigned) for answer in answers.values())
            assert store.writes <= 3
            kept = store.assignments()
            assert {peer: answer.lease for peer, answer in answers.items() if isinstance(answer, m.Assigned)} == {
                peer: assignment.lease for peer, assignment in kept.items()
            }

    run_deterministic(scenario, 1, clock=clock)


def test_a_full_disk_gives_nobody_a_lease_and_what_was_owed_is_written_once_it_can_be(store: CountedStore) -> None:
    clock = VirtualClock()

    async def scenario() -> None:
        async with MemoryNetwork.open(MemoryFabric(Random(1), clock), ORCHESTRATOR.peer_id) as network:
            made = await membership(clock, store, network)
            store.broken = True
            answers = await registrations(made)
            assert all(isinstance(answer, StorageError) for answer in answers.values())
            known = len(made.members())
            with pytest.raises(StorageError):  # and nothing is taken in on top of it
                await made.handle(Registered(key_of("late").peer_id, register(claim_mb=200)))
            assert len(made.members()) == known
            store.broken = False
            await made.handle(TimePassed())
            assert store.assignments().keys() == {member.peer_id for member in made.members()}
            assert store.serial_floor() > 0
            assert all(isinstance(answer, m.Assigned) for answer in (await registrations(made)).values())

    run_deterministic(scenario, 1, clock=clock)
