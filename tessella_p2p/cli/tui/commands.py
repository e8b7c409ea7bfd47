"""The commands of the terminal UI, as ``/help`` lists them; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        usage: its name, and what may stand after it.
        help: what it does.
    """

    usage: str
    help: str

    @property
    def name(self) -> str:
        """With its slash."""
        return self.usage.partition(" ")[0]

    @property
    def takes_argument(self) -> bool:
        """Whether something may stand after its name."""
        return " " in self.usage


_LISTED: Final = (
    Command("/swarm", "the mesh, live and anonymous"),
    Command("/model [NAME]", "ask another model from now on"),
    Command("/status", "what this node is doing"),
    Command("/credits", "balance, tier and proofs"),
    Command("/new", "begin a new conversation"),
    Command("/save FILE", "keep it: .json to go on with, else to read"),
    Command("/connect", "another node, or another mesh"),
    Command("/help", "this"),
    Command("/quit", "leave; so does Ctrl-D"),
)
COMMANDS: Final = {command.name: command for command in _LISTED}

_KEYS: Final = """\
Enter sends, Alt-Enter or Ctrl-J begins a new line, Tab completes.
Up and Down leaf through what was asked; Page Up and Page Down scroll.
Escape or Ctrl-C stops an answer; Ctrl-D or Ctrl-Q leaves.
A question that begins with a slash is asked with a space before it."""


def help_text() -> str:
    """Every command, and the keys."""
    width = max(len(command.usage) for command in _LISTED)
    return "\n".join([*(f"{each.usage:<{width}}  {each.help}" for each in _LISTED), "", _KEYS])
