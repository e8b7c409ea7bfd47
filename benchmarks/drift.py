"""``python -m benchmarks.drift``: how far apart recipes are on this machine, for `audit_tolerances`.

Two recipes compute the same layers on the same input, which is what one of them really sends: as an auditor of one recipe recomputes a
worker of the other. What is printed is the file that the orchestrator's setting names. The tail's range is left out, for tails are
never audited by tolerance. An entry is for a pair's published names; on other machines measure again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path

import click
import numpy as np

from benchmarks.token_runs import prompts
from tessella_p2p.base.errors import TessellaError
from tessella_p2p.base.ids import LayerRange, SessionId
from tessella_p2p.model.config import ModelConfig
from tessella_p2p.model.gguf import GgufFile
from tessella_p2p.model.recipe import RECIPES, Recipe
from tessella_p2p.stages.engine import Buffer, SessionKey, StageEngine, StepInput, StepOutput
from tessella_p2p.stages.loading import load_engine, published_name
from tessella_p2p.stages.rows import cast, deviation_ppm, floats_of
from tessella_p2p.weights.catalog import SMOLLM2_135M_INSTRUCT
from tessella_p2p.weights.store import default_models_dir, resolve
from tessella_p2p.wire.frames import DType

_ROWS = 64


class _Stage:
    """One recipe on one range, and one session at a time."""

    def __init__(self, path: Path, layers: LayerRange, recipe: Recipe, positions: int) -> None:
        self.engine: StageEngine = load_engine(path, layers, recipe, max_sessions=1, max_positions=positions)
        self._key: SessionKey | None = None
        self._opened = 0

    def begin(self, positions: int) -> None:
        if self._key is not None:
            self.engine.close_session(self._key)
        self._key = SessionKey(SessionId(self._opened.to_bytes(16, "big")), 0)
        self._opened += 1
        self.engine.open_session(self._key, positions)

    def step(self, position: int, rows: int, body: Buffer, dtype: DType) -> StepOutput:
        assert self._key is not None
        if dtype not in (DType.U32, self.engine.wire_dtype):
            body, dtype = cast(body, dtype, self.engine.wire_dtype), self.engine.wire_dtype
        (answer,) = self.engine.forward([StepInput(self._key, position, rows, dtype, body)])
        assert isinstance(answer, StepOutput), answer
        return answer


def _ranges(total_layers: int, stages: int) -> list[LayerRange]:
    """All but the last of so many ranges."""
    edges = [total_layers * index // stages for index in range(stages + 1)]
    return [LayerRange(start, end) for start, end in pairwise(edges[:-1])]


def _steps(ids: list[int]) -> Iterator[tuple[int, list[int]]]:
    """A prompt in chunks, and its second half one by one, as an answer would come."""
    half = len(ids) // 2
    for start in range(0, half, _ROWS):
        yield start, ids[start : min(half, start + _ROWS)]
    for start in range(half, len(ids)):
        yield start, ids[start : start + 1]


def measured(path: Path, worker: Recipe, auditor: Recipe, total_layers: int, runs: list[list[int]], stages: int) -> int:
    """The largest deviation of ``worker``'s rows from ``auditor``'s on the same input, in millionths."""
    positions, worst = len(runs[0]), 0
    ranges = _ranges(total_layers, stages)
    theirs = [_Stage(path, layers, worker, positions) for layers in ranges]
    ours = [_Stage(path, layers, auditor, positions) for layers in ranges]
    for ids in runs:
        for stage in (*theirs, *ours):
            stage.begin(positions)
        for position, chunk in _steps(ids):
            body: Buffer = np.array(chunk, "<u4").tobytes()
            dtype = DType.U32
            for their, our in zip(theirs, ours, strict=True):
                true, got = (stage.step(position, len(chunk), body, dtype) for stage in (our, their))
                deviation = deviation_ppm(
                    floats_of(true.body, true.dtype), floats_of(got.body, got.dtype), rows=len(chunk)
                )
                worst = max(worst, deviation)
                body, dtype = got.body, got.dtype
    for stage in (*theirs, *ours):
        stage.engine.close()
    return worst


@click.command()
@click.option(
    "--model", default=SMOLLM2_135M_INSTRUCT.model_id, show_default=True, help="A catalogue id, or a GGUF file."
)
@click.option(
    "--recipe", "names", multiple=True, type=click.Choice(list(RECIPES)), help="Recipes to compare; twice or more."
)
@click.option("--prompts", "num_prompts", default=4, show_default=True, type=click.IntRange(1, 1000))
@click.option("--positions", default=256, show_default=True, type=click.IntRange(2, 8192), help="Of each prompt.")
@click.option(
    "--stages", default=3, show_default=True, type=click.IntRange(2, 64), help="Into which the model is split."
)
def main(model: str, names: tuple[str, ...], num_prompts: int, positions: int, stages: int) -> None:
    """Measure how far recipes are apart, and print the file for `audit_tolerances`."""
    try:
        path = resolve(model, default_models_dir())
        with GgufFile.open(path) as file:
            total_layers = ModelConfig.from_gguf(file).layers
        runs = prompts(num_prompts, positions, seed=1)
        click.echo(f"# {model}: {num_prompts} prompts of {positions} positions, {stages} stages, all but the last")
        for one, other in combinations(names or ("f32", "torch-f32"), 2):
            both = (RECIPES[one], RECIPES[other])
            ppm = max(measured(path, *pair, total_layers, runs, stages) for pair in (both, both[::-1]))
            published = ", ".join(f'"{published_name(recipe)}"' for recipe in both)
            click.echo(f"[[pair]]\nrecipes = [{published}]\nmeasured_ppm = {ppm}\n")
    except TessellaError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
