"""``tessella-p2p doctor``: what is wrong with a node, and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import trio
from rich.console import Console
from rich.text import Text

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.cli.daemons import chosen_file
from tessella_p2p.cli.main import EXIT_FAILED
from tessella_p2p.cli.node_client import check_token
from tessella_p2p.cli.options import ClientOptions
from tessella_p2p.cli.setting_options import configured, setting_options
from tessella_p2p.cli.tables import console
from tessella_p2p.cli.terminal import print_json, printable
from tessella_p2p.node.config import NodeConfig
from tessella_p2p.node.findings import Finding, has_problem, problem
from tessella_p2p.node.log import configure_logging, unlogged

_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "bold red")}
_EPILOG = "Exit status: 0 no problem, at most warnings; 1 a problem; 2 wrong usage; 130 interrupted."


@click.command(epilog=_EPILOG)
@setting_options(NodeConfig)
@click.option("--json", "as_json", is_flag=True, help="The findings as one JSON object.")
@click.pass_context
def doctor(ctx: click.Context, /, config_file: Path | None, as_json: bool, **typed: Any) -> None:
    """Look for what is wrong with a node, and say how to mend it.

    It takes the settings that `daemon` would take, needs no running node, and looks at the one that runs. It changes nothing.
    """
    findings = _findings(ctx, config_file, typed)
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings], "healthy": not has_problem(findings)})
    else:
        show(findings, console())
    if has_problem(findings):
        ctx.exit(EXIT_FAILED)


def _findings(ctx: click.Context, config_file: Path | None, typed: dict[str, Any]) -> Sequence[Finding]:
    try:
        config = configured(NodeConfig, chosen_file(ctx, config_file, "node"), typed)
    except ConfigurationError as error:
        fix = "set it by a flag, a variable or in the file; `tessella-p2p settings` lists them all"
        return [problem("configuration", str(error), fix)]
    api_key = ctx.obj.api_key if isinstance(ctx.obj, ClientOptions) else None
    check_token(api_key)
    from tessella_p2p.node.doctor import examine  # libp2p takes two seconds to import

    configure_logging("error", "auto")
    with unlogged():  # what a library has to say about a peer that is not there is a finding
        return trio.run(partial(examine, config, api_key))


def show(findings: Sequence[Finding], to: Console) -> None:
    """Print findings for people: each with its fix below it, and the count at the end."""
    width = max((len(finding.subject) for finding in findings), default=0)
    for finding in findings:
        mark, style = _MARKS[finding.level]
        line = Text.assemble(
            (f"{mark} ", style), (f"{printable(finding.subject):<{width}}  ", "bold"), printable(finding.says)
        )
        to.print(line, soft_wrap=True)
        if finding.fix:
            to.print(Text(f"  {'':<{width}}  → {printable(finding.fix)}", style="dim"), soft_wrap=True)
    counts = {level: sum(finding.level == level for finding in findings) for level in ("problem", "warning")}
    said = ", ".join(f"{number} {word}{'' if number == 1 else 's'}" for word, number in counts.items() if number)
    to.print(Text(said or "nothing is wrong"), soft_wrap=True)
