"""What befalls a running worker: the blacklist, a canary beside it, and reports of many that it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulations.mesh import MeshShape, SimulatedMesh, SimulatedNode, simulate
from tessella_p2p.base.limits import REPAIR_AFTER_S, SUSPECT_REPORTERS
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.orchestrator.member import MemberState
from tessella_p2p.wire import messages as m
from tests.orchestrator.running_mesh import held, held_by, orchestrator_of, worker_of
from tests.worker.hostile_mesh import PROMPT, eventually, pass_time


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def started(mesh: SimulatedMesh, count: int) -> None:
    for _ in range(count):
        await mesh.start_node(mesh.add_node())
    await eventually(lambda: len(held(mesh)) == count)
    for node in mesh.nodes:
        await mesh.wait_listed(node)


def state_of(mesh: SimulatedMesh, node: SimulatedNode) -> MemberState | None:
    member = orchestrator_of(mesh).membership.core.get(node.peer_id)
    return None if member is None else member.state


async def test_a_blacklisted_worker_leaves_at_once_and_stays_out_until_it_is_taken_off(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with simulate(MeshShape(), seed=1, folder=tmp_path, clock=clock) as mesh:
        await started(mesh, 4)
        node = mesh.nodes[3]
        mesh.store.set_blacklisted(node.peer_id, True, "a test", mesh.date().unix_ms())
        await orchestrator_of(mesh).membership.exclude(node.peer_id)
        assert state_of(mesh, node) is MemberState.LEFT
        await pass_time(90.0)  # its lease is taken away, so its layers are missing until a replica has taken them over
        assert state_of(mesh, node) in (MemberState.LEFT, None)
        refusals = orchestrator_of(mesh).outcomes
        assert refusals["register:blacklisted"] + refusals["ready:blacklisted"] > 0
        assert (await mesh.ask(mesh.nodes[0], PROMPT, 5)).token_ids == mesh.expected(PROMPT, 5)
        mesh.store.set_blacklisted(node.peer_id, False, "a test", mesh.date().unix_ms())
        await eventually(lambda: state_of(mesh, node) is MemberState.HEALTHY, 120.0)


async def test_a_canary_serves_a_copy_and_no_request_goes_through_it(tmp_path: Path, clock: VirtualClock) -> None:
    async with simulate(MeshShape(), seed=1, folder=tmp_path, clock=clock) as mesh:
        await started(mesh, 3)
        canary = mesh.add_node()
        canary.canary = "echo"
        await mesh.start_node(canary)
        await eventually(lambda: state_of(mesh, canary) is MemberState.HEALTHY)
        member = orchestrator_of(mesh).membership.core.get(canary.peer_id)
        assert member is not None
        assert member.canary == "echo"
        assert held(mesh).count(member.layers.as_tuple()) == 2
        await pass_time(15.0)
        for node in mesh.nodes:
            assert (await mesh.ask(node, PROMPT, 5)).token_ids == mesh.expected(PROMPT, 5)
        assert worker_of(canary).hops.sessions_served == 0
        entry = mesh.nodes[0].roles
        assert entry is not None
        known = [status.stage for status in entry.discovery.view.statuses(mesh.date().unix_ms())]
        assert [stage.peer_id for stage in known if stage.canary] == [canary.peer_id]


async def test_a_worker_that_many_report_gets_a_replica_beside_it_and_loses_nothing(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with simulate(MeshShape(), seed=1, folder=tmp_path, clock=clock) as mesh:
        await started(mesh, 4)
        layers = held(mesh)
        alone = min(set(layers), key=layers.count)
        suspect = next(n for n in mesh.nodes if held_by(n) == alone)
        reporters = [n for n in mesh.nodes if n is not suspect]
        assert (layers.count(alone), len(reporters)) == (1, SUSPECT_REPORTERS)
        for node in reporters[: SUSPECT_REPORTERS - 1]:
            await _report(node, suspect)
        await pass_time(REPAIR_AFTER_S + 30.0)
        assert held(mesh) == layers, "too few of them"
        for _ in range(3):
            for node in reporters:
                await _report(node, suspect)
            await pass_time(40.0)
        member = orchestrator_of(mesh).membership.core.get(suspect.peer_id)
        assert member is not None
        assert member.state is MemberState.HEALTHY
        assert held_by(suspect) == alone, "nobody loses layers by hearsay"
        await eventually(lambda: held(mesh).count(alone) == 2, 120.0)


async def _report(node: SimulatedNode, failed: SimulatedNode) -> None:
    assert node.roles is not None
    assert node.roles.client is not None
    await node.roles.client.call(m.ReportFailure(peer_id=failed.peer_id, code="hop_timeout"))
