"""A mesh of real processes that is driven from a thread of its own, so that many tests can share it."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from tessella_p2p.cli.demo_mesh import Mesh, MeshPlan, run_mesh

T = TypeVar("T")

CHECKPOINT_S = 0.25
HEALTHY_S = 240.0


class MeshThread:
    """A `Mesh` that lives in a trio loop of its own thread, so that it outlives single tests."""

    def __init__(self, plan: MeshPlan) -> None:
        self._plan = plan
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="mesh", daemon=True)
        self._failure: BaseException | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._stop: trio.Event | None = None
        self.mesh: Mesh

    def __enter__(self) -> MeshThread:
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._stop is not None
        self.call(self._set_stop)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    async def _set_stop(self) -> None:
        assert self._stop is not None
        self._stop.set()

    def _main(self) -> None:
        try:
            trio.run(self._run)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
            self._failure = error
        self._started.set()

    async def _run(self) -> None:
        self._token, self._stop = trio.lowlevel.current_trio_token(), trio.Event()
        async with run_mesh(self._plan) as self.mesh:
            await self.mesh.wait_healthy(HEALTHY_S)
            self._started.set()
            await self._stop.wait()

    def call(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Run ``function(*args)`` in the mesh's loop; from a plain thread."""
        return trio.from_thread.run(function, *args, trio_token=self._token)

    async def run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Run ``function(*args)`` in the mesh's loop; from another trio loop."""
        return await trio.to_thread.run_sync(self.call, function, *args)

    async def healthy(self) -> None:
        """Wait until the mesh answers again."""
        await self.run(self.mesh.wait_healthy, HEALTHY_S)
