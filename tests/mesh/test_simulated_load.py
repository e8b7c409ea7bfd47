"""The daemons' own roles where there is not enough of something: places, KV pages, or stages that live. Bytes stay the same."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import trio

from simulations.mesh import MeshShape, SimulatedMesh, SimulatedNode, simulate
from simulations.toy_model import MODEL_ID
from tessella_p2p.base.errors import CacheMiss, Overloaded, TooManyHopBodies
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import FULL_PATIENCE_S, KV_IDLE_S, REPORT_PERIOD_S
from tessella_p2p.entry.api import Delta, Finished, GenerateRequest
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.engine import StepAnswer, StepInput
from tessella_p2p.stages.service import StageService
from tessella_p2p.stages.toy import ToyEngine

PROMPT = list(range(40))


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@asynccontextmanager
async def loaded_mesh(
    folder: Path, clock: VirtualClock, num_nodes: int = 3, **shape: object
) -> AsyncIterator[SimulatedMesh]:
    async with simulate(MeshShape(**shape), seed=1, folder=folder, clock=clock) as mesh:  # type: ignore[arg-type]
        for _ in range(num_nodes):
            await mesh.start_node(mesh.add_node())
        for node in mesh.nodes:
            await mesh.wait_listed(node)
        yield mesh


async def pass_time(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.Event().wait()


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = trio.current_time() + timeout_s
    while not condition():
        assert trio.current_time() < deadline, "it did not become true"
        await pass_time(0.1)


def stage_of(node: SimulatedNode) -> StageService:
    assert node.roles is not None
    assert node.roles.worker is not None
    assert node.roles.worker.stage is not None
    return node.roles.worker.stage


def failures(mesh: SimulatedMesh) -> dict[PeerId, int]:
    found: dict[PeerId, int] = {}
    for node in mesh.nodes:
        assert node.roles is not None
        found.update(node.roles.entry.peer_failures)
    return found


async def ask_slowly(
    mesh: SimulatedMesh, prompt: Sequence[int], max_tokens: int, pauses: dict[int, float]
) -> tuple[int, ...]:
    """An answer whose client pauses before it reads on from some of its tokens."""
    roles = mesh.nodes[0].roles
    assert roles is not None
    tokens: list[int] = []
    request = GenerateRequest(model=MODEL_ID, prompt_ids=prompt, max_tokens=max_tokens)
    async with roles.entry.generate(request) as generation, aclosing(generation.events()) as events:
        async for event in events:
            if isinstance(event, Delta):
                tokens += event.token_ids
                await pass_time(pauses.get(len(tokens), 0.0))
            else:
                assert isinstance(event, Finished)
                assert event.token_ids == tuple(tokens)
    return tuple(tokens)


# ---- places and pages ----


async def test_more_sessions_than_there_is_kv_for_wait_their_turn_and_all_answer_the_same(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with loaded_mesh(tmp_path, clock, kv_pages=3) as mesh:  # three sessions of one page each
        answers: dict[int, tuple[int, ...]] = {}

        async def ask(index: int) -> None:
            answers[index] = (await mesh.ask(mesh.nodes[index % 3], [index, *PROMPT], 12)).token_ids

        async with trio.open_nursery() as nursery:
            for index in range(8):
                nursery.start_soon(ask, index)
        for index in range(8):
            assert answers[index] == mesh.expected([index, *PROMPT], 12)
        assert not failures(mesh), "full is not broken"
        await eventually(lambda: all(stage_of(node).kv.pages_used == 0 for node in mesh.nodes))


async def test_a_newcomer_that_finds_no_place_is_told_so_in_time_and_costs_nobody_an_answer(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with loaded_mesh(tmp_path, clock, kv_pages=3) as mesh:
        answer: list[tuple[int, ...]] = []

        async def ask() -> None:
            answer.append(await ask_slowly(mesh, PROMPT, 100, dict.fromkeys(range(101), 0.5)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await pass_time(1.0)
            began = trio.current_time()
            with pytest.raises(TooManyHopBodies):
                await mesh.ask(mesh.nodes[1], [5, 6, 7], 40)
            assert FULL_PATIENCE_S <= trio.current_time() - began < FULL_PATIENCE_S + 3.0
        assert answer == [mesh.expected(PROMPT, 100)]
        assert not failures(mesh)
        finished = await mesh.ask(mesh.nodes[1], [5, 6, 7], 40)
        assert finished.token_ids == mesh.expected([5, 6, 7], 40)


async def test_an_evicted_session_begins_anew_behind_its_clients_back(tmp_path: Path, clock: VirtualClock) -> None:
    async with loaded_mesh(tmp_path, clock, kv_pages=3) as mesh:
        answer: list[tuple[int, ...]] = []

        async def ask() -> None:
            answer.append(await ask_slowly(mesh, PROMPT, 60, {30: 2 * KV_IDLE_S}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await pass_time(1.5 * KV_IDLE_S)
            other = await mesh.ask(mesh.nodes[1], [9, *PROMPT], 120)
            assert other.token_ids == mesh.expected([9, *PROMPT], 120)
            assert any(stage_of(node).kv.sessions_evicted for node in mesh.nodes)
            assert not answer
        assert answer == [mesh.expected(PROMPT, 60)]


class FailingOnce(ToyEngine):
    """Answers one step in mid-answer with an error value, as an engine that is out of pages does."""

    failure: Overloaded | CacheMiss | None = None

    def forward(self, batch: Sequence[StepInput]) -> list[StepAnswer]:
        answers = super().forward(batch)
        if self.failure is not None and batch[0].position >= len(PROMPT) + 5:
            answers[0], self.failure = self.failure, None
        return answers


@pytest.mark.parametrize("failure", [Overloaded("no pages"), CacheMiss("gone")], ids=["overloaded", "cache miss"])
@pytest.mark.parametrize("at", [0, 1, 2])
async def test_a_step_that_a_stage_has_no_room_for_costs_the_client_nothing_but_time(
    tmp_path: Path, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, failure: Overloaded | CacheMiss, at: int
) -> None:
    monkeypatch.setattr("simulations.mesh.ToyEngine", FailingOnce)
    async with loaded_mesh(tmp_path, clock) as mesh:
        ordered = sorted(mesh.nodes, key=lambda node: stage_of(node).engine.layers.start)
        engine = stage_of(ordered[at]).engine
        assert isinstance(engine, FailingOnce)
        engine.failure = failure
        began = trio.current_time()
        answer = await ask_slowly(mesh, PROMPT, 30, {})
        assert answer == mesh.expected(PROMPT, 30)
        assert trio.current_time() - began < 10.0  # it takes 7 s without a failure
        assert failures(mesh) == ({} if isinstance(failure, Overloaded) else {ordered[at].peer_id: 1})
        await eventually(lambda: all(stage_of(node).num_sessions == 0 for node in mesh.nodes))


# ---- reports ----


async def test_a_stage_that_dies_is_reported_by_its_neighbours_alone(tmp_path: Path, clock: VirtualClock) -> None:
    async with loaded_mesh(tmp_path, clock, num_nodes=6) as mesh:
        await eventually(lambda: all(n.roles and n.roles.worker and n.roles.worker.stage for n in mesh.nodes))
        await pass_time(10.0)
        entry, victim = mesh.nodes[0], None
        assert entry.roles is not None
        request = GenerateRequest(model=MODEL_ID, prompt_ids=PROMPT, max_tokens=30)
        tokens: list[int] = []
        async with entry.roles.entry.generate(request) as generation, aclosing(generation.events()) as events:
            async for event in events:
                if isinstance(event, Delta):
                    tokens += event.token_ids
                    if len(tokens) == 5:
                        victim = next(n for n in mesh.nodes if n is not entry and stage_of(n).num_sessions)
                        mesh.crash_node(victim)
        assert tuple(tokens) == mesh.expected(PROMPT, 30)
        assert victim is not None
        await pass_time(2 * REPORT_PERIOD_S)
        assert mesh.orchestrator is not None
        reported = mesh.orchestrator.membership.reported_failures
        assert set(reported) == {victim.peer_id}
        assert 1 <= reported[victim.peer_id] <= 2


async def test_full_stages_and_leaving_ones_are_not_reported(tmp_path: Path, clock: VirtualClock) -> None:
    async with loaded_mesh(tmp_path, clock, kv_pages=1) as mesh:
        async with trio.open_nursery() as nursery:
            for index in range(3):
                nursery.start_soon(mesh.ask, mesh.nodes[index], [index, *PROMPT], 12)
        mesh.stop_node(mesh.nodes[1])
        await pass_time(2 * REPORT_PERIOD_S)
        assert mesh.orchestrator is not None
        assert not mesh.orchestrator.membership.reported_failures


# ---- tiers ----


async def test_at_a_full_stage_the_higher_tier_gets_the_place_that_becomes_free(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with loaded_mesh(tmp_path, clock, kv_pages=1) as mesh:  # room for one session
        holder, standard, leech = mesh.nodes
        await mesh.ask(holder, PROMPT, 12)
        await eventually(lambda: all(mesh.store.account(node.peer_id).micro_credits > 0 for node in mesh.nodes))
        owes = mesh.store.account(leech.peer_id).micro_credits
        mesh.store.slash(leech.peer_id, owes, "to be a leech", "operator", mesh.date().unix_ms())
        order: list[tuple[str, str]] = []

        async def hold() -> None:
            assert await ask_slowly(mesh, PROMPT, 12, {3: 5.0}) == mesh.expected(PROMPT, 12)
            order.append(("holder", ""))

        async def ask(node: SimulatedNode, name: str) -> None:
            finished = await mesh.ask(node, [7, *PROMPT], 12)
            assert finished.token_ids == mesh.expected([7, *PROMPT], 12)
            order.append((name, finished.tier))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold)
            await pass_time(1.0)
            nursery.start_soon(ask, leech, "leech")
            await pass_time(1.0)
            nursery.start_soon(ask, standard, "standard")
            await pass_time(2.0)
            assert [stage_of(node).num_waiting_opens for node in mesh.nodes].count(2) == 1, "both wait at the head"
        assert order == [("holder", ""), ("standard", "Standard"), ("leech", "Leech")]
        assert not failures(mesh)
