"""What ``POST /infill`` answers: where its text ends, and llama.cpp's fields; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

StopType = Literal["none", "eos", "limit", "word"]


class InfillTimings(TypedDict):
    """Milliseconds until the first token, and from there to the last; rates are 0 where nothing was counted."""

    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillAnswer(TypedDict):
    """A whole answer, and the last event of a stream. ``tokens_cached`` is what llama.cpp calls so: all that the context holds."""

    index: int
    content: str
    stop: Literal[True]
    model: str
    tokens: tuple[int, ...]
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool
    has_new_line: bool
    stop_type: StopType
    stopping_word: str
    timings: InfillTimings


class InfillChunk(TypedDict):
    """One event of a stream before the last."""

    index: int
    content: str
    tokens: tuple[int, ...]
    stop: Literal[False]
    tokens_predicted: int
    tokens_evaluated: int


@dataclass(frozen=True, slots=True)
class Filled:
    """How one gap was filled.

    Attributes:
        model: that did it.
        text: all of it.
        num_prompt: tokens that were asked with.
        token_ids: that were generated; of a warm-up none count.
        truncated: whether some of the extra texts had no room.
        reason: ``stop``, ``length``, or ``cut`` where a `Cut` ended it.
        stopping_word: the stop text that ended it; empty where none did.
        first_ms, rest_ms: until the first token, and from there.
    """

    model: str
    text: str
    num_prompt: int
    token_ids: tuple[int, ...]
    truncated: bool
    reason: Literal["stop", "length", "cut"]
    stopping_word: str
    first_ms: float
    rest_ms: float

    def answer(self) -> InfillAnswer:
        """The whole of it in llama.cpp's fields."""
        predicted = len(self.token_ids)
        if self.reason == "stop":
            stop_type: StopType = "word" if self.stopping_word else "eos"
        else:
            stop_type = "limit"
        return {
            "index": 0,
            "content": self.text,
            "stop": True,
            "model": self.model,
            "tokens": self.token_ids,
            "tokens_predicted": predicted,
            "tokens_evaluated": self.num_prompt,
            "tokens_cached": self.num_prompt + predicted,
            "truncated": self.truncated,
            "has_new_line": "\n" in self.text,
            "stop_type": stop_type,
            "stopping_word": self.stopping_word,
            "timings": {
                "prompt_n": self.num_prompt,
                "prompt_ms": self.first_ms,
                "prompt_per_token_ms": _per(self.first_ms, self.num_prompt),
                "prompt_per_second": _per(self.num_prompt * 1000, self.first_ms),
                "predicted_n": predicted,
                "predicted_ms": self.rest_ms,
                "predicted_per_token_ms": _per(self.rest_ms, predicted),
                "predicted_per_second": _per(predicted * 1000, self.rest_ms),
            },
        }


def _per(amount: float, of: float) -> float:
    return amount / of if of else 0.0


def selected(answer: InfillAnswer, fields: Sequence[str]) -> dict[str, Any]:
    """``answer``, or of it the ``fields`` alone: ``timings/prompt_n`` is a field of the object ``timings``, and keeps that name.

    A field that is not there is left out, as llama.cpp does it.
    """
    whole: dict[str, Any] = {**answer}
    if not fields:
        return whole
    chosen: dict[str, Any] = {}
    for field in fields:
        value: Any = whole
        for name in field.split("/"):
            value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is not _ABSENT:
            chosen[field] = value
    return chosen


_ABSENT: Any = object()


class Cut:
    """Ends a text where an editor has no more use for it.

    Args:
        indent: each line behind the first has to begin with so many blanks or tabs; one that does not, and is not empty, ends the
            text before its first character.
        limit_s: seconds from the first text on, after which the text ends as soon as it has a line; None for no limit.
    """

    def __init__(self, indent: int, limit_s: float | None) -> None:
        self._indent = indent
        self._limit_s = limit_s
        self._began_s: float | None = None
        self._has_line = False
        self._blanks: int | None = None
        """Blanks seen at the beginning of the line; None within the first line, and within one that is long enough."""
        self.cut = False

    def feed(self, text: str, now_s: float) -> str:
        """What of ``text`` belongs to the answer; sets ``cut`` when the answer ends with it."""
        if self._began_s is None:
            self._began_s = now_s
        shown = self._within_indent(text)
        self._has_line = self._has_line or "\n" in shown
        if self._limit_s is not None and self._has_line and now_s - self._began_s > self._limit_s:
            self.cut = True
        return shown

    def _within_indent(self, text: str) -> str:
        if not self._indent:
            return text
        for at, character in enumerate(text):
            if character == "\n":
                self._blanks = 0
            elif self._blanks is None:
                continue
            elif character in " \t":
                self._blanks += 1
            elif self._blanks < self._indent:
                self.cut = True
                return text[:at]
            else:
                self._blanks = None
        return text
