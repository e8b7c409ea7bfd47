"""Virtual time for simulations and tests: nothing waits, and what is due happens in order.

`VirtualClock` is a trio clock with a heap of timed callbacks. trio asks a clock how long to sleep only when no task can run; this one
answers by jumping to whatever is due next, a callback or a deadline. Delivering a message is a callback, never a task: 1 µs instead of
50. Virtual time outruns threads and sockets: under this clock use neither.

It leans on a few of trio's private names, as deterministic scheduling must; trio is pinned, and the import checks that they are there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from heapq import heappop, heappush
from typing import NoReturn, TypeVar

import trio
from trio._core import _run

from tessella_p2p.base.errors import LocalProtocolError

T = TypeVar("T")

MAX_LOOKS_AT_ONE_INSTANT = 1_000_000
"""How often the time may be asked for before it moves; a program that asks more often spins."""
_IDLE_S = 0.001

for _name in ("GLOBAL_RUN_CONTEXT", "_ALLOW_DETERMINISTIC_SCHEDULING", "_r"):
    if not hasattr(_run, _name):
        raise LocalProtocolError(f"this trio has no {_name}; virtual time was written for 0.35")


class VirtualClock(trio.abc.Clock):
    """A trio clock that starts at 0 and jumps.

    Args:
        max_looks: the bound on looks at the clock at one instant, after which it raises instead of spinning for ever.
        strict: when nothing is scheduled and no task can run, raise instead of waiting for the outside world.

    What it raises, it raises in the main task, as `trio.run` does with a KeyboardInterrupt, so that the run ends in order.
    """

    def __init__(self, *, max_looks: int = MAX_LOOKS_AT_ONE_INSTANT, strict: bool = False) -> None:
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._sequence = 0
        self._looks = 0
        self._max_looks = max_looks
        self._strict = strict

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    def call_at(self, time_s: float, callback: Callable[..., object], *args: object) -> None:
        """Call ``callback(*args)`` at ``time_s``, or as soon as no task can run when that is past; equal times keep their order.

        The callback runs outside any task: it may reschedule tasks and start them in a nursery, and must not raise.
        """
        self._sequence += 1
        heappush(self._heap, (time_s, self._sequence, callback, args))

    # trio.abc.Clock

    def start_clock(self) -> None:
        """Nothing to start."""

    def current_time(self) -> float:
        """Virtual seconds since the start.

        Raises:
            LocalProtocolError: in the main task, when it was asked `max_looks` times without time moving: something spins.
        """
        self._looks += 1
        if self._looks > self._max_looks:
            problem = f"virtual time stands still at {self._now:.6f} s: something spins"
            if not _fail(problem) and self._looks > 2 * self._max_looks:
                raise LocalProtocolError(problem)  # the main task itself is what spins
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Called by trio when no task can run: run what is due until one can, or ``deadline`` is reached."""
        runner = _run.GLOBAL_RUN_CONTEXT.runner
        if deadline <= self._now:
            return 0.0
        if (
            runner.waiting_for_idle
        ):  # wait_all_tasks_blocked: this is the moment it waits for, so time stands still for it
            return _IDLE_S
        heap = self._heap
        while heap and heap[0][0] <= deadline:
            self._advance(heap[0][0])
            while heap and heap[0][0] <= self._now:
                _, _, callback, args = heappop(heap)
                callback(*args)
            if runner.runq:
                return 0.0
            deadline = min(deadline, runner.deadlines.next_deadline())  # a callback may have started or ended a scope
        if deadline == math.inf:
            problem = f"nothing is scheduled after {self._now:.6f} s and every task waits"
            if self._strict and runner.main_task_outcome is None and _fail(problem):
                return 0.0
            return math.inf  # a wake-up from outside: trio's own shutdown needs one
        self._advance(deadline)
        return 0.0

    def _advance(self, time_s: float) -> None:
        if time_s > self._now:
            self._now = time_s
            self._looks = 0


def _fail(problem: str) -> bool:
    """Raise in the main task, which ends the run; False while that task does not wait for anything."""
    task = _run.GLOBAL_RUN_CONTEXT.runner.main_task
    if task is None or task._abort_func is None:
        return False

    def raise_problem() -> NoReturn:
        raise LocalProtocolError(problem)

    task._attempt_abort(raise_problem)
    return True


def run_deterministic(
    async_fn: Callable[..., Awaitable[T]], seed: int, *args: object, clock: trio.abc.Clock | None = None
) -> T:
    """``trio.run`` with the order of tasks drawn from ``seed``: the same seed gives the same run.

    What breaks it: decisions taken from sets, ``id()``, the wall clock, ``os.urandom`` or threads.
    """
    names = vars(_run)
    saved = {name: names[name] for name in ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r")}
    names.update(_ALLOW_DETERMINISTIC_SCHEDULING=True, _r=random.Random(seed))
    try:
        return trio.run(async_fn, *args, clock=clock if clock is not None else VirtualClock())
    finally:
        names.update(saved)
