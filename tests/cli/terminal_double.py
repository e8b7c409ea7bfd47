"""A command on a terminal of its own: what a person sees and types, byte by byte."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

_PATIENCE_S = 60.0
_WIDTH = 200


@dataclass(slots=True)
class Terminal:
    """What the other side of a pseudo-terminal sees."""

    process: trio.Process
    _controller: int
    seen: str = ""
    _decoder: codecs.IncrementalDecoder = field(default_factory=codecs.getincrementaldecoder("utf-8"))

    async def type(self, text: str) -> None:
        """Press keys."""
        await trio.lowlevel.wait_writable(self._controller)
        os.write(self._controller, text.encode())

    async def see(self, text: str) -> str:
        """Wait until ``text`` is shown; all that came until then, which is taken off what is seen."""
        with trio.move_on_after(_PATIENCE_S):
            while text not in self.seen:
                await trio.lowlevel.wait_readable(self._controller)
                try:
                    part = os.read(self._controller, 4096)
                except OSError:  # EIO: the last process of the terminal is gone
                    part = b""
                assert part, f"the command ended, and {text!r} was never shown; what was: {self.seen}"
                self.seen += self._decoder.decode(part)
        assert text in self.seen, f"{text!r} was never shown; what was: {self.seen!r}"
        before, _, self.seen = self.seen.partition(text)
        return before

    async def ended(self) -> int:
        """Wait for the end; the exit status."""
        with trio.fail_after(_PATIENCE_S):
            return await self.process.wait()


@asynccontextmanager
async def terminal(*arguments: str, environ: Mapping[str, str | None]) -> AsyncIterator[Terminal]:
    """Run ``tessella-p2p`` with ``arguments`` on a terminal; it is killed in the end if it has not left.

    ``environ`` is put over this process's; None takes a variable out of it.
    """
    controller, own = pty.openpty()
    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 50, _WIDTH, 0, 0))
    merged = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **environ}
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "tessella_p2p", *arguments],
        stdin=own,
        stdout=own,
        stderr=own,
        env={name: value for name, value in merged.items() if value is not None},
        preexec_fn=_take_terminal,
        start_new_session=True,
    )
    os.close(own)
    try:
        yield Terminal(process, controller)
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
        os.close(controller)


def _take_terminal() -> None:
    """In the child: Ctrl-C on this terminal is for it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
