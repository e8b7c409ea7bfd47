"""Entries that believe their own eyes, in a mesh under virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from simulations.mesh import MeshShape, SimulatedMesh, SimulatedNode, simulate
from simulations.toy_model import MODEL_ID
from tessella_p2p.base.errors import NoRoute
from tessella_p2p.base.limits import READY_S
from tessella_p2p.entry.service import EntryService
from tessella_p2p.net.virtual_clock import VirtualClock
from tests.mesh.test_simulated_mesh import PROMPT, balance, eventually, held_sessions, is_tail

SETTLING_S = 60.0
"""Until work that is paid for has been paid, and more."""


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@asynccontextmanager
async def proving_mesh(folder: Path, clock: VirtualClock) -> AsyncIterator[SimulatedMesh]:
    shape = MeshShape(prove_routes=True)
    async with simulate(shape, seed=1, folder=folder, clock=clock) as mesh:
        for _ in range(3):
            await mesh.start_node(mesh.add_node())
        for node in mesh.nodes:
            await eventually(lambda node=node: bool(entry_of(node).model_ids()))  # type: ignore[misc]
        yield mesh


def entry_of(node: SimulatedNode) -> EntryService:
    assert node.roles is not None
    return node.roles.entry


def sessions_served(mesh: SimulatedMesh) -> int:
    workers = [node.roles.worker for node in mesh.nodes if node.roles is not None]
    return sum(worker.hops.sessions_served for worker in workers if worker is not None)


async def pass_time(seconds: float) -> None:
    """Let virtual time go by."""
    await trio.sleep(seconds)


async def test_every_entry_proves_its_route_once_and_nobody_pays_for_it(tmp_path: Path, clock: VirtualClock) -> None:
    async with proving_mesh(tmp_path, clock) as mesh:
        await eventually(lambda: sessions_served(mesh) == 3 * len(mesh.nodes))  # three stages, one token for each entry
        await eventually(lambda: held_sessions(mesh) == 0)
        await pass_time(SETTLING_S)
        assert [balance(mesh, node) for node in mesh.nodes] == [0, 0, 0]
        assert all(entry_of(node).requests.num_begun == 0 for node in mesh.nodes)


async def test_an_idle_mesh_is_left_alone_and_answers_the_next_one_who_asks(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with proving_mesh(tmp_path, clock) as mesh:
        await eventually(lambda: sessions_served(mesh) == 3 * len(mesh.nodes))
        served = sessions_served(mesh)
        await pass_time(20 * READY_S)
        assert sessions_served(mesh) == served
        entry = entry_of(mesh.nodes[0])
        assert (entry.model_ids(), entry.readiness().state) == ((), "old")
        await entry.check_ready()
        assert entry.model_ids() == (MODEL_ID,)


async def test_a_lost_stage_is_told_and_its_successor_is_proven_before_anybody_asks(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with proving_mesh(tmp_path, clock) as mesh:
        tail = next(node for node in mesh.nodes if is_tail(mesh, node))
        entry = next(node for node in mesh.nodes if node is not tail)
        mesh.crash_node(tail)
        await eventually(lambda: not entry_of(entry).has_route())
        with pytest.raises(NoRoute) as caught:
            await entry_of(entry).check_ready()
        assert caught.value.missing == ((8, 12),)
        await mesh.start_node(mesh.add_node())
        await eventually(lambda: entry_of(entry).readiness().state == "ready", timeout_s=200.0)
        answer = await mesh.ask(entry, PROMPT, 3)
        assert answer.token_ids == mesh.expected(PROMPT, 3)
        (record,) = entry_of(entry).requests.recent()
        assert (record.end, record.num_tokens, record.paid, len(record.epochs)) == ("length", 3, True, 1)
        assert len(record.epochs[0].route) == 3
