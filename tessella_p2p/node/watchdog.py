"""Notices when the event loop stands still (shell)."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
import trio

from tessella_p2p.base.limits import LOOP_STALL_S, LOOP_TICK_S, STALL_LOG_S

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class LoopWatchdog:
    """Reports stalls of the event loop: while it stands still, every peer waits.

    One timer ticks every ``tick_s``; a tick that comes late by more than ``stall_s - tick_s`` saw a stall. So every stall over
    ``stall_s`` is seen, whoever caused it (a callback, native code that holds the interpreter's lock, a machine that swaps), and none
    under ``stall_s - tick_s``. Under a virtual clock no tick is late. A tick costs some 20 µs of a core.

    Attributes:
        num_stalls: how many there were.
        longest_s: the longest.
        total_s: all together.
    """

    stall_s: float = LOOP_STALL_S
    tick_s: float = LOOP_TICK_S
    num_stalls: int = 0
    longest_s: float = 0.0
    total_s: float = 0.0

    async def run(self) -> None:
        """Watch until cancelled. Stalls are logged at once, then summed up for `STALL_LOG_S`."""
        log_at = -float("inf")
        unlogged: list[float] = []
        due = trio.current_time() + self.tick_s
        while True:
            await trio.sleep_until(due)
            now = trio.current_time()
            if now - due > self.stall_s - self.tick_s:
                self._count(now - due)
                unlogged.append(now - due)
            if unlogged and now >= log_at:
                log.warning(
                    "the event loop stood still",
                    longest_ms=round(max(unlogged) * 1000),
                    stalls=len(unlogged),
                    since_start=self.num_stalls,
                )
                log_at, unlogged = now + STALL_LOG_S, []
            due = now + self.tick_s

    def _count(self, stall_s: float) -> None:
        self.num_stalls += 1
        self.total_s += stall_s
        self.longest_s = max(self.longest_s, stall_s)
