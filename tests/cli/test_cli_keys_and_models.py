"""``keys`` and ``models`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from tessella_p2p.cli.main import cli
from tessella_p2p.node.keystore import load_key


def invoke(folder: Path, *arguments: str) -> Result:
    return CliRunner(env={"TESSELLA_CONFIG_DIR": str(folder), "TESSELLA_KEYPAIR_PATH": None}).invoke(cli, arguments)


def test_a_made_key_is_shown(tmp_path: Path) -> None:
    made = invoke(tmp_path, "keys", "generate")
    assert made.exit_code == 0
    assert invoke(tmp_path, "keys", "show").stdout == made.stdout
    assert made.stdout.strip() == load_key(tmp_path / "node.key").peer_id


def test_a_key_is_shown_as_json(tmp_path: Path) -> None:
    made = json.loads(invoke(tmp_path, "keys", "generate", "--role", "orchestrator", "--json").stdout)
    assert made == json.loads(invoke(tmp_path, "keys", "show", "--role", "orchestrator", "--json").stdout)
    assert made["path"] == str(tmp_path / "orchestrator.key")
    assert made["peer_id"].startswith("12D3KooW")


def test_a_key_is_never_made_twice(tmp_path: Path) -> None:
    invoke(tmp_path, "keys", "generate")
    again = invoke(tmp_path, "keys", "generate")
    assert again.exit_code == 2
    assert "never replaced" in again.stderr


def test_a_missing_key_points_to_the_others_that_are_there(tmp_path: Path) -> None:
    missing = invoke(tmp_path, "keys", "show")
    assert (missing.exit_code, "keys generate" in missing.stderr) == (2, True)
    invoke(tmp_path, "keys", "generate", "--role", "orchestrator")
    missing = invoke(tmp_path, "keys", "show")
    assert (missing.exit_code, "`tessella-p2p keys show --role orchestrator`" in missing.stderr) == (2, True)


def test_a_key_path_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own" / "my.key"
    invoke(tmp_path, "keys", "generate", "--keypair-path", str(path))
    assert invoke(tmp_path, "keys", "show", "--keypair-path", str(path)).stdout.strip() == load_key(path).peer_id


def test_a_damaged_key_is_status_2(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    path.write_bytes(b"garbage")
    path.chmod(0o600)
    shown = invoke(tmp_path, "keys", "show")
    assert (shown.exit_code, shown.stderr.startswith(f"error: {path} is damaged: ")) == (2, True)
    assert path.read_bytes() == b"garbage"


def test_models_here_are_listed_with_path_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    listed = json.loads(invoke(tmp_path, "models", "list", "--models-dir", str(tmp_path), "--json").stdout)
    assert listed == [{"id": "mine", "path": str(tmp_path / "mine.gguf"), "bytes": 4}]
    table = invoke(tmp_path, "models", "list", "--models-dir", str(tmp_path)).stdout
    assert "mine" in table
    assert "smollm2-135m-instruct" in table


def test_an_unknown_model_is_status_2_and_names_the_known(tmp_path: Path) -> None:
    pulled = invoke(tmp_path, "models", "pull", "gpt-9", "--models-dir", str(tmp_path))
    assert pulled.exit_code == 2
    assert "smollm2-135m-instruct" in pulled.stderr


def test_a_model_that_is_here_is_verified_and_its_path_printed(tmp_path: Path, smollm2_path: Path) -> None:
    if smollm2_path.stem != "smollm2-135m-instruct":
        raise AssertionError("the fixture is the catalogue's model")
    arguments = ("models", "pull", "smollm2-135m-instruct", "--models-dir", str(smollm2_path.parent))
    assert invoke(tmp_path, *arguments).stdout.strip() == str(smollm2_path)
    answer = json.loads(invoke(tmp_path, *arguments, "--json").stdout)
    assert answer == {"id": smollm2_path.stem, "path": str(smollm2_path), "bytes": smollm2_path.stat().st_size}


def test_a_demo_of_a_model_that_is_not_here_says_what_to_type(tmp_path: Path) -> None:
    demo = invoke(tmp_path, "demo", "--models-dir", str(tmp_path))
    assert demo.exit_code == 2
    assert "tessella-p2p models pull smollm2-135m-instruct" in demo.stderr
    both = invoke(tmp_path, "demo", "--prompt", "a", "--prompts", "b")
    assert both.exit_code == 2
