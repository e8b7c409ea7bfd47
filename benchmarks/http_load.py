"""Clients of the ``http`` group: raw sockets that note when bytes come, and read them when all is over."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import trio

from benchmarks.http_events import data_of
from benchmarks.http_world import BARE_CHUNK, MODEL
from benchmarks.results import BenchmarkError

_RECEIVE_BYTES = 65_536
_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Streamed:
    """One streamed chat.

    Attributes:
        asked_at: before the connection was made; seconds of the machine's monotonic clock, as all moments here.
        tokens: when each token came.
        complete: whether it ended as a stream has to.
    """

    asked_at: float
    tokens: list[float] = field(default_factory=list)
    complete: bool = False


def request_bytes(prompt: str, max_tokens: int, *, stream: bool, close: bool = True) -> bytes:
    """A chat request as it goes over the wire."""
    message = {"role": "user", "content": prompt}
    body = json.dumps({"model": MODEL, "messages": [message], "max_tokens": max_tokens, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + (b"Connection: close\r\n\r\n" if close else b"\r\n") + body


def port_of(url: str) -> int:
    """The port of a URL that has one."""
    port = urlsplit(url).port
    assert port is not None
    return port


async def stream_all(url: str, prompts: Sequence[str], max_tokens: int) -> list[Streamed]:
    """All ``prompts`` at the same time.

    Raises:
        BenchmarkError: one was refused, or broke.
    """
    received: list[list[tuple[float, bytes]]] = [[] for _ in prompts]
    answers = [Streamed(0.0) for _ in prompts]
    with trio.fail_after(_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for prompt, answer, pieces in zip(prompts, answers, received, strict=True):
                request = request_bytes(prompt, max_tokens, stream=True)
                nursery.start_soon(_stream, port_of(url), request, answer, pieces)
    for answer, pieces in zip(answers, received, strict=True):
        _read(answer, pieces)
        if not answer.complete:
            raise BenchmarkError(f"a stream broke off behind {len(answer.tokens)} tokens")
    return answers


async def _stream(port: int, request: bytes, answer: Streamed, pieces: list[tuple[float, bytes]]) -> None:
    answer.asked_at = time.monotonic()
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request)
        while data := await stream.receive_some(_RECEIVE_BYTES):
            pieces.append((time.monotonic(), bytes(data)))


def _read(answer: Streamed, pieces: Sequence[tuple[float, bytes]]) -> None:
    """What the pieces say, token by token: a toy's tokens are words."""
    for at, data in data_of(pieces):
        if data == b"[DONE]":
            answer.complete = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise BenchmarkError(f"a stream failed: {chunk['error']}")
        answer.tokens += [at] * (chunk["choices"][0]["delta"].get("content") or "").count(" ")


async def whole_all(url: str, prompts: Sequence[str], each: int, max_tokens: int) -> float:
    """Requests a second: every prompt has a connection of its own, and asks ``each`` times, one answer after the other.

    Raises:
        BenchmarkError: one was refused.
    """
    began = time.monotonic()
    with trio.fail_after(_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                request = request_bytes(prompt, max_tokens, stream=False, close=False)
                nursery.start_soon(_ask, port_of(url), request, each)
    return len(prompts) * each / (time.monotonic() - began)


async def _ask(port: int, request: bytes, times: int) -> None:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        for _ in range(times):
            await stream.send_all(request)
            received = b""
            while not received.endswith(b"}"):  # the answer is one JSON object, and comes in one write
                data = await stream.receive_some(_RECEIVE_BYTES)
                if not data:
                    raise BenchmarkError("the server ended a connection")
                received += data
            if not received.startswith(b"HTTP/1.1 200 "):
                raise BenchmarkError(f"the server answered {received[:400].decode(errors='replace')}")


async def bare_all(port: int, clients: int, chunks: int, pause_s: float) -> list[float]:
    """What bare sockets take: for each chunk the seconds from its sending to its arrival."""
    taken: list[float] = []
    with trio.fail_after(_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for _ in range(clients):
                nursery.start_soon(_take_bare, port, chunks, pause_s, taken)
    return taken


async def _take_bare(port: int, chunks: int, pause_s: float, taken: list[float]) -> None:
    arrivals: list[float] = []
    received = bytearray()
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(f"{chunks} {pause_s}".encode())
        while data := await stream.receive_some(_RECEIVE_BYTES):
            received += data
            whole = min(len(received) // len(BARE_CHUNK), chunks)
            arrivals += [time.monotonic()] * (whole - len(arrivals))
    sent = map(float, received[chunks * len(BARE_CHUNK) :].decode().split(","))
    taken += [came - went for came, went in zip(arrivals, sent, strict=True)]
