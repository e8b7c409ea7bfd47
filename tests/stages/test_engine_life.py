"""A stage whose engine crashes, does not load, runs out of memory again and again, or sleeps."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
import trio.testing

from tessella_p2p.base.errors import ArtifactError, CacheMiss, Overloaded
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import RELOAD_RETRY_S
from tessella_p2p.stages.engine import Sampled, SessionKey, StepAnswer, StepInput
from tessella_p2p.stages.engine_life import StageRules
from tessella_p2p.stages.failures import FailureStreak
from tessella_p2p.stages.pending import StepResult
from tessella_p2p.stages.service import StageService
from tessella_p2p.stages.toy import ToyEngine, ToyModel
from tests.stages.stage_runs import GREEDY, alone, first_step, key_of, play

MODEL = ToyModel(layers=4)
WHOLE = LayerRange(0, 4)


class Machine:
    """Loads toy engines that fail when told, and remembers each of them."""

    def __init__(self) -> None:
        self.engines: list[FailingEngine] = []
        self.forward_fails: Callable[[Sequence[StepInput]], Exception | None] = lambda batch: None
        self.open_fails: Callable[[SessionKey], Exception | None] = lambda key: None
        self.load_fails: Callable[[], Exception | None] = lambda: None
        self.gate = threading.Event()
        self.gate.set()
        self.loading = threading.Event()

    def load(self) -> FailingEngine:
        """A new engine; waits at the gate."""
        self.loading.set()
        self.gate.wait()
        if error := self.load_fails():
            raise error
        self.engines.append(FailingEngine(self))
        return self.engines[-1]


class FailingEngine(ToyEngine):
    def __init__(self, machine: Machine) -> None:
        super().__init__(MODEL, WHOLE, max_sessions=8)
        self.machine = machine
        self.closed = 0

    def open_session(self, key: SessionKey, max_positions: int, scope: bytes = b"") -> None:
        if error := self.machine.open_fails(key):
            raise error
        super().open_session(key, max_positions, scope)

    def forward(self, batch: Sequence[StepInput]) -> list[StepAnswer]:
        assert not self.closed
        if error := self.machine.forward_fails(batch):
            raise error
        return super().forward(batch)

    def close(self) -> None:
        self.closed += 1
        super().close()


@pytest.fixture
def machine() -> Machine:
    return Machine()


@asynccontextmanager
async def serving(
    machine: Machine, rules: StageRules | None = None, *, inline: bool = True
) -> AsyncIterator[StageService]:
    service = (
        StageService(machine.load(), load=machine.load, rules=rules, inline=True, compute_s=lambda rows: 0.01)
        if inline
        else await StageService.loaded(machine.load, rules=rules)
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        try:
            yield service
        finally:
            machine.gate.set()
            nursery.cancel_scope.cancel()
    assert all(engine.closed for engine in machine.engines)


def state_of(service: StageService) -> str:
    return service.state


async def pass_time(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.Event().wait()


async def ask(service: StageService, session: int, tokens: Sequence[int], *, position: int = 0) -> StepAnswer:
    return (await service.step(first_step(session, tokens, position=position, sample=GREEDY))).output


def expected(prompt: Sequence[int]) -> Sampled:
    played = play([ToyEngine(MODEL, WHOLE)], {1: list(prompt)}, alone({1: list(prompt)}, len(prompt)))
    return Sampled(played.tokens[1, len(prompt)])


def once(error: Exception) -> Callable[[object], Exception | None]:
    errors = [error]
    return lambda _: errors.pop() if errors else None


# ---- Crashes ----


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory"), OSError("device lost")])
async def test_a_crash_loses_the_engines_sessions_with_a_typed_error_and_the_next_engine_serves(
    machine: Machine, error: Exception, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving(machine) as service:
        for session in (1, 2):
            await service.open(key_of(session), 8)
        assert isinstance(await ask(service, 2, [1]), Sampled)
        machine.forward_fails = once(error)
        answer = await ask(service, 1, [1])
        assert isinstance(answer, CacheMiss)
        assert type(error).__name__ in str(answer)
        assert isinstance(await ask(service, 2, [2], position=1), CacheMiss)
        assert (service.crashes, service.num_sessions) == (1, 0)
        await service.open(key_of(1), 8)
        assert await ask(service, 1, [1]) == expected([1])
        assert (state_of(service), len(machine.engines), machine.engines[0].closed) == ("ready", 2, 1)


async def test_what_waits_at_a_crash_is_told_or_served_by_the_next_engine(
    machine: Machine, autojump_clock: trio.testing.MockClock
) -> None:
    results: list[StepResult] = []

    async with serving(machine) as service:
        for session in (1, 2):
            await service.open(key_of(session), 600)
        machine.forward_fails = once(MemoryError())

        async def run(session: int) -> None:
            results.append(await service.step(first_step(session, [1] * 500)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, 1)
            nursery.start_soon(run, 2)
            nursery.start_soon(service.open, key_of(3), 8)
            nursery.start_soon(service.close, key_of(9))
        assert [type(result.output) for result in results] == [CacheMiss, CacheMiss]
        assert await ask(service, 3, [1]) == expected([1])


async def test_an_open_that_crashes_the_engine_fails_alone(
    machine: Machine, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving(machine) as service:
        machine.open_fails = once(MemoryError())
        with pytest.raises(CacheMiss):
            await service.open(key_of(1), 8)
        await service.open(key_of(1), 8)
        assert await ask(service, 1, [1]) == expected([1])


async def test_the_loop_goes_on_while_an_engine_is_loaded_again_and_opens_wait_for_it(machine: Machine) -> None:
    async with serving(machine, inline=False) as service:
        await service.open(key_of(1), 8)
        machine.loading.clear()
        machine.gate.clear()
        machine.forward_fails = once(MemoryError())
        assert isinstance(await ask(service, 1, [1]), CacheMiss)
        await trio.to_thread.run_sync(machine.loading.wait)
        assert state_of(service) == "loading"
        assert isinstance(await ask(service, 1, [1]), CacheMiss)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.open, key_of(2), 8)
            await trio.testing.wait_all_tasks_blocked()
            machine.gate.set()
        assert await ask(service, 2, [1]) == expected([1])


async def test_an_engine_that_does_not_load_is_tried_again(
    machine: Machine, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving(machine) as service:
        await service.open(key_of(1), 8)
        machine.forward_fails = once(MemoryError())
        machine.load_fails = lambda: ArtifactError("the file is gone")
        assert isinstance(await ask(service, 1, [1]), CacheMiss)
        await trio.testing.wait_all_tasks_blocked()
        assert (state_of(service), service.accepts) == ("failed", False)
        with pytest.raises(Overloaded, match="the file is gone"):
            await service.open(key_of(2), 8)
        await service.close(key_of(1))
        machine.load_fails = lambda: None
        await pass_time(RELOAD_RETRY_S + 0.1)
        assert (state_of(service), service.accepts) == ("ready", True)
        await service.open(key_of(2), 8)
        assert await ask(service, 2, [1]) == expected([1])


# ---- Saturation ----


async def test_a_client_that_causes_out_of_memory_again_and_again_saturates_the_stage_until_the_window_is_over(
    machine: Machine, autojump_clock: trio.testing.MockClock
) -> None:
    """The harmless steps between its failures do not hide it."""

    def fails(batch: Sequence[StepInput]) -> Exception | None:
        return MemoryError() if any(step.session == key_of(666) for step in batch) else None

    machine.forward_fails = fails
    async with serving(machine, StageRules(oom_streak=3, streak_window_s=30.0)) as service:
        for round_ in range(3):
            assert service.accepts
            await service.open(key_of(1, round_), 8)
            harmless = replace(first_step(1, [1], sample=GREEDY), session=key_of(1, round_))
            assert (await service.step(harmless)).output == expected([1])
            await service.open(key_of(666), 8)
            assert isinstance(await ask(service, 666, [1]), CacheMiss)
            await pass_time(5.0)
        assert (state_of(service), service.recent_failures, service.accepts) == ("saturated", 3, False)
        engines = len(machine.engines)
        for _ in range(50):
            with pytest.raises(Overloaded, match="failed 3 times"):
                await service.open(key_of(666), 8)
        assert len(machine.engines) == engines
        await pass_time(26.0)
        assert (state_of(service), service.accepts) == ("ready", True)
        await service.open(key_of(1), 8)
        assert await ask(service, 1, [1]) == expected([1])


def test_failures_count_within_the_window_only() -> None:
    streak = FailureStreak(3, 30.0)
    for now in (0.0, 20.0, 31.0):
        streak.failed(now)
    assert (streak.count(31.0), streak.saturated_for(31.0)) == (2, 0.0)
    streak.failed(40.0)
    assert streak.saturated_for(40.0) == 30.0
    assert streak.saturated_for(69.0) == 1.0
    assert (streak.saturated_for(70.0), streak.count(70.0)) == (0.0, 0)


def test_a_failure_while_saturated_prolongs_it() -> None:
    streak = FailureStreak(1, 30.0)
    streak.failed(0.0)
    streak.failed(20.0)
    assert streak.saturated_for(30.0) == 20.0


# ---- Sleep ----

SLEEPY = StageRules(sleep_after_s=60.0, patience_s=10.0)


async def test_an_idle_engine_sleeps_and_wakes_at_the_next_open(
    machine: Machine, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving(machine, SLEEPY) as service:
        await service.open(key_of(1), 8)
        await pass_time(600.0)
        assert state_of(service) == "ready"  # a session is open
        await service.close(key_of(1))
        await pass_time(59.0)
        assert state_of(service) == "ready"
        await pass_time(2.0)
        assert (state_of(service), service.accepts, service.memory_bytes) == ("sleeping", True, 0)
        assert machine.engines[0].closed == 1
        await service.close(key_of(1))
        assert isinstance(await ask(service, 1, [1]), CacheMiss)
        assert state_of(service) == "sleeping"
        await service.open(key_of(2), 8)
        assert (state_of(service), len(machine.engines)) == ("ready", 2)
        assert await ask(service, 2, [1]) == expected([1])


async def test_a_stage_that_has_stopped_asks_its_closed_engine_for_nothing(machine: Machine) -> None:
    async with serving(machine) as service:
        assert service.memory_bytes == machine.engines[0].memory_bytes > 0
    assert machine.engines[0].closed
    assert (service.memory_bytes, service.kv.pages_used) == (0, 0)


async def test_without_a_setting_or_a_loader_no_engine_sleeps(
    machine: Machine, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving(machine) as service:
        await pass_time(1e6)
        assert state_of(service) == "ready"
    service = StageService(machine.load(), rules=SLEEPY, inline=True)
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        await pass_time(1e6)
        assert state_of(service) == "ready"
        nursery.cancel_scope.cancel()


async def test_a_burst_of_opens_wakes_one_engine_and_is_bounded(machine: Machine) -> None:
    async with serving(machine, StageRules(sleep_after_s=0.0), inline=False) as service:
        await trio.testing.wait_all_tasks_blocked()
        while state_of(service) != "sleeping":
            await service.changed.wait()
        machine.loading.clear()
        machine.gate.clear()
        outcomes: list[str] = []

        async def open_one(number: int) -> None:
            try:
                await service.open(key_of(number), 8)
                outcomes.append("opened")
            except Overloaded:
                outcomes.append("refused")

        async with trio.open_nursery() as nursery:
            for number in range(58):
                nursery.start_soon(open_one, number)
            await trio.to_thread.run_sync(machine.loading.wait)
            await trio.testing.wait_all_tasks_blocked()
            assert outcomes == ["refused"] * 50
            machine.gate.set()
        assert outcomes.count("opened") == 8, "as many as the engine has places wait for it"
        assert len(machine.engines) == 2


async def test_opens_that_are_cancelled_during_the_wake_leave_no_session_behind(machine: Machine) -> None:
    async with serving(machine, StageRules(sleep_after_s=0.0), inline=False) as service:
        while state_of(service) != "sleeping":
            await service.changed.wait()
        machine.loading.clear()
        machine.gate.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.open, key_of(1), 8)
            await trio.to_thread.run_sync(machine.loading.wait)
            nursery.cancel_scope.cancel()
        machine.gate.set()
        await service.open(key_of(1), 8)
        assert service.num_sessions == 1
        assert await ask(service, 1, [1]) == expected([1])


async def test_an_open_waits_for_the_wake_within_its_patience(machine: Machine) -> None:
    async with serving(machine, StageRules(sleep_after_s=0.0, patience_s=0.0), inline=False) as service:
        while state_of(service) != "sleeping":
            await service.changed.wait()
        machine.gate.clear()
        with pytest.raises(Overloaded):
            await service.open(key_of(1), 8)
        machine.gate.set()
        await service.close(key_of(2))
        assert service.num_sessions == 0


async def test_a_stage_that_stops_while_it_loads_tells_who_waits(machine: Machine) -> None:
    async with serving(machine, StageRules(sleep_after_s=0.0), inline=False) as service:
        while state_of(service) != "sleeping":
            await service.changed.wait()
        machine.loading.clear()
        machine.gate.clear()
        async with trio.open_nursery() as nursery:

            async def open_one() -> None:
                with pytest.raises(Overloaded):
                    await service.open(key_of(1), 8)

            nursery.start_soon(open_one)
            await trio.to_thread.run_sync(machine.loading.wait)
            machine.load_fails = lambda: MemoryError("no room")
            machine.gate.set()


async def test_a_first_load_that_fails_says_so(machine: Machine) -> None:
    machine.load_fails = lambda: ArtifactError("damaged")
    with pytest.raises(ArtifactError, match="damaged"):
        await StageService.loaded(machine.load)


# ---- Tiers and groups ----


async def test_steps_that_wait_are_counted_by_tier(machine: Machine, autojump_clock: trio.testing.MockClock) -> None:
    async with serving(machine) as service:
        await service.open(key_of(1), 600, tier="VIP")
        await service.open(key_of(2), 600)
        async with trio.open_nursery() as nursery:
            for session in (1, 2):
                nursery.start_soon(service.step, first_step(session, [1] * 500))
            await trio.testing.wait_all_tasks_blocked()
            assert service.num_waiting == {"Leech": 1}  # the VIP's prompt has the turn
            nursery.cancel_scope.cancel()


async def test_a_turn_of_a_chain_waits_a_moment_for_a_full_group(
    machine: Machine, autojump_clock: trio.testing.MockClock
) -> None:
    turns: list[int] = []
    machine.forward_fails = lambda batch: turns.append(len(batch))
    async with serving(machine) as service:
        for session in range(4):
            await service.open(key_of(session), 8, num_stages=2)
        async with trio.open_nursery() as nursery:  # all decode
            for session in range(4):
                nursery.start_soon(ask, service, session, [1])
        turns.clear()

        async def late(session: int, delay_s: float) -> None:
            await pass_time(delay_s)
            await service.step(first_step(session, [2], position=1, sample=GREEDY))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(late, 0, 0.0)
            nursery.start_soon(late, 1, 0.0005)
            nursery.start_soon(late, 2, 1.0)
            nursery.start_soon(late, 3, 1.1)
    assert turns == [2, 1, 1]
