"""The daemons' own roles in one process, under virtual time: routes, tokens, credits, kills."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from simulations.mesh import MeshShape, SimulatedMesh, simulate
from tessella_p2p.net.virtual_clock import VirtualClock

PROMPT = list(range(40))


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@asynccontextmanager
async def running_mesh(folder: Path, clock: VirtualClock, num_nodes: int = 3) -> AsyncIterator[SimulatedMesh]:
    async with simulate(MeshShape(), seed=1, folder=folder, clock=clock) as mesh:
        for _ in range(num_nodes):
            await mesh.start_node(mesh.add_node())
        await mesh.wait_listed(mesh.nodes[0])
        yield mesh


async def test_three_nodes_answer_as_the_whole_model_does(tmp_path: Path, clock: VirtualClock) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        finished = await mesh.ask(mesh.nodes[0], PROMPT, 20)
        assert finished.token_ids == mesh.expected(PROMPT, 20)
        assert [hop.layers.as_tuple() for hop in finished.route][0][0] == 0
        assert finished.paid
