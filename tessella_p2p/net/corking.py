"""Sends of one moment leave together: one packet to seal, one system call, and one wake-up at the other end instead of many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_flushes: dict[Callable[[], None], None] | None = None
"""What to flush at the end of the `corked` block that runs. One for the whole process: nothing is awaited inside of such a block."""


@contextmanager
def corked() -> Iterator[None]:
    """Hold back what connections are given to send until the end of the block, in which nothing may be awaited. Blocks may nest."""
    global _flushes  # noqa: PLW0603 - see above
    if _flushes is not None:
        yield
        return
    _flushes = {}
    try:
        yield
    finally:
        flushes, _flushes = _flushes, None
        for flush in flushes:
            flush()


def hold_back(flush: Callable[[], None]) -> bool:
    """Whether a `corked` block runs; ``flush`` is then called at its end, once, and must not raise."""
    if _flushes is None:
        return False
    _flushes[flush] = None
    return True
