"""Draws: reproducible from (seed, position), and distributed as the softmax says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.stages.engine import SampleAt
from tessella_p2p.stages.sampler import draw, uniform_at

LOGITS = np.array([0.0, 2.0, 1.0, -1.0, 2.0], np.float32)


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals() -> None:
    assert draw(LOGITS, 0.0, 1, 2) == 1
    assert draw(LOGITS[::-1].copy(), 0.0, 9, 9) == 0


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    drawn = [draw(LOGITS, 1.0, 7, position) for position in range(200)]
    np.random.seed(3)
    assert [draw(LOGITS, 1.0, 7, position) for position in reversed(range(200))] == drawn[::-1]
    assert [draw(LOGITS, 1.0, 8, position) for position in range(200)] != drawn
    assert len(set(drawn)) == 5


def test_draws_are_pinned_across_versions() -> None:
    """A new generator would be another recipe: sessions that two nodes share would part ways."""
    assert uniform_at(0, 0) == 0.5602518355491615
    assert uniform_at(2**64 - 1, 4096) == 0.7754281359085055


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    count = 20_000
    counts = np.bincount([draw(LOGITS, temperature, 42, position) for position in range(count)], minlength=5)
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    expected = weights / weights.sum() * count
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < 18.5  # 4 degrees of freedom, p = 0.001


def test_uniforms_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in ([uniform_at(1, i) for i in range(4000)], [uniform_at(i, 1) for i in range(4000)]):
        assert min(numbers) >= 0.0
        assert max(numbers) < 1.0
        counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
        assert float(((counts - 400) ** 2 / 400).sum()) < 27.9  # 9 degrees of freedom, p = 0.001


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=50),
    temperature=st.floats(0.0, 2.0),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**20),
)
def test_every_finite_input_gives_a_token_that_is_possible(
    logits: list[float], temperature: float, seed: int, position: int
) -> None:
    array = np.array(logits, np.float32)
    token = draw(array, temperature, seed, position)
    assert 0 <= token < len(logits)
    if temperature < 1e-30:
        assert array[token] == array.max()


@pytest.mark.parametrize(("temperature", "seed"), [(-0.1, 0), (math.nan, 0), (math.inf, 0), (1.0, -1), (1.0, 2**64)])
def test_sampling_out_of_range_is_our_own_bug(temperature: float, seed: int) -> None:
    with pytest.raises(ValueError, match="no sampling"):
        SampleAt(temperature, seed)
