"""The line at the bottom: what is typed, what was typed before, and commands that complete themselves."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.message import Message
from textual.widgets import TextArea

from tessella_p2p.cli.terminal import printable

_MAX_HISTORY = 1000
_MAX_CHARS = 1 << 20


class Prompt(TextArea):
    """Enter sends, Alt-Enter or Ctrl-J begins a new line, Tab completes a command, Up and Down leaf through what was asked.

    Args:
        commands: the commands that are completed.
    """

    DEFAULT_CSS = "Prompt { width: 1fr; height: auto; max-height: 8; padding: 0; background: transparent; }"

    class Sent(Message):
        """Enter was pressed on ``text``, which is not empty."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Scrolled(Message):
        """The conversation is to scroll: ``page_up``, ``page_down``, ``home`` or ``end``."""

        def __init__(self, where: str) -> None:
            super().__init__()
            self.where = where

    class Left(Message):
        """Ctrl-D was pressed on an empty line."""

    def __init__(self, commands: Sequence[str], *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, compact=True, highlight_cursor_line=False, placeholder="Ask something, or /help")
        self._commands = tuple(commands)
        self._history: list[str] = []
        self._place = 0
        self._draft = ""

    def recall(self, asked: Sequence[str]) -> None:
        """Take up what was asked before this UI started, the newest last."""
        self._history = [*map(printable, asked), *self._history][-_MAX_HISTORY:]
        self._place = len(self._history)

    def completions(self) -> tuple[str, ...]:
        """The commands that begin with what is typed; none where no command is being typed."""
        typed = self.text
        is_command = typed.startswith("/") and not any(c.isspace() for c in typed)
        return tuple(command for command in self._commands if command.startswith(typed)) if is_command else ()

    def update_suggestion(self) -> None:
        """Show the rest of the command, where only one is left."""
        found = self.completions()
        self.suggestion = found[0][len(self.text) :] if len(found) == 1 else ""

    def put(self, text: str) -> None:
        """Replace what is typed; the cursor goes to its end."""
        self.text = text
        self.move_cursor(self.document.end)

    async def _on_key(self, event: events.Key) -> None:
        """Keys of our own. They are no bindings, which are looked for later: what is typed fast would overtake them."""
        own = {
            "enter": self._send,
            "tab": self._complete,
            "alt+enter": self._break_line,
            "ctrl+j": self._break_line,
            "up": self._older,
            "down": self._newer,
            "pageup": lambda: self.post_message(self.Scrolled("page_up")),
            "pagedown": lambda: self.post_message(self.Scrolled("page_down")),
            "ctrl+home": lambda: self.post_message(self.Scrolled("home")),
            "ctrl+end": lambda: self.post_message(self.Scrolled("end")),
            "ctrl+d": self._leave_or_delete,
        }.get(event.key)
        if own is None:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()
        own()

    def _send(self) -> None:
        text = self.text[:_MAX_CHARS]
        if text.strip():
            self._keep(text)
            self.put("")
            self.post_message(self.Sent(text))

    def _keep(self, text: str) -> None:
        if self._history[-1:] != [text]:
            self._history.append(text)
            del self._history[:-_MAX_HISTORY]
        self._place = len(self._history)

    def _break_line(self) -> None:
        self.insert("\n")

    def _complete(self) -> None:
        """Type as much as all commands share that fit."""
        found = self.completions()
        if not found:
            return
        shared = found[0]
        while not all(command.startswith(shared) for command in found):
            shared = shared[:-1]
        self.put(f"{shared} " if len(found) == 1 else shared)

    def _older(self) -> None:
        """One line up; from the first one, to what was asked before."""
        if not self.cursor_at_first_line:
            self.action_cursor_up()
        elif self._place:
            if self._place == len(self._history):
                self._draft = self.text
            self._place -= 1
            self.put(self._history[self._place])

    def _newer(self) -> None:
        """One line down; from the last one, to what was asked after this."""
        if not self.cursor_at_last_line:
            self.action_cursor_down()
        elif self._place < len(self._history):
            self._place += 1
            self.put(self._history[self._place] if self._place < len(self._history) else self._draft)

    def _leave_or_delete(self) -> None:
        if self.text:
            self.action_delete_right()
        else:
            self.post_message(self.Left())
