"""The engine's thread and the cores it is pinned to."""

from __future__ import annotations

import os
import threading

import pytest
from structlog.testing import capture_logs

from tessella_p2p.stages.engine_thread import EngineThread

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no threads")


async def masks_on(thread: EngineThread) -> list[set[int]]:
    """Cores of the engine's thread, and of a thread that it starts, as native pools do."""
    masks: list[set[int]] = []

    def look() -> None:
        masks.append(os.sched_getaffinity(0))
        child = threading.Thread(target=lambda: masks.append(os.sched_getaffinity(0)))
        child.start()
        child.join()

    await thread.run(look, 0)
    return masks


@linux
async def test_a_pinned_thread_and_those_it_starts_use_their_cores_and_the_loop_keeps_all() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    thread = EngineThread("pinned", (core,))
    assert await masks_on(thread) == [{core}, {core}]
    assert os.sched_getaffinity(0) == before
    thread.close()


@linux
async def test_cores_that_the_machine_does_not_have_pin_nothing_and_are_reported() -> None:
    with capture_logs() as lines:
        thread = EngineThread("pinned", (65_535,))
        masks = await masks_on(thread)
        thread.close()
    assert masks == [os.sched_getaffinity(0)] * 2
    assert [line["event"] for line in lines] == ["the engine's thread is not pinned"]
