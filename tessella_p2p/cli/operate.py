"""``tessella-p2p operate``: what the operator of an orchestrator asks of it, over its HTTP API; answers are its own JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.limits import MAX_PAGE_ROWS, MIB, MICRO_PER_CREDIT
from tessella_p2p.cli.main import EXIT_STATUS_HELP
from tessella_p2p.cli.node_client import NodeClient
from tessella_p2p.cli.terminal import print_json

DEFAULT_URL: Final = "http://127.0.0.1:9091"
_VARIABLE: Final = "TESSELLA_ADMIN_TOKEN"
_MAX_TOKEN_BYTES = 1024
_MAX_MANIFEST_BYTES = 1 * MIB

_limit = click.option(
    "--limit", type=click.IntRange(1, MAX_PAGE_ROWS), default=100, show_default=True, help="Rows of a page."
)
_after = click.option("--after", metavar="NAME", help="The last name of the page before.")


@click.group(epilog=EXIT_STATUS_HELP)
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The orchestrator's HTTP API.")
@click.option(
    "--admin-token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"Holds the admin token, where {_VARIABLE} does not.",
)
@click.pass_context
def operate(ctx: click.Context, url: str, admin_token_file: Path | None) -> None:
    """Operate an orchestrator: read its ledger, accounts and reputations, slash, rebalance, publish a manifest.

    The admin token comes out of the environment or a file, never off the command line, where everybody on the machine reads it. It
    goes to this machine or over HTTPS.
    """
    ctx.obj = lambda: NodeClient(url, bearer=_token(admin_token_file))


Connect = Callable[[], NodeClient]


@operate.command(epilog=EXIT_STATUS_HELP)
@_limit
@click.option("--before", type=click.IntRange(min=0), metavar="SEQUENCE", help="The last sequence of the page before.")
@click.pass_obj
def ledger(connect: Connect, limit: int, before: int | None) -> None:
    """Show the newest entries of the ledger, newest first."""
    _show(connect, "/ledger", limit=limit, before=before)


@operate.command(epilog=EXIT_STATUS_HELP)
@click.argument("sequence", type=click.IntRange(min=1))
@click.pass_obj
def evidence(connect: Connect, sequence: int) -> None:
    """Show what the verdict at SEQUENCE of the ledger rests on, as it was sealed."""
    _show(connect, "/ledger/evidence", sequence=sequence)


@operate.command("credits", epilog=EXIT_STATUS_HELP)
@click.argument("peer_id", required=False)
@_after
@_limit
@click.pass_obj
def credits_(connect: Connect, peer_id: str | None, after: str | None, limit: int) -> None:
    """Show the balance of PEER_ID, or a page of all balances."""
    _show_table(connect, "/credits", peer_id, after, limit)


@operate.command(epilog=EXIT_STATUS_HELP)
@click.argument("peer_id", required=False)
@_after
@_limit
@click.pass_obj
def reputation(connect: Connect, peer_id: str | None, after: str | None, limit: int) -> None:
    """Show the score of PEER_ID, or a page of all scores."""
    _show_table(connect, "/reputation", peer_id, after, limit)


@operate.command(epilog=EXIT_STATUS_HELP)
@click.argument("peer_id")
@click.option("--credits", "amount", type=click.FloatRange(min=0.0), default=0.0, help="Credits to take off it.")
@click.option("--reason", required=True, help="Why; it stays in the ledger.")
@click.option("--blacklist/--pardon", default=None, help="Put it on the blacklist, or take it off.")
@click.pass_obj
def slash(connect: Connect, peer_id: str, amount: float, reason: str, blacklist: bool | None) -> None:
    """Take credits off PEER_ID, or exclude it. Asked twice, it is done twice."""
    body = {"peer_id": peer_id, "micro_credits": round(amount * MICRO_PER_CREDIT), "reason": reason}
    with connect() as orchestrator:
        print_json(orchestrator.post("/slash", body if blacklist is None else {**body, "blacklist": blacklist}))


@operate.command(epilog=EXIT_STATUS_HELP)
@click.option("--model-id", help="Of one model; else of all.")
@click.option("--dry-run", is_flag=True, help="Only say who would move.")
@click.pass_obj
def rebalance(connect: Connect, model_id: str | None, dry_run: bool) -> None:
    """Recompute the split and move the mesh to it."""
    body: dict[str, object] = {"dry_run": dry_run}
    with connect() as orchestrator:
        print_json(orchestrator.post("/rebalance", body if model_id is None else {**body, "model_id": model_id}))


@operate.command(epilog=EXIT_STATUS_HELP)
@click.argument("file", type=click.File("rb"))
@click.pass_obj
def publish(connect: Connect, file: Any) -> None:
    """Publish the manifest that FILE describes (JSON; - is standard input), with the terms of each recipe."""
    content = file.read(_MAX_MANIFEST_BYTES + 1)
    try:
        body = json.loads(content) if len(content) <= _MAX_MANIFEST_BYTES else None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"the manifest is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ConfigurationError(f"the manifest: a JSON object of at most {_MAX_MANIFEST_BYTES} bytes is expected")
    with connect() as orchestrator:
        print_json(orchestrator.post("/weights/manifest", body))


def _show_table(connect: Connect, path: str, peer_id: str | None, after: str | None, limit: int) -> None:
    if peer_id is not None:
        _show(connect, path, peer_id=peer_id)
    else:
        _show(connect, path, all="true", after=after, limit=limit)


def _show(connect: Connect, path: str, **parameters: object) -> None:
    with connect() as orchestrator:
        given = {name: str(value) for name, value in parameters.items() if value is not None}
        print_json(orchestrator.get(path, **given))


def _token(path: Path | None) -> str:
    """The admin token.

    Raises:
        ConfigurationError: there is none, or the file cannot be read or may be read by others.
    """
    if path is None:
        token = os.environ.get(_VARIABLE, "")
        if not token:
            raise ConfigurationError(f"no admin token: set {_VARIABLE}, or name its file with --admin-token-file")
    else:
        try:
            if path.stat().st_mode & 0o077:
                raise ConfigurationError(f"{path}: others may read or write it: `chmod 600 {path}`")
            with path.open(encoding="ascii") as file:
                token = file.read(_MAX_TOKEN_BYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path}: the admin token cannot be read: {error}") from error
    return token
