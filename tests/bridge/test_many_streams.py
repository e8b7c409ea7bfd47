"""Two hundred streams at a time through one server, over a whole entry and a toy stage in real time."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from benchmarks.http_load import port_of, request_bytes
from benchmarks.http_world import SESSIONS, World, world
from simulations.toy_model import ToyText, whole_model_tokens
from tessella_p2p.bridge.server import ServerLimits, serve
from tests.bridge.raw_http import open_unread

STREAMS = 200
TOKENS = 16
GRACE_S = 2.0
PATIENCE_S = 240.0
PROMPTS = [chr(0x100 + index) for index in range(STREAMS)]


@dataclass
class Read:
    """What one client read: the text, and how it ended."""

    text: str = ""
    reason: str | None = None
    error: str | None = None
    done: bool = False
    begun: trio.Event = field(default_factory=trio.Event)

    @property
    def is_complete(self) -> bool:
        return self.done and self.reason == "length" and self.error is None

    @property
    def is_broken_off(self) -> bool:
        return self.done and self.reason is None and self.error == "overloaded"

    def take(self, line: bytes) -> None:
        assert not self.done, line
        data = line.removeprefix(b"data: ")
        if data == b"[DONE]":
            self.done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = chunk["error"]["code"]
            return
        (choice,) = chunk["choices"]
        self.text += choice["delta"].get("content") or ""
        self.reason = choice["finish_reason"]
        if self.text:
            self.begun.set()


async def read_stream(port: int, prompt: str, max_tokens: int, read: Read) -> None:
    """A client that keeps nothing but the text."""
    unread = b""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request_bytes(prompt, max_tokens, stream=True))
        while data := await stream.receive_some(65_536):
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: "):
                    read.take(line)


async def read_all(port: int, max_tokens: int) -> list[Read]:
    reads = [Read() for _ in PROMPTS]
    async with trio.open_nursery() as nursery:
        for prompt, read in zip(PROMPTS, reads, strict=True):
            nursery.start_soon(read_stream, port, prompt, max_tokens, read)
    return reads


def expected(served: World, prompt: str, max_tokens: int) -> str:
    ids = [ord(character) % served.mesh.model.vocabulary for character in prompt]
    return "".join(map(ToyText().push, whole_model_tokens(served.mesh.model, ids, max_tokens)))


@asynccontextmanager
async def served_world(folder: Path, beat_s: float) -> AsyncIterator[tuple[World, int, trio.Event, trio.Event]]:
    """The world, its port, what drains the server, and what says that it has ended."""
    drain, ended = trio.Event(), trio.Event()

    async def main(task_status: trio.TaskStatus[str]) -> None:
        limits = ServerLimits(grace_s=GRACE_S)
        await serve(served.app, "127.0.0.1", 0, drain=drain, limits=limits, task_status=task_status)
        ended.set()

    async with world(folder, beat_s) as served, trio.open_nursery() as nursery:
        url: str = await nursery.start(main)
        yield served, port_of(url), drain, ended
        nursery.cancel_scope.cancel()


async def test_every_stream_is_complete_beside_a_client_that_never_reads(tmp_path: Path) -> None:
    assert STREAMS < SESSIONS
    async with served_world(tmp_path, 0.0) as (served, port, _, _):
        idler = await open_unread(port)
        await idler.send_all(request_bytes("idler", 1000, stream=True))
        texts = [expected(served, prompt, TOKENS) for prompt in PROMPTS]
        with trio.fail_after(PATIENCE_S):
            reads = await read_all(port, TOKENS)
        assert all(read.is_complete for read in reads)
        assert [read.text for read in reads] == texts
        await idler.aclose()


async def test_memory_does_not_grow_with_what_was_streamed(tmp_path: Path) -> None:
    few, many, num_streams, chunk_bytes = 5, 305, 8, 200
    async with served_world(tmp_path, 0.0) as (_, port, _, _):
        held = []
        tracemalloc.start()
        for tokens in (few, few, many):
            with trio.fail_after(PATIENCE_S):
                async with trio.open_nursery() as nursery:
                    for prompt in PROMPTS[:num_streams]:
                        nursery.start_soon(read_stream, port, prompt, tokens, Read())
            gc.collect()
            held.append(held_by_http(tracemalloc.take_snapshot()))
        tracemalloc.stop()
    assert held[2] - held[1] < num_streams * (many - few) * chunk_bytes / 4


def held_by_http(snapshot: tracemalloc.Snapshot) -> int:
    """Bytes that the HTTP surface made and that are still there: what the mesh keeps for auditors and prefixes is another matter."""
    makers = ("*/tessella_p2p/bridge/*", "*/hypercorn/*", "*/h11/*", "*/starlette/*")
    made = snapshot.filter_traces([tracemalloc.Filter(inclusive=True, filename_pattern=maker) for maker in makers])
    return sum(statistic.size for statistic in made.statistics("filename"))


async def test_a_drain_ends_each_open_stream_completely_or_with_an_error_event(tmp_path: Path) -> None:
    async with served_world(tmp_path, 0.01) as (served, port, drain, ended):
        reads = [Read() for _ in PROMPTS]
        async with trio.open_nursery() as nursery:
            for index, (prompt, read) in enumerate(zip(PROMPTS, reads, strict=True)):
                tokens = 1900 if index % 2 else 3
                nursery.start_soon(read_stream, port, prompt, tokens, read)
            with trio.fail_after(PATIENCE_S):
                for read in reads:
                    await read.begun.wait()
                drain.set()
                await ended.wait()
        assert all(read.is_complete for read in reads[::2])
        assert all(read.is_complete or read.is_broken_off for read in reads)
        assert any(read.is_broken_off for read in reads)
        for prompt, read in zip(PROMPTS, reads[:20], strict=False):
            assert expected(served, prompt, read.text.count(" ")) == read.text
        with trio.fail_after(PATIENCE_S):
            await served.entry.idle()
