"""An engine through sleep and wake, crashes and reloads (shell).

    loaded ──no session for sleep_after_s──▶ sleeping ──an open──▶ loading ──▶ loaded
       └──any exception──▶ loading ──it loads──▶ loaded
                              └──it does not──▶ failed ──RELOAD_RETRY_S──▶ loading

Whoever drives it runs one of its coroutines at a time. What blocks, runs on the engine's thread, so the event loop goes on.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import structlog
import trio

from tessella_p2p.base.errors import Overloaded
from tessella_p2p.base.limits import (
    GATHER_S,
    HOP_TIMEOUT_S,
    OOM_STREAK,
    RELOAD_RETRY_S,
    STREAK_WINDOW_S,
)
from tessella_p2p.stages.engine import KvUse, StageEngine
from tessella_p2p.stages.engine_thread import TurnRunner
from tessella_p2p.stages.failures import FailureStreak
from tessella_p2p.stages.pending import Loader

log = structlog.get_logger(__name__)

StageState = Literal["ready", "loading", "sleeping", "saturated", "failed"]
"""What a stage says of itself. ``ready`` and ``sleeping`` ones take sessions, and so does one that is ``loading``: they wait for it."""


@dataclass(frozen=True, slots=True)
class StageRules:
    """How a stage behaves when it is idle, busy or in trouble. Times are in seconds.

    Attributes:
        oom_streak: so many failures of the engine …
        streak_window_s: … within this mean saturated.
        sleep_after_s: without a session for so long, the engine is let go of; None for never.
        patience_s: how long an open may wait for its turn, or for the engine to load.
        gather_s: how long a turn waits for a full group; see `batching`.
    """

    oom_streak: int = OOM_STREAK
    streak_window_s: float = STREAK_WINDOW_S
    sleep_after_s: float | None = None
    patience_s: float = HOP_TIMEOUT_S
    gather_s: float = GATHER_S


class EngineLife:
    """The engine of one stage, and what has become of it.

    Args:
        engine: loaded.
        load: loads it again; None for an engine that stays as it is: it does not sleep, and goes on after a crash.
    """

    def __init__(self, engine: StageEngine, load: Loader | None, rules: StageRules) -> None:
        self.engine = engine
        """The newest one; while it sleeps, only what does not change may be asked of it."""
        self.crashes = 0
        self.changed = trio.Event()
        """Set, and replaced, at each change of the state but the end of a saturation."""
        self.retry_at: float | None = None
        """When an engine that did not load is to be tried again (trio's clock); it stays set until it has loaded."""
        self._load = load
        self._rules = rules
        self._condition: Literal["loaded", "loading", "sleeping", "failed"] = "loaded"
        self._streak = FailureStreak(rules.oom_streak, rules.streak_window_s)
        self._kv = engine.kv
        self._reason = ""

    @property
    def is_loaded(self) -> bool:
        """Whether the engine can be called."""
        return self._condition == "loaded"

    @property
    def can_reload(self) -> bool:
        """Whether there is a way to load it again."""
        return self._load is not None

    @property
    def kv(self) -> KvUse:
        """What the KV holds; an engine that is not loaded holds nothing."""
        if self.is_loaded:
            self._kv = self.engine.kv
            return self._kv
        return replace(self._kv, pages_used=0, pages_cached=0)

    @property
    def memory_bytes(self) -> int:
        """Of weights and KV; see `engine.StageEngine.memory_bytes`."""
        return self.engine.memory_bytes if self.is_loaded else 0

    def state(self, now: float) -> StageState:
        """What the stage says of itself; ``now`` is trio's time."""
        if self._condition in ("loading", "failed"):
            return "failed" if self._condition == "failed" else "loading"
        if self._streak.saturated_for(now):
            return "saturated"
        return "ready" if self.is_loaded else "sleeping"

    def recent_failures(self, now: float) -> int:
        """Failures within ``streak_window_s``."""
        return self._streak.count(now)

    def refusal(self, now: float) -> Overloaded | None:
        """Why no session may be opened now."""
        saturated_s = self._streak.saturated_for(now)
        if saturated_s:
            return Overloaded(
                f"this stage's engine failed {self._rules.oom_streak} times within {self._rules.streak_window_s:.0f} s; "
                f"it takes no new session for {saturated_s:.0f} s"
            )
        if self.retry_at is not None:
            return Overloaded(f"this stage's engine does not load ({self._reason}); it is tried again")
        return None

    def crashed(self, error: BaseException, now: float) -> None:
        """Count a crash."""
        self.crashes += 1
        was = self.state(now)
        self._streak.failed(now)
        if self.state(now) != was:
            log.error("the stage is saturated", failures=self._streak.count(now), window_s=self._rules.streak_window_s)
            self._tell()

    async def load(self, runner: TurnRunner) -> None:
        """Load the engine again, whatever became of the one before; afterwards it is loaded, or has failed."""
        assert self._load is not None
        load, before = self._load, self.engine
        loaded: list[StageEngine] = []
        errors: list[Exception] = []

        def reload() -> None:
            with suppress(Exception):  # it may be closed already, or broken; there is nothing more to be had from it
                before.close()
            try:
                loaded.append(load())
            except Exception as error:  # noqa: BLE001 - native loaders raise what they like
                errors.append(error)

        self._become("loading")
        start = trio.current_time()
        await runner.run(reload, 0)
        now = trio.current_time()
        if loaded:
            self.engine, self.retry_at = loaded[0], None
            log.info("engine loaded again", layers=str(self.engine.layers), seconds=round(now - start, 3))
            self._become("loaded")
            return
        self._reason = f"{type(errors[0]).__name__}: {errors[0]}"[:200]
        self._streak.failed(now)
        self.retry_at = now + RELOAD_RETRY_S
        log.error("the engine does not load", layers=str(before.layers), retry_s=RELOAD_RETRY_S, exc_info=errors[0])
        self._become("failed")

    async def sleep(self, runner: TurnRunner) -> None:
        """Let go of the weights and the KV until `load`."""
        log.info("engine asleep", layers=str(self.engine.layers))
        await self.close(runner)

    async def close(self, runner: TurnRunner) -> None:
        """Let go of the weights and the KV; not cancelled in between. From the beginning on the engine counts as not loaded."""
        engine = self.engine
        self._kv = engine.kv
        self._become("sleeping")

        def close() -> None:
            with suppress(Exception):  # as above
                engine.close()
            _return_freed_memory()

        with trio.CancelScope(shield=True):
            await runner.run(close, 0)

    def _become(self, condition: Literal["loaded", "loading", "sleeping", "failed"]) -> None:
        self._condition = condition
        self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


def _return_freed_memory() -> None:
    """Give what was freed back to the system: glibc keeps it for the next engine, which an idle machine has no use for."""
    with suppress(OSError, AttributeError):  # no glibc: its allocator has ways of its own
        ctypes.CDLL(None).malloc_trim(0)
