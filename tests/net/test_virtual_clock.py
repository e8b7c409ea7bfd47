"""Virtual time: exact, ordered, the same every run, and never stuck in silence."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from tessella_p2p.base.errors import LocalProtocolError
from tessella_p2p.net.virtual_clock import VirtualClock, run_deterministic


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def test_an_hour_of_sleep_passes_at_once(clock: VirtualClock) -> None:
    await trio.sleep(3600)
    assert trio.current_time() == clock.now == 3600


async def test_callbacks_and_sleepers_happen_in_the_order_of_their_time(clock: VirtualClock) -> None:
    happened: list[tuple[float, str]] = []

    def note(what: str) -> None:
        happened.append((clock.now, what))

    clock.call_at(3.0, note, "callback at 3")
    clock.call_at(1.0, note, "callback at 1")
    clock.call_at(1.0, note, "second callback at 1")
    await trio.sleep(2)
    note("woke at 2")
    await trio.sleep(2)
    assert happened == [
        (1.0, "callback at 1"),
        (1.0, "second callback at 1"),
        (2.0, "woke at 2"),
        (3.0, "callback at 3"),
    ]


async def test_a_callback_can_wake_a_task_before_its_deadline(clock: VirtualClock) -> None:
    event = trio.Event()
    clock.call_at(1.0, event.set)
    with trio.fail_after(5):
        await event.wait()
    assert clock.now == 1.0


async def test_a_callback_can_start_tasks_and_cancel_scopes(clock: VirtualClock) -> None:
    async with trio.open_nursery() as nursery:
        finished = trio.Event()

        async def task() -> None:
            await trio.sleep(1)
            finished.set()

        clock.call_at(1.0, nursery.start_soon, task)
        await finished.wait()
        assert clock.now == 2.0
        clock.call_at(4.0, nursery.cancel_scope.cancel)
        await trio.sleep_forever()
    assert clock.now == 4.0


async def test_waiting_for_blocked_tasks_works_and_moves_no_time(clock: VirtualClock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep, 10)
        await trio.testing.wait_all_tasks_blocked()
        assert clock.now == 0


def test_spinning_at_one_instant_is_an_error_not_a_hang() -> None:
    async def spin() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(spin)

    with pytest.raises(ExceptionGroup) as caught:
        trio.run(main, clock=VirtualClock(max_looks=1000))
    assert caught.group_contains(LocalProtocolError, match="spins")


def test_a_deadlock_is_an_error_under_a_strict_clock() -> None:
    with pytest.raises(LocalProtocolError, match="every task waits"):
        trio.run(trio.sleep_forever, clock=VirtualClock(strict=True))
    trio.run(trio.sleep, 5, clock=VirtualClock(strict=True))


def _order_of_tasks(seed: int) -> list[int]:
    order: list[int] = []

    async def main() -> None:
        async def task(number: int) -> None:
            for _ in range(3):
                await trio.sleep(1)
                order.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(task, number)

    run_deterministic(main, seed)
    return order


def test_the_seed_decides_the_order_of_tasks() -> None:
    assert _order_of_tasks(1) == _order_of_tasks(1)
    assert _order_of_tasks(1) != _order_of_tasks(2)


def test_deterministic_runs_leave_no_trace() -> None:
    from trio._core import _run

    before = _run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r
    assert run_deterministic(trio.sleep, 1, math.pi) is None
    assert (_run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r) == before
