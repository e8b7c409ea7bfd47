"""Where tables and findings are printed: as wide as the terminal, and in a pipe or a file as wide as they are."""

from __future__ import annotations

import os

from rich.console import Console

_ENDLESS = 10_000
"""Columns where no screen ends the line: `grep` and `awk` want whole words in whole lines."""


def console(*, stderr: bool = False) -> Console:
    """Standard output or standard error; ``COLUMNS`` sets another width."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _ENDLESS
    return made
