"""Sessions over a mesh of real processes, as a client of its HTTP bridge sees them.

The client shares the machine with what it measures, so it does next to nothing while it runs: it notes when bytes come, and reads them
when all is over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import trio

from benchmarks.http_events import data_of
from benchmarks.results import BenchmarkError

_TIMEOUT_S = 600.0
_RECEIVE_BYTES = 65_536


@dataclass(slots=True)
class Answer:
    """One generation: the moment of the request, those of its tokens, and what the node said of it at its end."""

    asked_at: float = 0.0
    times: list[float] = field(default_factory=list)
    extension: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        """From the request to the first token."""
        return self.times[0] - self.asked_at


async def generate(url: str, model: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
    """All ``prompts`` at the same time, greedy, streamed.

    Raises:
        BenchmarkError: a generation failed, or had no token.
    """
    answers = [Answer() for _ in prompts]
    pieces: list[list[tuple[float, bytes]]] = [[] for _ in prompts]
    with trio.fail_after(_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for prompt, answer, received in zip(prompts, answers, pieces, strict=True):
                body = {"model": model, "prompt_ids": list(prompt), "max_tokens": max_tokens}
                body |= {"stream": True, "tessella": True}
                nursery.start_soon(_ask, url, json.dumps(body).encode(), answer, received)
    for answer, received in zip(answers, pieces, strict=True):
        _read(answer, received)
    return answers


async def _ask(url: str, body: bytes, answer: Answer, received: list[tuple[float, bytes]]) -> None:
    target = urlsplit(url)
    assert target.hostname is not None
    head = (
        f"POST /v1/generate HTTP/1.1\r\nHost: {target.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    async with await trio.open_tcp_stream(target.hostname, target.port or 80) as stream:
        answer.asked_at = time.perf_counter()
        await stream.send_all(head.encode() + body)
        while data := await stream.receive_some(_RECEIVE_BYTES):
            received.append((time.perf_counter(), bytes(data)))


def _read(answer: Answer, received: Sequence[tuple[float, bytes]]) -> None:
    for at, data in data_of(received):
        if data == b"[DONE]":
            break
        chunk = json.loads(data)
        if "error" in chunk:
            raise BenchmarkError(f"a generation failed: {chunk['error']}")
        answer.times += [at] * len(chunk["token_ids"])
        answer.extension = chunk.get("tessella") or answer.extension
    if not answer.times:
        raise BenchmarkError("a generation ended without a token")
