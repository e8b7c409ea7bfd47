"""Where a stage's turns run (shell): on one thread of their own, or inside the event loop under a virtual clock."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import structlog
import trio

log = structlog.get_logger(__name__)


class TurnRunner(Protocol):
    """Runs one job at a time."""

    async def run(self, job: Callable[[], None], rows: int) -> float:
        """Run ``job``, which forwards ``rows`` rows and raises nothing. Returns the seconds that it took."""
        ...

    def close(self) -> None:
        """Let go of the thread; no job is running."""
        ...


class EngineThread:
    """One dedicated thread.

    Not trio's thread cache: native thread pools and their scratch memory belong to the thread that calls them, so each further
    thread would own a pool of its own.

    Args:
        name: of the thread.
        cpus: the cores that it, and every thread that is started from it, may use; none for all that the process may use. Only
            Linux has that; elsewhere, and where the machine does not have these cores, it is logged and nothing is pinned.
    """

    def __init__(self, name: str, cpus: Sequence[int] = ()) -> None:
        self._cpus = frozenset(cpus)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        if self._cpus:
            self._pin()
        while (job := self._jobs.get()) is not None:
            job()

    def _pin(self) -> None:
        try:
            os.sched_setaffinity(threading.get_native_id(), self._cpus)
        except (AttributeError, OSError) as error:
            log.warning("the engine's thread is not pinned", cpus=sorted(self._cpus), reason=str(error))

    async def run(self, job: Callable[[], None], rows: int) -> float:
        """See `TurnRunner.run`. Cannot be cancelled: native code cannot be stopped in the middle of a turn."""
        done = trio.Event()
        took_s = 0.0

        def ended(seconds: float) -> None:
            nonlocal took_s
            took_s = seconds
            done.set()

        self.start(job, ended)
        with trio.CancelScope(shield=True):
            await done.wait()
        return took_s

    def start(self, job: Callable[[], None], ended: Callable[[float], None]) -> None:
        """Run ``job``, which raises nothing, behind those that run or wait, and say in the event loop how many seconds it took.

        ``ended`` may not raise: it is called by trio itself, so that no task has to be woken first.
        """
        token = trio.lowlevel.current_trio_token()

        def in_thread() -> None:
            start = time.perf_counter()
            job()
            took_s = time.perf_counter() - start
            with suppress(trio.RunFinishedError):  # the loop was torn down meanwhile: nobody waits
                token.run_sync_soon(ended, took_s)

        self._jobs.put(in_thread)

    def close(self) -> None:
        """End the thread; it is idle, so this returns at once."""
        self._jobs.put(None)
        self._thread.join()


class InlineRunner:
    """Runs jobs in the event loop; what they cost is slept, not computed.

    Args:
        compute_s: seconds that a turn of so many rows takes.
    """

    def __init__(self, compute_s: Callable[[int], float]) -> None:
        self._compute_s = compute_s

    async def run(self, job: Callable[[], None], rows: int) -> float:
        """See `TurnRunner.run`. Cancelled before the job runs, or not at all."""
        took_s = self._compute_s(rows) if rows else 0.0
        await trio.sleep(took_s)
        job()
        return took_s

    def close(self) -> None:
        """Nothing to let go of."""
