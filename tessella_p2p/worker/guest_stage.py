"""A range that this node does not serve, loaded for audits and let go again (shell).

A worker whose claim has room for it recomputes a range of others too: so a mesh without replicas is audited as well. There is one guest
at a time, on an engine of its own, loaded as the node's own stage is. It stays for a moment after its audit, for the next order may be
of the same range; and it leaves at once where the node is to serve other layers, for those are what the claim is for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog
import trio

from tessella_p2p.base.errors import Overloaded
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import GUEST_KEPT_S
from tessella_p2p.stages.service import StageService

log = structlog.get_logger(__name__)

Load = Callable[[LayerRange], Awaitable[StageService]]


@dataclass(slots=True, eq=False)
class _Guest:
    """One loaded range. ``settled`` is set once it is loaded or gone, ``error`` why it did not load."""

    layers: LayerRange
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    settled: trio.Event = field(default_factory=trio.Event)
    gone: trio.Event = field(default_factory=trio.Event)
    returned: trio.Event = field(default_factory=trio.Event)
    wanted: trio.Event = field(default_factory=trio.Event)
    stage: StageService | None = None
    error: Exception | None = None


class GuestStage:
    """The one guest of a node.

    Args:
        load: loads a range; see `service.Worker`.
        has_room: whether the node holds nothing beside what it serves.
        kept_s: how long a range stays loaded after an audit.
    """

    def __init__(
        self, load: Load, has_room: Callable[[], bool] = lambda: True, *, kept_s: float = GUEST_KEPT_S
    ) -> None:
        self._load = load
        self._has_room = has_room
        self._kept_s = kept_s
        self._lives: trio.Nursery | None = None
        self._guest: _Guest | None = None
        self._num_own_loads = 0
        self.loads = 0
        """Ranges that were loaded for audits."""

    @property
    def layers(self) -> LayerRange | None:
        """What is loaded now, or is being loaded."""
        return None if self._guest is None else self._guest.layers

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Let guests live until cancelled; a load or a turn that runs then is finished first."""
        try:
            async with trio.open_nursery() as self._lives:
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._lives = None

    @asynccontextmanager
    async def borrowed(self, layers: LayerRange) -> AsyncIterator[StageService]:
        """The running stage of a range, for one borrower at a time; another range's leaves for it.

        Raises:
            Overloaded: there is no room now, or it had to leave again while it was loaded.
            whatever the loader raises.
        """
        guest = await self._invited(layers)
        try:
            await guest.settled.wait()
            if guest.error is not None:
                raise guest.error
            if guest.stage is None:
                raise Overloaded(f"layers {layers} had to make room for what this node serves")
            yield guest.stage
        finally:
            guest.wanted = trio.Event()
            guest.returned.set()

    async def load_own(self, layers: LayerRange) -> StageService:
        """Load what this node is to serve: the guest makes room first, and nobody is invited meanwhile."""
        self._num_own_loads += 1
        try:
            await self._dismiss()
            return await self._load(layers)
        finally:
            self._num_own_loads -= 1

    async def _invited(self, layers: LayerRange) -> _Guest:
        if self._lives is None or self._num_own_loads or not self._has_room():
            raise Overloaded("this node has no room for layers beside its own right now")
        guest = self._guest
        if guest is None or guest.layers != layers or guest.scope.cancel_called:
            await self._dismiss()
            if self._num_own_loads:
                raise Overloaded("this node is loading layers of its own")
            self._guest = guest = _Guest(layers)
            self._lives.start_soon(self._host, guest)
        guest.returned = trio.Event()
        guest.wanted.set()
        return guest

    async def _dismiss(self) -> None:
        guest = self._guest
        if guest is not None:
            guest.scope.cancel()
            await guest.gone.wait()

    async def _host(self, guest: _Guest) -> None:
        """Load a guest, and keep it while it is borrowed, and a moment longer."""
        try:
            with guest.scope:
                stage = await self._load(guest.layers)
                async with trio.open_nursery() as nursery:
                    await nursery.start(stage.run)  # however this ends, the service closes its engine
                    self.loads += 1
                    log.info("layers loaded for audits", layers=str(guest.layers))
                    guest.stage = stage
                    guest.settled.set()
                    await self._outstay(guest)
        except Exception as error:  # native code raises what it likes; it is an audit's trouble, not the node's
            log.error("layers for an audit failed", layers=str(guest.layers), exc_info=error)
            guest.error = error
        finally:
            guest.stage = None
            if self._guest is guest:
                self._guest = None
            guest.settled.set()
            guest.gone.set()

    async def _outstay(self, guest: _Guest) -> None:
        """End it once nobody has wanted it for a while; from then on nobody gets it."""
        while True:
            await guest.returned.wait()
            with trio.move_on_after(self._kept_s):
                await guest.wanted.wait()
            if not guest.wanted.is_set():
                guest.scope.cancel()
                await trio.lowlevel.checkpoint()
