"""Starts the terminal UI, and ends what it started."""

from __future__ import annotations

import asyncio
import os
import signal
import tomllib
from contextlib import suppress
from pathlib import Path

import click

from tessella_p2p.cli.client_file import ClientFile
from tessella_p2p.cli.tui.app import TessellaUi
from tessella_p2p.cli.tui.remembered import default_path, read_remembered
from tessella_p2p.cli.tui.wishes import Wishes

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
    wishes = Wishes(
        api_url=api_url,
        api_key=api_key,
        model_id=model_id,
        mesh=_mesh_of_environment(),
        remembered=read_remembered(path),
        client=client,
        known_mesh=_own_mesh(path.with_name("node.toml")),
    )
    asyncio.run(_run(wishes, path))


async def _run(wishes: Wishes, path: Path) -> None:
    ui = TessellaUi(wishes, path, os.environ)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, ui.exit)
    try:
        await ui.run_async()
    finally:
        if any(node.runs for node in ui.started):
            with suppress(OSError):  # the terminal may be gone, which is no reason to leave a node behind
                click.echo("the node leaves the mesh…", err=True)
        for node in ui.started:
            await node.leave()
    if ui.return_code:
        raise SystemExit(ui.return_code)


def _mesh_of_environment() -> str | None:
    """The orchestrator that a variable names."""
    if not any(name.endswith("ORCHESTRATOR_URL") for name in os.environ):
        return None
    from tessella_p2p.node.config import NodeConfig  # only where there is one: a node's settings import much
    from tessella_p2p.node.settings import variables_of

    variables = variables_of(_MESH, NodeConfig.model_fields[_MESH])
    return next((os.environ[name] for name in variables if os.environ.get(name)), None)


def _own_mesh(path: Path) -> str | None:
    """The orchestrator that this machine's node has in its file, to be proposed; whatever is wrong with that file."""
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8")).get(_MESH)
    except (OSError, ValueError, RecursionError):
        return None
    return said if isinstance(said, str) else None
