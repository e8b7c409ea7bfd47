"""``tessella-p2p status`` and ``peers``: what a node tells of itself and of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from tessella_p2p.base.errors import MalformedMessage
from tessella_p2p.cli.main import EXIT_STATUS_HELP
from tessella_p2p.cli.node_client import NodeClient
from tessella_p2p.cli.options import ClientOptions
from tessella_p2p.cli.tables import console
from tessella_p2p.cli.terminal import print_json, printable

_PEER_COLUMNS = {
    "peer_id": "peer",
    "model_id": "model",
    "layer_ranges": "layers",
    "status": "status",
    "queue_depth": "queue",
    "recipe": "recipe",
    "canary": "canary",
}
"""Fields of a peer, and their heads: short, so that a line fits a terminal of 80 columns."""
_ID_ENDS = (8, 6)
_SAME_AS_DEVICE = "gpu"
"""The manual's name of ``device``: shown once."""


@click.command(epilog=EXIT_STATUS_HELP)
@click.option("--json", "as_json", is_flag=True, help="The node's own JSON.")
@click.pass_obj
def status(options: ClientOptions, as_json: bool) -> None:
    """Show what a node is doing: its range, its limits, its credits."""
    with NodeClient(options.api_url, bearer=options.api_key) as node:
        body = node.get("/status")
    if not isinstance(body, dict):
        raise MalformedMessage(f"{options.api_url}/status is no JSON object: is it a Tessella node?")
    if as_json:
        print_json(body)
        return
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(overflow="fold")
    for name, value in _rows({name: value for name, value in body.items() if name != _SAME_AS_DEVICE}):
        table.add_row(Text(printable(name), style="bold"), Text(printable(value)))
    console().print(table)


@click.command(epilog=EXIT_STATUS_HELP)
@click.option("--json", "as_json", is_flag=True, help="The node's own JSON.")
@click.pass_obj
def peers(options: ClientOptions, as_json: bool) -> None:
    """Show the peers that a node knows, of one model with --model-id."""
    with NodeClient(options.api_url, bearer=options.api_key) as node:
        body = node.get("/peers", **({"model_id": options.model_id} if options.model_id else {}))
    if not isinstance(body, list) or not all(isinstance(peer, dict) for peer in body):
        raise MalformedMessage(f"{options.api_url}/peers is no list of peers: is it a Tessella node?")
    if as_json:
        print_json(body)
        return
    if not body:
        click.echo("no peers are known yet", err=True)
        return
    table = Table(box=None, pad_edge=False)
    for head in _PEER_COLUMNS.values():
        table.add_column(head, overflow="fold")
    for peer in body:
        shown = {**peer, "peer_id": short_peer_id(str(peer.get("peer_id")))}
        table.add_row(*(Text(printable(_short(shown.get(column)))) for column in _PEER_COLUMNS))
    console().print(table)


def short_peer_id(peer_id: str) -> str:
    """Both ends of a peer id, for a table on a screen; ``--json`` has all of it."""
    start, end = _ID_ENDS
    return peer_id if len(peer_id) <= start + end + 1 else f"{peer_id[:start]}…{peer_id[-end:]}"


def _rows(body: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in body.items():
        if isinstance(value, dict) and value:
            yield from _rows(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            yield f"{prefix}{name}", "\n".join(value)
        else:
            yield f"{prefix}{name}", _short(value)


def _short(value: object) -> str:
    if value is None or value in ([], {}):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_range(item) for item in value)
    return str(value)


def _range(item: object) -> str:
    if isinstance(item, list) and len(item) == 2:
        return f"{item[0]}–{item[1]}"
    return str(item)
