"""Two federated orchestrators and the nodes of one mesh: one of them dies, the nodes go on at the other, and come back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from simulations.mesh import MeshShape, SimulatedMesh, SimulatedNode, simulate
from simulations.toy_model import ROOT
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import MICRO_PER_LAYER_POSITION, ORCHESTRATOR_PROBE_S
from tessella_p2p.ledger.changes import ProofSettled
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.orchestrator.service import Orchestrator

PROMPT = list(range(40))
POSITIONS = len(PROMPT) + 19
"""Of one request for 20 tokens: the last sampled one is not computed."""


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@asynccontextmanager
async def running_mesh(folder: Path, clock: VirtualClock) -> AsyncIterator[SimulatedMesh]:
    """Three nodes that share the model."""
    async with simulate(MeshShape(standby=True, checkpoint_s=2.0), seed=3, folder=folder, clock=clock) as mesh:
        for _ in range(3):
            await mesh.start_node(mesh.add_node())
        for node in mesh.nodes:
            await mesh.wait_listed(node)
        yield mesh


async def eventually(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait in virtual time."""
    deadline = trio.current_time() + timeout_s
    while not condition():
        assert trio.current_time() < deadline, "it did not become true"
        await pass_time(0.25)


async def pass_time(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.Event().wait()


def layers_of(node: SimulatedNode) -> LayerRange:
    assert node.roles is not None
    assert node.roles.worker is not None
    assert node.roles.worker.assignment is not None
    return node.roles.worker.assignment.layers


def asked_by(node: SimulatedNode) -> PeerId:
    assert node.roles is not None
    assert node.roles.client is not None
    return node.roles.client.orchestrator


def all_ask(mesh: SimulatedMesh, orchestrator: PeerId) -> bool:
    return all(asked_by(node) == orchestrator for node in mesh.nodes)


def is_whole(orchestrator: Orchestrator | None) -> bool:
    return orchestrator is not None and orchestrator.membership.coverage(ROOT).health == "healthy"


def waiting(mesh: SimulatedMesh) -> int:
    """Proofs that wait on the nodes' disks."""
    counts = [node.proof_log.counts() for node in mesh.nodes if node.proof_log is not None]
    return sum(count.open + count.pending for count in counts)


def settled_at(store: LedgerStore) -> list[ProofSettled]:
    return [entry.change for _, entry in store.journal() if isinstance(entry.change, ProofSettled)]


def earned(store: LedgerStore, mesh: SimulatedMesh) -> dict[int, int]:
    return {node.index: store.account(node.peer_id).micro_credits for node in mesh.nodes}


def due(mesh: SimulatedMesh, requests: int) -> dict[int, int]:
    """What so many requests bring to each node."""
    each = POSITIONS * requests * MICRO_PER_LAYER_POSITION
    return {node.index: len(layers_of(node)) * each for node in mesh.nodes}


async def test_nodes_go_on_at_the_standby_and_come_back_and_every_proof_is_paid_once(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        first, second = mesh.orchestrator_key.peer_id, mesh.standby_key.peer_id
        standby_store = mesh.standby_store
        assert standby_store is not None
        ranges = [layers_of(node) for node in mesh.nodes]
        stages = [node.roles.worker.stage for node in mesh.nodes if node.roles and node.roles.worker]
        await mesh.ask(mesh.nodes[0], PROMPT, 20)
        await eventually(lambda: earned(mesh.store, mesh) == due(mesh, 1))

        mesh.crash_orchestrator()
        await eventually(lambda: all_ask(mesh, second))
        await eventually(lambda: is_whole(mesh.standby))
        for node in mesh.nodes:
            finished = await mesh.ask(node, PROMPT, 20)
            assert finished.token_ids == mesh.expected(PROMPT, 20)
            assert finished.paid
        await eventually(lambda: earned(standby_store, mesh) == due(mesh, 3))
        assert waiting(mesh) == 0

        await mesh.start_orchestrator()
        await eventually(lambda: all_ask(mesh, first), timeout_s=3 * ORCHESTRATOR_PROBE_S)
        await eventually(lambda: is_whole(mesh.orchestrator))
        assert (await mesh.ask(mesh.nodes[1], PROMPT, 20)).paid
        await eventually(lambda: earned(mesh.store, mesh) == due(mesh, 2))
        assert waiting(mesh) == 0
        await pass_time(15.0)

        # Nobody loaded anything anew, on neither way.
        assert [layers_of(node) for node in mesh.nodes] == ranges
        assert [node.roles.worker.stage for node in mesh.nodes if node.roles and node.roles.worker] == stages
        assert earned(standby_store, mesh) == due(mesh, 3)
        assert mesh.store.total() == standby_store.total() == 0
        proofs = [*settled_at(mesh.store), *settled_at(standby_store)]
        assert len(proofs) == 3 * 5
        assert len({(proof.session, proof.epoch, proof.worker) for proof in proofs}) == len(proofs)
        assert mesh.orchestrator is not None
        assert mesh.standby is not None
        for node in mesh.nodes:
            assert mesh.orchestrator.federating.foreign_balance(node.peer_id) == due(mesh, 3)[node.index]
            assert mesh.standby.federating.foreign_balance(node.peer_id) == due(mesh, 2)[node.index]


async def test_a_proof_waits_for_the_orchestrator_that_minted_its_ticket(tmp_path: Path, clock: VirtualClock) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        store = mesh.standby_store
        assert store is not None
        asked = trio.Event()

        async def ask() -> None:
            assert (await mesh.ask(mesh.nodes[0], PROMPT, 100)).paid
            asked.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            # Its ticket is minted, and every stage has a checkpoint.
            await eventually(lambda: waiting(mesh) == 3)
            mesh.crash_orchestrator()
            await asked.wait()
        await eventually(lambda: all_ask(mesh, mesh.standby_key.peer_id))
        assert (await mesh.ask(mesh.nodes[0], PROMPT, 20)).paid
        await eventually(lambda: earned(store, mesh) == due(mesh, 1))
        await pass_time(60.0)
        assert waiting(mesh) == 3, "the proofs of the first one's ticket hold up no other's, and go nowhere else"
        await mesh.start_orchestrator()
        await eventually(lambda: waiting(mesh) == 0)
        assert all(earned(mesh.store, mesh).values())
        assert earned(store, mesh) == due(mesh, 1)


async def test_a_node_that_starts_during_the_outage_registers_at_the_standby(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        mesh.crash_orchestrator()
        await eventually(lambda: is_whole(mesh.standby))
        late = mesh.add_node()
        await mesh.start_node(late)
        await mesh.wait_listed(late)
        finished = await mesh.ask(late, PROMPT, 20)
        assert finished.token_ids == mesh.expected(PROMPT, 20)
        assert finished.paid
        await eventually(
            lambda: late.roles is not None and late.roles.worker is not None and late.roles.worker.state == "ready"
        )


async def test_a_partition_between_the_orchestrators_heals_with_the_sums_right(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        standby_store = mesh.standby_store
        assert standby_store is not None
        await mesh.ask(mesh.nodes[0], PROMPT, 20)
        await eventually(lambda: earned(mesh.store, mesh) == due(mesh, 1))
        # The nodes are with the standby on one side, the first orchestrator is alone on the other.
        others = [mesh.standby_key.peer_id, *(node.peer_id for node in mesh.nodes)]
        mesh.fabric.partition({mesh.orchestrator_key.peer_id: 1, **dict.fromkeys(others, 2)})
        await eventually(lambda: all_ask(mesh, mesh.standby_key.peer_id))
        await eventually(lambda: is_whole(mesh.standby))
        assert (await mesh.ask(mesh.nodes[1], PROMPT, 20)).paid
        await eventually(lambda: earned(standby_store, mesh) == due(mesh, 1))
        mesh.fabric.heal()
        await eventually(lambda: all_ask(mesh, mesh.orchestrator_key.peer_id))
        await eventually(lambda: is_whole(mesh.orchestrator))
        await pass_time(30.0)
        assert mesh.orchestrator is not None
        assert mesh.standby is not None
        for node in mesh.nodes:
            own, other = mesh.store.account(node.peer_id), standby_store.account(node.peer_id)
            assert own.micro_credits == other.micro_credits == due(mesh, 1)[node.index]
            assert mesh.orchestrator.federating.foreign_balance(node.peer_id) == other.micro_credits
            assert mesh.standby.federating.foreign_balance(node.peer_id) == own.micro_credits
