"""Typed flags mean what variables and keys mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.cli.daemons import bootstrap, daemon, orchestrator
from tessella_p2p.cli.main import cli
from tessella_p2p.cli.setting_options import configured
from tessella_p2p.node.config import ROLES, NodeConfig, RoleConfig, load_config
from tessella_p2p.node.settings import flags_of, variables_of
from tessella_p2p.wire.keys import NodeKey

PEER = NodeKey(bytes(32)).peer_id
URL = f"/ip4/203.0.113.7/tcp/9090/p2p/{PEER}"
BOOTSTRAP = [f"/ip4/203.0.113.{i}/tcp/9070/p2p/{PEER}" for i in (1, 2)]


def typed(command: click.Command, *arguments: str) -> tuple[Path | None, dict[str, Any]]:
    parameters = dict(command.make_context("command", list(arguments)).params)
    return parameters.pop("config_file"), parameters


def node_config(*arguments: str, **environ: str) -> NodeConfig:
    file, parameters = typed(daemon, "--tracker-url", URL, *arguments)
    return configured(NodeConfig, file, parameters, environ)


@pytest.mark.parametrize("alias", ["--orchestrator-url", "--tracker-url", "--musivum-url"])
def test_the_trackers_url_has_two_aliases(alias: str) -> None:
    file, parameters = typed(daemon, alias, URL)
    assert configured(NodeConfig, file, parameters, {}).orchestrator.multiaddr == URL


def test_the_flags_of_the_demos_workers_are_understood() -> None:
    config = node_config(
        *(
            "--bootstrap",
            BOOTSTRAP[0],
            "--bootstrap",
            BOOTSTRAP[1],
            "--model-id",
            "m",
            "--recipe",
            "torch-f32",
            "--vram-gb",
            "4",
        ),
        *("--threads", "1", "--api-host", "127.0.0.1", "--api-port", "0", "--p2p-host", "127.0.0.1", "--p2p-port", "0"),
        *(
            "--allow-private-addrs",
            "--keypair-path",
            "k",
            "--data-dir",
            "d",
            "--log-format",
            "json",
            "--log-level",
            "debug",
        ),
        *("--ready-file", "r.json", "--exit-with-stdin", "--layers", "0,10", "--models-dir", "~/m"),
    )
    assert config.bootstrap == tuple(BOOTSTRAP)
    assert (config.vram_mb, config.recipe, config.threads, config.default_model) == (4096, "torch-f32", 1, "m")
    assert (config.ready_file, config.exit_with_stdin) == (Path("r.json"), True)
    assert config.models_dir == Path("~/m").expanduser()


@given(st.integers(1, 64), st.sampled_from([0, 0.25, 0.5]))
def test_a_claim_in_gb_is_the_claim_in_mb(whole: int, part: float) -> None:
    assert node_config("--vram-gb", str(whole + part)).vram_mb == int((whole + part) * 1024)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--vram-gb", "2", "--vram-mb", "2048"), "same setting"),
        (("--vram-gb", "nan"), "--vram-gb nan: a number of GB"),
        (("--vram-gb", "inf"), "--vram-gb inf: a number of GB"),
        (("--vram-gb", "0.1"), "--vram-gb 0.1, in MB = 102: .*256"),
        (("--vram-mb", "much"), "--vram-mb = 'much': .*integer"),
        (("--recipe", "q"), "--recipe = 'q': .*'f32', 'q8_0', .* or 'torch-int4'"),
        (("--bootstrap", "nowhere"), "--bootstrap = 'nowhere': .*no multiaddr"),
        (("--no-allow-private-addrs",), "--allow-private-addrs = False: not supported yet"),
    ],
)
def test_a_wrong_flag_is_refused_by_name_and_rule(arguments: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=wanted):
        node_config(*arguments)


def test_a_flag_wins_over_its_variable() -> None:
    assert node_config("--p2p-port", "1", TESSELLA_P2P_PORT="2").p2p_port == 1
    assert node_config(TESSELLA_P2P_PORT="2").p2p_port == 2
    assert not node_config("--no-kademlia-enabled", TESSELLA_KADEMLIA_ENABLED="true").kademlia_enabled


@pytest.mark.parametrize(("command", "kind"), list(zip((daemon, orchestrator, bootstrap), ROLES.values(), strict=True)))
def test_every_setting_has_its_flag_and_its_variable(command: click.Command, kind: type[RoleConfig]) -> None:
    options = {name for parameter in command.params for name in parameter.opts}
    help_text = " ".join(command.get_help(click.Context(command)).split())
    for name, field in kind.model_fields.items():
        assert set(flags_of(name, field)) <= options
        assert flags_of(name, field) or variables_of(name, field)
        if flags_of(name, field) and (variables := variables_of(name, field)):
            assert variables[0] in help_text
        assert field.description


def _status(arguments: tuple[str, ...], environ: Mapping[str, str | None]) -> tuple[int, str]:
    result = CliRunner(env=environ).invoke(cli, arguments)
    return result.exit_code, result.stderr


def test_a_daemon_without_an_orchestrator_is_status_2() -> None:
    status, message = _status(("daemon",), {"ORCHESTRATOR_URL": None})
    assert status == 2
    assert message.startswith("error: orchestrator_url is not set: ")


def test_the_config_file_comes_by_flag_or_variable(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text("[worker]\nvram_mb = 1\n")
    for arguments, environ in ((("daemon", "-c", str(path)), {}), (("daemon",), {"TESSELLA_CONFIG": str(path)})):
        status, message = _status(arguments, {"ORCHESTRATOR_URL": URL, **environ})
        assert (status, message.startswith(f"error: {path}: [worker] vram_mb = 1: ")) == (2, True)


def test_the_model_may_be_named_before_the_subcommand() -> None:
    long = "m" * 1025
    status, message = _status(("--model-id", long, "daemon"), {"ORCHESTRATOR_URL": URL})
    assert status == 2
    assert message.startswith("error: --default-model/--model-id = ")


def test_the_file_is_where_the_folder_says(tmp_path: Path) -> None:
    config = load_config(NodeConfig, flags={}, environ={"ORCHESTRATOR_URL": URL, "TESSELLA_CONFIG_DIR": str(tmp_path)})
    assert config.keypair_path == tmp_path / "node.key"
