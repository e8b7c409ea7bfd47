"""``tessella-p2p sim``: scenarios of many nodes in virtual time."""

from __future__ import annotations

import click

from tessella_p2p.cli.main import EXIT_STATUS_HELP


@click.command(epilog=EXIT_STATUS_HELP)
@click.argument("scenario", metavar="NAME|FILE")
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="In place of the scenario's number.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="In place of the scenario's seed.")
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object.")
@click.pass_context
def sim(ctx: click.Context, scenario: str, nodes: int | None, seed: int | None, as_json: bool) -> None:
    """Simulate the scenario NAME, or the one in FILE (TOML).

    The nodes run the daemon's own code over an in-memory network; the same seed gives the same report.

    ``thousand`` is no scenario but a thousand workers of one orchestrator that register, announce and are re-sharded; its report has
    wall times too.
    """
    if scenario == "thousand":
        from simulations import thousand

        ctx.exit(thousand.main(nodes, seed, as_json=as_json))
    from simulations.runner import main

    ctx.exit(main(scenario, nodes=nodes, seed=seed, as_json=as_json))
