"""How a shell calls what blocks: on a thread, or in place where time is virtual and threads would run behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

T = TypeVar("T")


class RunBlocking(Protocol):
    """Runs a function that blocks; waits for its result and passes on its exception."""

    async def __call__(self, function: Callable[[], T], /) -> T:
        """The result of ``function()``."""
        ...


async def in_thread(function: Callable[[], T], /) -> T:
    """Run ``function`` on a worker thread. A cancellation waits until it has returned, so nothing durable is half done."""
    return await trio.to_thread.run_sync(function)


async def in_place(function: Callable[[], T], /) -> T:
    """Run ``function`` on the event loop; for virtual time."""
    await trio.lowlevel.checkpoint()
    return function()
