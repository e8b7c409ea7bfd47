"""Deadlines that move with every message."""

from __future__ import annotations

import trio


def extend(patience: trio.CancelScope, timeout_s: float) -> None:
    """Move a scope's deadline to ``timeout_s`` from now, unless it is nearly there.

    To set a deadline costs more than a small message, and a scope for each message costs more still.
    """
    deadline = trio.current_time() + timeout_s
    if not deadline - timeout_s / 4 <= patience.deadline <= deadline:
        patience.deadline = deadline
