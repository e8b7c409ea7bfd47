"""When an engine that fails again and again stops taking work (pure)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class FailureStreak:
    """Counts an engine's failures.

    Every exception out of an engine counts: native allocators report an empty memory as whatever they like, and each failure costs all
    sessions of the stage, whatever it was. Work that succeeds in between changes nothing, or one client's harmless steps would hide
    another's harmful ones.

    Attributes:
        streak: so many failures …
        window_s: … within so many seconds mean saturated, until as much time has passed without one.
    """

    streak: int
    window_s: float
    _at: deque[float] = field(default_factory=deque)
    _saturated_until: float | None = None

    def failed(self, now: float) -> None:
        """Count a failure. Times are of any one clock, in seconds, and never go back."""
        self._at.append(now)
        if self.count(now) >= self.streak:
            self._saturated_until = now + self.window_s

    def count(self, now: float) -> int:
        """Failures within the window."""
        while self._at and self._at[0] <= now - self.window_s:
            self._at.popleft()
        return len(self._at)

    def saturated_for(self, now: float) -> float:
        """For how many seconds more no work is to be taken; 0 when it may."""
        return 0.0 if self._saturated_until is None else max(0.0, self._saturated_until - now)
