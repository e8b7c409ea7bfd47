"""When a daemon ends: a signal, or the end of its standard input; and how it tells others that it is up (shell)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import structlog
import trio

log = structlog.get_logger(__name__)


async def until_told(*, exit_with_stdin: bool, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Return at SIGTERM or SIGINT and, if so asked, at the end of standard input.

    Whoever starts a node with a pipe as its standard input can thus be killed in any way, and the node leaves too.
    """
    async with trio.open_nursery() as nursery:

        async def by_signal(task_status: trio.TaskStatus[None]) -> None:
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                task_status.started()
                async for number in signals:
                    log.info("leaving", reason=signal.Signals(number).name)
                    nursery.cancel_scope.cancel()

        async def by_stdin() -> None:
            with suppress(OSError, trio.BrokenResourceError):  # closed, or no longer readable: that is its end, too
                async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
                    while await stdin.receive_some():
                        pass
            log.info("leaving", reason="standard input ended")
            nursery.cancel_scope.cancel()

        await nursery.start(by_signal)
        if exit_with_stdin:
            nursery.start_soon(by_stdin)
        task_status.started()


async def outlive_hangups() -> None:
    """Say at each SIGHUP that there is nothing to read again, until cancelled: unheard, the signal would end the process at once.

    Where standard input is a terminal, that is what its user wants who closes it, and the signal is left alone.
    """
    if os.isatty(0):
        return
    with trio.open_signal_receiver(signal.SIGHUP) as hangups:
        async for _ in hangups:
            log.info("nothing to read again", reason="SIGHUP")


def write_ready_file(path: Path | None, content: Mapping[str, object]) -> None:
    """Write ``content`` as JSON, atomically: whoever sees the file sees all of it."""
    if path is None:
        return
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content), encoding="utf-8")
    os.replace(part, path)
