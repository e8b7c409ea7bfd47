"""The promise of a recipe, on the machine that runs this: the same bits in any batch, chunk, thread count and split.

On real weights; a row's hidden states are compared byte by byte with those of a session that ran alone in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from tessella_p2p.base.ids import LayerRange
from tessella_p2p.model.recipe import RECIPES, Recipe
from tessella_p2p.stages.engine import StageEngine
from tessella_p2p.stages.loading import load_engine
from tessella_p2p.stages.sampler import Sampler
from tessella_p2p.wire.messages import Sampling
from tests.stages.stage_runs import Turn, alone, mixed, play, ragged, random_prompts

VOCABULARY = 49152
PROMPTS = random_prompts([150, 3, 64, 65, 1, 129, 290], VOCABULARY)
NUM_LAYERS = 2
SAMPLED = Sampler(Sampling(temperature=1.0, seed=11))


@pytest.fixture(scope="module", params=["f32", "q8_0", "q4_0", "torch-f32", "torch-int4"])
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return RECIPES[request.param]


@pytest.fixture(scope="module")
def load(recipe: Recipe, smollm2_path: Path) -> Callable[..., list[StageEngine]]:
    """Loads a chain of stages with these cuts."""

    def chain(*cuts: int, threads: int = 1) -> list[StageEngine]:
        return [
            load_engine(smollm2_path, LayerRange(*layers), recipe, threads=threads, max_positions=320)
            for layers in pairwise(cuts)
        ]

    return chain


@pytest.fixture(scope="module")
def one_stage(load: Callable[..., list[StageEngine]]) -> list[StageEngine]:
    return load(0, NUM_LAYERS)


@pytest.fixture(scope="module")
def rows(one_stage: list[StageEngine]) -> dict[int, bytes]:
    """What each session gives when it is alone and whole."""
    return dict(play(one_stage, PROMPTS, alone(PROMPTS, 1 << 20)).rows)


SCHEDULES: dict[str, Callable[[], Iterable[Turn]]] = {
    "alone, chunks of 3": lambda: alone(PROMPTS, 3),
    "alone, chunks of 32": lambda: alone(PROMPTS, 32),
    "together, whole": lambda: ragged(PROMPTS, 1 << 20),
    "together, chunks of 64": lambda: ragged(PROMPTS, 64),
    "together, chunks of 7": lambda: ragged(PROMPTS, 7),
    "any order 1": lambda: mixed(PROMPTS, 1),
    "any order 2": lambda: mixed(PROMPTS, 2),
}


FEW_SCHEDULES = {"alone, chunks of 32", "together, chunks of 7", "any order 1"}


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_batches_and_chunks_leave_no_trace(
    one_stage: list[StageEngine], rows: dict[int, bytes], recipe: Recipe, schedule: str
) -> None:
    if recipe.engine == "torch" and schedule not in FEW_SCHEDULES:
        pytest.skip("the schedules that torch's slower kernels take are enough to show a difference")
    assert play(one_stage, PROMPTS, SCHEDULES[schedule]()).rows == rows


def test_single_rows_are_prompt_rows(one_stage: list[StageEngine], rows: dict[int, bytes]) -> None:
    short = {session: PROMPTS[session][:140] for session in (0, 1)}
    got = play(one_stage, short, ragged(short, 1)).rows
    assert all(rows[session].startswith(got[session]) for session in short)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_leave_no_trace(
    load: Callable[..., list[StageEngine]], rows: dict[int, bytes], recipe: Recipe, threads: int
) -> None:
    if threads > 2 and recipe.engine == "torch":
        pytest.skip("torch's threads are the process's, and 2 show it")
    assert play(load(0, NUM_LAYERS, threads=threads), PROMPTS, mixed(PROMPTS, threads + 1)).rows == rows


def test_a_cut_leaves_no_trace(load: Callable[..., list[StageEngine]], rows: dict[int, bytes]) -> None:
    assert play(load(0, 1, NUM_LAYERS), PROMPTS, mixed(PROMPTS, 4)).rows == rows


def test_the_whole_models_draws_are_those_of_any_split(load: Callable[..., list[StageEngine]], recipe: Recipe) -> None:
    """Draws at temperature 1 over random tokens: a logit's last bit is seldom harmless at all of them."""
    prompts = random_prompts([24 if recipe.engine == "native" else 10, 5], VOCABULARY, seed=5)
    whole = play(load(0, 30), prompts, alone(prompts, 1), SAMPLED).tokens
    split = play(load(0, 11, 19, 30), prompts, ragged(prompts, 3), SAMPLED).tokens
    assert len(whole) == sum(map(len, prompts.values()))
    assert len(split) == sum(-(-len(prompt) // 3) for prompt in prompts.values())
    assert split.items() <= whole.items()


@pytest.mark.parametrize("name", ["torch-f16", "torch-bf16"])
def test_half_precision_leaves_no_trace_either(smollm2_path: Path, name: str) -> None:
    """Its products are float32's; two threads, a cut and any order at once stand for the rest."""
    whole, first, second = (
        load_engine(smollm2_path, LayerRange(*layers), RECIPES[name], threads=threads, max_positions=320)
        for layers, threads in (((0, 2), 1), ((0, 1), 2), ((1, 2), 2))
    )
    alone_and_whole = play([whole], PROMPTS, alone(PROMPTS, 1 << 20)).rows
    assert play([first, second], PROMPTS, mixed(PROMPTS, 5)).rows == alone_and_whole
