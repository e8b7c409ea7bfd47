"""The watchdog of the event loop: it sees what stands still, and nothing else."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tessella_p2p.node.watchdog import LoopWatchdog


class SteppedClock(trio.abc.Clock):
    """Time that passes by deadlines, and by stalls: seconds in which no task ran."""

    def __init__(self) -> None:
        self.now = 0.0

    def start_clock(self) -> None:
        """Nothing to start."""

    def current_time(self) -> float:
        return self.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        if deadline != float("inf"):
            self.now = max(self.now, deadline)
        return 0.0


async def wait_until(time: float) -> None:
    with trio.move_on_at(time):
        await trio.Event().wait()


def watch(stalls_s: list[float], watchdog: LoopWatchdog) -> None:
    """Run ``watchdog`` over stalls that are a second apart."""
    clock = SteppedClock()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watchdog.run)
            for stall_s in stalls_s:
                await wait_until(clock.now + 1.0)
                clock.now += stall_s
            await wait_until(clock.now + 1.0)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=clock)


@pytest.mark.parametrize("stall_s", [0.0501, 0.06, 0.5, 3600.0])
def test_a_stall_over_50_ms_is_seen(stall_s: float) -> None:
    watchdog = LoopWatchdog()
    watch([stall_s], watchdog)
    assert watchdog.num_stalls == 1
    assert stall_s - watchdog.tick_s <= watchdog.longest_s <= stall_s + 1e-9


@pytest.mark.parametrize("stall_s", [0.0, 0.01, 0.039])
def test_a_shorter_one_is_none(stall_s: float) -> None:
    watchdog = LoopWatchdog()
    watch([stall_s] * 5, watchdog)
    assert (watchdog.num_stalls, watchdog.longest_s) == (0, 0.0)


def test_many_stalls_are_counted_and_take_few_lines() -> None:
    watchdog = LoopWatchdog()
    with capture_logs() as lines:
        watch([0.1] * 35, watchdog)
    assert watchdog.num_stalls == 35
    assert watchdog.total_s == pytest.approx(35 * 0.1, abs=35 * watchdog.tick_s)
    assert 4 <= len(lines) <= 5
    assert {line["event"] for line in lines} == {"the event loop stood still"}
    assert lines[0]["stalls"] == 1
    assert lines[1]["stalls"] > 5


async def test_under_a_virtual_clock_no_tick_is_late(autojump_clock: trio.testing.MockClock) -> None:
    watchdog = LoopWatchdog()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watchdog.run)
        await wait_until(trio.current_time() + 10.0)
        nursery.cancel_scope.cancel()
    assert watchdog.num_stalls == 0
