"""The coverage walk, by the manual's three words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.ids import LayerRange
from tessella_p2p.model.coverage import walk

TOTAL = 12


@st.composite
def ranges(draw: st.DrawFn) -> LayerRange:
    start = draw(st.integers(0, TOTAL - 1))
    return LayerRange(start, draw(st.integers(start + 1, TOTAL)))


@pytest.mark.parametrize(
    ("shards", "health", "holes"),
    [
        ([(0, 12)], "healthy", []),
        ([(0, 4), (4, 9), (9, 12)], "healthy", []),
        ([(0, 4), (4, 9), (4, 8), (8, 12)], "healthy", []),
        ([(0, 4), (8, 12)], "degraded", [(4, 8)]),
        ([(4, 12)], "degraded", [(0, 4)]),
        ([(0, 4), (4, 9)], "incomplete", [(9, 12)]),
        ([(0, 4), (6, 9)], "incomplete", [(4, 6), (9, 12)]),
        ([], "incomplete", [(0, 12)]),
        ([(0, 6), (5, 12)], "incomplete", [(6, 12)]),
    ],
)
def test_health_is_the_word_of_the_walk(
    shards: list[tuple[int, int]], health: str, holes: list[tuple[int, int]]
) -> None:
    coverage = walk([LayerRange(*shard) for shard in shards], TOTAL)
    assert coverage.health == health
    assert [hole.as_tuple() for hole in coverage.holes] == holes


@given(st.lists(ranges(), max_size=8))
def test_covered_and_holes_are_every_layer_once(shards: list[LayerRange]) -> None:
    coverage = walk(shards, TOTAL)
    layers = sorted(layer for part in (*coverage.covered, *coverage.holes) for layer in part)
    assert layers == list(range(TOTAL))


@given(st.lists(ranges(), max_size=8))
def test_healthy_means_that_some_chain_of_exact_boundaries_exists(shards: list[LayerRange]) -> None:
    reachable = {0}
    for _ in range(TOTAL):
        reachable |= {shard.end for shard in shards if shard.start in reachable}
    assert (walk(shards, TOTAL).health == "healthy") == (TOTAL in reachable)


def test_a_range_beyond_the_model_is_left_out() -> None:
    assert walk([LayerRange(0, 13)], TOTAL).health == "incomplete"
