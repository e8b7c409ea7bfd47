"""The server of the ``http`` group: ``python -m benchmarks.http_process BEAT_S`` serves until its standard input ends.

It answers lines of JSON: where it listens, what it has used, when tokens were drawn; and it takes the entry's answers itself, without
HTTP, so that what HTTP costs is the difference. Beside it listens a bare socket server, the physical limit.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import trio

from benchmarks.http_world import BARE_CHUNK, MODEL, World, world
from benchmarks.json_lines import answer
from benchmarks.net_wire import quiet
from tessella_p2p.bridge.server import serve
from tessella_p2p.entry.api import Delta, GenerateRequest

_ASKED_BYTES = 64


class Operations:
    """What may be asked of the process, by name."""

    def __init__(self, served: World, url: str, bare_port: int) -> None:
        self._world = served
        self._told = {"url": url, "bare_port": bare_port}

    async def where(self) -> Mapping[str, object]:
        """Where it listens."""
        return self._told

    async def used(self) -> Mapping[str, object]:
        """Seconds of CPU so far, and MiB of memory now."""
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: ASYNC230 - it is no disk
            pages = int(statm.read().split()[1])
        rss_mib = pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
        return {"cpu_s": time.process_time(), "rss_mib": rss_mib}

    async def consume(self, prompts: list[str], max_tokens: int) -> Mapping[str, object]:
        """Take the answers to ``prompts``, all at the same time, without HTTP; says how many tokens came, and the CPU that it took."""
        began_cpu_s = time.process_time()
        counts: list[int] = []
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(self._take, prompt, max_tokens, counts)
        return {"tokens": sum(counts), "cpu_s": time.process_time() - began_cpu_s}

    async def _take(self, prompt: str, max_tokens: int, counts: list[int]) -> None:
        request = GenerateRequest(MODEL, messages=({"role": "user", "content": prompt},), max_tokens=max_tokens)
        async with self._world.entry.generate(request) as generation, aclosing(generation.events()) as events:
            counts.append(sum([len(each.token_ids) async for each in events if isinstance(each, Delta)]))

    async def draws(self) -> Mapping[str, object]:
        """When the tokens of each prompt were drawn, since this was asked last."""
        drawn = {prompt: list(times) for prompt, times in self._world.draws.of_prompt.items()}
        self._world.draws.forget()
        return {"draws": drawn}


async def _bare(stream: trio.SocketStream) -> None:
    """A client asks for so many chunks, with so long between them: the moments of sending come behind them."""
    async with stream:
        try:
            asked = bytes(await stream.receive_some(_ASKED_BYTES))
            count, pause_s = asked.split()
            times = []
            for _ in range(int(count)):
                if float(pause_s):
                    await trio.sleep(float(pause_s))
                times.append(time.monotonic())
                await stream.send_all(BARE_CHUNK)
            await stream.send_all(",".join(map(str, times)).encode())
        except trio.BrokenResourceError:
            pass


async def _serve(beat_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix="tessella-bench-") as folder:
        async with world(Path(folder), beat_s=beat_s) as served, trio.open_nursery() as nursery:
            url: str = await nursery.start(partial(serve, served.app, "127.0.0.1", 0))
            listeners = await nursery.start(partial(trio.serve_tcp, _bare, 0, host="127.0.0.1"))
            operations = Operations(served, url, listeners[0].socket.getsockname()[1])
            gc.freeze()  # as a daemon does once it is up
            answer({"ready": True})
            await _answer_lines(operations)
            nursery.cancel_scope.cancel()


async def _answer_lines(operations: Operations) -> None:
    while line := await trio.to_thread.run_sync(sys.stdin.readline):
        request: dict[str, Any] = json.loads(line)
        answer(await getattr(operations, request.pop("op"))(**request))


if __name__ == "__main__":
    quiet()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # its output is for answers
    trio.run(_serve, float(sys.argv[1]))
