"""The client's file: a flag wins over a variable, a variable over the file; ``init`` writes it once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.cli.client_file import ClientFile, read_client_file
from tessella_p2p.cli.main import cli
from tessella_p2p.node.keystore import load_key

PEER = "12D3KooWQQnKirL4V2nvfnvhJzicNpsznh9k1htRGcT177VpeD8M"


def invoke(folder: Path, *arguments: str, **environ: str) -> Result:
    unset = {"TESSELLA_API_URL": None, "TESSELLA_API_KEY": None, "TESSELLA_MODEL_ID": None}
    return CliRunner(env={**unset, "TESSELLA_CONFIG_DIR": str(folder), **environ}).invoke(cli, arguments)


def asked_at(result: Result) -> str:
    """Where the command looked for a node, out of its complaint."""
    return result.stderr.partition("no node answers at ")[2].partition(" ")[0]


def test_what_init_writes_is_what_the_commands_go_by(tmp_path: Path) -> None:
    made = json.loads(invoke(tmp_path, "-a", "http://127.0.0.1:1", "--model-id", 'odd "name"', "init", "--json").stdout)
    assert made["written"] is True
    said = read_client_file(None, {"TESSELLA_CONFIG_DIR": str(tmp_path)})
    assert said == ClientFile("http://127.0.0.1:1", 'odd "name"', None)
    assert load_key(tmp_path / "client.key").peer_id == made["peer_id"]
    assert (tmp_path / "client.toml").stat().st_mode & 0o777 == 0o600
    assert asked_at(invoke(tmp_path, "status")) == "http://127.0.0.1:1"


def test_init_writes_nothing_into_a_folder_that_others_may_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    refused = invoke(tmp_path, "init")
    assert (refused.exit_code, "chmod go-w" in refused.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_init_leaves_what_is_there_alone(tmp_path: Path) -> None:
    first = json.loads(invoke(tmp_path, "init", "--json").stdout)
    before = (tmp_path / "client.toml").read_bytes()
    again = invoke(tmp_path, "-a", "http://other:1", "init")
    assert again.exit_code == 0
    assert "left as it is" in again.stdout
    assert first["peer_id"] in again.stdout
    assert (tmp_path / "client.toml").read_bytes() == before


def test_a_flag_wins_over_a_variable_and_that_over_the_file(tmp_path: Path) -> None:
    invoke(tmp_path, "-a", "http://127.0.0.1:1", "init")
    assert asked_at(invoke(tmp_path, "status", TESSELLA_API_URL="http://127.0.0.1:2")) == "http://127.0.0.1:2"
    flagged = invoke(tmp_path, "-a", "http://127.0.0.1:3", "status", TESSELLA_API_URL="http://127.0.0.1:2")
    assert asked_at(flagged) == "http://127.0.0.1:3"


def test_another_file_comes_by_flag_or_variable(tmp_path: Path) -> None:
    other = tmp_path / "other" / "mine.toml"
    assert invoke(tmp_path, "-a", "http://127.0.0.1:4", "-c", str(other), "init").exit_code == 0
    assert other.with_name("client.key").exists()
    assert asked_at(invoke(tmp_path, "-c", str(other), "status")) == "http://127.0.0.1:4"
    assert asked_at(invoke(tmp_path, "status", TESSELLA_CLIENT_CONFIG=str(other))) == "http://127.0.0.1:4"


def test_a_named_file_that_is_missing_is_said_with_what_to_do(tmp_path: Path) -> None:
    result = invoke(tmp_path, "-c", str(tmp_path / "none.toml"), "status")
    assert result.exit_code == 2
    assert "none.toml init` writes one" in result.stderr


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("api_ulr = 'x'", "did you mean api_url"),
        ("colour = 'x'", "known: api_url, model_id, api_key"),
        ("api_url = 3", "a text is expected"),
        ("api_url = ''", "a text is expected"),
        ("api_url =", "no TOML"),
        ("[a]\nb = 1", "unknown key"),
        ("#" * 70_000, "over 65536 bytes"),
        ("x = " + "[" * 60_000, "no TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_rule(tmp_path: Path, content: str, rule: str) -> None:
    path = tmp_path / "client.toml"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=rule):
        read_client_file(path, {})
    result = invoke(tmp_path, "status")
    assert (result.exit_code, result.stderr.startswith(f"error: {path}: ")) == (2, True)
    assert invoke(tmp_path, "keys", "generate").exit_code == 0  # it is no client, and does not read it


def test_an_api_key_in_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "client.toml"
    path.write_text("api_key = 'tsl-x'")
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_client_file(path, {})
    path.chmod(0o600)
    assert read_client_file(path, {}).api_key == "tsl-x"


def test_a_key_in_the_file_is_not_sent_over_the_network_in_the_clear(tmp_path: Path) -> None:
    path = tmp_path / "client.toml"
    path.write_text("api_key = 'tsl-x'\napi_url = 'http://node.example:8080'")
    path.chmod(0o600)
    result = invoke(tmp_path, "status")
    assert (result.exit_code, "not sent unencrypted" in result.stderr) == (2, True)


@pytest.mark.parametrize("token", ["schlüssel-zum-netz", "tsl-line\nend", "\ttsl-tab"])
@pytest.mark.parametrize(
    "command", [("status",), ("chat", "hi"), ("why",), ("doctor", "--tracker-url", f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}")]
)
def test_a_token_that_no_header_carries_is_refused_and_not_shown(
    tmp_path: Path, token: str, command: tuple[str, ...]
) -> None:
    result = invoke(tmp_path, *command, TESSELLA_API_KEY=token)
    assert (result.exit_code, "what no header can" in result.stderr) == (2, True), result.output
    assert token.strip() not in result.output


def test_the_address_that_openais_clients_have_is_the_nodes(tmp_path: Path) -> None:
    for suffix in ("", "/", "/v1", "/v1/"):
        assert asked_at(invoke(tmp_path, "-a", f"http://127.0.0.1:1{suffix}", "status")) == "http://127.0.0.1:1"
