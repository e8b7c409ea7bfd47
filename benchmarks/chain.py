"""Group ``chain``: tokens a second of chains of stages, against the same sessions in one process, and what a hop adds.

Solo and chain take turns, so that each ratio compares neighbours in time. One session and eight; every process has one compute thread.
A chain of two has an ideal of 2 with many sessions, and of 1 with one: one session never uses both stages at the same time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import trio

from benchmarks.results import Result, of_runs, ratio_of_runs
from tessella_p2p.cli.demo_mesh import MeshPlan, run_mesh
from tessella_p2p.model.recipe import DEFAULT_RECIPE
from tessella_p2p.weights.store import default_models_dir, resolve

MODEL = "smollm2-135m-instruct"
ROUNDS = 3
MAX_TOKENS = 48
_HEALTHY_S = 300.0
_BASE_PROMPT = (
    1,
    9690,
    198,
    2683,
    359,
    253,
    5356,
    5646,
    11173,
    3365,
    3511,
    308,
    34519,
    28,
    7018,
    411,
    407,
    19712,
    8182,
    2,
)


def prompts(count: int) -> list[list[int]]:
    """``count`` prompts of 40 tokens that differ."""
    return [[*_BASE_PROMPT, *(1000 + 37 * number + step for step in range(20))] for number in range(count)]


def _decode_rate(times: Sequence[float], sessions: int) -> float:
    """Tokens a second after every session has its first token."""
    ordered = sorted(times)
    return (len(ordered) - sessions) / (ordered[-1] - ordered[sessions - 1])


class Solo:
    """The baseline's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    async def rate(self, sessions: int) -> float:
        """Tokens a second with so many sessions."""
        answer = await self._ask({"prompts": prompts(sessions), "max_tokens": MAX_TOKENS})
        return _decode_rate(answer["times"], sessions)

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return await self.line()

    async def line(self) -> dict[str, Any]:
        """The next line that it prints."""
        assert self._process.stdout is not None
        line = await trio.to_thread.run_sync(self._process.stdout.readline)
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def _solo(model: Path, recipe: str) -> AsyncIterator[Solo]:
    command = [sys.executable, "-m", "benchmarks.solo", str(model), recipe]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220 - it is read on threads
        solo = Solo(process)
        try:
            await solo.line()
            yield solo
        finally:
            assert process.stdin is not None
            process.stdin.close()


async def _chain_rate(url: str, sessions: int) -> tuple[float, float]:
    """Tokens a second over a mesh, and the median milliseconds that a transfer adds."""
    firsts: list[float] = []
    last, tokens, added = 0.0, 0, 0.0

    async def ask(client: httpx.AsyncClient, prompt: list[int]) -> None:
        nonlocal last, tokens, added
        body = {"model": MODEL, "prompt_ids": prompt, "max_tokens": MAX_TOKENS, "stream": True}
        seen_first = False
        async with client.stream("POST", f"{url}/v1/generate", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if not seen_first:
                    seen_first = True
                    firsts.append(time.perf_counter())
                chunk = json.loads(line.removeprefix("data: "))
                if chunk.get("tessella"):
                    last = max(last, time.perf_counter())
                    tokens += len(chunk["tessella"]["token_ids"])
                    added = chunk["tessella"]["timings"]["hop_added_ms_p50"]

    async with httpx.AsyncClient(timeout=600.0) as client, trio.open_nursery() as nursery:
        for prompt in prompts(sessions):
            nursery.start_soon(ask, client, prompt)
    return (tokens - sessions) / (last - max(firsts)), added


@dataclass
class _Runs:
    """Rates of one mesh, run by run, each beside the solo run before it."""

    solo_1: list[float] = field(default_factory=list)
    solo_8: list[float] = field(default_factory=list)
    chain_1: list[float] = field(default_factory=list)
    chain_8: list[float] = field(default_factory=list)
    added_ms: list[float] = field(default_factory=list)


async def _measure(model: Path, workers: int, recipe: str) -> _Runs:
    runs = _Runs()
    with tempfile.TemporaryDirectory(prefix="tessella-bench-") as home:
        plan = MeshPlan(home=Path(home), model=str(model), workers=workers, recipe=recipe, log_level="warning")
        async with _solo(model, recipe) as solo, run_mesh(plan) as mesh:
            await mesh.wait_healthy(_HEALTHY_S)
            for warm_up in (True, *(False,) * ROUNDS):
                solo_1, (chain_1, added) = await solo.rate(1), await _chain_rate(mesh.entry_url, 1)
                solo_8, (chain_8, _) = await solo.rate(8), await _chain_rate(mesh.entry_url, 8)
                if warm_up:
                    continue
                for runs_of, value in (
                    (runs.solo_1, solo_1),
                    (runs.solo_8, solo_8),
                    (runs.chain_1, chain_1),
                    (runs.chain_8, chain_8),
                    (runs.added_ms, added),
                ):
                    runs_of.append(value)
    return runs


async def run(recipe: str = DEFAULT_RECIPE) -> list[Result]:
    """Measure chains of two and three stages."""
    model = resolve(MODEL, default_models_dir())
    results: list[Result] = []
    for workers, word in ((2, "two"), (3, "three")):
        print(f"chain: {word} stages, {recipe}", file=sys.stderr)
        runs = await _measure(model, workers, recipe)
        note = f"{recipe}, greedy, prompts of 40 tokens, {MAX_TOKENS} tokens"
        if workers == 2:
            results.append(
                of_runs("chain.solo_tok_s", "tok/s", runs.solo_1, f"whole model, one process, one thread; {note}")
            )
            results.append(
                of_runs("chain.solo_8_tok_s", "tok/s", runs.solo_8, "the same with eight sessions, in total")
            )
        name = f"chain.{word}_stage"
        ideal = f"ideal {workers} with many sessions and as many cores"
        results += [
            of_runs(f"{name}_1_tok_s", "tok/s", runs.chain_1, f"{workers} processes, one session; {note}"),
            of_runs(f"{name}_8_tok_s", "tok/s", runs.chain_8, f"{workers} processes, eight sessions, in total"),
            ratio_of_runs(
                f"{name}_1_vs_solo", runs.chain_1, runs.solo_1, "ideal 1: one session uses one stage at a time"
            ),
            ratio_of_runs(f"{name}_8_vs_solo", runs.chain_8, runs.solo_8, ideal),
        ]
        if workers == 2:
            note = "one session: (step − sum of stage compute) / transfers"
            results.append(of_runs("net.hop_added_ms_p50", "ms", runs.added_ms, note))
    return results
