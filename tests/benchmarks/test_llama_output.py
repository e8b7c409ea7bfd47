"""What llama.cpp's programs print, as they printed it."""

from __future__ import annotations

import pytest

from benchmarks.llama_build import build_key, progress_of
from benchmarks.llama_cpp import Batched, parse_batched, parse_bench
from benchmarks.results import BenchmarkError

BENCH = """[
  {
    "build_commit": "0c1e570", "n_threads": 1, "n_prompt": 512, "n_gen": 0, "n_depth": 0,
    "avg_ns": 3938461538, "avg_ts": 130.000000, "stddev_ts": 0.000000, "samples_ts": [ 130.0 ]
  },
  { "n_prompt": 0, "n_gen": 32, "avg_ts": 62.5 }
]
"""
BATCHED = """llama_model_loader: a line of its log
{"n_kv_max": 2048, "n_batch": 2048, "pp": 128, "tg": 32, "pl": 1, "n_kv": 160, "t_pp": 0.9, "speed_tg": 61.5, "t": 1.5}
{"n_kv_max": 2048, "n_batch": 2048, "pp": 128, "tg": 32, "pl": 8, "n_kv": 1280, "t_pp": 7.5, "speed_tg": 84.25, "t": 9}

llama_perf_context_print: load time = 100 ms
"""


def test_the_bench_gives_rates_by_what_was_run() -> None:
    assert parse_bench(BENCH) == {(512, 0): 130.0, (0, 32): 62.5}


@pytest.mark.parametrize(
    "output", ["", "error: no such file", "{}", "[]", "[1]", '[{"n_prompt": 512}]', '[{"avg_ts": 1}]']
)
def test_what_is_not_the_benchs_output_is_an_error(output: str) -> None:
    with pytest.raises(BenchmarkError, match="llama-bench printed"):
        parse_bench(output)


def test_the_batched_bench_gives_rows_by_sequences_among_lines_of_log() -> None:
    assert parse_batched(BATCHED) == {1: Batched(1, 0.9, 61.5), 8: Batched(8, 7.5, 84.25)}


@pytest.mark.parametrize(
    "output", ["", "| PP | TG |", '{"n_kv_max": 1}', '{"n_kv_max": 1, "pl": 8', '{"n_kv_max": []}']
)
def test_what_is_not_the_batched_benchs_output_is_an_error(output: str) -> None:
    with pytest.raises(BenchmarkError, match="llama-batched-bench printed"):
        parse_batched(output)


@pytest.mark.parametrize(
    ("line", "done"),
    [
        ("[51/102] Building CXX object src/llama.cpp.o", 0.5),
        ("[ 25%] Building CXX object src/llama.cpp.o", 0.25),
        ("[100%] Built target llama-bench", 1.0),
        ("[0/0] nothing to do", None),
        ("In file included from [12/13]", None),
        ("", None),
    ],
)
def test_progress_is_read_from_ninja_and_from_make(line: str, done: float | None) -> None:
    assert progress_of(line) == done


def test_builds_for_different_processors_have_different_folders() -> None:
    assert build_key("flags: avx2") == build_key("flags: avx2") != build_key("flags: avx2 avx512f")
