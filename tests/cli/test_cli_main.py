"""The root command: instant, lazy, and one line for each failure."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import trio
from click.testing import CliRunner, Result

from tessella_p2p.base.errors import ConfigurationError, KeyFileError, NoRoute, TransportError
from tessella_p2p.cli import main as root

HEAVY = (
    *("torch", "libp2p", "pydantic", "trio", "httpx", "rich", "structlog", "numpy", "platformdirs", "nacl"),
    *("textual", "prompt_toolkit", "tomlkit", "llguidance", "starlette", "jinja2", "psutil"),
)

COMMANDS = [
    *(
        "demo",
        "chat",
        "fim",
        "init",
        "daemon",
        "orchestrator",
        "operate",
        "bootstrap",
        "keys",
        "models",
        "status",
        "peers",
        "why",
        "doctor",
        "settings",
        "sim",
    ),
    *("keys show", "keys generate", "keys delegate", "keys api", "keys api add", "keys api list", "keys api revoke"),
    *("models list", "models pull"),
]


def invoke(*arguments: str, **environ: str) -> Result:
    return CliRunner(env=environ).invoke(root.cli, arguments)


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from tessella_p2p.cli.main import cli\n"
        "cli.main(['--help'], standalone_mode=False)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    for name in ("demo", "chat", "daemon", "sim"):
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("command", ["daemon", "orchestrator", "bootstrap"])
def test_help_of_a_daemon_imports_neither_torch_nor_libp2p(command: str) -> None:
    script = (
        "import sys\n"
        "from tessella_p2p.cli.main import cli\n"
        f"cli.main([{command!r}, '--help'], standalone_mode=False)\n"
        "print(sorted({'torch', 'libp2p'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_its_exit_statuses(command: str) -> None:
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage: " in result.stdout
    assert "2 wrong usage" in " ".join(result.stdout.split())


def test_the_list_of_commands_says_what_each_command_says_of_itself() -> None:
    listed = invoke("--help").stdout
    with click.Context(root.cli) as ctx:
        for name in root.cli.list_commands(ctx):
            assert f"\n  {name} " in listed
            assert root.cli.get_command(ctx, name) is not None


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tessella_p2p", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("tessella-p2p, version ")


@pytest.mark.parametrize("arguments", [("nonsense",), ("chat", "--max-tokens", "0", "hi"), ("demo", "--workers", "0")])
def test_wrong_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("chta", "hi"), "Did you mean chat?"),
        (("chat", "-a", "http://127.0.0.1:1", "hi"), "before the command, as in: tessella-p2p -a … chat"),
        (("why", "--model-id=x"), "before the command, as in: tessella-p2p --model-id … why"),
    ],
)
def test_wrong_usage_names_what_was_meant(arguments: tuple[str, ...], hint: str) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, hint in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("closed", "arguments", "status"),
    [("<&-", "chat", 2), (">&-", "keys generate", 0), ("2>&-", "keys show", 2), ("<&- >&- 2>&-", "keys generate", 0)],
)
def test_a_closed_standard_stream_is_no_bug(closed: str, arguments: str, status: int, tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m tessella_p2p {arguments} {closed}"
    environ = {**os.environ, "TESSELLA_CONFIG_DIR": str(tmp_path)}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environ, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr


def _fail(raise_it: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setattr(root.cli, "get_command", lambda *_: click.Command("fails", callback=raise_it))
    return invoke("fails")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigurationError("vram_mb is wrong"), 2),
        (KeyFileError("the key is damaged"), 2),
        (TransportError("nobody answers"), 1),
        (PermissionError(13, "Permission denied", "/srv/data"), 1),
    ],
)
def test_a_failure_is_one_line_without_a_traceback(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    result = _fail(fail, monkeypatch)
    assert (result.exit_code, result.stderr, result.stdout) == (status, f"error: {error}\n", "")


def test_a_failure_in_a_nursery_is_the_first_error_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        async def inner() -> None:
            async with trio.open_nursery() as outer, trio.open_nursery():
                outer.start_soon(trio.lowlevel.checkpoint)
                raise NoRoute("layers 10–20 are missing")

        trio.run(inner)

    result = _fail(fail, monkeypatch)
    assert (result.exit_code, result.stderr) == (1, "error: layers 10–20 are missing\n")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ExceptionGroup("nursery", [NoRoute("no route"), ZeroDivisionError("ours")])

    result = _fail(fail, monkeypatch)
    assert isinstance(result.exception, ExceptionGroup)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BaseExceptionGroup("nursery", [KeyboardInterrupt()])])
def test_an_interrupt_is_status_130(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    result = _fail(fail, monkeypatch)
    assert (result.exit_code, result.stderr) == (130, "")
