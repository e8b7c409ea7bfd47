"""``tessella-p2p fim``: what is missing between two texts."""

from __future__ import annotations

import click

from tessella_p2p.cli.asking import Answer, Manner, fim_question
from tessella_p2p.cli.chat import read_gap
from tessella_p2p.cli.main import EXIT_STATUS_HELP
from tessella_p2p.cli.node_client import NodeClient
from tessella_p2p.cli.options import ClientOptions
from tessella_p2p.cli.prompting import Asker, answer_options


@click.command(epilog=EXIT_STATUS_HELP)
@click.option("--prefix", help="What stands before the gap; else standard input.")
@click.option("--suffix", help="What stands behind it.")
@answer_options
@click.pass_obj
def fim(
    options: ClientOptions,
    prefix: str | None,
    suffix: str | None,
    max_tokens: int,
    temperature: float,
    timing: bool,
    as_json: bool,
) -> None:
    """Fill in the middle: what stands between a prefix and a suffix, by a model that was trained for it.

    Into a pipe or a file goes the missing text alone, without a newline that the model did not write.
    """
    gap = read_gap(prefix, suffix)
    manner = Manner(max_tokens, temperature)
    with NodeClient(options.api_url, bearer=options.api_key) as node:
        model = options.model_id or node.model_id()
        asker = Asker(node, model, manner, timing=timing, as_json=as_json, exact=True)
        asker.ask(fim_question(model, *gap, manner), Answer())
