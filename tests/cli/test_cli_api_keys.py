"""``keys api`` and ``keys delegate`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tessella_p2p.base.clock import SystemClock
from tessella_p2p.bridge.api_keys import ApiKeys
from tessella_p2p.cli.main import cli
from tessella_p2p.node.api_key_file import path_in, read_keys
from tessella_p2p.node.keystore import generate_key, load_key
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import open_envelope

DAY_MS = 86_400_000


def invoke(folder: Path, *arguments: str) -> Result:
    environ = {
        "TESSELLA_CONFIG_DIR": str(folder),
        "TESSELLA_DATA_DIR": str(folder / "data"),
        "TESSELLA_KEYPAIR_PATH": None,
        "TESSELLA_CONFIG": None,
    }
    return CliRunner(env=environ).invoke(cli, arguments)


def kept(folder: Path) -> ApiKeys:
    return read_keys(path_in(folder / "data"))


def added(folder: Path, *arguments: str) -> dict[str, Any]:
    result = invoke(folder, "keys", "api", "add", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_a_key_is_shown_once_and_alone_on_standard_output(tmp_path: Path) -> None:
    made = invoke(tmp_path, "keys", "api", "add", "--label", "alice")
    secret = made.stdout.strip()
    (key,) = kept(tmp_path)
    assert kept(tmp_path).find(secret, SystemClock().unix_ms()) == key
    assert "will not show it again" in made.stderr
    for shown in (invoke(tmp_path, "keys", "api", "list"), invoke(tmp_path, "keys", "api", "list", "--json")):
        assert key.key_id in shown.stdout
        assert secret not in shown.stdout
    assert secret not in path_in(tmp_path / "data").read_text()


def test_a_key_whose_delegation_was_damaged_is_listed_beside_the_others(tmp_path: Path) -> None:
    generate_key(tmp_path / "node.key")
    generate_key(tmp_path / "identity.key")
    added(tmp_path, "--label", "broken", "--identity", str(tmp_path / "identity.key"))
    added(tmp_path, "--label", "sound")
    path = path_in(tmp_path / "data")
    (sealed,) = (key.delegation for key in kept(tmp_path) if key.delegation is not None)
    path.write_text(path.read_text().replace(sealed.hex(), sealed.hex()[:-2]))
    listed = invoke(tmp_path, "keys", "api", "list", "--json")
    assert listed.exit_code == 0, listed.stderr
    identities = {row["label"]: row["identity"] for row in json.loads(listed.stdout)}
    assert identities == {"broken": "unreadable: make this key anew", "sound": None}


def test_limits_are_kept_as_they_were_given(tmp_path: Path) -> None:
    before_ms = SystemClock().unix_ms()
    made = added(
        tmp_path,
        *("--tier", "Standard", "--requests-per-minute", "60", "--tokens-per-minute", "9000", "--concurrent", "3"),
        *("--expires", "30d"),
    )
    (key,) = kept(tmp_path)
    limits = key.limits
    assert (limits.tier, limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent) == (
        *("Standard", 60, 9000, 3),
    )
    assert key.expires is not None
    assert 0 <= key.expires - before_ms - 30 * DAY_MS < 60_000
    listed = json.loads(invoke(tmp_path, "keys", "api", "list", "--json").stdout)
    assert listed == [{name: value for name, value in made.items() if name != "api_key"}]


def test_a_revoked_key_is_gone_and_an_unknown_one_is_status_2(tmp_path: Path) -> None:
    first, second = added(tmp_path), added(tmp_path)
    assert invoke(tmp_path, "keys", "api", "revoke", first["id"]).exit_code == 0
    assert [key.key_id for key in kept(tmp_path)] == [second["id"]]
    again = invoke(tmp_path, "keys", "api", "revoke", first["id"])
    assert (again.exit_code, "keys api list" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    "wrong",
    [
        ("--tier", "Gold"),
        ("--requests-per-minute", "0"),
        ("--expires", "soon"),
        ("--expires", "2001-01-31"),
        ("--expires", "999999w"),
        ("--label", "x" * 65),
        ("--identity", "nowhere.key"),
        ("--delegation", "00"),
        ("--delegation", "zz"),
    ],
)
def test_a_wrong_value_is_status_2_and_makes_no_key(tmp_path: Path, wrong: tuple[str, str]) -> None:
    generate_key(tmp_path / "node.key")
    assert invoke(tmp_path, "keys", "api", "add", *wrong).exit_code == 2
    assert len(kept(tmp_path)) == 0


def test_an_identity_lets_this_node_ask_in_its_name_for_as_long_as_the_key_lasts(tmp_path: Path) -> None:
    node, me = generate_key(tmp_path / "node.key"), generate_key(tmp_path / "me.key")
    made = added(tmp_path, "--identity", str(tmp_path / "me.key"), "--expires", "7d")
    assert made["identity"] == me.peer_id
    (key,) = kept(tmp_path)
    assert key.delegation is not None
    envelope = open_envelope(key.delegation, m.DELEGATION, now_ms=SystemClock().unix_ms(), signer=me.peer_id)
    assert envelope.message(m.Delegation).entry == node.peer_id
    assert envelope.expires_at == key.expires
    refused = invoke(tmp_path, "keys", "api", "add", "--identity", str(tmp_path / "node.key"))
    assert (refused.exit_code, "leave --identity out" in refused.stderr) == (2, True)
    assert (
        invoke(tmp_path, "keys", "api", "add", "--identity", str(tmp_path / "me.key"), "--expires", "400d").exit_code
        == 2
    )


def test_an_identity_elsewhere_delegates_without_its_key_and_to_one_node_alone(tmp_path: Path) -> None:
    here, elsewhere, other = (tmp_path / name for name in ("here", "elsewhere", "other"))
    node, me = generate_key(here / "node.key"), generate_key(elsewhere / "node.key")
    generate_key(other / "node.key")
    delegated = invoke(elsewhere, "keys", "delegate", node.peer_id, "--expires", "30d").stdout.strip()
    assert added(here, "--delegation", delegated)["identity"] == me.peer_id
    refused = invoke(other, "keys", "api", "add", "--delegation", delegated)
    assert (refused.exit_code, f"is for {node.peer_id}" in refused.stderr) == (2, True)
    forged = delegated[:-2] + f"{int(delegated[-2:], 16) ^ 1:02x}"
    assert invoke(here, "keys", "api", "add", "--delegation", forged).exit_code == 2
    assert invoke(elsewhere, "keys", "delegate", "nobody").exit_code == 2
    assert load_key(elsewhere / "node.key").peer_id == me.peer_id


def test_the_nodes_file_says_where_its_keys_are(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(f'data_dir = "{tmp_path}/elsewhere"\n')
    environ = {"TESSELLA_CONFIG_DIR": str(tmp_path), "TESSELLA_DATA_DIR": None, "TESSELLA_CONFIG": None}
    assert CliRunner(env=environ).invoke(cli, ["keys", "api", "add"]).exit_code == 0
    assert len(read_keys(path_in(tmp_path / "elsewhere"))) == 1
    (tmp_path / "node.toml").write_text("no_such_key = 1\n")
    assert CliRunner(env=environ).invoke(cli, ["keys", "api", "list"]).exit_code == 2
