"""The questions of a first start: each answer is held to the rules, the file is written once, nothing is asked twice."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import ConfigurationError, DialError, TessellaError, WorkerNotAuthorized
from tessella_p2p.base.limits import MIB, MIN_CLAIM_MB
from tessella_p2p.cli.main import cli
from tessella_p2p.cli.wizard import Answers, default_claim_mb, first_free_port, is_due, run_wizard
from tessella_p2p.node.config import NodeConfig, load_config
from tessella_p2p.node.keystore import load_key
from tessella_p2p.node.served_models import NetworkModel
from tessella_p2p.node.settings import Given
from tessella_p2p.wire.keys import NodeKey
from tests.cli.terminal_double import terminal

PEER = NodeKey(bytes(32)).peer_id
URL = f"/ip4/203.0.113.7/tcp/9090/p2p/{PEER}"
MODELS = (NetworkModel("here", 3, "q8_0"), NetworkModel("other", 1, None))


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    """A folder in which the models of the network are, so that nothing is pulled."""
    folder = tmp_path / "models"
    folder.mkdir()
    for model in MODELS:
        (folder / f"{model.model_id}.gguf").write_bytes(b"GGUF")
    return folder


def asked(
    folder: Path,
    *lines: str,
    flags: dict[str, object] | None = None,
    environ: dict[str, str] | None = None,
    read: Callable[[NodeConfig], Sequence[NetworkModel]] = lambda _: MODELS,
) -> Result:
    """The wizard, with what a person types."""
    given_flags = {name: Given(value, f"--{name}") for name, value in (flags or {}).items()}

    @click.command()
    def ask() -> None:
        variables = {"TESSELLA_CONFIG_DIR": str(folder), **(environ or {})}
        run_wizard(folder / "node.toml", given_flags, variables, read)

    return CliRunner().invoke(ask, input="".join(f"{line}\n" for line in lines))


def written(folder: Path) -> NodeConfig:
    return load_config(NodeConfig, flags={}, environ={"TESSELLA_CONFIG_DIR": str(folder)}, file=folder / "node.toml")


def test_answers_become_a_file_and_a_key(tmp_path: Path, models_dir: Path) -> None:
    key = tmp_path / "my.key"
    result = asked(tmp_path, URL, "2", "512", str(models_dir), str(key), "", "18080", "19080", "y")
    assert result.exception is None
    config = written(tmp_path)
    assert (config.orchestrator_url, config.default_model, config.vram_mb) == (URL, "other", 512)
    assert (config.models_dir, config.keypair_path, config.api_host) == (models_dir, key, "127.0.0.1")
    assert (config.api_port, config.p2p_port, config.api_keys) == (18080, 19080, None)
    assert load_key(key).peer_id in result.output


def test_enter_takes_the_defaults_and_the_mesh_says_the_recipe(tmp_path: Path, models_dir: Path) -> None:
    result = asked(tmp_path, URL, "", "", str(models_dir), "", "", "", "", "")
    assert result.exception is None
    config = written(tmp_path)
    assert (config.default_model, config.recipe) == ("here", "q8_0")
    assert "its workers compute in q8_0" in result.output
    assert config.keypair_path == tmp_path / "node.key"
    assert config.vram_mb % 256 == 0


def test_a_wrong_answer_is_asked_again_with_the_rule_that_it_breaks(tmp_path: Path, models_dir: Path) -> None:
    lines = ("nowhere", "/ip4/203.0.113.7/tcp/9090", URL, "1", "12", "much", "512", str(models_dir), "", "host", "")
    result = asked(tmp_path, *lines, "99999", "18080", "", "y")
    assert result.exception is None
    for rule in (
        "no orchestrator address",
        "not who it is",
        "equal to 256",
        "valid integer",
        "an IPv4 or IPv6",
        "65535",
    ):
        assert rule in result.output, rule
    assert "this answer" not in result.output
    assert written(tmp_path).vram_mb == 512


@pytest.mark.parametrize(("typed", "kept"), [("", "required"), ("off", "off")])
def test_whoever_opens_the_api_to_others_says_whether_they_need_keys(
    tmp_path: Path, models_dir: Path, typed: str, kept: str
) -> None:
    result = asked(tmp_path, URL, "1", "", str(models_dir), "", "0.0.0.0", "perhaps", typed, "", "", "y")
    assert result.exception is None
    assert (written(tmp_path).api_host, written(tmp_path).api_keys) == ("0.0.0.0", kept)
    assert ("keys api add" in result.output) == (kept == "required")


@pytest.mark.parametrize("by_flag", [True, False])
def test_an_api_that_flags_or_the_environment_open_to_others_is_asked_who_may_use_it(
    tmp_path: Path, models_dir: Path, by_flag: bool
) -> None:
    flags: dict[str, object] = {"api_host": "0.0.0.0"} if by_flag else {}
    environ = {} if by_flag else {"TESSELLA_PUBLIC_API_URL": "https://node.example"}
    lines = (URL, "1", "", str(models_dir), "", *(() if by_flag else ("",)), "off", "", "", "y")
    result = asked(tmp_path, *lines, flags=flags, environ=environ)
    assert result.exception is None, result.output
    assert "Ask for API keys" in result.output
    assert result.output.count("Orchestrator:") == 1
    assert 'api_keys = "off"' in (tmp_path / "node.toml").read_text()


def test_what_flags_answer_is_not_asked_and_is_kept(tmp_path: Path, models_dir: Path) -> None:
    flags: dict[str, object] = {"orchestrator_url": URL, "default_model": "here", "vram_mb": "640", "threads": 2}
    flags |= {"models_dir": str(models_dir), "api_host": "127.0.0.1", "api_port": 18080, "p2p_port": 19080}
    result = asked(tmp_path, "", "y", flags=flags)
    assert result.exception is None
    config = written(tmp_path)
    assert (config.vram_mb, config.api_port, config.threads) == (640, 18080, None)
    assert "Memory" not in result.output


def test_what_flags_say_beyond_the_questions_is_said_not_to_be_kept(tmp_path: Path, models_dir: Path) -> None:
    answers = (URL, "1", "", str(models_dir), "", "", "", "", "y")
    result = asked(tmp_path, *answers, flags={"bootstrap": URL, "threads": 2})
    assert result.exception is None, result.output
    assert "not in the file: --bootstrap, --threads" in result.output
    assert written(tmp_path).bootstrap == ()


def test_a_number_is_one_of_the_list_and_the_ports_differ(tmp_path: Path, models_dir: Path) -> None:
    result = asked(tmp_path, URL, "7", "0", "2", "", str(models_dir), "", "", "18080", "18080", "19080", "y")
    assert result.exception is None, result.output
    assert "no model 7 in the list" in result.output
    assert "18080 is the other port of this node" in result.output
    config = written(tmp_path)
    assert (config.default_model, config.api_port, config.p2p_port) == ("other", 18080, 19080)


def test_a_path_is_written_in_full(tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = asked(tmp_path, URL, "1", "", "models", "my.key", "", "", "", "y")
    assert result.exception is None, result.output
    monkeypatch.chdir("/")
    assert (written(tmp_path).models_dir, written(tmp_path).keypair_path) == (models_dir, tmp_path / "my.key")


def test_the_port_of_another_program_is_noted(tmp_path: Path, models_dir: Path) -> None:
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        result = asked(tmp_path, URL, "1", "", str(models_dir), "", "", port, "", "y")
    assert result.exception is None, result.output
    assert "another program listens on " + port in result.output


def test_what_the_environment_answers_is_neither_asked_nor_written(tmp_path: Path, models_dir: Path) -> None:
    environ = {"TESSELLA_VRAM_MB": "700", "TESSELLA_MODELS_DIR": str(models_dir)}
    result = asked(tmp_path, URL, "1", "", "", "", "", "y", environ=environ)
    assert result.exception is None
    assert "Memory" not in result.output
    assert "# vram_mb = 2048" in (tmp_path / "node.toml").read_text()


def test_an_orchestrator_that_does_not_answer_is_asked_for_again_or_kept(tmp_path: Path, models_dir: Path) -> None:
    tries: list[str] = []

    def read(config: NodeConfig) -> Sequence[NetworkModel]:
        tries.append(config.orchestrator_url)
        raise DialError("nobody is there")

    other = URL.replace("9090", "9099")
    result = asked(tmp_path, URL, "n", other, "y", "here", "", str(models_dir), "", "", "", "", "y", read=read)
    assert result.exception is None
    assert tries == [URL, other]
    assert written(tmp_path).orchestrator_url == other


@pytest.mark.parametrize(
    ("refusal", "said"),
    [(WorkerNotAuthorized("worker_not_authorized"), "its mesh is private"), (None, "serves nothing yet")],
)
def test_a_mesh_that_tells_nothing_is_joined_all_the_same(
    tmp_path: Path, models_dir: Path, refusal: TessellaError | None, said: str
) -> None:
    def read(_: NodeConfig) -> Sequence[NetworkModel]:
        if refusal is not None:
            raise refusal
        return ()

    result = asked(tmp_path, URL, "here", "", str(models_dir), "", "", "", "", "y", read=read)
    assert result.exception is None
    assert said in result.output
    assert written(tmp_path).default_model == "here"


@pytest.mark.parametrize("typed", [(), (URL,), (URL, "1", "", "m", "", "", "", "", "n")])
def test_whoever_leaves_finds_nothing_written(tmp_path: Path, models_dir: Path, typed: tuple[str, ...]) -> None:
    lines = [str(models_dir) if line == "m" else line for line in typed]
    result = asked(tmp_path, *lines)
    assert isinstance(result.exception, (KeyboardInterrupt, SystemExit))
    assert "nothing was written" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_names_of_the_network_cannot_drive_the_terminal(tmp_path: Path) -> None:
    result = asked(tmp_path, URL, read=lambda _: (NetworkModel("\x1b]0;title\x07", 1, None),))
    assert "Model, by" in result.output
    assert "\x1b" not in result.output


@given(st.integers(0, 1 << 50))
def test_the_default_claim_is_half_of_what_is_free_in_whole_steps(available: int) -> None:
    claim = default_claim_mb(available)
    assert claim % 256 == 0
    assert claim >= MIN_CLAIM_MB
    assert claim == MIN_CLAIM_MB or claim * MIB <= available // 2


@given(st.integers(1, 60_000), st.sets(st.integers(0, 20)))
def test_the_port_is_the_wanted_one_or_a_free_one_near_it(wanted: int, taken: set[int]) -> None:
    port = first_free_port(wanted, lambda port: port - wanted not in taken)
    assert port == wanted or (port - wanted not in taken and 0 < port - wanted < 16)


def test_it_is_due_only_where_nothing_says_where_the_orchestrator_is() -> None:
    assert is_due({}, {})
    assert not is_due({}, {"ORCHESTRATOR_URL": URL})
    assert not is_due({"orchestrator_url": Given(URL, "--tracker-url")}, {})


def test_an_answer_that_breaks_a_rule_is_not_taken() -> None:
    answers = Answers({}, {"orchestrator_url": Given(URL, "x")})
    with pytest.raises(ConfigurationError):
        answers.add("vram_mb", "1")
    assert answers.needs("vram_mb")


# ---- the command ----


def test_without_a_terminal_nothing_is_asked(tmp_path: Path) -> None:
    environ = {"TESSELLA_CONFIG_DIR": str(tmp_path), "ORCHESTRATOR_URL": None}
    result = CliRunner(env=environ).invoke(cli, ["daemon"], input=f"{URL}\n")
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert result.stderr.startswith("error: orchestrator_url is not set: ")


@pytest.mark.parametrize("before", [True, False])
def test_the_file_of_a_first_start_is_read_by_the_next_ones(tmp_path: Path, before: bool) -> None:
    path = tmp_path / ("node.toml" if not before else "other.toml")
    path.write_text("[worker]\nvram_mb = 1\n")
    arguments = ["-c", str(path), "daemon"] if before else ["daemon"]
    result = CliRunner(env={"TESSELLA_CONFIG_DIR": str(tmp_path), "ORCHESTRATOR_URL": URL}).invoke(cli, arguments)
    assert (result.exit_code, result.stderr.startswith(f"error: {path}: [worker] vram_mb = 1: ")) == (2, True)


async def test_a_first_start_on_a_terminal_asks_and_writes_nothing_for_whoever_leaves(tmp_path: Path) -> None:
    environ: dict[str, str | None] = {name: None for name in os.environ if name.startswith("TESSELLA_")}
    with closing(socket.socket()) as nobody:  # bound and not listening: refused at once
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        environ |= {"TESSELLA_CONFIG_DIR": str(tmp_path), "ORCHESTRATOR_URL": None}
        async with terminal("daemon", environ=environ) as shown:
            await shown.see("Orchestrator:")
            await shown.type("nonsense\n")
            await shown.see("is no orchestrator address")
            await shown.see("Orchestrator:")
            await shown.type(f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}\n")
            await shown.see("it cannot be reached")
            await shown.see("all the same?")
            await shown.type("y\n")
            await shown.see("Model [")
            # The end of input, not an interrupt: CPython loses one that comes just before `input` begins to wait.
            await shown.type("\x04")
            await shown.see("nothing was written")
            assert await shown.ended() == 130
    assert not os.listdir(tmp_path)


async def test_no_wizard_is_the_plain_error_on_a_terminal_too(tmp_path: Path) -> None:
    environ = {"TESSELLA_CONFIG_DIR": str(tmp_path), "ORCHESTRATOR_URL": None}
    async with terminal("daemon", "--no-wizard", environ=environ) as shown:
        await shown.see("error: orchestrator_url is not set")
        assert await shown.ended() == 2
