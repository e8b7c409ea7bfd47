"""Sessions over a mesh of real processes, as a client of its HTTP bridge sees them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import trio

from benchmarks.results import BenchmarkError

_TIMEOUT_S = 600.0


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
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client, trio.open_nursery() as nursery:
        for prompt, answer in zip(prompts, answers, strict=True):
            body = {"model": model, "prompt_ids": list(prompt), "max_tokens": max_tokens, "stream": True}
            nursery.start_soon(_stream, client, f"{url}/v1/generate", body, answer)
    return answers


async def _stream(client: httpx.AsyncClient, url: str, body: dict[str, Any], answer: Answer) -> None:
    answer.asked_at = time.perf_counter()
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            said = (await response.aread()).decode(errors="replace")
            raise BenchmarkError(f"the mesh answered {response.status_code}: {said}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise BenchmarkError(f"a generation failed: {chunk['error']}")
            answer.times += [time.perf_counter()] * len(chunk["token_ids"])
            answer.extension = chunk.get("tessella") or answer.extension
    if not answer.times:
        raise BenchmarkError("a generation ended without a token")
