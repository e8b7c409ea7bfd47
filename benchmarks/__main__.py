"""``python -m benchmarks [GROUP...] [--json FILE]``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import click
import trio

from benchmarks import chain
from benchmarks.results import Result, print_results, write_json

GROUPS: dict[str, Callable[[], Awaitable[list[Result]]]] = {"chain": chain.run}


@click.command()
@click.argument("groups", nargs=-1, type=click.Choice(sorted(GROUPS)))
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the results here too."
)
def main(groups: tuple[str, ...], json_path: Path | None) -> None:
    """Measure. Without GROUP, everything."""
    results: list[Result] = []
    for group in groups or sorted(GROUPS):
        results += trio.run(GROUPS[group])
    print_results(results)
    if json_path is not None:
        write_json(results, json_path)


if __name__ == "__main__":
    main()
