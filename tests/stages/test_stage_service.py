"""Continuous batching: who shares a turn, and what cancellation, closing and a crashing engine leave behind."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from tessella_p2p.base.errors import CacheMiss, InvalidStep, LocalProtocolError, Overloaded, PromptTooLong, StaleEpoch
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import MAX_PREFILL_ROWS_PER_TURN, MAX_QUEUED_STEPS, PREFILL_ROWS_BESIDE_DECODES
from tessella_p2p.stages.engine import Sampled, SessionKey, StepAnswer, StepInput, StepOutput
from tessella_p2p.stages.pending import StepResult
from tessella_p2p.stages.service import StageService
from tessella_p2p.stages.toy import ToyEngine, ToyModel
from tessella_p2p.wire.frames import DType
from tests.stages.stage_runs import GREEDY, alone, first_step, ids_body, key_of, play

MODEL = ToyModel(layers=4)


class WatchedEngine(ToyEngine):
    """A toy that notes what it ran and where, and can be held or made to crash."""

    def __init__(self, layers: LayerRange, max_sessions: int = 8) -> None:
        super().__init__(MODEL, layers, max_sessions=max_sessions)
        self.turns: list[list[int]] = []
        self.threads: set[int] = set()
        self.kept: list[set[SessionKey]] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.fail: Callable[[], None] = lambda: None

    def forward(self, batch: Sequence[StepInput]) -> list[StepAnswer]:
        self.turns.append([step.rows for step in batch])
        self.threads.add(threading.get_ident())
        self.entered.set()
        self.gate.wait()
        self.fail()
        return super().forward(batch)

    def keep(self, waiting: Collection[SessionKey]) -> None:
        self.kept.append(set(waiting))
        super().keep(waiting)


WHOLE = LayerRange(0, 4)


@asynccontextmanager
async def serving(engine: ToyEngine, *, inline: bool = True) -> AsyncIterator[StageService]:
    service = StageService(engine, inline=inline, compute_s=lambda rows: 0.01)
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        yield service
        nursery.cancel_scope.cancel()


@pytest.fixture
def engine() -> WatchedEngine:
    return WatchedEngine(WHOLE)


def expected_token(prompt: Sequence[int]) -> Sampled:
    played = play([ToyEngine(MODEL, WHOLE)], {1: list(prompt)}, alone({1: list(prompt)}, len(prompt)))
    return Sampled(played.tokens[1, len(prompt)])


def prompt_of(length: int) -> list[int]:
    return [i % 97 for i in range(length)]


async def test_ready_steps_of_all_sessions_share_a_turn(
    engine: WatchedEngine, autojump_clock: trio.testing.MockClock
) -> None:
    results: dict[int, StepResult] = {}
    async with serving(engine) as service:
        for session in range(3):
            await service.open(key_of(session), 8)

        async def run(session: int) -> None:
            results[session] = await service.step(first_step(session, [session], sample=GREEDY))

        async with trio.open_nursery() as nursery:
            for session in range(3):
                nursery.start_soon(run, session)
        assert service.num_sessions == 3
        assert service.queue_depth == 0
    assert engine.turns == [[1, 1, 1]]
    assert {session: result.output for session, result in results.items()} == {
        session: expected_token([session]) for session in range(3)
    }
    assert all(result.compute_us == 10_000 and result.queue_us == 0 for result in results.values())


async def test_a_long_prompt_is_cut_and_does_not_hold_up_a_session_that_decodes(
    engine: WatchedEngine, autojump_clock: trio.testing.MockClock
) -> None:
    prompt = prompt_of(MAX_PREFILL_ROWS_PER_TURN + 12 * PREFILL_ROWS_BESIDE_DECODES)
    async with serving(engine) as service:
        for session in (1, 2):
            await service.open(key_of(session), 2048)
        answers: list[StepAnswer] = []

        async def prefill() -> None:
            answers.append((await service.step(first_step(1, prompt, sample=GREEDY))).output)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefill)
            await trio.testing.wait_all_tasks_blocked()
            for position in range(4):
                result = await service.step(first_step(2, [position], position=position, sample=GREEDY))
                assert isinstance(result.output, Sampled)
                assert not answers
        assert answers == [expected_token(prompt)]
    assert engine.turns[0] == [MAX_PREFILL_ROWS_PER_TURN]
    assert engine.turns[1] == [1, PREFILL_ROWS_BESIDE_DECODES]
    assert all(max(rows) <= PREFILL_ROWS_BESIDE_DECODES for rows in engine.turns[1:])


async def test_the_engine_knows_whose_steps_wait_for_a_later_turn(
    engine: WatchedEngine, autojump_clock: trio.testing.MockClock
) -> None:
    prompt = prompt_of(2 * MAX_PREFILL_ROWS_PER_TURN)
    async with serving(engine) as service:
        for session in (1, 2):
            await service.open(key_of(session), 2048)
        async with trio.open_nursery() as nursery:
            for session in (1, 2):
                nursery.start_soon(service.step, first_step(session, prompt, sample=GREEDY))
                await trio.testing.wait_all_tasks_blocked()
    assert engine.turns == [[MAX_PREFILL_ROWS_PER_TURN]] * 4
    assert engine.kept == [{key_of(2)}]  # behind the second half of the first prompt; afterwards nobody waits


async def test_the_pieces_of_a_step_come_back_as_one_output(autojump_clock: trio.testing.MockClock) -> None:
    head = ToyEngine(MODEL, LayerRange(0, 2))
    prompt = prompt_of(MAX_PREFILL_ROWS_PER_TURN * 2 + 5)
    async with serving(head) as service:
        await service.open(key_of(1), 1024)
        result = await service.step(first_step(1, prompt))
    assert isinstance(result.output, StepOutput)
    rows = play([ToyEngine(MODEL, LayerRange(0, 2))], {1: prompt}, alone({1: prompt}, len(prompt))).rows[1]
    assert bytes(result.output.body) == rows
    assert result.compute_us == 30_000


async def test_steps_of_one_session_run_in_the_order_of_their_calls(
    engine: WatchedEngine, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving(engine) as service:
        await service.open(key_of(1), 8)
        async with trio.open_nursery() as nursery:
            for position in range(3):
                nursery.start_soon(service.step, first_step(1, [position], position=position))
                await trio.testing.wait_all_tasks_blocked(0.0001)
        result = await service.step(first_step(1, [3], position=3, sample=GREEDY))
    assert result.output == expected_token([0, 1, 2, 3])


async def test_the_engine_runs_on_one_thread_that_is_not_the_loops(engine: WatchedEngine) -> None:
    async with serving(engine, inline=False) as service:
        await service.open(key_of(1), 8)
        for position in range(4):
            result = await service.step(first_step(1, [position], position=position, sample=GREEDY))
        assert result.output == expected_token([0, 1, 2, 3])
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


async def test_the_loop_goes_on_while_the_engine_computes(engine: WatchedEngine) -> None:
    engine.gate.clear()
    async with serving(engine, inline=False) as service:
        await service.open(key_of(1), 8)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.step, first_step(1, [1]))
            await trio.to_thread.run_sync(engine.entered.wait)
            assert service.queue_depth == 1
            engine.gate.set()


async def test_a_step_that_is_cancelled_before_its_turn_leaves_its_session_as_it_was(engine: WatchedEngine) -> None:
    engine.gate.clear()
    async with serving(engine, inline=False) as service:
        for session in (1, 2):
            await service.open(key_of(session), 8)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.step, first_step(2, [1]))
            await trio.to_thread.run_sync(engine.entered.wait)
            with trio.CancelScope() as scope:
                scope.cancel()
                await service.step(first_step(1, [7]))
            engine.gate.set()
        assert service.queue_depth == 0
        result = await service.step(first_step(1, [5], sample=GREEDY))
        assert result.output == expected_token([5])


async def test_a_step_that_is_cancelled_in_its_turn_closes_its_session(engine: WatchedEngine) -> None:
    engine.gate.clear()
    async with serving(engine, inline=False) as service:
        for session in (1, 2):
            await service.open(key_of(session), 8)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.step, first_step(1, [1]))
            await trio.to_thread.run_sync(engine.entered.wait)
            nursery.cancel_scope.cancel()
        engine.gate.set()
        result = await service.step(first_step(1, [2], position=1))
        assert isinstance(result.output, CacheMiss)
        result = await service.step(first_step(2, [5], sample=GREEDY))
        assert result.output == expected_token([5])
        assert service.num_sessions == 1


async def test_an_open_that_is_cancelled_leaves_no_session_behind(engine: WatchedEngine) -> None:
    engine.gate.clear()
    async with serving(engine, inline=False) as service:
        await service.open(key_of(1), 8)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.step, first_step(1, [1]))
            await trio.to_thread.run_sync(engine.entered.wait)
            with trio.CancelScope() as scope:
                scope.cancel()
                await service.open(key_of(2), 8)
            with trio.CancelScope() as scope:
                scope.cancel()
                await service.open(key_of(1), 8)  # refused, and not ours to close
            engine.gate.set()
        await service.close(key_of(9))
        assert service.num_sessions == 1
        await service.open(key_of(2), 8)
        result = await service.step(first_step(1, [2], position=1, sample=GREEDY))
        assert result.output == expected_token([1, 2])


async def test_closing_frees_the_slot_and_fails_the_steps_that_wait(engine: WatchedEngine) -> None:
    engine.gate.clear()
    results: list[StepResult] = []
    async with serving(engine, inline=False) as service:
        for session in (1, 2):
            await service.open(key_of(session), 8)

        async def run() -> None:
            results.append(await service.step(first_step(2, [1])))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.step, first_step(1, [1]))
            await trio.to_thread.run_sync(engine.entered.wait)
            nursery.start_soon(run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(service.close, key_of(2))
            await trio.testing.wait_all_tasks_blocked()
            assert isinstance(results[0].output, CacheMiss)
            engine.gate.set()
        assert service.num_sessions == 1


async def test_a_prompt_whose_session_is_closed_between_two_pieces_does_not_reach_its_successor(
    engine: WatchedEngine,
) -> None:
    engine.gate.clear()
    results: list[StepResult] = []
    async with serving(engine, inline=False) as service:
        await service.open(key_of(1), 1024)

        async def run() -> None:
            results.append(await service.step(first_step(1, prompt_of(MAX_PREFILL_ROWS_PER_TURN + 50))))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.to_thread.run_sync(engine.entered.wait)
            nursery.start_soon(service.close, key_of(1))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(service.open, key_of(1), 8)
            await trio.testing.wait_all_tasks_blocked()
            engine.gate.set()
        assert isinstance(results[0].output, CacheMiss)
        result = await service.step(first_step(1, [3], sample=GREEDY))
        assert result.output == expected_token([3])
    assert engine.turns == [[MAX_PREFILL_ROWS_PER_TURN], [1]]


async def test_a_crash_loses_the_sessions_of_its_turn_and_nothing_else(
    engine: WatchedEngine, autojump_clock: trio.testing.MockClock
) -> None:
    def crash() -> None:
        engine.fail = lambda: None
        raise RuntimeError("can't allocate memory")

    async with serving(engine) as service:
        for session in (1, 2):
            await service.open(key_of(session), 8)
        await service.step(first_step(2, [1]))
        engine.fail = crash
        result = await service.step(first_step(1, [1], sample=GREEDY))
        assert isinstance(result.output, CacheMiss)
        assert "RuntimeError" in str(result.output)
        assert service.crashes == 1
        gone = await service.step(first_step(1, [1], position=0))
        assert isinstance(gone.output, CacheMiss)
        kept = await service.step(first_step(2, [2], position=1, sample=GREEDY))
        assert kept.output == expected_token([1, 2])
        await service.open(key_of(1), 8)
        again = await service.step(first_step(1, [1], sample=GREEDY))
        assert again.output == expected_token([1])


async def test_a_bad_step_fails_alone(engine: WatchedEngine, autojump_clock: trio.testing.MockClock) -> None:
    async with serving(engine) as service:
        await service.open(key_of(1), 4)
        bad: list[tuple[StepInput, type[Exception]]] = [
            (first_step(1, [MODEL.vocabulary]), InvalidStep),
            (first_step(1, [1], position=2), InvalidStep),
            (StepInput(key_of(1), 0, 2, DType.U32, ids_body([1])), InvalidStep),
            (StepInput(key_of(1), 0, 0, DType.U32, b""), InvalidStep),
            (StepInput(key_of(1), 0, 1, DType.F32, bytes(4)), InvalidStep),
            (first_step(1, [1] * 5), PromptTooLong),
            (first_step(2, [1]), CacheMiss),
        ]
        for step, error in bad:
            result = await service.step(step)
            assert isinstance(result.output, error), step
        good = await service.step(first_step(1, [1], sample=GREEDY))
        assert good.output == expected_token([1])
        with pytest.raises(StaleEpoch):
            await service.open(key_of(1), 4)


async def test_a_prompt_with_a_bad_token_behind_its_first_piece_closes_its_session(
    engine: WatchedEngine, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving(engine) as service:
        await service.open(key_of(1), 1024)
        result = await service.step(first_step(1, [*prompt_of(MAX_PREFILL_ROWS_PER_TURN), MODEL.vocabulary]))
        assert isinstance(result.output, InvalidStep)
        again = await service.step(first_step(1, [1], position=0))
        assert isinstance(again.output, CacheMiss)


async def test_more_steps_than_may_wait_are_refused(engine: WatchedEngine) -> None:
    engine.gate.clear()
    async with serving(engine, inline=False) as service:
        await service.open(key_of(1), 8)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.step, first_step(1, [1]))
            await trio.to_thread.run_sync(engine.entered.wait)
            for _ in range(MAX_QUEUED_STEPS - 1):
                nursery.start_soon(service.step, first_step(1, [1]))
            await trio.testing.wait_all_tasks_blocked()
            result = await service.step(first_step(1, [1]))
            assert isinstance(result.output, Overloaded)
            nursery.cancel_scope.cancel()
        engine.gate.set()
        assert service.queue_depth <= 1


async def test_no_free_slot_is_overloaded(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(WatchedEngine(WHOLE, max_sessions=1)) as service:
        await service.open(key_of(1), 8)
        with pytest.raises(Overloaded):
            await service.open(key_of(2), 8)
        await service.close(key_of(1))
        await service.open(key_of(2), 8)


@pytest.mark.parametrize("inline", [True, False])
async def test_a_stage_that_stops_answers_whoever_waits(engine: WatchedEngine, inline: bool) -> None:
    service = StageService(engine, inline=inline, compute_s=lambda rows: 1e9)
    results: list[StepResult] = []
    engine.gate.clear()

    async def run() -> None:
        results.append(await service.step(first_step(1, [1])))

    async with trio.open_nursery() as callers, trio.open_nursery() as nursery:
        await nursery.start(service.run)
        with pytest.raises(LocalProtocolError):
            await service.run()
        await service.open(key_of(1), 8)
        for _ in range(
            3
        ):  # one that runs, one whose turn may begin at the instant of the cancellation, and one that waits
            callers.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        engine.gate.set()
    assert any(isinstance(result.output, CacheMiss) for result in results)
    assert len(results) == 3
    assert isinstance((await service.step(first_step(1, [1]))).output, CacheMiss)
    with pytest.raises(Overloaded):
        await service.open(key_of(1), 8)
    await service.close(key_of(1))
