"""What was asked before, on disk for this user alone: one file for ``chat -i`` and the terminal UI."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import platformdirs
from prompt_toolkit.history import FileHistory, History, InMemoryHistory


class _QuestionHistory(FileHistory):
    """A file that may go away or fill its disk while it is used: a question that it cannot keep is asked all the same."""

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


def question_history() -> History:
    """The history; in memory where the disk cannot have it."""
    path = platformdirs.user_state_path("tessella-p2p", appauthor=False) / "chat_history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError:
        return InMemoryHistory()
    return _QuestionHistory(path)
