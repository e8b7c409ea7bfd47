"""Wall-clock time as an argument, so that simulations and tests decide what time it is."""

from __future__ import annotations

import time
from typing import Protocol


class WallClock(Protocol):
    """Something that knows the date. Durations and deadlines use trio's own clock, never this one."""

    def unix_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        ...


class SystemClock:
    """The machine's clock."""

    def unix_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return time.time_ns() // 1_000_000
