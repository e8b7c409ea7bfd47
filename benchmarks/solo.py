"""The baseline of the chain: the same sessions on the whole model in one process, with one compute thread and no network.

Run as a process of its own (``python -m benchmarks.solo``), it answers lines of JSON on standard input with lines of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import trio

from tessella_p2p.base.ids import LayerRange, SessionId
from tessella_p2p.base.limits import PREFILL_CHUNK
from tessella_p2p.model.artifact import Artifact
from tessella_p2p.model.recipe import recipe_named
from tessella_p2p.stages.engine import Sampled, SessionKey, StepInput
from tessella_p2p.stages.loading import load_engine
from tessella_p2p.stages.sampler import Sampler, SamplingParams
from tessella_p2p.stages.service import StageService
from tessella_p2p.wire.frames import DType

_GREEDY = Sampler(SamplingParams())


async def _generate(
    service: StageService,
    number: int,
    prompt: Sequence[int],
    max_tokens: int,
    times: list[float],
    end_ids: frozenset[int],
) -> None:
    """One greedy session, up to its end token; appends the moment of every token."""
    key = SessionKey(SessionId(number.to_bytes(16, "big")), 0)
    await service.open(key, len(prompt) + max_tokens)
    ids, position = list(prompt), 0
    for _ in range(max_tokens):
        for start in range(0, len(ids), PREFILL_CHUNK):
            part = ids[start : start + PREFILL_CHUNK]
            body = b"".join(token.to_bytes(4, "little") for token in part)
            sample = _GREEDY if start + PREFILL_CHUNK >= len(ids) else None
            result = await service.step(StepInput(key, position, len(part), DType.U32, body, sample))
            position += len(part)
        assert isinstance(result.output, Sampled)
        if result.output.token_id in end_ids:
            break
        times.append(time.perf_counter())
        ids = [result.output.token_id]
    await service.close(key)


async def _serve(path: Path, recipe: str) -> None:
    with Artifact.open(path) as artifact:
        layers, end_ids = LayerRange(0, artifact.config.layers), artifact.tokenizer.end_ids
    engine = await trio.to_thread.run_sync(partial(load_engine, path, layers, recipe_named(recipe), threads=1))
    service = StageService(engine)
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        print(json.dumps({"ready": True}), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            request = json.loads(line)
            times: list[float] = []
            async with trio.open_nursery() as sessions:
                for number, prompt in enumerate(request["prompts"]):
                    sessions.start_soon(_generate, service, number, prompt, request["max_tokens"], times, end_ids)
            print(json.dumps({"times": times}), flush=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(_serve, Path(sys.argv[1]), sys.argv[2])
