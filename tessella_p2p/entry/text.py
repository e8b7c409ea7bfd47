"""From tokens to text that may be shown (pure): characters come whole, stop strings never leak, held text is flushed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

EndReason = Literal["stop", "length"]


class TextDecoder(Protocol):
    """Turns tokens into text as they come."""

    def push(self, token_id: int) -> str:
        """Text that is complete with this token."""
        ...

    def flush(self) -> str:
        """What is left at the end."""
        ...


class AnswerText:
    """One answer, token by token: what of it may be shown, and when it is over.

    Args:
        decoder: a fresh one.
        stops: any of them ends the answer, and is no part of it.
        end_ids: tokens that end the answer, and are no part of it.
        max_tokens: at least 1; the end token is not counted.

    Attributes:
        reason: why the answer is over; None while it is not.
        token_ids: the tokens of the answer so far.
    """

    def __init__(self, decoder: TextDecoder, stops: Sequence[str], end_ids: Collection[int], max_tokens: int) -> None:
        self._decoder = decoder
        self._filter = StopFilter(stops)
        self._end_ids = end_ids
        self._max_tokens = max_tokens
        self.reason: EndReason | None = None
        self.token_ids: list[int] = []

    def push(self, token_id: int) -> str | None:
        """Text that is certain to belong to the answer with one more token, or None for an end token, which does not belong to it.

        ``reason`` says whether it was the last one; nothing may be pushed after that.
        """
        assert self.reason is None
        if token_id in self._end_ids:
            self.reason = "stop"
            return None
        self.token_ids.append(token_id)
        text = self._filter.feed(self._decoder.push(token_id))
        if self._filter.stopped:
            self.reason = "stop"
        elif len(self.token_ids) >= self._max_tokens:
            self.reason = "length"
        return text

    def end(self) -> tuple[str, EndReason]:
        """The rest of the text, which was held back because a stop string or a character might have followed; and why it is over."""
        assert self.reason is not None
        if self._filter.stopped:
            return "", self.reason
        rest = self._filter.feed(self._decoder.flush())
        return rest + self._filter.flush(), "stop" if self._filter.stopped else self.reason


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """The one of ``stops`` that is complete first in ``text``; of two that end at the same place, the longer one."""
    found = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[2] if found else None


class StopFilter:
    """Holds text back while it may still become a stop string.

    The `first_stop` ends the text, whatever the pieces are that it comes in.

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
        stop = first_stop(self._held, self._stops)
        if stop is not None:
            shown, self._held, self.stopped = self._held[: self._held.find(stop)], "", True
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
