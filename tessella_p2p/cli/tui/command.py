"""Starts the terminal UI, and ends what it started."""

from __future__ import annotations

import asyncio
import os
import signal
import tomllib
from pathlib import Path

import click
from prompt_toolkit.history import History

from tessella_p2p.cli.client_file import ClientFile
from tessella_p2p.cli.question_history import question_history
from tessella_p2p.cli.tui.app import TessellaUi
from tessella_p2p.cli.tui.remembered import default_path, read_remembered
from tessella_p2p.cli.tui.wishes import Wishes
from tessella_p2p.node.config import NodeConfig
from tessella_p2p.node.config_file import found_config
from tessella_p2p.node.settings import variables_of

_MESH = "orchestrator_url"


def run_ui(api_url: str | None, api_key: str | None, model_id: str | None, client: ClientFile) -> None:
    """Run the terminal UI until the user leaves.

    Args:
        api_url, api_key, model_id: what flags and variables say.
        client: what the client's file says.

    Raises:
        ConfigurationError: ``ui.toml`` is damaged.
    """
    path = default_path(os.environ)
    variables = variables_of(_MESH, NodeConfig.model_fields[_MESH])
    wishes = Wishes(
        api_url=api_url,
        api_key=api_key,
        model_id=model_id,
        mesh=next((os.environ[name] for name in variables if os.environ.get(name)), None),
        remembered=read_remembered(path),
        client=client,
        known_mesh=_own_mesh(),
    )
    asyncio.run(_run(wishes, path, question_history()))


async def _run(wishes: Wishes, path: Path, history: History) -> None:
    ui = TessellaUi(wishes, path, os.environ, history)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, ui.exit)
    try:
        await ui.run_async()
    finally:
        if any(node.runs for node in ui.started):
            click.echo("the node leaves the mesh…", err=True)
        for node in ui.started:
            await node.leave()
    if ui.return_code:
        raise SystemExit(ui.return_code)


def _own_mesh() -> str | None:
    """The orchestrator that this machine's node has in its file, to be proposed; whatever is wrong with that file."""
    path = found_config("node", os.environ)
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8")).get(_MESH) if path is not None else None
    except (OSError, ValueError, RecursionError):
        return None
    return said if isinstance(said, str) else None
