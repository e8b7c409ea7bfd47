"""``daemon``, ``orchestrator`` and ``bootstrap``: settings in, a running role until it is told to leave."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import structlog
import trio
from click.core import ParameterSource

from tessella_p2p.cli.ledger_backup import backup, restore
from tessella_p2p.cli.main import EXIT_STATUS_HELP
from tessella_p2p.cli.setting_options import configured, given_flags, setting_options
from tessella_p2p.node.config import BootstrapConfig, ConfigT, NodeConfig, OrchestratorConfig
from tessella_p2p.node.config_file import default_config_path, found_config
from tessella_p2p.node.log import configure_logging, unlogged

if TYPE_CHECKING:
    from tessella_p2p.node.served_models import NetworkModel

_EPILOG = f"Ends at SIGTERM and Ctrl-C. {EXIT_STATUS_HELP}"

log = structlog.get_logger(__name__)


@click.command(epilog=_EPILOG)
@setting_options(NodeConfig)
@click.option("--no-wizard", is_flag=True, help="Ask nothing, even where there is no configuration yet.")
@click.pass_context
def daemon(ctx: click.Context, /, config_file: Path | None, no_wizard: bool, **typed: Any) -> None:
    """Run a node.

    It serves a range of layers when the orchestrator assigns one, and is an entry for clients in any case. Without --config it reads
    node.toml beside its key; where there is none, the first start on a terminal asks what has to be known, and writes it.
    """
    given = _with_model(ctx, typed)
    chosen = chosen_file(ctx, config_file, "node")
    if chosen is None and not no_wizard:
        chosen = _asked_for(given)
    config = configured(NodeConfig, chosen, given)
    from tessella_p2p.node.daemon import run_daemon  # after the check: libp2p takes two seconds to import

    _run(run_daemon, config)


@click.group(epilog=_EPILOG, invoke_without_command=True)
@setting_options(OrchestratorConfig)
@click.pass_context
def orchestrator(ctx: click.Context, /, config_file: Path | None, **typed: Any) -> None:
    """Run an orchestrator, or back its ledger up.

    It admits workers, splits the model among them, mints tickets and keeps the ledger; it never sees a prompt, a token or a tensor.
    At SIGHUP it reads its allow-list, federation, admin token and log level again.
    """
    chosen = chosen_file(ctx, config_file, "orchestrator")
    reread = partial(configured, OrchestratorConfig, chosen, _with_model(ctx, typed))
    config = reread()
    if ctx.invoked_subcommand is not None:
        ctx.obj = config
        return
    from tessella_p2p.node.orchestrator import run_orchestrator

    _run(partial(run_orchestrator, reread=reread), config)


orchestrator.add_command(backup)
orchestrator.add_command(restore)


@click.command(epilog=_EPILOG)
@setting_options(BootstrapConfig)
@click.pass_context
def bootstrap(ctx: click.Context, /, config_file: Path | None, **typed: Any) -> None:
    """Run a bootstrap node: others join the DHT through it."""
    config = configured(BootstrapConfig, chosen_file(ctx, config_file, "bootstrap"), typed)
    from tessella_p2p.node.bootstrap import run_bootstrap

    _run(run_bootstrap, config)


def chosen_file(ctx: click.Context, config_file: Path | None, role: str) -> Path | None:
    """The role's file: the one that was named, behind the subcommand or before it, or the one at its default place."""
    before = ctx.find_root()
    if config_file is None and before.get_parameter_source("config_file") is ParameterSource.COMMANDLINE:
        config_file = before.params["config_file"]
    return config_file or found_config(role, os.environ)


def _asked_for(typed: dict[str, Any]) -> Path | None:
    """The file that the wizard wrote; None where it has nothing to ask, or nobody to ask it of."""
    from tessella_p2p.cli.wizard import is_due, run_wizard

    flags = given_flags(NodeConfig, typed)
    if not is_due(flags, os.environ) or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    path = default_config_path("node", os.environ)
    run_wizard(path, flags, os.environ, _network_models)
    return path


def _network_models(config: NodeConfig) -> Sequence[NetworkModel]:
    from tessella_p2p.node.served_models import read_network_models

    configure_logging("error", "console")
    with unlogged():  # the questions have the terminal to themselves
        return trio.run(read_network_models, config.orchestrator)


def _with_model(ctx: click.Context, typed: dict[str, Any]) -> dict[str, Any]:
    """``--model-id`` before the subcommand means what it means behind it."""
    before = ctx.find_root()
    if typed["default_model"] is None and before.get_parameter_source("model_id") is ParameterSource.COMMANDLINE:
        return {**typed, "default_model": before.params["model_id"]}
    return typed


def _run(role: Callable[[ConfigT], Awaitable[None]], config: ConfigT) -> None:
    configure_logging(config.log_level, config.log_format)
    if isinstance(config, NodeConfig) and config.hf_token is not None:
        log.info("HF_TOKEN is set, but no weights are fetched with it yet")
    # What is imported lives as long as the process. A collection that visits all of it takes 0.1 s, in which the loop stands still.
    gc.collect()
    gc.freeze()
    trio.run(role, config)
