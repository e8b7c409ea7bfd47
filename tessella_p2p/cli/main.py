"""The ``tessella-p2p`` command: names and one-line descriptions here, everything else is imported when it is asked for.

``tessella-p2p --help`` must be instant, so this module imports click and nothing heavy; a test holds it to that.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
from click.exceptions import NoArgsIsHelpError

from tessella_p2p import __version__
from tessella_p2p.base.errors import ConfigurationError, TessellaError
from tessella_p2p.cli.client_file import VARIABLE, ClientFile, read_client_file
from tessella_p2p.cli.options import DEFAULT_API_URL, ClientOptions

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
EXIT_INTERRUPTED = 130
EXIT_STATUS_HELP = "Exit status: 0 done; 1 failed; 2 wrong usage or configuration; 130 interrupted."

_COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "demo": ("tessella_p2p.cli.demo_command:demo", "Run a whole mesh on this machine and ask it a question."),
    "chat": ("tessella_p2p.cli.chat:chat", "Ask a node, and read the answer as it comes."),
    "fim": ("tessella_p2p.cli.fim:fim", "Fill in the middle: what stands between a prefix and a suffix."),
    "daemon": ("tessella_p2p.cli.daemons:daemon", "Run a node: worker and entry."),
    "orchestrator": ("tessella_p2p.cli.daemons:orchestrator", "Run an orchestrator: admit, split, mint, settle."),
    "operate": ("tessella_p2p.cli.operate:operate", "Read an orchestrator's books, slash, rebalance, publish."),
    "bootstrap": ("tessella_p2p.cli.daemons:bootstrap", "Run a node that others join the DHT through."),
    "keys": ("tessella_p2p.cli.keys:keys", "Make and show identity keys."),
    "models": ("tessella_p2p.cli.models:models", "Pull models and list them."),
    "settings": ("tessella_p2p.cli.settings_page:settings", "List every setting: flag, variable, key, default, rule."),
    "init": ("tessella_p2p.cli.init:init", "Write the client's configuration file and key."),
    "status": ("tessella_p2p.cli.status:status", "Show what a node is doing."),
    "peers": ("tessella_p2p.cli.status:peers", "Show the peers that a node knows."),
    "why": ("tessella_p2p.cli.why:why", "Tell what became of a request: its waits, its routes, its end."),
    "doctor": ("tessella_p2p.cli.doctor:doctor", "Look for what is wrong with this node, and say how to mend it."),
    "sim": ("tessella_p2p.cli.sim:sim", "Simulate many nodes in virtual time."),
}
"""Each command: where it is, and what it does."""

_CLIENTS = frozenset({"chat", "fim", "status", "peers", "why"})
"""Commands that ask a node, and go by the client's file."""


class _Failure(click.ClickException):
    """An error that the user can do something about: one message on standard error, no traceback."""

    exit_code = EXIT_FAILED

    def show(self, file: Any = None) -> None:
        """Print the message to standard error."""
        click.echo(f"error: {self.message}", err=True, file=file)


class _WrongConfiguration(_Failure):
    exit_code = EXIT_CONFIGURATION


class _LazyGroup(click.Group):
    """Imports a command when it is run, and turns errors into messages and exit statuses."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean {near[0]}?", ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, description) for name, (_, description) in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)
        except click.NoSuchOption as error:
            if not any(error.option_name in option.opts for option in self.params):
                raise
            there = f"It stands before the command, as in: tessella-p2p {error.option_name} … {ctx.invoked_subcommand}"
            raise click.UsageError(f"{error.message} {there}", error.ctx) from error
        except TessellaError as error:
            raise _failure(error) from error
        except BaseExceptionGroup as group:
            return self._end_by_group(ctx, group)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of our output left; click ends quietly
                raise
            raise _Failure(str(error)) from error

    def _end_by_group(self, ctx: click.Context, group: BaseExceptionGroup[BaseException]) -> None:
        """A nursery's errors: the first one that is a user's matter, unless one is a bug of ours."""
        if group.subgroup(KeyboardInterrupt):
            ctx.exit(EXIT_INTERRUPTED)
        known, bugs = group.split(TessellaError)
        if known is None or bugs is not None:
            raise group
        first: BaseException = known
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        assert isinstance(first, TessellaError)
        raise _failure(first) from group


def _failure(error: TessellaError) -> _Failure:
    return _WrongConfiguration(str(error)) if isinstance(error, ConfigurationError) else _Failure(str(error))


@click.group(
    cls=_LazyGroup,
    epilog=EXIT_STATUS_HELP,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="tessella-p2p")
@click.option(
    "-a",
    "--api-url",
    envvar="TESSELLA_API_URL",
    show_envvar=True,
    help=f"The node that chat, fim, status, peers and why talk to.  [default: {DEFAULT_API_URL}]",
)
@click.option(
    "--api-key",
    envvar="TESSELLA_API_KEY",
    show_envvar=True,
    help="What that node asks for; better by the variable, since others on a machine see its flags.",
)
@click.option("--model-id", envvar="TESSELLA_MODEL_ID", show_envvar=True, help="The model, where a node knows several.")
@click.option(
    "-c",
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar=VARIABLE,
    show_envvar=True,
    help="The command's TOML file: a client's (init writes one), or that of a daemon.",
)
@click.pass_context
def cli(
    ctx: click.Context, api_url: str | None, api_key: str | None, model_id: str | None, config_file: Path | None
) -> None:
    """One language model, run by many machines that nobody has to trust.

    Without a command, on a terminal: a terminal UI that attaches to a node or joins a mesh, and chats.
    """
    if ctx.invoked_subcommand is None:
        _run_ui(ctx, api_url, api_key, model_id, config_file)
        return
    is_client = ctx.invoked_subcommand in _CLIENTS
    said = read_client_file(config_file, os.environ) if is_client else ClientFile()
    ctx.obj = ClientOptions(
        api_url=api_url if api_url is not None else said.api_url or DEFAULT_API_URL,
        model_id=model_id or said.model_id,
        api_key=api_key or said.api_key,
        config_file=config_file,
    )


def _run_ui(
    ctx: click.Context, api_url: str | None, api_key: str | None, model_id: str | None, config_file: Path | None
) -> None:
    """The terminal UI; where there is no terminal, what is missing is a command."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        if len(sys.argv) > 1:
            ctx.fail("Missing command.")
        raise NoArgsIsHelpError(ctx)
    from tessella_p2p.cli.tui.command import run_ui

    run_ui(api_url, api_key, model_id, read_client_file(config_file, os.environ))


def _open_missing_streams() -> None:
    """Where whoever started this closed a standard stream, there is nothing to read, and what is written is lost.

    Else the stream is None here, and the first socket or database takes its number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (as long as the process)


def main() -> None:
    """The entry point of the console script."""
    _open_missing_streams()
    cli.main(args=sys.argv[1:], prog_name="tessella-p2p")
