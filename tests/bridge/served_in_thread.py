"""A server in a loop of its own thread: for clients that are no trio, or that have the test's own thread for their loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Self

import trio

PATIENCE_S = 60.0
"""Until it serves, on a busy machine."""


class ServerThread:
    """Serves what ``opened`` gives, at its ``url``, for as long as the context lasts; ``opened`` is called in the server's own loop."""

    def __init__(self, opened: Callable[[], AbstractAsyncContextManager[str]]) -> None:
        self._opened = opened
        self._thread = threading.Thread(target=self._main, name="server", daemon=True)
        self._up: Future[tuple[str, trio.lowlevel.TrioToken]] = Future()
        self._stop = trio.Event()

    @property
    def url(self) -> str:
        """Where it serves."""
        return self._up.result(PATIENCE_S)[0]

    def _main(self) -> None:
        try:
            trio.run(self._run)
        except BaseException as error:
            if self._up.done():
                raise
            self._up.set_exception(error)  # handed to the thread that waits for the URL

    async def _run(self) -> None:
        async with self._opened() as url:
            self._up.set_result((url, trio.lowlevel.current_trio_token()))
            await self._stop.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        self._up.result(PATIENCE_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server, if it has not ended."""
        if self._thread.is_alive():
            self.call(self._stop.set)
            self._thread.join()

    def call(self, function: Callable[[], object]) -> None:
        """Run ``function()`` in the server's loop."""
        trio.from_thread.run_sync(function, trio_token=self._up.result(PATIENCE_S)[1])
