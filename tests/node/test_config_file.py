"""A file that this program writes is one that it reads, with what was answered; its comments are the defaults."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.node.config import NOT_SUPPORTED, ROLES, NodeConfig, RoleConfig, load_config
from tessella_p2p.node.config_file import config_text, default_config_path, found_config, toml_value, write_config
from tessella_p2p.node.settings import spelling_of
from tessella_p2p.wire.keys import NodeKey

URL = f"/ip4/203.0.113.7/tcp/9090/p2p/{NodeKey(bytes(32)).peer_id}"
COMMENTED = re.compile(r"^# ([a-z_0-9]+ = .+)$", re.MULTILINE)
NEEDED: dict[type[RoleConfig], dict[str, object]] = {NodeConfig: {"orchestrator_url": URL}}


def read_back(kind: type[RoleConfig], text: str, folder: Path) -> RoleConfig:
    path = folder / "file.toml"
    path.write_text(text)
    return load_config(kind, flags={}, environ={}, file=path)


@pytest.mark.parametrize("kind", ROLES.values())
def test_no_answers_are_the_defaults_whether_commented_out_or_not(kind: type[RoleConfig], tmp_path: Path) -> None:
    text = config_text(kind, NEEDED.get(kind, {}), "Written by a test.")
    config = read_back(kind, text, tmp_path)
    assert read_back(kind, COMMENTED.sub(r"\1", text), tmp_path) == config
    for name, field in kind.model_fields.items():
        is_there = re.search(rf"^(# )?{name} =", text, re.MULTILINE) is not None
        assert is_there == (spelling_of(field).only is None and not (kind is NodeConfig and name in NOT_SUPPORTED))


@given(
    claim=st.integers(256, 1 << 20),
    port=st.integers(0, 65_535),
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40),
)
def test_answers_come_back(tmp_path_factory: pytest.TempPathFactory, claim: int, port: int, name: str) -> None:
    folder = tmp_path_factory.mktemp("config")
    answers = {
        "orchestrator_url": URL,
        "default_model": name,
        "vram_mb": claim,
        "p2p_port": port,
        "models_dir": folder / name.replace("/", "_").replace("~", "_"),
        "api_host": "0.0.0.0",
        "api_keys": "required",
    }
    config = read_back(NodeConfig, config_text(NodeConfig, answers, "Written by a test."), folder)
    assert {key: getattr(config, key) for key in answers} == answers


def test_every_line_is_short_enough_to_read_and_a_comment_says_what_the_key_is_for(tmp_path: Path) -> None:
    lines = config_text(NodeConfig, {"orchestrator_url": URL}, "Written by a test.").splitlines()
    assert max(map(len, lines)) <= 120
    assert tomllib.loads("\n".join(lines))["orchestrator_url"] == URL
    for index, line in enumerate(lines):
        if re.match(r"^(# )?[a-z_0-9]+ =", line):
            assert lines[index - 1].endswith(")")


def test_a_file_is_never_written_over_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "node.toml"
    write_config(path, NodeConfig, {"orchestrator_url": URL}, "one")
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="never written over"):
        write_config(path, NodeConfig, {"orchestrator_url": URL}, "two")
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_place_where_no_file_can_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_config(tmp_path / "taken" / "node.toml", NodeConfig, {}, "")


def test_the_default_file_is_beside_the_key_and_found_where_it_is(tmp_path: Path) -> None:
    environ = {"TESSELLA_CONFIG_DIR": str(tmp_path)}
    assert found_config("node", environ) is None
    path = default_config_path("node", environ)
    path.write_text("")
    assert found_config("node", environ) == path == tmp_path / "node.toml"


def test_a_secret_is_not_written() -> None:
    from pydantic import SecretStr

    with pytest.raises(TypeError):
        toml_value(SecretStr("x"))
