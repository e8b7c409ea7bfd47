"""Notices when the event loop stands still (shell)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
import trio

from tessella_p2p.base.limits import LOOP_STALL_S, STALL_LOG_S

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class LoopWatchdog(trio.abc.Instrument):
    """Reports stalls of the event loop: while it stands still, every peer waits.

    Trio calls it before and after it waits for I/O; what lies between is a round of tasks, and one that takes longer than ``stall_s``
    is a stall, whoever caused it: a task, a callback, native code that holds the interpreter's lock, a machine without a free core. No
    timer wakes the process.

    Attributes:
        clock: seconds of real time, whatever clock the loop has.
        num_stalls: how many there were.
        longest_s: the longest.
        total_s: all together.
    """

    stall_s: float = LOOP_STALL_S
    clock: Callable[[], float] = time.monotonic
    num_stalls: int = 0
    longest_s: float = 0.0
    total_s: float = 0.0
    _since: float = field(default=float("inf"), init=False)
    _log_at: float = field(default=-float("inf"), init=False)
    _unlogged: list[float] = field(default_factory=list, init=False)

    async def run(self) -> None:
        """Watch until cancelled. Stalls are logged at once, then summed up for `STALL_LOG_S`."""
        trio.lowlevel.add_instrument(self)
        try:
            await trio.sleep_forever()
        finally:
            trio.lowlevel.remove_instrument(self)

    def after_io_wait(self, timeout: float) -> None:
        """A round begins."""
        self._since = self.clock()

    def before_io_wait(self, timeout: float) -> None:
        """A round has ended."""
        now = self.clock()
        took_s = now - self._since
        if took_s > self.stall_s:
            self.num_stalls += 1
            self.total_s += took_s
            self.longest_s = max(self.longest_s, took_s)
            self._unlogged.append(took_s)
        if self._unlogged and now >= self._log_at:
            self._log(now)

    def _log(self, now: float) -> None:
        log.warning(
            "the event loop stood still",
            longest_ms=round(max(self._unlogged) * 1000),
            stalls=len(self._unlogged),
            since_start=self.num_stalls,
        )
        self._log_at, self._unlogged = now + STALL_LOG_S, []
