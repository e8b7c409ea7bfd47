"""The command-line client against a real mesh with a real model: a conversation that goes on is cached on every stage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from tessella_p2p.cli.main import cli
from tests.mesh.mesh_thread import MeshThread

PAGE = 64
LONG = "Write a few sentences about the river Danube: where it begins, through which countries it flows, where it ends."


def invoke(mesh: MeshThread, folder: Path, *arguments: str) -> Result:
    result = CliRunner(env={"TESSELLA_CONFIG_DIR": str(folder)}).invoke(cli, ["-a", mesh.mesh.entry_url, *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_a_session_file_has_every_stage_take_the_prefix_from_its_cache(f32_mesh: MeshThread, tmp_path: Path) -> None:
    session = str(tmp_path / "session.json")
    asked = ("chat", "--session-file", session, "-m", "48", "--json")
    first: dict[str, Any] = json.loads(invoke(f32_mesh, tmp_path, *asked, LONG).stdout)
    second = json.loads(invoke(f32_mesh, tmp_path, *asked, "And the Rhine?").stdout)
    known = [*first["tessella"]["prompt_ids"], *first["tessella"]["token_ids"]]
    prompt = second["tessella"]["prompt_ids"]
    same = next((i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), len(known))
    # The last token was never sent to the stages: nothing was asked after it.
    cached = min(same, len(known) - 1) // PAGE * PAGE
    assert cached >= PAGE
    assert len(second["tessella"]["route"]) >= 2
    assert [hop["cached"] for hop in second["tessella"]["route"]] == [cached] * len(second["tessella"]["route"])
    shown = invoke(f32_mesh, tmp_path, "chat", "--session-file", session, "-m", "4", "--timing", "Thanks").stderr
    told = [int(count) for count in re.findall(r"(\d+) of \d+$", shown, re.MULTILINE)]
    assert len(told) == len(second["tessella"]["route"])
    assert min(told) >= cached


def test_a_gap_is_filled_from_the_command_line(fim_mesh: MeshThread, tmp_path: Path) -> None:
    alone = invoke(fim_mesh, tmp_path, "fim", "--prefix", "the ", "--suffix", " in", "-m", "8").stdout
    told = json.loads(
        invoke(fim_mesh, tmp_path, "fim", "--prefix", "the ", "--suffix", " in", "-m", "8", "--json").stdout
    )
    assert alone == told["text"]
    assert told["usage"]["completion_tokens"] == 8
