"""What a node says of itself, through an outage, a full disk and a prompt limit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from simulations.mesh import MeshShape, SimulatedMesh, SimulatedNode, simulate
from simulations.toy_model import MODEL_ID, RECIPE
from tessella_p2p.base.errors import StorageError
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.ledger.blocking import in_place
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.node.view import LiveNodeView, NodeFacts

T = TypeVar("T")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def pass_time(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.Event().wait()


def facts(mesh: SimulatedMesh, node: SimulatedNode, max_input_tokens: int | None = None) -> NodeFacts:
    return NodeFacts(
        peer_id=node.peer_id,
        model_id=MODEL_ID,
        recipe=RECIPE,
        hidden_size=8,
        context_length=4096,
        device="cpu",
        orchestrator=mesh.orchestrator_key.peer_id,
        hop_timeout_s=10.0,
        max_input_tokens=max_input_tokens,
        conversions={},
    )


@asynccontextmanager
async def viewed(folder: Path, clock: VirtualClock) -> AsyncIterator[tuple[SimulatedMesh, LiveNodeView, list[bool]]]:
    """A mesh of two nodes, the view of the first, and whether its disk fails."""
    disk_fails = [False]

    async def blocking(function: Callable[[], T], /) -> T:
        if disk_fails[0]:
            raise StorageError("the disk is gone")
        return await in_place(function)

    async with simulate(MeshShape(min_stages=2), seed=1, folder=folder, clock=clock) as mesh:
        for _ in range(2):
            await mesh.start_node(mesh.add_node())
        for node in mesh.nodes:
            await mesh.wait_listed(node)
        node = mesh.nodes[0]
        assert node.roles is not None
        assert node.proof_log is not None
        view = LiveNodeView(facts(mesh, node), node.roles, mesh.date(), node.proof_log, blocking)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(view.run)
            yield mesh, view, disk_fails
            nursery.cancel_scope.cancel()


async def test_a_serving_node_shows_its_layers_its_credits_and_its_peers(tmp_path: Path, clock: VirtualClock) -> None:
    async with viewed(tmp_path, clock) as (mesh, view, _):
        await mesh.ask(mesh.nodes[1], [1, 2, 3], 4)
        await pass_time(15.0)
        status = view.status()
        assert (status.state, status.orchestrator.reachable, status.queue_depth) == ("ready", True, 0)
        assert len(status.layer_ranges) == 1
        assert len(status.layer_ranges[0]) == 6
        assert status.proofs.settled == 1
        assert status.credits is not None
        assert status.credits.micro_credits == 6 * 6 * 1000
        assert (status.max_concurrent_hop_bodies, status.hop_bodies_in_flight) == (16, 0)
        assert status.max_hop_body_bytes == 64 << 20
        assert (status.max_input_tokens, status.max_input_tokens_source) == (2048, "measured")
        peers = view.peers(MODEL_ID)
        assert {peer.peer_id for peer in peers} == {node.peer_id for node in mesh.nodes}
        assert {peer.layer_ranges[0] for peer in peers} == {LayerRange(0, 6), LayerRange(6, 12)}
        assert all(peer.status == "Healthy" for peer in peers)
        assert not view.peers("another model")


async def test_a_node_without_its_orchestrator_says_so_and_keeps_its_last_balance(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with viewed(tmp_path, clock) as (mesh, view, _):
        await mesh.ask(mesh.nodes[1], [1, 2, 3], 4)
        await pass_time(15.0)
        mesh.crash_orchestrator()
        await pass_time(40.0)
        status = view.status()
        assert not status.orchestrator.reachable
        assert status.state == "ready"
        assert status.credits is not None
        assert status.credits.micro_credits == 6 * 6 * 1000


async def test_a_disk_that_fails_does_not_end_the_view(tmp_path: Path, clock: VirtualClock) -> None:
    async with viewed(tmp_path, clock) as (mesh, view, disk_fails):
        disk_fails[0] = True
        await mesh.ask(mesh.nodes[1], [1, 2, 3], 4)
        await pass_time(30.0)
        assert view.status().proofs.settled == 0
        disk_fails[0] = False
        await pass_time(30.0)
        assert view.status().proofs.settled == 1


async def test_a_declared_prompt_limit_is_shown_as_declared(tmp_path: Path, clock: VirtualClock) -> None:
    async with viewed(tmp_path, clock) as (mesh, _, _):
        node = mesh.nodes[0]
        assert node.roles is not None
        assert node.proof_log is not None
        view = LiveNodeView(facts(mesh, node, 100), node.roles, mesh.date(), node.proof_log, in_place)
        assert (view.status().max_input_tokens, view.status().max_input_tokens_source) == (100, "declared")


async def test_a_peer_that_left_is_shown_as_such(tmp_path: Path, clock: VirtualClock) -> None:
    async with viewed(tmp_path, clock) as (mesh, view, _):
        other = mesh.nodes[1]
        mesh.stop_node(other)
        await other.down.wait()
        await pass_time(2.0)
        statuses = {peer.peer_id: peer.status for peer in view.peers(None)}
        assert statuses[other.peer_id] == "Draining"
        await pass_time(30.0)
        statuses = {peer.peer_id: peer.status for peer in view.peers(None)}
        assert statuses[other.peer_id] == "Offline"
