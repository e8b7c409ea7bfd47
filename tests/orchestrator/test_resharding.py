"""Running workers are moved to other layers: nobody restarts, no session is lost, and the answers stay the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

import simulations.mesh
from simulations.mesh import MeshShape, SimulatedMesh, SimulatedNode, simulate
from simulations.toy_model import MODEL_ID, RECIPE, ROOT
from tessella_p2p.base.errors import InvalidRequest, NotAuthorized, Overloaded, RemoteProtocolError, UnknownModel
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import MAX_ENVELOPE_BYTES, MAX_MEMBERS, MAX_MOVES_TOLD, REPAIR_AFTER_S
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.orchestrator.member import MemberState, MoveOrdered
from tessella_p2p.orchestrator.rebalance import Plan
from tessella_p2p.orchestrator.resharding import told
from tessella_p2p.orchestrator.waves import PlannedMove, Wave
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import seal
from tests.orchestrator.paper_workers import key_of
from tests.orchestrator.running_mesh import held, held_by, orchestrator_of, worker_of
from tests.worker.hostile_mesh import PROMPT, eventually, pass_time


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def rebalance(mesh: SimulatedMesh, **changes: object) -> m.RebalancePlan:
    """Ask for it as the operator."""
    handler = orchestrator_of(mesh).resharding.operator_handlers()[m.Rebalance]
    answer = await handler(mesh.orchestrator_key.peer_id, m.Rebalance.model_validate(changes))
    assert isinstance(answer, m.RebalancePlan)
    return answer


@asynccontextmanager
async def reshaped(
    folder: Path, clock: VirtualClock, *, nodes: int, before: int, after: int
) -> AsyncIterator[SimulatedMesh]:
    """A mesh that was split into ``before`` stages, under an orchestrator that wants ``after`` now."""
    async with simulate(MeshShape(min_stages=before), seed=1, folder=folder, clock=clock) as mesh:
        for _ in range(nodes):
            await mesh.start_node(mesh.add_node())
        for node in mesh.nodes:
            await mesh.wait_listed(node)
        await eventually(lambda: len(held(mesh)) == nodes)
        mesh.crash_orchestrator()
        mesh.shape = replace(mesh.shape, min_stages=after)
        await pass_time(1.0)
        await mesh.start_orchestrator()
        await eventually(
            lambda: [one.state for one in orchestrator_of(mesh).membership.members()] == [MemberState.HEALTHY] * nodes
        )
        yield mesh


async def asking(mesh: SimulatedMesh, entry: SimulatedNode, over: trio.Event, answers: list[int]) -> None:
    """Ask one long question after another until ``over``; each answer is right."""
    while not over.is_set():
        finished = await mesh.ask(entry, PROMPT, 60)
        assert finished.token_ids == mesh.expected(PROMPT, 60)
        answers.append(len(finished.token_ids))


@pytest.mark.parametrize("claim_mb", [1024, 130])
async def test_a_mesh_is_split_anew_under_load_and_no_answer_is_lost(
    tmp_path: Path, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, claim_mb: int
) -> None:
    """With room for two ranges nobody drains; without it the workers drain one after another, while replicas serve."""
    if claim_mb != 1024:
        claim_mb = -(-(12 * 10 + 16) * 100 // 90)  # the whole model, and no layer more
    monkeypatch.setattr(simulations.mesh, "CLAIM_MB", claim_mb)
    async with reshaped(tmp_path, clock, nodes=4, before=1, after=3) as mesh:
        assert held(mesh) == [(0, 12)] * 4
        services = [worker_of(node).stage for node in mesh.nodes]
        plan = await rebalance(mesh, dry_run=True)
        assert not plan.begun
        assert len(plan.moves) == 4
        assert (plan.dearest_before, plan.dearest_after) == (12, 4)
        await pass_time(15.0)
        assert held(mesh) == [(0, 12)] * 4, "a dry run moves nobody"
        over, answers = trio.Event(), list[int]()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asking, mesh, mesh.nodes[0], over, answers)
            assert (await rebalance(mesh)).begun
            with pytest.raises(Overloaded, match="being moved"):
                await rebalance(mesh)
            await eventually(lambda: set(held(mesh)) == {(0, 4), (4, 8), (8, 12)} and len(held(mesh)) == 4, 300.0)
            over.set()
        assert len(answers) > 2
        assert all(worker_of(node).stage not in services for node in mesh.nodes)
        await eventually(lambda: not orchestrator_of(mesh).resharding.is_busy)
        assert orchestrator_of(mesh).outcomes["moves:done"] == 1
        assert (await rebalance(mesh, dry_run=True)).moves == ()
        assert all(node.starts == 1 for node in mesh.nodes), "nobody restarted"


async def test_a_chain_without_replicas_changes_over_together_and_is_never_without_a_stage(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with reshaped(tmp_path, clock, nodes=3, before=2, after=3) as mesh:
        layers = held(mesh)
        assert sorted(layers) != [(0, 4), (4, 8), (8, 12)]
        over, answers = trio.Event(), list[int]()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asking, mesh, mesh.nodes[0], over, answers)
            await rebalance(mesh)
            await eventually(lambda: held(mesh) == [(0, 4), (4, 8), (8, 12)], 120.0)
            over.set()
        assert answers


async def test_a_session_that_is_open_on_the_layers_before_ends_there(tmp_path: Path, clock: VirtualClock) -> None:
    async with reshaped(tmp_path, clock, nodes=3, before=2, after=3) as mesh:
        old = {worker_of(node).stage for node in mesh.nodes}
        finished: list[tuple[int, ...]] = []

        async def ask() -> None:
            finished.append((await mesh.ask(mesh.nodes[0], PROMPT, 60)).token_ids)

        async with trio.open_nursery() as nursery:
            await rebalance(mesh)
            await eventually(lambda: any(_prepared(node) for node in mesh.nodes))
            nursery.start_soon(ask)
            await eventually(lambda: held(mesh) == [(0, 4), (4, 8), (8, 12)], 60.0)
        assert finished == [mesh.expected(PROMPT, 60)]
        await eventually(lambda: not any(stage is not None and stage.num_sessions for stage in old))


def _prepared(node: SimulatedNode) -> bool:
    return worker_of(node)._successor.prepared is not None


async def test_a_worker_that_dies_in_its_move_ends_the_plan_and_the_rest_serves_on(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with reshaped(tmp_path, clock, nodes=4, before=1, after=3) as mesh:
        plan = await rebalance(mesh)
        first = next(node for node in mesh.nodes if node.peer_id == plan.moves[0].peer_id)
        await eventually(lambda: _prepared(first))
        mesh.crash_node(first)
        await first.down.wait()
        await eventually(lambda: orchestrator_of(mesh).outcomes["moves:dropped"] == 1, 120.0)
        entry = next(node for node in mesh.nodes if node is not first)
        assert (await mesh.ask(entry, PROMPT, 20)).token_ids == mesh.expected(PROMPT, 20)
        assert (await rebalance(mesh)).begun, "the operator may ask again"


async def test_an_order_that_nobody_follows_up_leaves_the_memory(
    tmp_path: Path, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orchestrator dies between "load it beside" and "change over"."""
    monkeypatch.setattr("tessella_p2p.worker.successor.MOVE_TIMEOUT_S", 30.0)
    async with reshaped(tmp_path, clock, nodes=3, before=2, after=3) as mesh:
        await rebalance(mesh)
        await eventually(lambda: any(_prepared(node) for node in mesh.nodes))
        mesh.crash_orchestrator()
        layers = held(mesh)
        await eventually(lambda: not any(_prepared(node) for node in mesh.nodes))
        assert held(mesh) == layers
        await mesh.start_orchestrator()
        assert (await mesh.ask(mesh.nodes[0], PROMPT, 20)).token_ids == mesh.expected(PROMPT, 20)
        await eventually(lambda: len(_healthy(mesh)) == 3)
        assert _healthy(mesh) == layers, "who was ordered and never told to change over holds what it held"


def _healthy(mesh: SimulatedMesh) -> list[tuple[int, int]]:
    members = orchestrator_of(mesh).membership.members()
    return sorted(one.layers.as_tuple() for one in members if one.state is MemberState.HEALTHY)


async def test_a_hole_that_stays_is_filled_by_a_replica(tmp_path: Path, clock: VirtualClock) -> None:
    async with simulate(MeshShape(), seed=1, folder=tmp_path, clock=clock) as mesh:
        for _ in range(4):
            await mesh.start_node(mesh.add_node())
        await eventually(lambda: len(held(mesh)) == 4)
        (twice,) = {layers for layers in held(mesh) if held(mesh).count(layers) == 2}
        lost = next(node for node in mesh.nodes if held_by(node) != twice)
        gap = held_by(lost)
        mesh.crash_node(lost)
        await lost.down.wait()
        mesh.nodes.remove(lost)
        await pass_time(REPAIR_AFTER_S / 2)
        assert gap not in held(mesh), "most workers come back before"
        await eventually(lambda: gap in held(mesh), 2 * REPAIR_AFTER_S)
        await mesh.wait_listed(mesh.nodes[0])
        assert (await mesh.ask(mesh.nodes[0], PROMPT, 20)).token_ids == mesh.expected(PROMPT, 20)


async def test_a_model_that_is_not_served_is_not_split_anew(tmp_path: Path, clock: VirtualClock) -> None:
    async with simulate(MeshShape(), seed=1, folder=tmp_path, clock=clock) as mesh:
        with pytest.raises(UnknownModel):
            await rebalance(mesh, model_id="other")
        answer = await rebalance(mesh, model_id=MODEL_ID)
        assert answer == m.RebalancePlan(moves=(), dearest_before=0, dearest_after=0, begun=False)


def test_the_plan_of_the_largest_mesh_is_an_answer_that_fits_into_an_envelope() -> None:
    peer = key_of("worker").peer_id
    move = PlannedMove(peer, LayerRange(4094, 4095), LayerRange(4095, 4096), beside=False)
    plan = Plan((Wave((move,) * MAX_MEMBERS, together=False),), 2**52, 2**52)
    answer = told([plan], begun=True)
    sealed = seal(
        key_of("o"), m.ANSWER, m.AnswerBody(to=2**52, body=answer), sequence=2**52, now_ms=2**52, audience=peer
    )
    assert len(sealed) <= MAX_ENVELOPE_BYTES
    assert (answer.num_moves, len(answer.moves)) == (MAX_MEMBERS, MAX_MOVES_TOLD)


# ---- Hostile and stale orders ----


async def test_a_worker_refuses_orders_that_its_peers_would_not_believe(tmp_path: Path, clock: VirtualClock) -> None:
    async with reshaped(tmp_path, clock, nodes=3, before=3, after=3) as mesh:
        node = mesh.nodes[0]
        worker, orchestrator = worker_of(node), orchestrator_of(mesh)
        assert worker.assignment is not None
        current = worker.assignment.layers
        member = orchestrator.membership.core.get(node.peer_id)
        assert member is not None
        other = next(one for one in orchestrator.membership.members() if one.peer_id != node.peer_id)
        own = m.UpdateAssignment(
            model_id=MODEL_ID, layers=member.layers.as_tuple(), lease=member.lease, reason="a test"
        )
        signer = mesh.orchestrator_key.peer_id
        for change, error in (
            ({}, InvalidRequest),
            ({"lease": other.lease, "layers": other.layers.as_tuple()}, RemoteProtocolError),
            ({"layers": (0, 1)}, RemoteProtocolError),
            ({"lease": b"junk"}, RemoteProtocolError),
            ({"lease": member.record}, RemoteProtocolError),
        ):
            with pytest.raises(error):
                await worker._take_order(own.model_copy(update=change), signer)
        for foreign, signed_by in ((own.model_copy(update={"model_id": "other"}), signer), (own, node.peer_id)):
            with pytest.raises(RemoteProtocolError):
                await worker._take_order(foreign, signed_by)
        await pass_time(10.0)
        assert worker.assignment.layers == current
        assert worker.state == "ready"


async def test_the_core_orders_nobody_beyond_a_claim_nor_who_is_gone(tmp_path: Path, clock: VirtualClock) -> None:
    async with reshaped(tmp_path, clock, nodes=3, before=3, after=3) as mesh:
        membership = orchestrator_of(mesh).membership
        stranger = mesh.add_node()
        with pytest.raises(NotAuthorized):
            await membership.order(MoveOrdered(stranger.peer_id, LayerRange(0, 4), beside=False, reason="a test"))
        assert {(one.manifest_root, one.recipe) for one in membership.members()} == {(ROOT, RECIPE)}
