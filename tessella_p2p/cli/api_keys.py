"""``tessella-p2p keys api`` and ``keys delegate``: who may ask a node over HTTP, and in whose name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, cast, get_args

import click
from rich.table import Table
from rich.text import Text

from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.errors import ConfigurationError, InvalidRequest, RemoteProtocolError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import DELEGATION_TTL_S, MAX_REQUESTS_PER_MINUTE, MAX_TOKENS_PER_MINUTE
from tessella_p2p.bridge.api_keys import ApiKey, ApiKeys, KeyLimits, new_key
from tessella_p2p.cli.main import EXIT_STATUS_HELP
from tessella_p2p.cli.tables import console
from tessella_p2p.cli.terminal import print_json, printable
from tessella_p2p.node.api_key_file import changing, path_in, read_keys
from tessella_p2p.node.config import NodeConfig, default_key_path
from tessella_p2p.node.config_file import found_config
from tessella_p2p.node.keystore import load_key
from tessella_p2p.node.peer_address import check_peer_id
from tessella_p2p.node.settings import from_toml, read_toml
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import open_envelope, peek_signer, seal
from tessella_p2p.wire.keys import NodeKey

_DELEGATION_MS: Final = int(DELEGATION_TTL_S * 1000)
_DELEGATION_DAYS: Final = int(DELEGATION_TTL_S / 86_400)
_UNITS: Final = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


class _Expiry(click.ParamType[int]):
    """A span from now on, or a date: as Unix milliseconds."""

    name = "SPAN|DATE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """``30d``, ``12h``, ``2w``, ``2027-01-31`` or a whole ISO time; without a zone it is UTC."""
        if isinstance(value, int):
            return value
        span = re.fullmatch(r"([1-9][0-9]{0,4})([hdw])", str(value))
        try:
            if span is not None:
                at = datetime.now(UTC) + int(span[1]) * _UNITS[span[2]]
            else:
                at = datetime.fromisoformat(str(value))
                at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        except (ValueError, OverflowError):
            self.fail(f"{value!r}: a span as 30d, 12h or 2w is expected, or a date as 2027-01-31", param, ctx)
        return int(at.timestamp() * 1000)


@dataclass(frozen=True, slots=True)
class _Node:
    """Where a node of this machine has its key and its data."""

    data_dir: Path
    keypair_path: Path


@click.group(epilog=EXIT_STATUS_HELP)
@click.option(
    "-c",
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="TESSELLA_CONFIG",
    show_envvar=True,
    help="The node's TOML file; else node.toml in the folder of its key, where there is one.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="TESSELLA_DATA_DIR",
    show_envvar=True,
    help="The node's data folder, where it is neither the file's nor the default.",
)
@click.option(
    "--keypair-path",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="TESSELLA_KEYPAIR_PATH",
    show_envvar=True,
    help="The node's key file, likewise.",
)
@click.pass_context
def api(ctx: click.Context, config_file: Path | None, data_dir: Path | None, keypair_path: Path | None) -> None:
    """Make, list and revoke the API keys of the node on this machine.

    The node asks for them where its setting api_keys is "required". A running node takes a change within a second.
    """
    of_file = _in_file(config_file)
    ctx.obj = _Node(
        data_dir
        or of_file.get("data_dir")
        or NodeConfig.model_fields["data_dir"].get_default(call_default_factory=True),
        keypair_path or of_file.get("keypair_path") or default_key_path("node", os.environ),
    )


def _in_file(config_file: Path | None) -> dict[str, Path]:
    """The paths that the node's file gives, without looking at what else is in it."""
    config_file = config_file or found_config("node", os.environ)
    if config_file is None:
        return {}
    given = from_toml(NodeConfig, read_toml(config_file), str(config_file))
    return {name: Path(str(given[name].value)).expanduser() for name in ("data_dir", "keypair_path") if name in given}


@api.command(epilog=EXIT_STATUS_HELP)
@click.option("--label", default="", help="For people: whose key it is.")
@click.option("--tier", type=click.Choice(get_args(m.Tier)), help="The best tier that its requests may have.")
@click.option("--requests-per-minute", type=click.IntRange(1, MAX_REQUESTS_PER_MINUTE), metavar="N")
@click.option(
    "--tokens-per-minute", type=click.IntRange(1, MAX_TOKENS_PER_MINUTE), metavar="N", help="Of prompts and answers."
)
@click.option("--concurrent", type=click.IntRange(1, MAX_REQUESTS_PER_MINUTE), metavar="N", help="Requests at a time.")
@click.option("--expires", type=_Expiry(), help="30d, 12h, 2w, or 2027-01-31; else never.")
@click.option(
    "--identity",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The key file of an identity: its balance decides the tier, and pays.",
)
@click.option(
    "--delegation", metavar="HEX", help="The same of an identity elsewhere: what `keys delegate` printed there."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: api_key, and what `list --json` shows.")
@click.pass_obj
def add(
    node: _Node,
    label: str,
    tier: str | None,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    concurrent: int | None,
    expires: int | None,
    identity: Path | None,
    delegation: str | None,
    as_json: bool,
) -> None:
    """Make a key and show it: this once, for only its hash is kept."""
    now_ms = SystemClock().unix_ms()
    sealed = _delegation(node, identity, delegation, expires, now_ms)
    limits = KeyLimits(cast("m.Tier | None", tier), requests_per_minute, tokens_per_minute, concurrent)
    path = path_in(node.data_dir)
    with _changing(path) as write:
        secret, key = new_key(os.urandom, label=label, now_ms=now_ms, expires=expires, limits=limits, delegation=sealed)
        write(read_keys(path).with_key(key))
    if as_json:
        print_json({"api_key": secret, **_json_of(key)})
        return
    click.echo(secret)
    click.echo(f"{key.key_id} is in {path}; this node will not show it again", err=True)
    if key.expires is None and sealed is not None:
        until = _date(open_envelope(sealed, m.DELEGATION, now_ms=None).expires_at)
        click.echo(f"it asks in the name of {_identity_of(key)} until {until}; then it is of no use", err=True)


@api.command("list", epilog=EXIT_STATUS_HELP)
@click.option("--json", "as_json", is_flag=True, help="A JSON list.")
@click.pass_obj
def list_keys(node: _Node, as_json: bool) -> None:
    """Show what is kept of the keys: never the keys."""
    keys = read_keys(path_in(node.data_dir))
    if as_json:
        print_json([_json_of(key) for key in keys])
        return
    if not len(keys):
        click.echo("there are no API keys", err=True)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("id", "label", "expires", "tier", "per minute", "at a time", "identity"):
        table.add_column(column, overflow="fold")
    for key in keys:
        table.add_row(*(Text(printable(text)) for text in _row(key)))
    console().print(table)


@api.command(epilog=EXIT_STATUS_HELP)
@click.argument("key_id")
@click.pass_obj
def revoke(node: _Node, key_id: str) -> None:
    """Take a key away; requests that it has begun go on."""
    path = path_in(node.data_dir)
    with _changing(path) as write:
        write(read_keys(path).without(key_id))
    click.echo(f"{key_id} opens nothing any more", err=True)


@click.command(epilog=EXIT_STATUS_HELP)
@click.argument("entry")
@click.option(
    "--identity",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The key file of the identity; else the node's of this machine.",
)
@click.option(
    "--expires", type=_Expiry(), help=f"30d, 12h, 2w, or 2027-01-31; at most, and else, {_DELEGATION_DAYS} days."
)
def delegate(entry: str, identity: Path | None, expires: int | None) -> None:
    """Let the node ENTRY (a peer id) ask in this identity's name, and print the delegation.

    The operator of ENTRY gives it to `keys api add --delegation`, so that no key leaves this machine. Trust that operator: the
    delegation cannot be taken back before it expires, and what is asked under it goes on this identity's account.
    """
    key = load_key(identity or default_key_path("node", os.environ))
    click.echo(_sealed(key, check_peer_id(entry), expires, SystemClock().unix_ms()).hex())


@contextmanager
def _changing(path: Path) -> Iterator[Callable[[ApiKeys], None]]:
    """As `changing`; what the user gave that is not accepted is a wrong use of the command."""
    try:
        with changing(path) as write:
            yield write
    except InvalidRequest as error:
        raise ConfigurationError(str(error)) from error


def _delegation(
    node: _Node, identity: Path | None, given: str | None, expires: int | None, now_ms: int
) -> bytes | None:
    """The delegation of the key that is being made, good for this node.

    Raises:
        ConfigurationError: both ways are given, or it does not count.
    """
    if identity is None and given is None:
        return None
    if identity is not None and given is not None:
        raise ConfigurationError("--identity and --delegation both say in whose name: leave one out")
    entry = load_key(node.keypair_path).peer_id
    if identity is not None:
        key = load_key(identity)
        if key.peer_id == entry:
            raise ConfigurationError(
                f"{identity} is this node's own identity, for which a key asks anyway: leave --identity out"
            )
        return _sealed(key, entry, expires, now_ms)
    try:
        raw = bytes.fromhex(given or "")
        envelope = open_envelope(raw, m.DELEGATION, now_ms=now_ms)
        meant = envelope.message(m.Delegation).entry
    except (ValueError, RemoteProtocolError) as error:
        raise ConfigurationError(
            f"--delegation does not count: {error}; `tessella-p2p keys delegate {entry}` prints one where that identity is"
        ) from error
    if meant != entry:
        raise ConfigurationError(f"--delegation is for {meant}; this node is {entry}")
    return raw


def _sealed(key: NodeKey, entry: PeerId, expires: int | None, now_ms: int) -> bytes:
    ttl_ms = _DELEGATION_MS if expires is None else expires - now_ms
    if not 0 < ttl_ms <= _DELEGATION_MS:
        raise ConfigurationError(
            f"--expires: an identity lets others ask in its name for {_DELEGATION_DAYS} days at most, from now on"
        )
    return seal(key, m.DELEGATION, m.Delegation(entry=entry), sequence=now_ms * 1000, now_ms=now_ms, ttl_ms=ttl_ms)


def _identity_of(key: ApiKey) -> str | None:
    if key.delegation is None:
        return None
    try:
        return peek_signer(key.delegation)
    except RemoteProtocolError:  # the file was changed by hand: the other keys are to be seen all the same
        return "unreadable: make this key anew"


def _json_of(key: ApiKey) -> dict[str, object]:
    limits = key.limits
    return {
        "id": key.key_id,
        "label": key.label,
        "created": _date(key.created),
        "expires": None if key.expires is None else _date(key.expires),
        "tier": limits.tier,
        "requests_per_minute": limits.requests_per_minute,
        "tokens_per_minute": limits.tokens_per_minute,
        "concurrent": limits.concurrent,
        "identity": _identity_of(key),
    }


def _row(key: ApiKey) -> list[str]:
    limits = key.limits
    bounds = [(limits.requests_per_minute, "requests"), (limits.tokens_per_minute, "tokens")]
    return [
        key.key_id,
        key.label,
        "never" if key.expires is None else _date(key.expires),
        limits.tier or "by balance",
        ", ".join(f"{most} {what}" for most, what in bounds if most is not None) or "any",
        str(limits.concurrent or "any"),
        _identity_of(key) or "this node's",
    ]


def _date(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%MZ")
