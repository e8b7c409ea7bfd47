"""Group ``http``: what the node's HTTP surface adds to an answer, over a toy model whose own cost is known.

The server is a process with `create_app`, `serve` and a whole entry over a mesh in memory (``http_world``); the clients are this
process. What HTTP costs is the server's CPU for streamed chats less its CPU for the same chats taken from the entry without HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.http_load import Streamed, bare_all, stream_all, whole_all
from benchmarks.json_lines import JsonLines, process
from benchmarks.net_wire import quiet
from benchmarks.results import BenchmarkError, Result, of_runs

STREAMS = 200
TOKENS_EACH = 100
BEAT_S = 0.05
"""Of the paced mesh: each stream has every second one, so ten tokens a second, and a hundred streams have theirs at the same time."""
_WARM = 4
_FIRSTS = 30
_FAST_STREAMS = 8
_FAST_TOKENS = 400
_CLIENTS = 10
_ASKED_EACH = 20


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def added_s(streams: Sequence[Streamed], prompts: Sequence[str], draws: dict[str, list[float]]) -> list[float]:
    """For each token the seconds from its draw to its arrival at the client.

    Raises:
        BenchmarkError: what came is not what was drawn.
    """
    added: list[float] = []
    for prompt, stream in zip(prompts, streams, strict=True):
        if len(stream.tokens) != len(draws[prompt]):
            raise BenchmarkError(f"{len(draws[prompt])} tokens were drawn and {len(stream.tokens)} came")
        added += [came - drawn for came, drawn in zip(stream.tokens, draws[prompt], strict=True)]
    return added


@dataclass(frozen=True, slots=True)
class Fast:
    """One round with an engine that takes no time. Milliseconds, microseconds of CPU, and requests a second."""

    first_ms: float
    chunk_us: float
    whole_chunk_us: float
    bare_us: float
    requests_per_s: float


async def _fast(server: JsonLines, number: int) -> Fast:
    told = await server.ask(op="where")
    firsts = []
    for index in range(_FIRSTS):
        (stream,) = await stream_all(told["url"], [f"first {number} {index:03}"], 2)
        firsts.append(1000 * (stream.tokens[0] - stream.asked_at))
    prompts = [f"fast {number} {index:03}" for index in range(_FAST_STREAMS)]
    chunks = _FAST_STREAMS * _FAST_TOKENS
    before = await server.ask(op="used")
    streams = await stream_all(told["url"], prompts, _FAST_TOKENS)
    over_http = (await server.ask(op="used"))["cpu_s"] - before["cpu_s"]
    alone = await server.ask(op="consume", prompts=prompts, max_tokens=_FAST_TOKENS)
    came = sum(len(each.tokens) for each in streams)
    if not came == alone["tokens"] == chunks:
        raise BenchmarkError(f"{chunks} tokens were asked for: {came} came over HTTP, and {alone['tokens']} without it")
    before = await server.ask(op="used")
    await bare_all(told["bare_port"], _FAST_STREAMS, _FAST_TOKENS, 0.001)
    bare = (await server.ask(op="used"))["cpu_s"] - before["cpu_s"]
    rate = await whole_all(told["url"], [f"whole {number} {index:03}" for index in range(_CLIENTS)], _ASKED_EACH, 1)
    return Fast(
        first_ms=quantile(firsts, 0.5),
        chunk_us=1e6 * (over_http - alone["cpu_s"]) / chunks,
        whole_chunk_us=1e6 * over_http / chunks,
        bare_us=1e6 * bare / chunks,
        requests_per_s=rate,
    )


@dataclass(frozen=True, slots=True)
class Paced:
    """One round of `STREAMS` streams. Milliseconds and MiB."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    gap_ms: float
    tokens_per_s: float
    grown_mib: float
    cores: float
    bare_p99_ms: float


async def _paced(server: JsonLines, number: int) -> Paced:
    told = await server.ask(op="where")
    prompts = [chr(0x100 + index) for index in range(STREAMS)]  # one token each: no prompt holds up a turn
    await stream_all(told["url"], [f"warm {number} {index}" for index in range(_WARM)], 4)
    await server.ask(op="draws")
    before = await server.ask(op="used")
    streams = await stream_all(told["url"], prompts, TOKENS_EACH)
    after = await server.ask(op="used")
    drawn: dict[str, Any] = (await server.ask(op="draws"))["draws"]
    added = [1000 * each for each in added_s(streams, prompts, drawn)]
    first, last = min(each.tokens[0] for each in streams), max(each.tokens[-1] for each in streams)
    rates = [(len(each.tokens) - 1) / (each.tokens[-1] - each.tokens[0]) for each in streams]
    bare = await bare_all(told["bare_port"], STREAMS, TOKENS_EACH // 4, 2 * BEAT_S)
    return Paced(
        p50_ms=quantile(added, 0.5),
        p99_ms=quantile(added, 0.99),
        max_ms=max(added),
        gap_ms=1000 * max(later - earlier for each in streams for earlier, later in pairwise(each.tokens)),
        tokens_per_s=quantile(rates, 0.5),
        grown_mib=after["rss_mib"] - before["rss_mib"],
        cores=(after["cpu_s"] - before["cpu_s"]) / (last - first),
        bare_p99_ms=1000 * quantile(bare, 0.99),
    )


async def run(rounds: int, report: Callable[[str], None]) -> list[Result]:
    """Measure in ``rounds`` rounds."""
    quiet()
    report("http: an engine that takes no time")
    async with process("benchmarks.http_process", "0") as server:
        await _fast(server, 0)  # caches and code warm up
        fast = [await _fast(server, 1 + number) for number in range(rounds)]
    report(f"http: {STREAMS} streams")
    async with process("benchmarks.http_process", str(BEAT_S)) as server:
        paced = [await _paced(server, number) for number in range(rounds)]
    return [*_of_fast(fast), *_of_paced(paced)]


def _of_fast(fast: Sequence[Fast]) -> list[Result]:
    streams = f"{_FAST_STREAMS} streamed chats of {_FAST_TOKENS} tokens at a time"
    return [
        of_runs(
            "http.first_chunk_ms_p50",
            "ms",
            [each.first_ms for each in fast],
            f"from before the connection, {_FIRSTS} chats one after the other; grant, route, opening and engine are in it",
        ),
        of_runs(
            "http.cpu_us_per_chunk",
            "µs",
            [each.chunk_us for each in fast],
            f"{streams}, less the same without HTTP",
        ),
        of_runs(
            "http.cpu_us_per_chunk_in_all",
            "µs",
            [each.whole_chunk_us for each in fast],
            "the same with entry, orchestrator, stage and toy, which share the process",
        ),
        of_runs(
            "http.bare_us_per_chunk",
            "µs",
            [each.bare_us for each in fast],
            "the limit: trio sends as many bytes to as many sockets, with a pause between two",
        ),
        of_runs(
            "http.requests_per_s",
            "1/s",
            [each.requests_per_s for each in fast],
            f"whole chats of one token, {_CLIENTS} at a time on connections that stay open",
        ),
    ]


def _of_paced(paced: Sequence[Paced]) -> list[Result]:
    last = paced[-1]
    streams = f"{STREAMS} streams of {TOKENS_EACH} tokens at {last.tokens_per_s:.1f}/s, {last.cores:.2f} cores"
    return [
        of_runs(
            "http.streams_200_added_ms_p99",
            "ms",
            [each.p99_ms for each in paced],
            f"{streams}: from the draw to the client; bare sockets {last.bare_p99_ms:.1f} ms",
        ),
        of_runs("http.streams_200_added_ms_p50", "ms", [each.p50_ms for each in paced], "the same"),
        of_runs("http.streams_200_added_ms_max", "ms", [each.max_ms for each in paced], "the same"),
        of_runs("http.streams_200_gap_ms_max", "ms", [each.gap_ms for each in paced], "the longest between two tokens"),
        of_runs("http.streams_200_grown_mib", "MiB", [each.grown_mib for each in paced], "resident memory, each round"),
    ]
