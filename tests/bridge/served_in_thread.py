"""A server in a loop of its own thread: for clients that are no trio."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

import trio


@contextmanager
def served_in_thread(opened: Callable[[], AbstractAsyncContextManager[str]]) -> Iterator[str]:
    """What ``opened`` gives, its URL, for as long as the context lasts."""
    started: list[tuple[str, trio.lowlevel.TrioToken, trio.Event]] = []
    up = threading.Event()

    async def main() -> None:
        async with opened() as url:
            stop = trio.Event()
            started.append((url, trio.lowlevel.current_trio_token(), stop))
            up.set()
            await stop.wait()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    up.wait()
    ((url, token, stop),) = started
    try:
        yield url
    finally:
        trio.from_thread.run_sync(stop.set, trio_token=token)
        thread.join()
