"""``tessella-p2p keys``: the identity of a node on this machine, and the API keys of its HTTP surface."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tessella_p2p.base.errors import KeyFileError
from tessella_p2p.cli.api_keys import api, delegate
from tessella_p2p.cli.main import EXIT_STATUS_HELP
from tessella_p2p.cli.terminal import print_json
from tessella_p2p.node.config import ROLES, default_key_path
from tessella_p2p.node.keystore import generate_key, load_key
from tessella_p2p.wire.keys import NodeKey

_role = click.option(
    "--role", type=click.Choice(list(ROLES)), default="node", show_default=True, help="Whose key file of this machine."
)
_path = click.option(
    "--keypair-path",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="TESSELLA_KEYPAIR_PATH",
    show_envvar=True,
    help="The key file, where it is not the role's default.",
)
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object: peer_id, public_key, path.")


@click.group(epilog=EXIT_STATUS_HELP)
def keys() -> None:
    """Make and show identity keys, and the API keys that clients of a node need.

    A peer id derives from its key. A lost key is a lost identity and its balance: keep a copy in a safe place.
    """


keys.add_command(api)
keys.add_command(delegate)


@keys.command(epilog=EXIT_STATUS_HELP)
@_role
@_path
@_json
def show(role: str, keypair_path: Path | None, as_json: bool) -> None:
    """Show the peer id that a key file makes."""
    path = _key_path(role, keypair_path)
    if keypair_path is None and not path.exists():
        _point_to_others(path)
    _print(load_key(path), path, as_json=as_json)


@keys.command(epilog=EXIT_STATUS_HELP)
@_role
@_path
@_json
def generate(role: str, keypair_path: Path | None, as_json: bool) -> None:
    """Make a new key file; one that exists is never replaced."""
    path = _key_path(role, keypair_path)
    _print(generate_key(path), path, as_json=as_json)


def _key_path(role: str, keypair_path: Path | None) -> Path:
    return default_key_path(role, os.environ) if keypair_path is None else keypair_path.expanduser()


def _point_to_others(path: Path) -> None:
    others = [role for role in ROLES if default_key_path(role, os.environ).exists()]
    if others:
        commands = " or ".join(f"`tessella-p2p keys show --role {role}`" for role in others)
        raise KeyFileError(f"{path}: there is no key file; this machine has others: {commands}")


def _print(key: NodeKey, path: Path, *, as_json: bool) -> None:
    if as_json:
        print_json({"peer_id": key.peer_id, "public_key": key.public_key.hex(), "path": str(path)})
        return
    click.echo(key.peer_id)
    click.echo(f"key file: {path}", err=True)
