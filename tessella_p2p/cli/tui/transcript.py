"""What was said: questions, answers as they come, notes and errors. All of it is plain text."""

from __future__ import annotations

from typing import Final, Literal

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from tessella_p2p.cli.terminal import printable

Kind = Literal["question", "note", "error"]

_MAX_ENTRIES = 400
"""Older ones leave the screen; the conversation keeps them."""
_PIECE_CHARS = 2000
"""An answer is drawn in pieces of whole lines, so that its newest line costs the same however long it is."""
_LINE_CHARS = 8 * _PIECE_CHARS
"""A line longer than this is broken at a space: it would be wrapped anew with each word that comes."""
_MARK: Final = {"question": "> ", "note": "· ", "error": "! "}


class Said(Static):
    """A text that is complete; its mark tells what it is, so that no colour has to."""

    DEFAULT_CSS = """
    Said { height: auto; margin: 1 1 0 1; }
    Said.question { color: $text-accent; text-style: bold; }
    Said.note { color: $text-muted; }
    Said.error { color: $text-error; }
    """

    def __init__(self, text: str, kind: Kind) -> None:
        mark = _MARK[kind]
        lines = printable(text).strip("\n").replace("\n", "\n" + " " * len(mark))
        super().__init__(Content(mark + lines), classes=kind)


class AnswerView(Vertical):
    """An answer that grows."""

    DEFAULT_CSS = "AnswerView { height: auto; margin: 1 1 0 3; } AnswerView Static { height: auto; }"

    def __init__(self) -> None:
        super().__init__()
        self._drawn = ""
        self._newest = Static(Content(""))
        self._pending = ""

    def compose(self) -> ComposeResult:
        """The newest piece; those before it are mounted as they are complete."""
        yield self._newest

    def add(self, text: str) -> None:
        """Take text; `draw` shows it."""
        self._pending += printable(text)

    def draw(self) -> None:
        """Show what came since the last time."""
        if not self._pending:
            return
        self._drawn, self._pending = self._drawn + self._pending, ""
        pieces = []
        piece, self._drawn = _next_piece(self._drawn)
        while piece:
            pieces.append(Static(Content(piece)))
            piece, self._drawn = _next_piece(self._drawn)
        if pieces:
            self.mount(*pieces, before=self._newest)
        self._newest.update(Content(self._drawn))


def _next_piece(text: str) -> tuple[str, str]:
    """The first piece of a text and the rest of it; no piece while it is too short for one.

    The newline between both is taken by their being two widgets, and so is the space where a long line is broken.
    """
    if len(text) > _PIECE_CHARS:
        end = text.rfind("\n", 1, _PIECE_CHARS)
        if end < 0:
            end = text.find("\n", _PIECE_CHARS, _LINE_CHARS)
        if end < 0 and len(text) > _LINE_CHARS:
            end = text.rfind(" ", 1, _LINE_CHARS)
        if end > 0:
            return text[:end], text[end + 1 :]
        if len(text) > _LINE_CHARS:
            return text[:_LINE_CHARS], text[_LINE_CHARS:]
    return "", text


class Transcript(VerticalScroll, can_focus=False):
    """Everything said, the newest at the bottom, where it stays unless somebody scrolls up."""

    DEFAULT_CSS = "Transcript { height: 1fr; scrollbar-size-vertical: 1; }"

    def on_mount(self) -> None:
        """Stay at the end."""
        self.anchor()

    async def say(self, text: str, kind: Kind) -> None:
        """Add a text."""
        await self._add(Said(text, kind))

    async def begin_answer(self, view: AnswerView) -> None:
        """Add an answer that is still to come."""
        await self._add(view)

    async def _add(self, entry: Said | AnswerView) -> None:
        await self.mount(entry)
        over = self.children[: max(len(self.children) - _MAX_ENTRIES, 0)]
        if over:
            await self.remove_children(over)
        self.anchor()

    async def clear(self) -> None:
        """Forget everything."""
        await self.remove_children()
