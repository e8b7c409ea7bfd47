"""``chat -i``: question after question, with history, editing and a few commands."""

from __future__ import annotations

import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from tessella_p2p.base.errors import TessellaError
from tessella_p2p.cli.asking import Answer, Mode, completion_question
from tessella_p2p.cli.prompting import checked
from tessella_p2p.cli.question_history import question_history
from tessella_p2p.cli.talk import Talk
from tessella_p2p.cli.terminal import printable

_HELP = """\
/clear   begin a new conversation
/undo    take the last question and its answer back
/timing  show the times of each answer, or stop doing so
/help    show this
/exit    leave; so does Ctrl-D
Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer. A question that begins with a slash is asked
with a space before it."""
_NEXT = "> "
_MORE = "  "
_MAX_LINE_CHARS = 1 << 20
_LOCAL_MODES = 3
"""Index of a terminal's local modes in what `termios` gives."""


def converse(talk: Talk, mode: Mode, first: str | None = None) -> None:
    """Ask what the user types, until there is no more. An error of the node ends its answer, not the talk.

    Where standard input is no terminal, each line of it is a question.

    Args:
        talk: what was said before, and who goes on.
        mode: a conversation, or one raw completion after the other.
        first: a question that is asked at once.
    """
    listener = _Listener(talk, mode)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        said = sum(turn.role == "user" for turn in talk.conversation.turns)
        before = f" · going on after {said} question{'s' * (said != 1)}" if said else ""
        click.echo(f"{printable(talk.asker.model)}{before} · /help lists the commands, Ctrl-D leaves", err=True)
    if first is not None:
        listener.hear(first)
    read = _typed() if is_terminal else _piped
    while not listener.has_left:
        try:
            line = read()
        except KeyboardInterrupt:
            continue  # as in a shell: what was typed is dropped
        except EOFError:
            break
        if line.strip():
            listener.hear(line)


class _Listener:
    """Takes one line after the other."""

    def __init__(self, talk: Talk, mode: Mode) -> None:
        self.has_left = False
        self._talk = talk
        self._mode = mode
        self._commands: dict[str, Callable[[], None]] = {
            "/clear": self._clear,
            "/undo": self._undo,
            "/timing": self._switch_timing,
            "/help": lambda: click.echo(_HELP, err=True),
            "/exit": self._leave,
            "/quit": self._leave,
        }

    def hear(self, line: str) -> None:
        """Do what a line says, or ask it."""
        try:
            if line.startswith("/"):
                self._obey(line.split(maxsplit=1)[0])
            else:
                with _unechoed():
                    self._ask(checked(line.removeprefix(" ") if line.startswith(" /") else line))
        except KeyboardInterrupt:
            click.echo("(stopped)", err=True)
        except (TessellaError, click.UsageError) as error:
            click.echo(f"error: {printable(str(error))}", err=True)

    def _ask(self, question: str) -> None:
        if self._mode == "completion":
            asker = self._talk.asker
            asker.ask(completion_question(asker.model, question, asker.manner), Answer())
        else:
            self._talk.say(question)

    def _obey(self, command: str) -> None:
        if command in self._commands:
            self._commands[command]()
        else:
            click.echo(f"{printable(command)} is no command; /help lists them", err=True)

    def _clear(self) -> None:
        self._talk.forget()
        click.echo("(a new conversation)", err=True)

    def _undo(self) -> None:
        taken = self._talk.take_back()
        what = "nothing was asked yet" if taken is None else f"taken back: {printable(' '.join(taken.split()))[:60]}"
        click.echo(f"({what})", err=True)

    def _switch_timing(self) -> None:
        asker = self._talk.asker
        asker.timing = not asker.timing
        click.echo(f"(times are {'shown' if asker.timing else 'not shown'})", err=True)

    def _leave(self) -> None:
        self.has_left = True


@contextmanager
def _unechoed() -> Iterator[None]:
    """What is typed during an answer is not mixed into it; it stands at the next prompt."""
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = [*before[:_LOCAL_MODES], before[_LOCAL_MODES] & ~termios.ECHO, *before[_LOCAL_MODES + 1 :]]
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def _piped() -> str:
    line = sys.stdin.readline(_MAX_LINE_CHARS)
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _typed() -> Callable[[], str]:
    """A prompt with a history; on standard error where standard output goes elsewhere."""
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=question_history(),
        key_bindings=keys,
        output=create_output(always_prefer_tty=True),
        prompt_continuation=_MORE,
        enable_history_search=True,
    )
    return lambda: session.prompt(_NEXT)
