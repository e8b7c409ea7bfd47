"""Group ``engine``: the whole model in one process with one compute thread, beside llama.cpp on the same file with one thread.

Ours and theirs take turns, so that each ratio compares neighbours in time. What one core of this machine can do is measured in the
same rounds, and stands beside each figure.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import trio

from benchmarks import json_lines, stage_memory
from benchmarks.engine_process import PLAIN
from benchmarks.json_lines import JsonLines
from benchmarks.llama_cpp import LlamaCpp
from benchmarks.results import BenchmarkError, Result, of_runs, ratio_of_runs
from benchmarks.stage_memory import StageMemory
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import MIB
from tessella_p2p.model.config import ModelConfig
from tessella_p2p.model.gguf import GgufFile
from tessella_p2p.model.recipe import DEFAULT_RECIPE
from tessella_p2p.weights.store import default_models_dir, resolve

MODEL = "smollm2-135m-instruct"
EXPANDED_RECIPE = "torch-f32"
"""Bit-identical on the same expanded float32 weights as the plain form: the price without the gain of small weights."""
PREFILL_TOKENS = 512
PROMPT_TOKENS = 128
DECODE_TOKENS = 32
_FEW_TOKENS = 12
"""Enough for the forms that are there for a ratio of ours to ours."""
_BATCHES = (1, 8)
_OVERHEAD_BYTES = 150 * MIB

Report = Callable[[str], None]


@dataclass(slots=True)
class Runs:
    """What was measured.

    Attributes:
        of: figures by name, run by run. Those of a form are tokens a second; ``bytes_s`` and ``flop_s`` are the machine's.
        weight_bytes: stored bytes of all matrices of the model, which one decode step reads.
        layer_flop: operations of one token in the layers' matrices.
        head_flop: those in the head's.
    """

    of: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    weight_bytes: int = 0
    layer_flop: int = 0
    head_flop: int = 0


async def _form_run(runs: Runs, name: str, form: JsonLines, seed: int, decode_tokens: int) -> None:
    """One run of one of our forms; tokens a second."""
    took = await form.ask(op="prefill", tokens=PREFILL_TOKENS, seed=seed)
    runs.of[f"{name} prefill"].append(PREFILL_TOKENS / took["seconds"])
    for batch in _BATCHES:
        took = await form.ask(op="decode", sequences=batch, prompt=PROMPT_TOKENS, tokens=decode_tokens, seed=seed)
        runs.of[f"{name} b{batch}"].append(batch * decode_tokens / took["seconds"])


async def _llama_run(runs: Runs, llama: LlamaCpp, model: Path) -> None:
    runs.of["llama prefill"].append(await llama.prefill_tok_s(model, PREFILL_TOKENS, threads=1))
    rows = await llama.batched(model, sequences=_BATCHES, prompt=PROMPT_TOKENS, generate=DECODE_TOKENS, threads=1)
    for batch in _BATCHES:
        runs.of[f"llama b{batch}"].append(rows[batch].decode_tok_s)


async def _limits_run(runs: Runs, plain: JsonLines) -> None:
    limits = await plain.ask(op="limits")
    runs.of["bytes_s"].append(limits["bytes_s"])
    runs.of["flop_s"].append(limits["flop_s"])
    runs.weight_bytes, runs.layer_flop = limits["weight_bytes"], limits["layer_flop"]
    runs.head_flop = limits["head_flop"]


async def _measure(model: Path, recipe: str, llama: LlamaCpp | None, rounds: int, report: Report) -> Runs:
    runs = Runs()
    async with (
        json_lines.process("benchmarks.engine_process", str(model), recipe) as ours,
        json_lines.process("benchmarks.engine_process", str(model), EXPANDED_RECIPE) as expanded,
        json_lines.process("benchmarks.engine_process", str(model), PLAIN) as plain,
    ):
        for number in range(rounds):
            report(f"engine: round {number + 1} of {rounds}")
            await _form_run(runs, "ours", ours, number, DECODE_TOKENS)
            if llama is not None:
                await _llama_run(runs, llama, model)
            await _limits_run(runs, plain)
            await _form_run(runs, "plain", plain, number, _FEW_TOKENS)
            await _form_run(runs, "expanded", expanded, number, _FEW_TOKENS)
    return runs


# ---- speed


def speed_results(runs: Runs, recipe: str) -> list[Result]:
    """Ours in tokens a second, the limits, and the ratios to llama.cpp where it was measured."""
    where = {
        "prefill": ("prefill512", f"{PREFILL_TOKENS} prompt tokens"),
        "b1": ("decode_b1", f"one session at {PROMPT_TOKENS} to {PROMPT_TOKENS + DECODE_TOKENS} positions"),
        "b8": ("decode_b8", "eight such sessions in total"),
    }
    bounds = limit_tok_s(runs)
    results = []
    for key, (word, what) in where.items():
        ours, bound = runs.of[f"ours {key}"], bounds[key]
        note = f"{recipe}, one thread, greedy draw included; {what}; {median(ours) / median(bound):.0%} of the limit"
        results.append(of_runs(f"engine.{word}_tok_s", "tok/s", ours, note))
        results.append(of_runs(f"engine.{word}_limit_tok_s", "tok/s", bound, _LIMIT_NOTES[key]))
        if theirs := runs.of.get(f"llama {key}"):
            results.append(
                of_runs(f"engine.{word}_llamacpp_tok_s", "tok/s", theirs, f"llama.cpp, one thread, same file; {what}")
            )
            results.append(ratio_of_runs(f"engine.{word}_vs_llamacpp", ours, theirs, "same file, one thread each"))
    gb_s, gflop_s = ([run / 1e9 for run in runs.of[key]] for key in ("bytes_s", "flop_s"))
    return [
        *results,
        of_runs("engine.bandwidth_gb_s", "GB/s", gb_s, "one thread sums 256 MiB: what memory gives one core"),
        of_runs("engine.f32_gflop_s", "GFLOP/s", gflop_s, "one thread, torch float32 product of square matrices"),
    ]


_LIMIT_NOTES = {
    "prefill": "physical limit: FLOP/s of this run over the multiplications of the layers",
    "b1": "physical limit: bandwidth of this run over the stored bytes of all matrices",
    "b8": "physical limit: the lesser of eight sessions per pass over the weights, and FLOP/s",
}


def limit_tok_s(runs: Runs) -> dict[str, list[float]]:
    """Upper bounds from this run's bandwidth and float32 FLOP/s, run by run; attention and KV are not counted."""
    bandwidth, flop_s = runs.of["bytes_s"], runs.of["flop_s"]
    token_flop = runs.layer_flop + runs.head_flop
    return {
        "prefill": [flops / (runs.layer_flop + runs.head_flop / PREFILL_TOKENS) for flops in flop_s],
        "b1": [rate / runs.weight_bytes for rate in bandwidth],
        "b8": [
            min(8 * rate / runs.weight_bytes, flops / token_flop) for rate, flops in zip(bandwidth, flop_s, strict=True)
        ],
    }


# ---- price


def price_results(runs: Runs, recipe: str) -> list[Result]:
    """Time of the bit-identical form over the plain one. The headline is the dearest of prefill and both decodes."""
    results = []
    for form, suffix, what in (
        ("ours", "", f"{recipe} (weights as stored)"),
        ("expanded", "_expanded", f"{EXPANDED_RECIPE} (expanded weights, blocked sums)"),
    ):
        against = "over plain torch float32 (F.linear, SDPA, the same numbers expanded), one thread"
        prices = [
            ratio_of_runs(
                f"engine.bit_identity_price{suffix}_{word}",
                runs.of[f"plain {key}"],
                runs.of[f"{form} {key}"],
                f"time of {what} {against}; {word.replace('_', ' ')}",
            )
            for key, word in (("prefill", "prefill512"), ("b1", "decode_b1"), ("b8", "decode_b8"))
        ]
        if form == "ours":
            worst = max(prices, key=lambda price: price.value)
            note = f"the dearest of the three: {worst.note}"
            results.append(Result("engine.bit_identity_price", worst.value, "ratio", worst.runs, note))
        results += prices
    return results


# ---- memory


async def _memory(model: Path, recipe: str) -> Result:
    """The worse of both halves of the model, each in a fresh process."""
    with GgufFile.open(model) as file:
        total = ModelConfig.from_gguf(file).layers
    measured = [
        await _stage_memory(model, recipe, layers)
        for layers in (LayerRange(0, total // 2), LayerRange(total // 2, total))
    ]
    return memory_result(measured, recipe)


async def _stage_memory(model: Path, recipe: str, layers: LayerRange) -> StageMemory:
    command = [sys.executable, "-m", stage_memory.__name__, str(model), recipe, str(layers.start), str(layers.end)]
    ended = await trio.run_process(command, capture_stdout=True, check=False)
    if ended.returncode:
        raise BenchmarkError(f"the stage whose memory is measured ended with status {ended.returncode}")
    return StageMemory(**json.loads(ended.stdout))


def memory_result(stages: list[StageMemory], recipe: str) -> Result:
    """Peak resident set over (stored bytes + KV in use + 150 MiB); the value is the worst stage's."""
    ratios = [stage.peak / (stage.tensors + stage.kv + _OVERHEAD_BYTES) for stage in stages]
    worst = stages[ratios.index(max(ratios))]
    sessions = f"{stage_memory.SESSIONS} sessions of {stage_memory.PROMPT_TOKENS} tokens"
    note = (
        f"{recipe}: peak resident set of a fresh process, everything counted ({worst.peak / MIB:.0f} MiB; before the engine "
        f"{worst.before / MIB:.0f}), over the stage's bytes in the file ({worst.tensors / MIB:.0f}) + KV in use "
        f"({worst.kv / MIB:.0f}) + 150 MiB; {sessions}; the worse half of the model"
    )
    return Result(
        "engine.peak_memory_vs_bytes", round(max(ratios), 4), "ratio", tuple(round(r, 4) for r in ratios), note
    )


async def run(rounds: int, report: Report) -> list[Result]:
    """Measure. Without llama.cpp what is compared with it is left out."""
    model = resolve(MODEL, default_models_dir())
    llama = await LlamaCpp.prepare_or_none(report)
    report(f"engine: {DEFAULT_RECIPE}, one thread")
    runs = await _measure(model, DEFAULT_RECIPE, llama, rounds, report)
    memory = await _memory(model, DEFAULT_RECIPE)
    return [*speed_results(runs, DEFAULT_RECIPE), *price_results(runs, DEFAULT_RECIPE), memory]
