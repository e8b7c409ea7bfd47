"""``python -m benchmarks [GROUP...] [--rounds N] [--json FILE]``."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import click
import trio

from benchmarks import chain, engine, http, ledger, net, orchestrator
from benchmarks.bars import table
from benchmarks.results import Result, write_json
from tessella_p2p.base.errors import TessellaError


def _report(line: str) -> None:
    click.echo(line, err=True)


def _messages(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [message for inner in error.exceptions for message in _messages(inner)]
    return [str(error)]


GROUPS: Mapping[str, Callable[[int], Awaitable[list[Result]]]] = {
    "engine": lambda rounds: engine.run(rounds, _report),
    "chain": lambda rounds: chain.run(rounds, _report),
    "net": lambda rounds: net.run(),
    "http": lambda rounds: http.run(rounds, _report),
    "orchestrator": orchestrator.run,
    "ledger": lambda rounds: ledger.run(rounds, _report),
}


@click.command()
@click.argument("groups", nargs=-1, type=click.Choice(list(GROUPS)))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1, 99), help="Of every group but net.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the results here too."
)
def main(groups: tuple[str, ...], rounds: int, json_path: Path | None) -> None:
    """Measure. Without GROUP, everything. What falls short is reported as it is; it is no failure."""
    wanted = groups or tuple(GROUPS)
    results: list[Result] = []
    failed = False
    for group in wanted:
        try:
            results += trio.run(GROUPS[group], rounds)
        except* TessellaError as errors:
            _report(f"{group}: not measured: {'; '.join(_messages(errors))}")
            failed = True
    for line in table(results, wanted):
        click.echo(line)
    if json_path is not None:
        write_json(results, json_path)
    sys.exit(failed)


if __name__ == "__main__":
    main()
