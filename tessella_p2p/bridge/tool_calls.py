"""Tool calls: read out of a model's text as it comes, and the grammar that makes a model write some; pure.

The form is the one of `model.tool_calls`: ``<tool_call>``, an object with ``name`` and ``arguments``, ``</tool_call>``. What has not
quite that form stays text: nothing of an answer is lost.

    TEXT ── <tool_call> ──> HEAD ── {"name": "f", "arguments": { ──> ARGUMENTS ── its last } ──> TAIL ── </tool_call> ──> TEXT
                             └──────── </tool_call>: a call in another order, or text after all ────────────────────────────┘
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from pydantic_core import from_json, to_json

from tessella_p2p.model.tool_calls import CALL_BEGIN, CALL_END, read_call

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_MAX_HEAD_CHARS = 1024
"""How far a head reaches at most: a name has 64 characters, which may be written as six each. It is looked for with each token."""
_SIGNIFICANT = re.compile(r'["\\{}<]')


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a function; ``index`` counts the calls of the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = str | CallBegun | CallArguments


class _State(Enum):
    TEXT = auto()
    HEAD = auto()
    ARGUMENTS = auto()
    TAIL = auto()


class ToolCallReader:
    """Splits one answer into text and calls; whatever the pieces are that it comes in, the parts join to the same.

    White space before a call, and between two, is no text. Arguments are passed on as the model writes them, so they may be cut off,
    or be no JSON, where the model was.

    Args:
        names: of the functions that may be called; anything else that looks like a call is text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._state = _State.TEXT
        self._held = ""
        self._searched = 0  # of what is held in HEAD, for its end
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """What is certain with this text."""
        self._held += text
        return list(self._parts(ended=False))

    def flush(self) -> list[Part]:
        """What is left at the end of the answer."""
        return list(self._parts(ended=True))

    def _parts(self, *, ended: bool) -> Iterator[Part]:
        steps: Mapping[_State, Callable[[bool], list[Part] | None]] = {
            _State.TEXT: self._text,
            _State.HEAD: self._head,
            _State.ARGUMENTS: self._arguments,
            _State.TAIL: self._tail,
        }
        while self._held and (parts := steps[self._state](ended)) is not None:
            yield from parts

    # Each of these takes what it can from what is held; None when it has to wait for more.

    def _text(self, ended: bool) -> list[Part] | None:
        text, begin, rest = self._held.partition(CALL_BEGIN)
        if begin:
            self._state, self._held, self._searched = _State.HEAD, rest, 0
            return _some(text.rstrip())
        if ended:
            self._held = ""
            return _some(text if text.strip() or not self.num_calls else "")
        shown = text[: len(text) - _overlap(text, CALL_BEGIN)].rstrip()
        self._held = text[len(shown) :]
        return _some(shown) or None

    def _head(self, ended: bool) -> list[Part] | None:
        head = _HEAD.match(self._held, 0, _MAX_HEAD_CHARS) if self._searched < _MAX_HEAD_CHARS else None
        name = _text_of(head[1]) if head is not None else None
        if head is not None and name in self._names:
            self._state, self._held = _State.ARGUMENTS, self._held[head.end() :]
            return [CallBegun(self._next_index(), str(name))]
        end = self._held.find(CALL_END, max(0, self._searched - len(CALL_END)))
        self._searched = len(self._held)
        if end < 0 and not ended:
            return None
        inside = self._held[:end] if end >= 0 else self._held
        rest = self._held[end + len(CALL_END) :] if end >= 0 else ""
        self._state = _State.TEXT
        call = read_call(inside)
        if call is not None and call.name in self._names:
            self._held = rest
            index = self._next_index()
            return [CallBegun(index, call.name), CallArguments(index, to_json(call.arguments).decode())]
        self._held = rest
        return [CALL_BEGIN + inside + (CALL_END if end >= 0 else "")]

    def _arguments(self, ended: bool) -> list[Part] | None:
        cut = self._end_of_arguments()
        shown, self._held = self._held[:cut], self._held[cut:]
        return [CallArguments(self.num_calls - 1, shown)] if shown else []

    def _end_of_arguments(self) -> int:
        """How much of what is held belongs to the arguments; the state is `_State.TAIL` when that is all of them."""
        if self._escaped:
            at, self._escaped = 1, False
        else:
            at = 0
        while (found := _SIGNIFICANT.search(self._held, at)) is not None:
            mark, at = found[0], found.end()
            if self._in_string:
                if mark == '"':
                    self._in_string = False
                elif mark == "\\":
                    if at == len(self._held):
                        self._escaped = True
                    at += 1
            elif mark == '"':
                self._in_string = True
            elif mark == "<":  # nothing that JSON has: the model broke off, and its end mark follows
                self._begin_tail()
                return at - 1
            elif mark in "{}":
                self._depth += 1 if mark == "{" else -1
                if not self._depth:
                    self._begin_tail()
                    return at
        return len(self._held)

    def _begin_tail(self) -> None:
        self._state, self._depth = _State.TAIL, 0

    def _tail(self, ended: bool) -> list[Part] | None:
        _, end, rest = self._held.partition(CALL_END)
        if end:
            self._state, self._held = _State.TEXT, rest
            return []
        self._held = "" if ended else self._held[-len(CALL_END) :]
        return [] if ended else None

    def _next_index(self) -> int:
        self.num_calls += 1
        return self.num_calls - 1


def _some(text: str) -> list[Part]:
    return [text] if text else []


def _overlap(text: str, mark: str) -> int:
    """The longest end of ``text`` that is a beginning of ``mark``, whose first character comes once in it."""
    at = text.rfind(mark[0], max(0, len(text) - len(mark) + 1))
    return len(text) - at if at >= 0 and mark.startswith(text[at:]) else 0


def _text_of(literal: str) -> str | None:
    try:
        text = from_json(literal)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


def calls_grammar(
    functions: Sequence[tuple[str, Mapping[str, object]]],
    *,
    several: bool,
    otherwise: Mapping[str, object] | None = None,
) -> str:
    """A grammar, in llguidance's dialect of Lark, of answers that call one of ``functions``.

    Args:
        functions: name (letters, digits, ``_``, ``-``) and JSON schema of the arguments of each; at least one.
        several: whether there may be more than one call.
        otherwise: the JSON schema of an answer that calls none; None where it has to.
    """
    rules = [
        "start: calls | answer" if otherwise is not None else "start: calls",
        'calls: call ("\\n" call)*' if several else "calls: call",
        f'call: {_literal(CALL_BEGIN)} "\\n" ({" | ".join(f"call_{i}" for i in range(len(functions)))}) "\\n" '
        f"{_literal(CALL_END)}",
    ]
    for i, (name, schema) in enumerate(functions):
        head = f'{{"name": "{name}", "arguments": '
        rules.append(f'call_{i}: {_literal(head)} %json {to_json(schema).decode()} "}}"')
    if otherwise is not None:
        rules.append(f"answer: %json {to_json(otherwise).decode()}")
    return "\n".join(rules) + "\n"


def _literal(text: str) -> str:
    return to_json(text).decode()
