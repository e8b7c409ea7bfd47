"""What a worker was ordered to serve next, and the stage for it where that is loaded beside the one that serves (shell)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog
import trio

from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import MOVE_TIMEOUT_S
from tessella_p2p.stages.service import StageService
from tessella_p2p.worker.registration import Assignment

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Beside:
    """A stage that is loaded beside another one, or is being loaded; ``over`` is set once nobody wants it as that any more."""

    assignment: Assignment
    over: trio.Event
    stage: StageService | None = None


class Successor:
    """The next stage of a worker; there is one at a time, and a newer order replaces an older one.

    Args:
        load: loads a range; see `service.Worker`.
        on_prepared: called once a stage is loaded beside, so that the orchestrator hears of it.
        on_due: called once what serves is to end, because the next one is ordered, and is loaded or has to wait for the room.
    """

    def __init__(
        self,
        load: Callable[[LayerRange], Awaitable[StageService]],
        on_prepared: Callable[[], None],
        on_due: Callable[[], None],
    ) -> None:
        self._load = load
        self._on_prepared = on_prepared
        self._on_due = on_due
        self._beside: _Beside | None = None
        self._ordered: Assignment | None = None

    @property
    def prepared(self) -> int | None:
        """The serial of the lease whose layers are loaded beside; None where there are none."""
        beside = self._beside
        return None if beside is None or beside.stage is None else beside.assignment.serial

    @property
    def is_expected(self) -> bool:
        """Whether other layers are ordered, or loaded or being loaded beside."""
        return self._ordered is not None or self._beside is not None

    @property
    def takes_over(self) -> bool:
        """Whether the next stage is ordered, and loaded: it takes the place of the one that serves, and nobody drains first."""
        return self._ordered is not None and self.prepared is not None

    def prepare(self, assignment: Assignment, nursery: trio.Nursery) -> None:
        """Load a range beside what serves; ``nursery`` is where that runs."""
        if self._beside is not None and self._beside.assignment.layers == assignment.layers:
            self._beside.assignment = assignment
            return
        self.discard()
        self._beside = _Beside(assignment, trio.Event())
        nursery.start_soon(self._prepare, self._beside)

    def order(self, assignment: Assignment) -> None:
        """Serve a range next: at once where it is loaded beside, or is not being loaded at all; else once it is loaded."""
        if self._beside is not None and self._beside.assignment.layers != assignment.layers:
            self.discard()
        self._ordered = assignment
        if self._beside is None or self._beside.stage is not None:
            self._on_due()

    def take(self) -> tuple[Assignment, StageService | None] | None:
        """What is ordered, with its stage where it was loaded beside; the caller's from now on. None where nothing is ordered."""
        ordered, beside = self._ordered, self._beside
        if ordered is None:
            self.discard()
            return None
        stage = None if beside is None else beside.stage
        if beside is not None:
            beside.stage = None
        self.discard()
        return ordered, stage

    def discard(self) -> None:
        """Forget what is ordered; what is loaded beside leaves the memory."""
        if self._beside is not None:
            self._beside.over.set()
        self._beside = self._ordered = None

    async def _prepare(self, beside: _Beside) -> None:
        """Load, and keep what is loaded until it is taken, discarded, or too old."""
        try:
            stage = await self._load(beside.assignment.layers)
        except Exception as error:  # native loaders raise what they like; what serves goes on
            log.error("layers cannot be loaded beside others", layers=str(beside.assignment.layers), exc_info=error)
            if self._beside is beside:
                self.discard()
            return
        try:
            beside.stage = stage
            if not beside.over.is_set():
                log.info("layers loaded beside others", layers=str(beside.assignment.layers))
                self._on_prepared()
                if self._ordered is not None:
                    self._on_due()
            with trio.move_on_after(MOVE_TIMEOUT_S):
                await beside.over.wait()
            if self._beside is beside:
                self.discard()
        finally:
            unused, beside.stage = beside.stage, None
            if unused is not None:
                with trio.CancelScope(shield=True):
                    await _close(unused)


async def _close(stage: StageService) -> None:
    """Free a stage that never ran: its service closes its engine at the end of its run."""
    async with trio.open_nursery() as nursery:
        await nursery.start(stage.run)
        nursery.cancel_scope.cancel()
