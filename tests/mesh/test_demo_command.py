"""``tessella-p2p demo`` as people and scripts run it: its JSON, its prompts file, and that nothing outlives it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.mesh.oracle import cases

PATIENCE_S = 240
COMMAND = [sys.executable, "-m", "tessella_p2p", "demo"]


def run_demo(smollm2_path: Path, *arguments: str) -> Any:
    command = [*COMMAND, "--json", "--models-dir", str(smollm2_path.parent), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_split_gives_the_oracles_tokens_with_the_exact_recipe(
    workers: int, tmp_path: Path, smollm2_path: Path
) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([{"prompt_ids": case.prompt_ids} for case in cases()]))
    arguments = ("--recipe", "f32", "--workers", str(workers), "--prompts", str(prompts), "--parallel", "8")
    answers = run_demo(smollm2_path, *arguments)
    assert len(answers) == len(cases())
    for case, answer in zip(cases(), answers, strict=True):
        case.check(answer["token_ids"], answer["finish_reason"])
        assert answer["prompt_ids"] == list(case.prompt_ids)
        edges = [hop["layers"] for hop in answer["route"]]
        assert len(edges) == workers
        assert [start for start, _ in edges] == [0, *(end for _, end in edges[:-1])]
        assert edges[-1][1] == 30
    earned = sum(row["credits"] for row in answers[0]["credits"])
    positions = sum(len(answer["prompt_ids"]) + len(answer["token_ids"]) for answer in answers)
    unsampled = sum(answer["finish_reason"] == "length" for answer in answers)  # the last token is not computed
    assert earned == pytest.approx((positions - unsampled) * 30 / 1000)


def test_the_default_demo_says_paris_and_where_it_came_from(smollm2_path: Path) -> None:
    answer = run_demo(smollm2_path)
    assert answer["text"] == "The capital of France is Paris."
    assert answer["token_ids"] == list(cases()[0].output_ids[:-1])
    assert answer["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 37, "completion_tokens": 7, "total_tokens": 44}
    assert {"ready_s", "ttft_ms", "tokens_per_s"} <= answer["timings"].keys()
    assert len(answer["route"]) == 3
    assert {row["peer_id"] for row in answer["credits"]} == {hop["peer_id"] for hop in answer["route"]}
    assert all(row["credits"] > 0 for row in answer["credits"])
    assert answer["audits"] is None


def test_without_a_replica_every_workers_part_is_audited_and_passes(smollm2_path: Path) -> None:
    answer = run_demo(smollm2_path, "--audits", "--max-tokens", "4")
    assert len({tuple(hop["layers"]) for hop in answer["route"]}) == 3
    assert answer["audits"] == {"passed": 3}


@contextmanager
def kept_demo(smollm2_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A demo that stays up, and the processes that it started."""
    command = [*COMMAND, "--keep", "--workers", "1", "--models-dir", str(smollm2_path.parent), "--max-tokens", "4"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stderr is not None
            for line in demo.stderr:
                if "curl" in line:
                    break
            children = psutil.Process(demo.pid).children(recursive=True)
            assert len(children) == 3
            yield demo, children
        finally:
            demo.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_survives_the_demo_however_it_ends(number: signal.Signals, smollm2_path: Path) -> None:
    with kept_demo(smollm2_path) as (demo, children):
        demo.send_signal(number)
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
        demo.wait(timeout=60)
    if number == signal.SIGINT:
        assert demo.returncode == 130
