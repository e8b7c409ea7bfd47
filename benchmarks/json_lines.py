"""A process of ours that answers lines of JSON on its standard input with lines of JSON on its standard output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio

from benchmarks.results import BenchmarkError

_END_S = 10.0


class JsonLines:
    """The asking side. Create it with `process`."""

    def __init__(self, name: str, process: trio.Process) -> None:
        self._name = name
        self._process = process
        self._unread = bytearray()

    async def ask(self, **request: object) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises:
            BenchmarkError: the process ended.
        """
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send_all(json.dumps(request).encode() + b"\n")
        except trio.BrokenResourceError:
            raise BenchmarkError(f"{self._name} ended with status {await self._process.wait()}") from None
        return await self.line()

    async def line(self) -> dict[str, Any]:
        """The next line that it prints."""
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            received = await self._process.stdout.receive_some()
            if not received:
                raise BenchmarkError(f"{self._name} ended with status {await self._process.wait()}")
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def process(module: str, *arguments: str) -> AsyncIterator[JsonLines]:
    """Run ``python -m module``; what it prints first says that it is ready. It ends with this context."""
    command = [sys.executable, "-m", module, *arguments]
    child = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        lines = JsonLines(" ".join([module, *arguments]), child)
        await lines.line()
        yield lines
    finally:
        with trio.CancelScope(shield=True):
            await child.stdin.aclose()  # it leaves when its input ends
            with trio.move_on_after(_END_S):
                await child.wait()
            if child.poll() is None:
                child.kill()
                await child.wait()
            await child.stdout.aclose()


def requests() -> Iterator[dict[str, Any]]:
    """In the process: the requests, until the other side is gone."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(line: Mapping[str, object]) -> None:
    """In the process: one answer."""
    print(json.dumps(line), flush=True)


def serve(operations: Mapping[str, Callable[..., Mapping[str, object]]]) -> None:
    """In the process: say ready, then answer each request ``{"op": name, **arguments}`` until the other side is gone."""
    answer({"ready": True})
    for request in requests():
        answer(operations[request.pop("op")](**request))
