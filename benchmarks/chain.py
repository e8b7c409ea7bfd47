"""Group ``chain``: two stages on two cores, a mesh of real processes, beside the same sessions in one process and beside llama.cpp.

Solo, chain, llama.cpp over RPC (two servers of one thread, the same file) and llama.cpp's best on this machine (one process, two
threads, Q4_0) take turns, so that each ratio compares neighbours in time. Every process of ours has one compute thread. One session
never uses both stages at the same time, so its ideal against solo is 1; with many it is the sum of the stages over the longer one.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import json_lines, mesh_client
from benchmarks.json_lines import JsonLines
from benchmarks.llama_cpp import LlamaCpp
from benchmarks.results import BenchmarkError, Result, of_runs, ratio_of_runs
from benchmarks.token_runs import decode_rate, prompts
from tessella_p2p.cli.demo_mesh import Mesh, MeshPlan, run_mesh
from tessella_p2p.model.recipe import DEFAULT_RECIPE
from tessella_p2p.weights.store import default_models_dir, resolve

MODEL = "smollm2-135m-instruct"
STAGES = 2
PROMPT_TOKENS = 128
MAX_TOKENS = 96
LONG_PROMPT_TOKENS = 512
BEST_LOCAL = "Q4_0"
_SESSIONS = (1, 3, 8)
_RPC_SEQUENCES = (1, 8)
_ATTEMPTS = 8
_WARM_UP_TOKENS = 16
_HEALTHY_S = 300.0

Report = Callable[[str], None]


@dataclass
class _Peers:
    """llama.cpp, ready to be measured."""

    llama: LlamaCpp
    rpc: Sequence[str]
    requantised: Path


@dataclass
class _Runs:
    """Figures by name, run by run, and the last single session's stages."""

    of: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    route: Sequence[Mapping[str, Any]] = ()


async def _round(runs: _Runs, model: Path, solo: JsonLines, mesh: Mesh, peers: _Peers | None, seed: int) -> None:
    """One round: every figure once, what is compared side by side."""
    long_prompt = prompts(1, LONG_PROMPT_TOKENS, seed)
    (answer,) = await mesh_client.generate(mesh.entry_url, MODEL, long_prompt, 1)
    runs.of["ttft"].append(answer.ttft_s)
    if peers is not None:
        rows = await peers.llama.batched(
            model, sequences=(1,), prompt=LONG_PROMPT_TOKENS, generate=1, threads=1, rpc=peers.rpc
        )
        runs.of["rpc ttft"].append(rows[1].prefill_s)
    for sessions in _SESSIONS:
        asked, answers = await _whole_answers(mesh, sessions, seed)
        runs.of[f"chain {sessions}"].append(decode_rate([answer.times for answer in answers]))
        times = (await solo.ask(prompts=asked, max_tokens=MAX_TOKENS))["times"]
        runs.of[f"solo {sessions}"].append(decode_rate(times))
        if sessions == 1:
            runs.of["added"].append(answers[0].extension["timings"]["hop_added_ms_p50"])
            runs.route = answers[0].extension["route"]
    if peers is not None:
        await _peers_round(runs, model, peers)


async def _whole_answers(mesh: Mesh, sessions: int, seed: int) -> tuple[list[list[int]], list[mesh_client.Answer]]:
    """Sessions that decode all their tokens; where one of them draws an end token on the way, other prompts are taken."""
    for attempt in range(_ATTEMPTS):
        asked = prompts(sessions, PROMPT_TOKENS, seed + 1000 * attempt)
        answers = await mesh_client.generate(mesh.entry_url, MODEL, asked, MAX_TOKENS)
        if all(len(answer.times) == MAX_TOKENS for answer in answers):
            return asked, answers
    raise BenchmarkError(f"{_ATTEMPTS} sets of {sessions} prompts had answers that ended before {MAX_TOKENS} tokens")


async def _peers_round(runs: _Runs, model: Path, peers: _Peers) -> None:
    rows = await peers.llama.batched(
        model, sequences=_RPC_SEQUENCES, prompt=PROMPT_TOKENS, generate=MAX_TOKENS, threads=1, rpc=peers.rpc
    )
    for sequences in _RPC_SEQUENCES:
        runs.of[f"rpc {sequences}"].append(rows[sequences].decode_tok_s)
    best = await peers.llama.batched(
        peers.requantised, sequences=(8,), prompt=PROMPT_TOKENS, generate=MAX_TOKENS, threads=STAGES
    )
    runs.of["best 8"].append(best[8].decode_tok_s)


async def _measure(model: Path, recipe: str, llama: LlamaCpp | None, rounds: int, report: Report) -> _Runs:
    runs = _Runs()
    async with AsyncExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="tessella-bench-"))
        plan = MeshPlan(home=Path(home), model=str(model), workers=STAGES, recipe=recipe, log_level="warning")
        solo = await stack.enter_async_context(json_lines.process("benchmarks.solo", str(model), recipe))
        mesh = await stack.enter_async_context(run_mesh(plan))
        await mesh.wait_healthy(_HEALTHY_S)
        peers = None
        if llama is not None:
            rpc = await stack.enter_async_context(llama.rpc_servers(STAGES))
            peers = _Peers(llama, rpc, await llama.requantised(model, BEST_LOCAL, report))
        report("chain: warming up")
        short = prompts(max(_SESSIONS), _WARM_UP_TOKENS, rounds)
        await mesh_client.generate(mesh.entry_url, MODEL, short, _WARM_UP_TOKENS)
        await solo.ask(prompts=short, max_tokens=_WARM_UP_TOKENS)
        for number in range(rounds):
            report(f"chain: round {number + 1} of {rounds}")
            await _round(runs, model, solo, mesh, peers, number)
    return runs


def split_note(route: Sequence[Mapping[str, Any]]) -> str:
    """Which layers each stage has, its compute for a step of one session, and what the pair can reach at best."""
    stages = ", ".join(f"layers {hop['layers'][0]}–{hop['layers'][1]} {hop['compute_ms']:.2f} ms" for hop in route)
    times = [hop["compute_ms"] for hop in route]
    ideal = sum(times) / max(times) if times and max(times) > 0 else float(len(route))
    return f"a step's compute: {stages}: ideal {ideal:.2f} with many sessions"


def results_of(runs: _Runs, recipe: str) -> list[Result]:
    """The figures of the group; those beside llama.cpp where it was measured."""
    note = f"{recipe}, greedy, prompts of {PROMPT_TOKENS} tokens, while all sessions decode"
    results = []
    for sessions in _SESSIONS:
        solo, chain = runs.of[f"solo {sessions}"], runs.of[f"chain {sessions}"]
        results += [
            of_runs(f"chain.solo_{sessions}_tok_s", "tok/s", solo, f"one process, one thread; {note}"),
            of_runs(f"chain.two_stage_{sessions}_tok_s", "tok/s", chain, f"{STAGES} processes, over HTTP; {note}"),
            ratio_of_runs(f"chain.two_stage_{sessions}_vs_solo", chain, solo, split_note(runs.route)),
        ]
    added_note = "one session in the mesh: (step − sum of stage compute) / transfers"
    ttft_ms = [1e3 * seconds for seconds in runs.of["ttft"]]
    results += [
        of_runs("chain.hop_added_ms_p50", "ms", runs.of["added"], added_note),
        of_runs("chain.ttft512_ms", "ms", ttft_ms, f"request to first token over HTTP, {LONG_PROMPT_TOKENS} tokens"),
    ]
    return [*results, *_peer_results(runs)] if runs.of["best 8"] else results


def _peer_results(runs: _Runs) -> list[Result]:
    rpc_note = "llama.cpp over RPC, two servers of one thread, same file, its batched bench"
    best_note = f"llama.cpp, one process, two threads, {BEST_LOCAL}, its batched bench"
    rpc_ttft_ms = [1e3 * seconds for seconds in runs.of["rpc ttft"]]
    return [
        of_runs("chain.rpc_ttft512_ms", "ms", rpc_ttft_ms, f"{rpc_note}: until the logits of the last prompt token"),
        ratio_of_runs("chain.ttft512_vs_rpc", runs.of["rpc ttft"], runs.of["ttft"], "how many times sooner"),
        of_runs("chain.rpc_1_tok_s", "tok/s", runs.of["rpc 1"], rpc_note),
        ratio_of_runs("chain.decode_1_vs_rpc", runs.of["chain 1"], runs.of["rpc 1"], "one session"),
        of_runs("chain.rpc_8_tok_s", "tok/s", runs.of["rpc 8"], f"{rpc_note}, eight sequences in total"),
        ratio_of_runs("chain.decode_8_vs_rpc_8", runs.of["chain 8"], runs.of["rpc 8"], "eight sessions in total"),
        of_runs("chain.best_local_8_tok_s", "tok/s", runs.of["best 8"], f"{best_note}, eight sequences in total"),
        ratio_of_runs("chain.decode_8_vs_best_local", runs.of["chain 8"], runs.of["best 8"], "eight sessions in total"),
    ]


async def run(rounds: int, report: Report) -> list[Result]:
    """Measure. Without llama.cpp what is compared with it is left out."""
    model = resolve(MODEL, default_models_dir())
    llama = await LlamaCpp.prepare_or_none(report)
    report(f"chain: {STAGES} stages, {DEFAULT_RECIPE}")
    return results_of(await _measure(model, DEFAULT_RECIPE, llama, rounds, report), DEFAULT_RECIPE)
