"""Where a prompt comes from: options, words, standard input; and how an answer goes out: text, JSON, times."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from tessella_p2p.base.limits import MIB
from tessella_p2p.cli.asking import Answer, Manner, Question, ask
from tessella_p2p.cli.node_client import NodeClient
from tessella_p2p.cli.terminal import print_json, write_text
from tessella_p2p.cli.timing import show_timing

STDIN = "-"
"""As a word of a prompt, or the value of an option: what comes on standard input."""
_MAX_STDIN_CHARS = 4 * MIB
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def answer_options(command: CommandT) -> CommandT:
    """The options that every command has that asks for text."""
    options = (
        click.option("-m", "--max-tokens", type=click.IntRange(min=1), default=512, show_default=True),
        click.option(
            "--temperature", type=click.FloatRange(0.0, 2.0), default=0.0, show_default=True, help="0 is greedy."
        ),
        click.option("--timing", is_flag=True, help="Speed, route and cached positions, on standard error."),
        click.option("--json", "as_json", is_flag=True, help="One JSON object, at the end."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def read_stdin() -> str:
    """All of standard input.

    Raises:
        UsageError: it is too long, or no UTF-8.
    """
    text = sys.stdin.read(_MAX_STDIN_CHARS + 1)
    if len(text) > _MAX_STDIN_CHARS:
        raise click.UsageError(f"standard input holds over {_MAX_STDIN_CHARS // MIB} Mi characters")
    return checked(text)


def checked(text: str) -> str:
    """``text``, which has to be text.

    Raises:
        UsageError: it holds bytes that are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.UsageError("the prompt is no UTF-8 text") from None
    return text


def joined(words: Sequence[str]) -> str:
    """Words as one text; a lone ``-`` among them stands for standard input."""
    stdin = read_stdin() if STDIN in words else ""
    return checked(" ".join(stdin if word == STDIN else word for word in words))


class Asker:
    """Asks one model of one node, and shows its answers.

    Args:
        node: who is asked.
        model: its name there.
        manner: how answers are drawn.
        timing: whether each answer is followed by its times.
        as_json: nothing is shown but one JSON object at the end of each answer.
        exact: the answer ends as it ends, where no terminal reads it: it is to go into a file.
    """

    def __init__(
        self,
        node: NodeClient,
        model: str,
        manner: Manner,
        *,
        timing: bool = False,
        as_json: bool = False,
        exact: bool = False,
    ) -> None:
        self.model = model
        self.manner = manner
        self.timing = timing
        self._node = node
        self._as_json = as_json
        self._exact = exact

    def ask(self, question: Question, answer: Answer) -> None:
        """Show the answer as it comes; what has come is in ``answer`` however this ends.

        Raises:
            TessellaError, KeyboardInterrupt: see `asking.ask`.
        """
        try:
            ask(self._node, question, answer, self._show)
        finally:
            if answer.text and not self._as_json and not (self._exact and not sys.stdout.isatty()):
                click.echo()
        self._conclude(answer)

    def _show(self, piece: str) -> None:
        if not self._as_json:
            write_text(piece)

    def _conclude(self, answer: Answer) -> None:
        if self._as_json:
            print_json(
                {
                    "model": self.model,
                    "text": answer.text,
                    "finish_reason": answer.reason,
                    "usage": answer.usage or None,
                    "tessella": answer.report or None,
                }
            )
        elif answer.reason == "length":
            click.echo(f"(cut at {self.manner.max_tokens} tokens; -m sets more)", err=True)
        if self.timing:
            show_timing(answer)
