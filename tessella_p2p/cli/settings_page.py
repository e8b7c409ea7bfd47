"""``tessella-p2p settings``: every setting on one page; ``docs/SETTINGS.md`` is its output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import click

from tessella_p2p.cli.main import EXIT_STATUS_HELP
from tessella_p2p.cli.terminal import print_json
from tessella_p2p.node.config import ROLES
from tessella_p2p.node.settings_reference import Setting, settings_of

_COMMANDS = {"node": "daemon", "orchestrator": "orchestrator", "bootstrap": "bootstrap"}
_HEAD = """# Settings

Written by `make docs` from the definitions that read them; do not edit. A flag wins over the environment, the environment over the
file, the file over the default. What is not listed is refused, with the nearest known name.
"""


@click.command(epilog=EXIT_STATUS_HELP)
@click.argument("roles", nargs=-1, type=click.Choice(list(ROLES)))
@click.option("--json", "as_json", is_flag=True, help="One JSON object: a list of settings for each role.")
def settings(roles: tuple[str, ...], as_json: bool) -> None:
    """List every setting of a role: flag, variable, TOML key, default, rule."""
    shown = {role: settings_of(ROLES[role]) for role in roles or ROLES}
    if as_json:
        print_json({role: [asdict(setting) for setting in of_role] for role, of_role in shown.items()})
        return
    click.echo("\n".join(_page(shown)), nl=False)


def _page(shown: dict[str, tuple[Setting, ...]]) -> Iterator[str]:
    yield _HEAD
    for role, of_role in shown.items():
        yield f"## `tessella-p2p {_COMMANDS[role]}`\n"
        yield "| TOML key | flag | variable | default | accepted | what it is |"
        yield "|---|---|---|---|---|---|"
        for setting in of_role:
            yield "| " + " | ".join(_cells(setting)) + " |"
        yield ""


def _cells(setting: Setting) -> Iterator[str]:
    yield _code((setting.key,))
    yield _code(setting.flags)
    yield _code(setting.variables)
    yield setting.default
    yield _escaped(setting.rule)
    yield _escaped(setting.description)


def _code(words: tuple[str, ...]) -> str:
    return "<br>".join(f"`{word}`" for word in words if word) or "–"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
