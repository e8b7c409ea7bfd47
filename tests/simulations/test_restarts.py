"""A node that comes back while the orchestrator is away: an entry without a stage of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from simulations.mesh import MeshShape, simulate
from tessella_p2p.net.virtual_clock import VirtualClock

PROMPT = list(range(20))


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def test_a_restarted_entry_does_not_choose_the_stage_that_it_served_before(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with simulate(MeshShape(layers=6, min_stages=2), seed=1, folder=tmp_path, clock=clock) as mesh:
        nodes = [mesh.add_node() for _ in range(4)]
        for node in nodes:
            await mesh.start_node(node)
        for node in nodes:
            await mesh.wait_listed(node)
        await trio.sleep(10.0)  # every view has heard of every stage
        mesh.crash_orchestrator()
        mesh.crash_node(nodes[0])
        await mesh.start_node(nodes[0])
        await mesh.wait_listed(nodes[0])
        finished = await mesh.ask(nodes[0], PROMPT, 8)
        assert finished.token_ids == mesh.expected(PROMPT, 8)
        assert all(hop.peer_id != nodes[0].peer_id for hop in finished.route)
