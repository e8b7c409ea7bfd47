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
from tessella_p2p.stages.sampler import Sampler, SamplingParams
from tests.stages.stage_runs import Turn, alone, mixed, play, ragged, random_prompts

VOCABULARY = 49152
PROMPTS = random_prompts([150, 3, 64, 65, 1, 129, 290], VOCABULARY)
NUM_LAYERS = 2
SAMPLED = Sampler(SamplingParams(temperature=1.0, seed=11))


@pytest.fixture(scope="module", params=["torch-f32", "torch-int4"])
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


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_batches_and_chunks_leave_no_trace(one_stage: list[StageEngine], rows: dict[int, bytes], schedule: str) -> None:
    assert play(one_stage, PROMPTS, SCHEDULES[schedule]()).rows == rows


def test_single_rows_are_prompt_rows(one_stage: list[StageEngine], rows: dict[int, bytes]) -> None:
    short = {session: PROMPTS[session][:140] for session in (0, 1)}
    got = play(one_stage, short, ragged(short, 1)).rows
    assert all(rows[session].startswith(got[session]) for session in short)


def test_two_threads_leave_no_trace(load: Callable[..., list[StageEngine]], rows: dict[int, bytes]) -> None:
    assert play(load(0, NUM_LAYERS, threads=2), PROMPTS, mixed(PROMPTS, 3)).rows == rows


def test_a_cut_leaves_no_trace(load: Callable[..., list[StageEngine]], rows: dict[int, bytes]) -> None:
    assert play(load(0, 1, NUM_LAYERS), PROMPTS, mixed(PROMPTS, 4)).rows == rows


def test_the_whole_models_draws_are_those_of_any_split(load: Callable[..., list[StageEngine]]) -> None:
    """Draws at temperature 1 over random tokens: a logit's last bit is seldom harmless at all of them."""
    prompts = random_prompts([24, 5], VOCABULARY, seed=5)
    whole = play(load(0, 30), prompts, alone(prompts, 1), SAMPLED).tokens
    split = play(load(0, 11, 19, 30), prompts, ragged(prompts, 3), SAMPLED).tokens
    assert len(whole) == 29
    assert len(split) == 10
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
