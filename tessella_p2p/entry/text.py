"""From tokens to text that may be shown (pure): stop strings never leak, held text is flushed."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Holds text back while it may still become a stop string.

    Args:
        stops: any of them ends the text; empty ones are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Text that is now certain to belong to the answer; sets ``stopped`` when a stop string is complete."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held, self.stopped = self._held[: min(found)], "", True
            return shown
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What is still held, at the end of the answer."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """The longest end of the held text that is a beginning of ``stop``."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0
