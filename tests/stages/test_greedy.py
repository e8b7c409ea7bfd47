"""The real model, token for token: the recipe `torch-f32` against transformers (``tests/data/greedy_f32.json``), for several splits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from tessella_p2p.base.ids import LayerRange
from tessella_p2p.model.recipe import RECIPES
from tessella_p2p.stages.engine import Sampled, StageEngine
from tessella_p2p.stages.loading import load_engine
from tests.stages.stage_runs import GREEDY, first_step, key_of, through

CASES = json.loads((Path(__file__).parents[1] / "data" / "greedy_f32.json").read_text())["cases"]
LEAST_GAP = 0.02
"""Between logits that are nearer than this, rounding decides."""


def expected(case: int, most: int) -> list[int]:
    """The reference's tokens, up to the first step that was nearly a tie."""
    gaps = CASES[case]["gaps"]
    certain = next((index for index, gap in enumerate(gaps) if gap <= LEAST_GAP), len(gaps))
    ids: list[int] = CASES[case]["output_ids"][: min(certain, most)]
    return ids


def generate(engines: Sequence[StageEngine], wanted: dict[int, int]) -> dict[int, list[int]]:
    """Greedy tokens of several cases in one continuous batch; ``wanted`` says how many of each."""
    inputs = {case: list(CASES[case]["prompt_ids"]) for case in wanted}
    positions = dict.fromkeys(wanted, 0)
    tokens: dict[int, list[int]] = {case: [] for case in wanted}
    for case in wanted:
        for engine in engines:
            engine.open_session(key_of(case), 256)
    while active := [case for case in wanted if len(tokens[case]) < wanted[case]]:
        steps = [first_step(case, inputs[case], position=positions[case], sample=GREEDY) for case in active]
        for case, answer in zip(active, through(engines, steps), strict=True):
            assert isinstance(answer, Sampled)
            positions[case] += len(inputs[case])
            inputs[case] = [answer.token_id]
            tokens[case].append(answer.token_id)
    return tokens


@pytest.mark.parametrize(
    ("cuts", "cases", "most"),
    [((0, 30), (0, 1, 8, 10), 20), ((0, 19, 30), (3, 7), 16), ((0, 8, 19, 30), (0, 9), 10)],
    ids=["1 stage", "2 stages", "3 stages"],
)
def test_f32_says_what_transformers_says(
    smollm2_path: Path, cuts: tuple[int, ...], cases: tuple[int, ...], most: int
) -> None:
    engines = [
        load_engine(smollm2_path, LayerRange(*layers), RECIPES["torch-f32"], max_positions=256)
        for layers in pairwise(cuts)
    ]
    wanted = {case: expected(case, most) for case in cases}
    assert all(len(ids) >= 8 for ids in wanted.values())
    assert generate(engines, {case: len(ids) for case, ids in wanted.items()}) == wanted
