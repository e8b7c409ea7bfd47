"""Bars, verdicts and the figures that are computed from runs."""

from __future__ import annotations

import pytest

from benchmarks.bars import BARS, Bar, barred_names, table
from benchmarks.chain import split_note
from benchmarks.engine import Runs, limit_tok_s, memory_result
from benchmarks.results import BenchmarkError, Result, of_runs, ratio_of_runs
from benchmarks.stage_memory import StageMemory
from benchmarks.token_runs import decode_rate, prompts

MIB = 1 << 20


@pytest.mark.parametrize(
    ("value", "verdict"), [(1.99, "NOT reached"), (2.0, "reached"), (2.99, "reached"), (3.0, "aim reached")]
)
def test_more_is_better_where_the_bar_is_a_least(value: float, verdict: str) -> None:
    assert Bar(2.0, 3.0).verdict(value) == verdict


@pytest.mark.parametrize(("value", "verdict"), [(0.51, "NOT reached"), (0.5, "reached"), (0.1, "reached")])
def test_less_is_better_where_the_bar_is_a_most(value: float, verdict: str) -> None:
    assert Bar(0.5, at_least=False).verdict(value) == verdict


def test_no_aim_lies_behind_its_bar() -> None:
    assert all(bar.aim is None or bar.verdict(bar.aim) == "aim reached" for bar in BARS.values())
    assert all(bar.aim is None or (bar.aim > bar.bar) == bar.at_least for bar in BARS.values())


def test_the_table_marks_every_figure_and_says_what_is_missing() -> None:
    results = [
        Result("chain.decode_1_vs_rpc", 0.9, "ratio", (0.8, 0.9, 1.0), "one session"),
        Result("chain.two_stage_8_vs_solo", 1.8, "ratio", (1.8,), "eight"),
        Result("chain.solo_1_tok_s", 20.0, "tok/s", (20.0,), "no bar"),
    ]
    lines = {line.split()[0]: line for line in list(table(results, ["chain"]))[1:]}
    assert "0.8–1" in lines["chain.decode_1_vs_rpc"]
    assert "≥ 1 NOT reached one session" in " ".join(lines["chain.decode_1_vs_rpc"].split())
    assert "aim reached" in lines["chain.two_stage_8_vs_solo"]
    assert "reached" not in lines["chain.solo_1_tok_s"]
    missing = {name for name, line in lines.items() if "NOT measured" in line}
    assert missing == set(barred_names(["chain"])) - {result.name for result in results}
    assert not any(name.startswith(("engine.", "net.")) for name in lines)


def test_a_ratio_is_the_median_of_neighbours_and_not_the_ratio_of_medians() -> None:
    result = ratio_of_runs("x", [2.0, 6.0, 3.0], [1.0, 2.0, 3.0], "")
    assert result.runs == (2.0, 3.0, 1.0)
    assert result.value == 2.0
    assert of_runs("x", "s", [3.0, 1.0, 2.0], "").value == 2.0


def test_a_rate_counts_only_the_time_in_which_every_session_decodes() -> None:
    early = [0.0, 1.0, 2.0, 3.0, 4.0]
    late = [2.0, 2.5, 3.0, 3.5, 4.0, 9.0]
    assert decode_rate([early]) == 1.0
    assert decode_rate([early, late]) == (2 + 4) / 2.0


@pytest.mark.parametrize("times", [[[0.0, 1.0], [1.0, 2.0]], [[0.0]], [[0.0, 1.0], []], []])
def test_sessions_that_never_decode_together_have_no_rate(times: list[list[float]]) -> None:
    with pytest.raises(BenchmarkError):
        decode_rate(times)


def test_prompts_repeat_with_their_seed_and_differ_without() -> None:
    assert prompts(2, 8, 1) == prompts(2, 8, 1)
    assert prompts(1, 8, 1) != prompts(1, 8, 2)
    assert len({tuple(prompt) for prompt in prompts(8, 16, 0)}) == 8


def test_the_worse_stage_is_the_figure() -> None:
    half = StageMemory(peak=300 * MIB, before=30 * MIB, tensors=40 * MIB, kv=10 * MIB)
    tail = StageMemory(peak=400 * MIB, before=30 * MIB, tensors=60 * MIB, kv=40 * MIB)
    result = memory_result([half, tail], "f32")
    assert result.runs == (1.5, 1.6)
    assert result.value == 1.6
    assert "400 MiB" in result.note


def test_limits_are_what_memory_and_arithmetic_allow() -> None:
    runs = Runs(weight_bytes=10**8, layer_flop=200_000_000, head_flop=51_200_000)
    runs.of["bytes_s"], runs.of["flop_s"] = [10e9], [100e9]
    limits = limit_tok_s(runs)
    assert limits["b1"] == [100.0]
    assert limits["b8"] == [pytest.approx(100e9 / 251.2e6)]
    assert limits["prefill"] == [pytest.approx(100e9 / 200.1e6)]


def test_the_split_says_what_an_even_one_would_give() -> None:
    route = [{"layers": [0, 19], "compute_ms": 3.0}, {"layers": [19, 30], "compute_ms": 4.0}]
    assert "layers 0–19 3.00 ms, layers 19–30 4.00 ms: ideal 1.75" in split_note(route)
