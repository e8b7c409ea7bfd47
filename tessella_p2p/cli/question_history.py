"""What was asked before, on disk for this user alone: one file for ``chat -i`` and the terminal UI."""

from __future__ import annotations

import os

import platformdirs
from prompt_toolkit.history import FileHistory, History, InMemoryHistory


def question_history() -> History:
    """The history; in memory where the disk cannot have it."""
    path = platformdirs.user_state_path("tessella-p2p", appauthor=False) / "chat_history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)
