"""``daemon``, ``orchestrator`` and ``bootstrap``: settings in, a running role until it is told to leave."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import structlog
import trio
from click.core import ParameterSource

from tessella_p2p.cli.ledger_backup import backup, restore
from tessella_p2p.cli.main import EXIT_STATUS_HELP
from tessella_p2p.cli.setting_options import configured, setting_options
from tessella_p2p.node.config import BootstrapConfig, ConfigT, NodeConfig, OrchestratorConfig
from tessella_p2p.node.log import configure_logging

_EPILOG = f"Ends at SIGTERM and Ctrl-C. {EXIT_STATUS_HELP}"

log = structlog.get_logger(__name__)


@click.command(epilog=_EPILOG)
@setting_options(NodeConfig)
@click.pass_context
def daemon(ctx: click.Context, /, config_file: Path | None, **typed: Any) -> None:
    """Run a node.

    It serves a range of layers when the orchestrator assigns one, and is an entry for clients in any case.
    """
    config = configured(NodeConfig, config_file, _with_model(ctx, typed))
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
    reread = partial(configured, OrchestratorConfig, config_file, _with_model(ctx, typed))
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
def bootstrap(config_file: Path | None, **typed: Any) -> None:
    """Run a bootstrap node: others join the DHT through it."""
    config = configured(BootstrapConfig, config_file, typed)
    from tessella_p2p.node.bootstrap import run_bootstrap

    _run(run_bootstrap, config)


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
