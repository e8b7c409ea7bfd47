"""A node that the terminal UI has started: a child process that leaves with it, however it ends (shell).

The child holds the reading end of a pipe whose writing end only this process has, and leaves when that closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tessella_p2p.base.errors import ConfigurationError, MalformedMessage
from tessella_p2p.base.limits import MIB
from tessella_p2p.cli.tui.words import shown

_LEAVE_S = 15.0
_POLL_S = 0.1
_TAIL_BYTES = 16 * 1024
_MAX_OUTPUT_BYTES = 1 * MIB
_TOLD = ("reason", "error", "model", "model_id", "layers", "peer_id", "state")
"""Fields of a log line that say why."""


class JoinedNode:
    """One ``tessella-p2p daemon``.

    Args:
        arguments: its flags.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = tuple(arguments)
        self._home = tempfile.TemporaryDirectory(prefix="tessella-ui-")
        self._process: asyncio.subprocess.Process | None = None
        self._leaving = asyncio.Lock()
        self._is_told_to_leave = False

    @property
    def log_path(self) -> Path:
        """Where its log goes, as long as it runs."""
        return Path(self._home.name) / "node.log"

    @property
    def runs(self) -> bool:
        """Whether its process does."""
        return self._process is not None and self._process.returncode is None

    @property
    def _ready_file(self) -> Path:
        return Path(self._home.name) / "ready.json"

    async def start(self) -> None:
        """Start the process."""
        command = (sys.executable, "-m", "tessella_p2p", "daemon", "--no-wizard", *self._arguments)
        hidden = ("--log-format", "json", "--ready-file", str(self._ready_file), "--exit-with-stdin")
        with self.log_path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, *hidden, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    def check(self) -> None:
        """Whether it runs.

        Raises:
            ConfigurationError: it has ended; says what it logged last.
        """
        if self._process is not None and self._process.returncode is not None and not self._is_told_to_leave:
            why = "\n".join(self.log_lines(6)) or "it said nothing"
            raise ConfigurationError(f"the node ended with status {self._process.returncode}:\n{why}")

    async def api_url(self) -> str:
        """Its HTTP address, once it is up.

        Raises:
            ConfigurationError: it has ended.
        """
        while not self._ready_file.exists():
            self.check()
            await asyncio.sleep(_POLL_S)
        return str(json.loads(self._ready_file.read_text())["api_url"])

    async def ended(self) -> None:
        """Wait for its end."""
        assert self._process is not None
        await self._process.wait()

    def log_lines(self, num_lines: int) -> list[str]:
        """What it logged last, for people."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self.log_path.stat().st_size - _TAIL_BYTES, 0))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        return [_plain(line) for line in lines if line.strip()][-num_lines:]

    async def leave(self) -> None:
        """End it, and wait for that; it is killed when it takes too long.

        Cancelled, it has been told to leave; who calls this again waits for the end.
        """
        self._is_told_to_leave = True
        async with self._leaving:
            process = self._process
            if process is not None:
                assert process.stdin is not None
                process.stdin.close()
                try:
                    async with asyncio.timeout(_LEAVE_S):
                        await process.wait()
                except TimeoutError:
                    with suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
            self._home.cleanup()


def _plain(line: str) -> str:
    """A line of the log as people read it: the event, and why."""
    try:
        said = json.loads(line)
        event = said["event"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return shown(line, 200)
    details = ", ".join(f"{name} {shown(said[name], 160)}" for name in _TOLD if said.get(name) not in (None, "", []))
    return f"{shown(event, 80)}{': ' if details else ''}{details}"


async def said_by(*arguments: str) -> Any:
    """The JSON that another process of this program prints: what needs an event loop of its own is asked in one.

    Args:
        arguments: those of ``python``.

    Raises:
        ConfigurationError: it failed; says what it said.
        MalformedMessage: it printed something else.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigurationError(shown(" ".join(last).removeprefix("error: ") or "it failed", 400))
    try:
        return json.loads(out[:_MAX_OUTPUT_BYTES])
    except ValueError as error:
        raise MalformedMessage("no JSON was printed") from error


def daemon_arguments(settings: Mapping[str, object]) -> list[str]:
    """Flags out of settings, those without a value left out: ``{"vram_mb": 512}`` is ``--vram-mb 512``."""
    return [
        part
        for name, value in settings.items()
        if value is not None
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
