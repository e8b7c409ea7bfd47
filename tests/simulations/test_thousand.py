"""`sim thousand`, with fewer: everybody is taken in and re-sharded, no layer is left alone, and a seed gives one run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from click.testing import CliRunner

from simulations import thousand
from simulations.thousand import STAGES_AFTER, Part, ThousandReport, run_thousand
from tessella_p2p.cli.main import cli

FEW = STAGES_AFTER + 4


@pytest.fixture(scope="module")
def report() -> ThousandReport:
    return run_thousand(FEW, 1)


def test_everybody_registers_announces_and_is_moved_without_a_hole(report: ThousandReport) -> None:
    assert report.content
    assert report.failures == []
    registered, announced, resharded = report.parts
    assert registered.answered["register"] == registered.answered["ready"] == FEW
    assert announced.answered["announce"] >= FEW * announced.virtual_s // 6
    assert set(announced.answered) == {"announce", "signatures_verified"}
    assert resharded.answered["operate.rebalance"] == 1
    assert report.moves == report.moved > 0


def test_a_seed_gives_one_run(report: ThousandReport) -> None:
    def virtual(one: ThousandReport) -> dict[str, Any]:
        return asdict(replace(one, parts=[replace(part, wall_s=0.0) for part in one.parts]))

    assert virtual(run_thousand(FEW, 1)) == virtual(report)


def test_the_command_reports_and_says_by_its_status_whether_it_came_about(
    report: ThousandReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(outcome: ThousandReport, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(thousand, "run_thousand", lambda *_: outcome)
        result = CliRunner().invoke(cli, ["sim", "thousand", *arguments])
        return result.exit_code, result.stdout

    status, text = ran(report)
    assert status == 0
    assert f"{FEW} workers of one orchestrator, seed 1" in text
    assert "re-sharded: " in text
    status, text = ran(report, "--json")
    assert (status, json.loads(text)["content"]) == (0, True)
    stuck = replace(report, moved=report.moves - 1)
    assert ran(stuck)[0] == ran(stuck, "--json")[0] == 1


@pytest.mark.parametrize(
    "change", [{"holes_s": 1.0}, {"health": "degraded"}, {"moves": 0, "moved": 0}, {"failures": ["x"]}]
)
def test_what_went_wrong_is_not_content(report: ThousandReport, change: dict[str, Any]) -> None:
    assert not replace(report, **change).content


def test_more_workers_than_are_simulated_are_refused() -> None:
    for nodes in (str(STAGES_AFTER - 1), "100000"):
        result = CliRunner().invoke(cli, ["sim", "thousand", "--nodes", nodes])
        assert result.exit_code == 2
        assert "workers are simulated here" in result.stderr


def test_a_part_shows_both_times() -> None:
    assert thousand.line_of(Part("registered", 30.0, 4.25, {"register": 3})) == (
        "  registered: 30 virtual s in 4.2 wall s; answered: 3 register"
    )
