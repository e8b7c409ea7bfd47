"""``tessella-p2p why``: what became of a request."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import click
from pydantic import ValidationError
from pydantic_core import to_json
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tessella_p2p.base.errors import MalformedMessage, UnknownRequest
from tessella_p2p.cli.main import EXIT_STATUS_HELP
from tessella_p2p.cli.node_client import NodeClient
from tessella_p2p.cli.options import ClientOptions
from tessella_p2p.cli.status import short_peer_id
from tessella_p2p.cli.tables import console
from tessella_p2p.cli.terminal import print_json, printable
from tessella_p2p.cli.timeline import BAR_CHARS, Epoch, Told, bar, blamed, last_ms, rows_of, slowest, verdict

_ID_START = "req-"
_NUMBERS_CHARS = 22
"""Two columns of milliseconds, and what stands between columns."""
_LEAST_BAR_CHARS = 8


@click.command(epilog=EXIT_STATUS_HELP)
@click.argument("request_id", required=False)
@click.option("--json", "as_json", is_flag=True, help="The node's own JSON.")
@click.pass_obj
def why(options: ClientOptions, request_id: str | None, as_json: bool) -> None:
    """Tell what became of a request: its waits, its routes and its end.

    REQUEST_ID is in the answer's x-request-id header, in its id, and in errors and logs; without one it is the newest request.
    """
    with NodeClient(options.api_url, bearer=options.api_key) as node:
        body = _newest(node) if request_id is None else node.get(f"/requests/{quote(_bare(request_id), safe='')}")
    try:
        told = Told.model_validate_json(to_json(body))
    except ValidationError as error:
        raise MalformedMessage(f"{options.api_url} tells of the request in a shape that is not known here") from error
    if as_json:
        print_json(body)
    else:
        show(told, console())


def _bare(request_id: str) -> str:
    """The id alone, where an answer's id has a word before it."""
    at = request_id.find(_ID_START)
    return request_id[at:] if at > 0 else request_id


def _newest(node: NodeClient) -> Any:
    listed = node.get("/requests")
    lists = [listed.get(name) for name in ("in_flight", "recent")] if isinstance(listed, dict) else []
    if not lists or not all(isinstance(each, list) for each in lists):
        raise MalformedMessage("the node's list of requests has a shape that is not known here")
    in_flight, recent = lists
    if in_flight:
        return in_flight[-1]
    if recent:
        return recent[0]
    raise UnknownRequest("this node remembers no request of yours")


def show(told: Told, to: Console) -> None:
    """Print a request for people."""
    when = datetime.fromtimestamp(told.began_at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    terms = "" if told.tier is None else f" · {told.tier}, {'paid' if told.paid else 'unpaid'}"
    to.print(_text(f"{told.request_id}: {verdict(told)}", "bold"), soft_wrap=True)
    to.print(
        _text(f"{told.kind} of {told.model} · {when} · prompt of {told.prompt_tokens} tokens{terms}"), soft_wrap=True
    )
    if told.trace_id is not None:
        to.print(_text(f"trace {told.trace_id}"), soft_wrap=True)
    to.print()
    to.print(_times(told, to.width))
    for epoch in told.epochs:
        to.print()
        to.print(_text(_heading(epoch)), soft_wrap=True)
        if epoch.route:
            to.print(_hops(epoch))


def _times(told: Told, width: int) -> Table:
    """The steps with their times, and a picture of them where the screen has room beside the numbers."""
    rows, span_ms = rows_of(told), last_ms(told)
    room = width - max((len(row.what) for row in rows), default=0) - _NUMBERS_CHARS
    table = Table(box=None, pad_edge=False)
    table.add_column("step", overflow="fold")
    table.add_column("from ms", justify="right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    if room >= _LEAST_BAR_CHARS:
        table.add_column("", no_wrap=True)
    for row in rows:
        numbers = (f"{row.start_ms:.1f}", f"{row.end_ms - row.start_ms:.1f}")
        picture = Text(bar(row, span_ms, min(room, BAR_CHARS)), style="cyan") if room >= _LEAST_BAR_CHARS else None
        table.add_row(_text(row.what), *numbers, *(() if picture is None else (picture,)))
    return table


def _heading(epoch: Epoch) -> str:
    what = f"route {epoch.epoch}"
    if epoch.fault is not None:
        return f"{what}, given up: {blamed(epoch.fault)}"
    most = slowest(epoch.route)
    return what if most is None else f"{what}, slowest at {short_peer_id(most.peer_id)}"


def _hops(epoch: Epoch) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", overflow="fold")
    for column in ("layers", "hop ms", "compute ms", "cached"):
        table.add_column(column, justify="right", overflow="fold")
    for hop in epoch.route:
        known = hop.hop_ms > 0
        table.add_row(
            _text(short_peer_id(hop.peer_id)),
            f"{hop.layers[0]}–{hop.layers[1]}",
            f"{hop.hop_ms:.2f}" if known else "–",
            f"{hop.compute_ms:.2f}" if known else "–",
            "–" if hop.cached is None else str(hop.cached),
        )
    return table


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)
