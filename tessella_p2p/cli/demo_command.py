"""The options of ``tessella-p2p demo``; `demo` does it."""

from __future__ import annotations

from pathlib import Path

import click

from tessella_p2p.cli.main import EXIT_STATUS_HELP
from tessella_p2p.cli.models import models_dir_option
from tessella_p2p.cli.options import ClientOptions, DemoOptions
from tessella_p2p.model.recipe import DEFAULT_RECIPE, RECIPES
from tessella_p2p.weights.catalog import SMOLLM2_135M_INSTRUCT
from tessella_p2p.weights.store import default_models_dir, resolve

_MAX_WORKERS = 64


@click.command(epilog=EXIT_STATUS_HELP)
@click.option("--prompt", help="The question.  [default: the capital of France]")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    help='A file with a JSON list of prompts, or of {"prompt_ids": [...]}, all asked of one mesh.',
)
@click.option("--workers", type=click.IntRange(1, _MAX_WORKERS), default=3, show_default=True, metavar="N")
@click.option(
    "--recipe",
    type=click.Choice(list(RECIPES)),
    default=DEFAULT_RECIPE,
    show_default=True,
    help="f32 keeps the weights as stored; q8_0 and q4_0 quantise them.",
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--temperature", type=click.FloatRange(0.0, 2.0), default=0.0, show_default=True, help="0 is greedy.")
@click.option(
    "--parallel",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="How many of --prompts are asked at the same time.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output, and nothing else there.")
@click.option("--keep", is_flag=True, help="Stay up afterwards, until Ctrl-C.")
@click.option(
    "--audits", is_flag=True, help="Have every worker's part recomputed by another one, and say what came of it."
)
@models_dir_option
@click.pass_obj
def demo(
    options: ClientOptions,
    prompt: str | None,
    prompts: Path | None,
    workers: int,
    recipe: str,
    max_tokens: int,
    temperature: float,
    parallel: int,
    as_json: bool,
    keep: bool,
    audits: bool,
    models_dir: Path | None,
) -> None:
    """Run a whole mesh on this machine and ask it a question.

    One bootstrap node, one orchestrator and N workers start as processes of their own on loopback, under a temporary home; none of
    them survives the command, however it ends.
    """
    from tessella_p2p.cli.demo import DEFAULT_PROMPT, run_demo
    from tessella_p2p.model.artifact import model_id_of

    if prompt is not None and prompts is not None:
        raise click.UsageError("--prompt and --prompts are two ways to ask: give one of them")
    folder = None if models_dir is None else models_dir.expanduser()
    model = options.model_id or SMOLLM2_135M_INSTRUCT.model_id
    run_demo(
        DemoOptions(
            prompt=prompt if prompt is not None else DEFAULT_PROMPT,
            prompts=prompts,
            workers=workers,
            recipe=recipe,
            max_tokens=max_tokens,
            temperature=temperature,
            parallel=parallel,
            json=as_json,
            keep=keep,
            audits=audits,
            model=model,
            model_id=model_id_of(resolve(model, folder or default_models_dir())),
            models_dir=folder,
        )
    )
