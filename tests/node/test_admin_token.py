"""The admin token: by variable or file, never by flag, never shown, and in no file that others read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.limits import MAX_ADMIN_TOKEN_CHARS
from tessella_p2p.node.config import OrchestratorConfig, load_config
from tessella_p2p.node.settings import flags_of, variables_of

TOKEN = "a-token-of-the-operator"


def config(file: Path | None = None, **environ: str) -> OrchestratorConfig:
    return load_config(OrchestratorConfig, flags={}, environ=environ, file=file)


def written(folder: Path, mode: int, token: str = TOKEN) -> Path:
    path = folder / "orchestrator.toml"
    path.write_text(f'admin_token = "{token}"\n', encoding="utf-8")
    path.chmod(mode)
    return path


def test_it_comes_by_variable_or_file_and_is_no_flag(tmp_path: Path) -> None:
    field = OrchestratorConfig.model_fields["admin_token"]
    assert flags_of("admin_token", field) == ()
    assert variables_of("admin_token", field) == ("TESSELLA_ADMIN_TOKEN",)
    for given in (config(TESSELLA_ADMIN_TOKEN=TOKEN), config(written(tmp_path, 0o600))):
        assert given.admin_token is not None
        assert given.admin_token.get_secret_value() == TOKEN
        assert TOKEN not in repr(given) + str(given)
    assert config().admin_token is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602])
def test_a_file_that_others_may_read_holds_no_token(tmp_path: Path, mode: int) -> None:
    with pytest.raises(
        ConfigurationError, match=r"admin_token: others may read or write the file.*chmod 600"
    ) as refused:
        config(written(tmp_path, mode))
    assert TOKEN not in str(refused.value)


def test_a_file_without_a_token_may_be_read_by_everybody(tmp_path: Path) -> None:
    path = tmp_path / "orchestrator.toml"
    path.write_text("min_stages = 2\n", encoding="utf-8")
    path.chmod(0o644)
    assert config(path).min_stages == 2


@pytest.mark.parametrize(
    "token", ["short", "x" * (MAX_ADMIN_TOKEN_CHARS + 1), "with a space in the middle", "ünïcödé-ünïcödé-ü"]
)
def test_a_token_that_is_none_is_refused_and_not_repeated(tmp_path: Path, token: str) -> None:
    for given in ({"TESSELLA_ADMIN_TOKEN": token}, {}):
        with pytest.raises(ConfigurationError, match=r"(?i)admin_token: ") as refused:
            config(None if given else written(tmp_path, 0o600, token), **given)
        assert token not in str(refused.value)
