"""The baseline of the chain: the same sessions on the whole model in one process, with one compute thread and no network.

Run as a process of its own (``python -m benchmarks.solo MODEL RECIPE``), it answers lines of JSON (see `json_lines`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import trio

from benchmarks.json_lines import answer
from tessella_p2p.base.errors import TessellaError
from tessella_p2p.base.ids import SessionId
from tessella_p2p.base.limits import PREFILL_CHUNK
from tessella_p2p.model.config import ModelConfig
from tessella_p2p.model.gguf import GgufFile
from tessella_p2p.model.recipe import recipe_named
from tessella_p2p.stages.engine import Sampled, SessionKey, StepInput
from tessella_p2p.stages.loading import load_engine
from tessella_p2p.stages.sampler import Sampler
from tessella_p2p.stages.service import StageService
from tessella_p2p.wire.frames import DType
from tessella_p2p.wire.messages import Sampling


async def _generate(
    service: StageService, number: int, prompt: Sequence[int], max_tokens: int, times: list[float]
) -> None:
    """One greedy session, cut into chunks as an entry cuts it; appends the moment of every token."""
    key = SessionKey(SessionId(number.to_bytes(16, "big")), 0)
    sampler = Sampler(Sampling())
    await service.open(key, len(prompt) + max_tokens)
    ids, position = list(prompt), 0
    for _ in range(max_tokens):
        for start in range(0, len(ids), PREFILL_CHUNK):
            part = ids[start : start + PREFILL_CHUNK]
            is_last = start + PREFILL_CHUNK >= len(ids)
            body = np.array(part, "<u4").tobytes()
            step = StepInput(key, position, len(part), DType.U32, body, sampler if is_last else None)
            output = (await service.step(step)).output
            if isinstance(output, TessellaError):
                raise output
            position += len(part)
        assert isinstance(output, Sampled)
        times.append(time.perf_counter())
        ids = [output.token_id]
    await service.close(key)


async def _serve(path: Path, recipe: str) -> None:
    with GgufFile.open(path) as file:
        layers = ModelConfig.from_gguf(file).all_layers
    engine = await trio.to_thread.run_sync(partial(load_engine, path, layers, recipe_named(recipe), threads=1))
    service = StageService(engine)
    opened = 0
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        answer({"ready": True})
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            request = json.loads(line)
            times: list[list[float]] = [[] for _ in request["prompts"]]
            async with trio.open_nursery() as sessions:
                for prompt, moments in zip(request["prompts"], times, strict=True):
                    sessions.start_soon(_generate, service, opened, prompt, request["max_tokens"], moments)
                    opened += 1
            answer({"times": times})
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(_serve, Path(sys.argv[1]), sys.argv[2])
