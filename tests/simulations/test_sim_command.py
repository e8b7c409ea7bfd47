"""The command: reports, exit statuses, and the same bytes for the same seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from click.testing import CliRunner, Result

from simulations.report import replay_command
from tessella_p2p.cli.main import cli
from tests.simulations.small_runs import small


def write(folder: Path, data: dict[str, Any]) -> str:
    path = folder / "small.toml"
    path.write_text(tomlkit.dumps(data), encoding="utf-8")
    return str(path)


def sim(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["sim", *arguments])


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """Three nodes for twenty virtual seconds."""
    return write(
        tmp_path,
        small(
            nodes=3,
            duration_s=26.0,
            load={"from_s": 6.0, "until_s": 14.0, "per_s": 1.0, "max_tokens": [2, 6], "abandoned": 0.0},
            churn=[],
        ),
    )


def in_processes(arguments: Sequence[str], hash_seeds: Sequence[str]) -> list[str]:
    """Standard output of the command in fresh processes that run at the same time."""
    command = [sys.executable, "-m", "tessella_p2p", "sim", *arguments]
    running = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for hash_seed in hash_seeds
    ]
    outputs = []
    for process in running:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        outputs.append(output)
    return outputs


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    path = write(tmp_path, small(liars={"count": 3}))
    one, two = in_processes([path, "--json"], ["1", "2"])
    assert one == two
    report = json.loads(one)
    assert report["requests"]["answered"] > 5
    assert report["mesh"]["absences"] == 2
    other = sim(path, "--json", "--seed", "2")
    assert other.exit_code == 0, other.output
    different = json.loads(other.stdout)
    assert different["seed"] == 2
    assert different["mesh"] != report["mesh"]
    assert different["requests"] != report["requests"]


def test_the_report_says_what_happened_and_what_the_checkers_found(tiny: str) -> None:
    result = sim(tiny)
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "requests: answered" in words
    assert "credits: sum of accounts │ 0" in words
    assert "violation (" not in words
    as_json = json.loads(sim(tiny, "--json").stdout)
    assert as_json["content"] is True
    assert as_json["checkers"]["credits"] == 0
    requests = as_json["requests"]
    assert requests["asked"] == requests["answered"] > 0
    assert requests["wrong_answers"] == 0
    assert requests["refused"] == {}
    assert as_json["discovery"]["lookups_found"] > 0
    assert as_json["mesh"]["registrations"] == 3
    assert as_json["credits"]["credits"] > 0
    assert as_json["credits"]["sum_of_accounts"] == 0


def test_nodes_and_seed_are_given_on_the_command_line(tiny: str) -> None:
    report = json.loads(sim(tiny, "--json", "--nodes", "4", "--seed", "9").stdout)
    assert (report["nodes"], report["seed"]) == (4, 9)
    assert report["mesh"]["registrations"] == 4
    assert report["replay"].endswith("--nodes 4 --seed 9")


def test_a_violation_ends_with_status_1_and_the_line_that_replays_it(tmp_path: Path) -> None:
    hasty = small(
        nodes=3,
        duration_s=24.0,
        load={"from_s": 6.0, "until_s": 12.0, "per_s": 1.0},
        churn=[{"share": 0.3, "from_s": 8.0, "until_s": 23.0, "down_s": [13.0, 13.0]}],
        bounds={"recovery_s": 0.0},
    )
    hasty["mesh"]["join_within_s"] = 1.0
    path = write(tmp_path, hasty)
    result = sim(path, "--seed", "51")
    assert result.exit_code == 1, result.output
    words = " ".join(result.stdout.split())
    assert "violation (leaks" in words or "violation (coverage" in words
    assert f"seed 51; replay it with: {replay_command(path, nodes=None, seed=51)}" in words.replace("- ", "-")
    again = json.loads(sim(path, "--seed", "51", "--json").stdout)
    assert again["content"] is False
    assert again["violations"]


def test_a_wrong_scenario_is_a_configuration_error(tmp_path: Path) -> None:
    result = sim(write(tmp_path, small(speed=3)))
    assert result.exit_code == 2
    assert "small.toml: speed: there is no such key" in result.stderr
    assert sim("no-such").exit_code == 2
    assert sim("churn", "--nodes", "0").exit_code == 2
