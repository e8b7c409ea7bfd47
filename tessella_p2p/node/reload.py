"""SIGHUP: a running orchestrator reads its configuration again (shell).

What can change in a running process does; of the rest it is said that it waits for a restart. A configuration that is refused changes
nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
import trio

from tessella_p2p.base.errors import TessellaError
from tessella_p2p.node.config import OrchestratorConfig

log = structlog.get_logger(__name__)

RELOADED: Final = ("allow", "admin_token", "federation", "log_level", "min_stages")
"""Settings that take effect without a restart."""

Reread = Callable[[], OrchestratorConfig]
"""Reads the configuration again, from where it came; it blocks."""
Reload = Callable[[], Awaitable[OrchestratorConfig]]


def changed(before: OrchestratorConfig, after: OrchestratorConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The settings that differ: those that take effect now, and those that wait for a restart."""
    differing = [name for name in type(before).model_fields if getattr(before, name) != getattr(after, name)]
    now = tuple(name for name in differing if name in RELOADED)
    return now, tuple(name for name in differing if name not in RELOADED)


async def reload_on_hangup(
    config: OrchestratorConfig,
    reload: Reload,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """At each SIGHUP, apply what the configuration says now; until cancelled.

    Args:
        config: as it was at the start.
        reload: reads it again, puts the settings of `RELOADED` into effect and gives what it read.
    """
    started = config
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            try:
                newer = await reload()
            except TessellaError as error:
                log.error("the configuration is not reloaded", code=error.code, reason=str(error))
                continue
            log.info("configuration reloaded", changed=changed(config, newer)[0])
            if later := changed(started, newer)[1]:
                log.warning("these settings take effect at the next start", settings=later)
            config = newer
