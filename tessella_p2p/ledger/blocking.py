"""How a shell calls what blocks: on a thread, or in place where time is virtual and threads would run behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

from tessella_p2p.base.errors import Overloaded

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


class OneAtATime:
    """Blocking calls of one kind, one after the other: a slow one holds up the others of its kind alone.

    Args:
        wait_s: how long one may wait for those before it.
        what: they are, for messages.
        run_blocking: how each is waited for.
    """

    def __init__(self, wait_s: float, what: str, run_blocking: RunBlocking = in_thread) -> None:
        self._wait_s, self._what = wait_s, what
        self._run_blocking = run_blocking
        self._turn = trio.CapacityLimiter(1)

    async def __call__(self, function: Callable[[], T], /) -> T:
        """The result of ``function()``. Cancelled while it runs, it ends once that has ended.

        Raises:
            Overloaded: too many others are before it.
        """
        try:
            with trio.fail_after(self._wait_s):
                await self._turn.acquire()
        except trio.TooSlowError:
            raise Overloaded(f"{self._what} kept this node busy for {self._wait_s:g} s; try again") from None
        try:
            return await self._run_blocking(function)
        finally:
            self._turn.release()
