"""A worker through what happens to it: ranges that do not load, an orchestrator that forgets, other layers, a full disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from simulations.mesh import MeshShape, SimulatedMesh, SimulatedNode, simulate
from simulations.toy_model import MODEL_ID, ROOT
from tessella_p2p.base.errors import ArtifactError, CacheMiss
from tessella_p2p.base.ids import LayerRange, SessionId
from tessella_p2p.base.limits import RECORD_TTL_S
from tessella_p2p.dht.stage_records import signed_stage
from tessella_p2p.entry.api import Delta, GenerateRequest
from tessella_p2p.ledger.proof_log import ProofLog
from tessella_p2p.net.memory import MemoryNetwork
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.node.assembly import NodeRoles
from tessella_p2p.orchestrator.member import MemberState
from tessella_p2p.stages.engine import SessionKey, StepAnswer, StepInput
from tessella_p2p.stages.service import StageService
from tessella_p2p.stages.toy import ToyEngine
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.frames import DType
from tessella_p2p.worker.service import Worker
from tests.worker.hostile_mesh import PROMPT, eventually, pass_time

Load = Callable[[LayerRange], Awaitable[StageService]]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def worker_of(node: SimulatedNode) -> Worker:
    assert node.roles is not None
    assert node.roles.worker is not None
    return node.roles.worker


@asynccontextmanager
async def running(folder: Path, clock: VirtualClock, num_nodes: int = 3) -> AsyncIterator[SimulatedMesh]:
    async with simulate(MeshShape(), seed=1, folder=folder, clock=clock) as mesh:
        for _ in range(num_nodes):
            await mesh.start_node(mesh.add_node())
        for node in mesh.nodes:
            await mesh.wait_listed(node)
        yield mesh


@asynccontextmanager
async def node_that_loads_with(mesh: SimulatedMesh, wrap: Callable[[Load], Load]) -> AsyncIterator[NodeRoles]:
    """One more node, whose loader is another one."""
    node = mesh.add_node()
    log = ProofLog(node.folder / "proofs", 16 << 20, sync=False)
    async with MemoryNetwork.open(mesh.fabric, node.peer_id) as network:
        around = mesh._surroundings(node, network, log)
        roles = NodeRoles(mesh._plan(node), replace(around, load=wrap(around.load)))
        async with trio.open_nursery() as nursery:
            await nursery.start(roles.run)
            yield roles
            nursery.cancel_scope.cancel()
    log.close()


class FailingEngine(ToyEngine):
    """A toy that runs out of memory at every forward of one session."""

    def forward(self, batch: Sequence[StepInput]) -> list[StepAnswer]:
        """Raises `MemoryError`."""
        if any(step.session == _HOSTILE for step in batch):
            raise MemoryError
        return super().forward(batch)


_HOSTILE = SessionKey(SessionId(bytes(16)), 0)


async def test_a_saturated_stage_says_so_to_the_mesh_gets_no_route_and_recovers(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with running(tmp_path, clock) as mesh:

        def failing(_: Load) -> Load:
            async def attempt(layers: LayerRange) -> StageService:
                def load() -> ToyEngine:
                    return FailingEngine(mesh.model, layers)

                return StageService(load(), load=load, inline=True)

            return attempt

        async with node_that_loads_with(mesh, failing) as roles:
            worker = roles.worker
            assert worker is not None
            await eventually(lambda: worker.state == "ready")
            stage, peer = worker.stage, worker._context.key.peer_id
            assert stage is not None
            await pass_time(10.0)

            def states() -> set[str]:
                views = [node.roles.discovery.view for node in mesh.nodes if node.roles is not None]
                seen = [view.stage_of(peer, mesh.date().unix_ms()) for view in views]
                return {each.state for each in seen if each is not None}

            assert states() == {"ready"}
            for _ in range(3):
                await stage.open(_HOSTILE, 8)
                body = bytes(4) if stage.engine.is_head else bytes(4 * stage.engine.hidden_size)
                dtype = DType.U32 if stage.engine.is_head else stage.engine.wire_dtype
                result = await stage.step(StepInput(_HOSTILE, 0, 1, dtype, body))
                assert isinstance(result.output, CacheMiss)
            assert not stage.accepts
            await eventually(lambda: states() == {"saturated"}, timeout_s=3.0)
            orchestrator = mesh.orchestrator
            assert orchestrator is not None

            def told() -> tuple[MemberState, str]:
                member = next(each for each in orchestrator.membership.members() if each.peer_id == peer)
                assert member.record is not None
                return member.state, signed_stage(member.record).record.state

            await eventually(lambda: told() == (MemberState.HEALTHY, "saturated"), timeout_s=1.0)
            for node in mesh.nodes[:3]:
                assert len((await mesh.ask(node, PROMPT, 5)).token_ids) == 5
            assert worker.hops.sessions_served == 0
            await eventually(lambda: states() == {"ready"}, timeout_s=40.0)
            assert stage.accepts


@pytest.mark.parametrize("error", [ArtifactError("a tensor is damaged"), MemoryError(), RuntimeError("native code")])
async def test_a_range_that_cannot_be_loaded_leaves_an_entry_that_tries_again(
    tmp_path: Path, clock: VirtualClock, error: Exception
) -> None:
    async with simulate(MeshShape(min_stages=1), seed=1, folder=tmp_path, clock=clock) as mesh:
        failures = 0

        def failing_twice(load: Load) -> Load:
            async def attempt(layers: LayerRange) -> StageService:
                nonlocal failures
                if failures < 2:
                    failures += 1
                    raise error
                return await load(layers)

            return attempt

        async with node_that_loads_with(mesh, failing_twice) as roles:
            worker = roles.worker
            assert worker is not None
            await eventually(lambda: failures == 1)
            assert worker.stage is None
            assert worker.last_refusal is not None
            assert not roles.entry.model_ids()
            await eventually(lambda: bool(roles.entry.model_ids()), timeout_s=200.0)
            assert failures == 2
            assert worker.state == "ready"


async def test_a_range_that_takes_minutes_to_load_is_kept_for_its_worker(tmp_path: Path, clock: VirtualClock) -> None:
    async with simulate(MeshShape(min_stages=1), seed=1, folder=tmp_path, clock=clock) as mesh:
        loads: list[LayerRange] = []

        def slow(load: Load) -> Load:
            async def attempt(layers: LayerRange) -> StageService:
                loads.append(layers)
                await trio.sleep(200.0)
                return await load(layers)

            return attempt

        async with node_that_loads_with(mesh, slow) as roles:
            await pass_time(150.0)
            assert mesh.orchestrator is not None
            assert [member.state for member in mesh.orchestrator.membership.members()] == [MemberState.PENDING_LOAD]
            await eventually(lambda: bool(roles.entry.model_ids()), timeout_s=100.0)
            assert len(loads) == 1


async def test_an_orchestrator_that_forgot_its_members_gets_them_back_while_answers_go_on(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with running(tmp_path, clock) as mesh:
        entry = mesh.nodes[0]
        assert entry.roles is not None
        tokens: list[int] = []
        request = GenerateRequest(model=MODEL_ID, prompt_ids=PROMPT, max_tokens=120)
        async with entry.roles.entry.generate(request) as generation, aclosing(generation.events()) as events:
            async for event in events:
                if not isinstance(event, Delta):
                    continue
                tokens += event.token_ids
                if len(tokens) == 5:
                    mesh.crash_orchestrator()
                if len(tokens) == 60:
                    await mesh.start_orchestrator()
        assert tuple(tokens) == mesh.expected(PROMPT, 120)
        await pass_time(2 * RECORD_TTL_S)
        orchestrator = mesh.orchestrator
        assert orchestrator is not None
        assert all(worker_of(node).state == "ready" for node in mesh.nodes)
        assert (await mesh.ask(entry, PROMPT, 3)).paid


async def test_a_worker_whose_membership_is_lost_goes_on_serving_and_says_that_it_is_ready(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with running(tmp_path, clock) as mesh:
        entry, node = mesh.nodes[0], mesh.nodes[1]
        worker = worker_of(node)
        stage, serial = worker.stage, worker.assignment
        await worker._tell(m.Deregister())  # the orchestrator believes that it left
        states: set[str] = set()
        deadline = trio.current_time() + 30.0
        while trio.current_time() < deadline:
            states.add(worker.state)
            await pass_time(0.5)
        assert states == {"ready"}
        assert worker.stage is stage, "the same layers are not loaded again"
        assert worker.assignment != serial
        assert (await mesh.ask(entry, PROMPT, 5)).token_ids == mesh.expected(PROMPT, 5)


async def test_a_node_that_stops_drains_first_and_answers_go_on_elsewhere(tmp_path: Path, clock: VirtualClock) -> None:
    async with running(tmp_path, clock, num_nodes=6) as mesh:
        await eventually(lambda: all(worker_of(node).stage is not None for node in mesh.nodes))
        await pass_time(10.0)
        entry = mesh.nodes[0]
        assert entry.roles is not None
        tokens: list[int] = []
        stopped: SimulatedNode | None = None
        request = GenerateRequest(model=MODEL_ID, prompt_ids=PROMPT, max_tokens=60)
        async with entry.roles.entry.generate(request) as generation, aclosing(generation.events()) as events:
            async for event in events:
                if isinstance(event, Delta):
                    tokens += event.token_ids
                if len(tokens) == 10 and stopped is None:
                    busy = [n for n in mesh.nodes if n is not entry and worker_of(n).hops.open_sessions]
                    stopped = busy[0]
                    mesh.stop_node(stopped)
        assert tuple(tokens) == mesh.expected(PROMPT, 60)
        assert stopped is not None
        await stopped.down.wait()
        listed = entry.roles.discovery.view.stages(ROOT, None, mesh.date().unix_ms())
        assert stopped.peer_id not in {stage.peer_id for stage in listed}, "its good-bye is heard at once"


async def test_other_layers_are_served_after_a_drain_and_the_answers_are_the_same(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with running(tmp_path, clock) as mesh:
        node = next(n for n in mesh.nodes if layers_of(n) == LayerRange(4, 8))
        entry = next(n for n in mesh.nodes if n is not node)
        newcomer = mesh.add_node()
        await worker_of(node)._tell(m.Deregister())
        await mesh.start_node(newcomer)  # it gets the layers before the node's next heartbeat
        await eventually(lambda: layers_of(newcomer) == LayerRange(4, 8), timeout_s=3.0)
        asked: list[int] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                asked.extend((await mesh.ask(entry, PROMPT, 100)).token_ids)

            nursery.start_soon(ask)
            await eventually(lambda: layers_of(node) != LayerRange(4, 8), timeout_s=60.0)
        assert tuple(asked) == mesh.expected(PROMPT, 100)
        await eventually(lambda: worker_of(node).state == "ready")
        assert (await mesh.ask(entry, PROMPT, 5)).token_ids == mesh.expected(PROMPT, 5)


def layers_of(node: SimulatedNode) -> LayerRange | None:
    assignment = worker_of(node).assignment
    return assignment.layers if assignment is not None else None
