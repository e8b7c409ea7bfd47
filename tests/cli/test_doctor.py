"""``doctor`` as it is typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from tessella_p2p.cli.doctor import show
from tessella_p2p.cli.main import cli
from tessella_p2p.node.findings import Finding, ok, problem, warning

PEER = "12D3KooWQQnKirL4V2nvfnvhJzicNpsznh9k1htRGcT177VpeD8M"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSELLA_CONFIG_DIR", str(tmp_path / "config"))


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["doctor", *arguments])


def test_without_a_configuration_that_is_the_finding() -> None:
    result = doctor("--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["healthy"] is False
    (finding,) = told["findings"]
    assert (finding["subject"], finding["level"]) == ("configuration", "problem")
    assert "orchestrator_url" in finding["says"]


def test_every_subject_is_looked_at_without_a_node_and_without_a_mesh(tmp_path: Path) -> None:
    result = doctor(
        *("--tracker-url", f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", "--api-port", "0", "--p2p-port", "0"),
        *("--data-dir", str(tmp_path / "data"), "--models-dir", str(tmp_path), "--p2p-host", "127.0.0.1", "--json"),
    )
    assert result.exit_code == 1, result.output
    levels = {finding["subject"]: finding["level"] for finding in json.loads(result.stdout)["findings"]}
    assert levels == {
        "node": "ok",
        "key": "warning",
        "api_port": "ok",
        "p2p_port": "ok",
        "reachability": "warning",
        "IPv6": "ok",
        "disk": "ok",
        "memory": levels["memory"],
        "model": "problem",
        "orchestrator": "problem",
        "DHT": "warning",
    }
    assert not (tmp_path / "data").exists(), "it changes nothing"


def shown(*findings: Finding) -> str:
    console = Console(width=60, color_system=None, record=True, highlight=False)
    with console.capture() as capture:
        show(findings, console)
    return capture.get()


def test_findings_are_shown_with_their_fix_and_their_count() -> None:
    text = shown(ok("key", "there"), warning("disk", "low", "make room"), problem("clock", "off", "set it"))
    lines = text.splitlines()
    assert re.match(r"✓ key\s+there", lines[0])
    assert lines[2].strip() == "→ make room"
    assert lines[-1] == "1 problem, 1 warning"
    assert shown(ok("key", "there")).splitlines()[-1] == "nothing is wrong"


def test_what_a_peer_wrote_moves_no_cursor() -> None:
    assert "\x1b" not in shown(problem("orchestrator", "\x1b[2Jgone", "\x1b]0;x\x07"))
