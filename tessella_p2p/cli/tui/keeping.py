"""What is kept of a conversation: the line under its last answer, and the files that it was saved to (shell: it writes them)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.cli.asking import Turn
from tessella_p2p.cli.private_file import write_private
from tessella_p2p.cli.session_file import Conversation, save_session

_WHO = {"user": "You", "assistant": "Answer", "system": "System"}


class Keeper:
    """One conversation's."""

    def __init__(self) -> None:
        self._held = ("", "")
        self._saved: set[Path] = set()

    def hold(self, foot: str, way: str) -> None:
        """Take the lines of an answer that is complete."""
        self._held = (foot, way)

    def lines(self, idle: str) -> tuple[str, str]:
        """Those of the last answer; before there is one, ``idle``."""
        foot, way = self._held
        return (foot, way) if foot else (idle, "")

    def save(self, name: str, model: str | None, turns: Sequence[Turn]) -> Path:
        """Write the conversation, for its owner alone; a file of another origin is never written over.

        Args:
            name: of the file; ``.json`` makes a session file, anything else a text.
            model: that was asked last.
            turns: what was said.

        Raises:
            ConfigurationError: there is nothing to save, the name is taken, or it cannot be written.
        """
        if not turns:
            raise ConfigurationError("nothing has been said yet")
        try:
            path = Path(name).expanduser().absolute()
            is_taken = path not in self._saved and os.path.lexists(path)
        except (RuntimeError, ValueError) as error:
            raise ConfigurationError(f"{name} is no name of a file: {error}") from error
        if is_taken:
            raise ConfigurationError(f"{path} exists, and is not written over: name another file")
        if path.suffix == ".json":
            save_session(path, Conversation(model, tuple(turns)))
        else:
            text = "\n\n".join(f"## {_WHO[turn.role]}\n\n{turn.content}" for turn in turns)
            try:
                write_private(path, f"{text}\n".encode())
            except OSError as error:
                raise ConfigurationError(f"{path}: it cannot be written: {error.strerror}") from error
        self._saved.add(path)
        return path
