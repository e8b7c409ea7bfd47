"""The watchdog of the event loop: it sees what stands still, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tessella_p2p.node.watchdog import LoopWatchdog


@dataclass
class Passing:
    """Real time, as far as the watchdog knows."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


async def watch(watchdog: LoopWatchdog, time: Passing, rounds_s: list[float], waits_s: float = 0.0) -> None:
    """Run ``watchdog`` over rounds of the loop that take so long each, with waits in between."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watchdog.run)
        await trio.testing.wait_all_tasks_blocked()
        for round_s in rounds_s:
            await trio.lowlevel.checkpoint()
            time.now += round_s
            with trio.move_on_after(waits_s):
                await trio.Event().wait()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("stall_s", [0.0501, 0.06, 0.5, 3600.0])
async def test_a_stall_over_50_ms_is_seen(stall_s: float) -> None:
    time = Passing()
    watchdog = LoopWatchdog(clock=time)
    await watch(watchdog, time, [0.01, stall_s, 0.02])
    assert watchdog.num_stalls == 1
    assert watchdog.longest_s == watchdog.total_s == pytest.approx(stall_s)


@pytest.mark.parametrize("round_s", [0.0, 0.01, 0.0499])
async def test_shorter_rounds_are_no_stalls(round_s: float) -> None:
    time = Passing()
    watchdog = LoopWatchdog(clock=time)
    await watch(watchdog, time, [round_s] * 5)
    assert (watchdog.num_stalls, watchdog.longest_s) == (0, 0.0)


async def test_a_loop_that_waits_does_not_stand_still(autojump_clock: trio.testing.MockClock) -> None:
    watchdog = LoopWatchdog()
    await watch(watchdog, Passing(), [0.0] * 3, waits_s=1000.0)
    assert watchdog.num_stalls == 0


async def test_many_stalls_are_counted_and_take_few_lines() -> None:
    time = Passing()
    watchdog = LoopWatchdog(clock=time)
    with capture_logs() as lines:
        await watch(watchdog, time, [1.0] * 35)
    assert watchdog.num_stalls == 35
    assert watchdog.total_s == pytest.approx(35.0)
    assert 4 <= len(lines) <= 5
    assert {line["event"] for line in lines} == {"the event loop stood still"}
    assert lines[0]["stalls"] == 1
    assert lines[1]["stalls"] > 5


async def test_a_watchdog_that_is_cancelled_watches_no_more() -> None:
    time = Passing()
    watchdog = LoopWatchdog(clock=time)
    await watch(watchdog, time, [])
    for _ in range(3):
        await trio.lowlevel.checkpoint()
        time.now += 1.0
    assert watchdog.num_stalls == 0
