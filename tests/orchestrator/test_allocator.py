"""Which layers a claim gets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tessella_p2p.base.errors import ClaimTooSmall, ConfigurationError, InvalidRequest
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.model.coverage import walk
from tessella_p2p.orchestrator.allocator import allocate, balanced_cuts
from tessella_p2p.orchestrator.terms import ModelTerms

AMPLE_MB = 1 << 20


def terms_of(**changes: int) -> ModelTerms:
    figures = {"total_layers": 30, "layer_mb": 40, "kv_mb": 16, "embedding_mb": 100, "head_mb": 110, "head_cost": 8}
    return ModelTerms(**{**figures, **changes})


terms = st.builds(
    ModelTerms,
    total_layers=st.integers(1, 40),
    layer_mb=st.integers(1, 60),
    kv_mb=st.integers(0, 20),
    embedding_mb=st.integers(0, 200),
    head_mb=st.integers(0, 200),
    usable_pct=st.integers(1, 100),
    min_mb=st.integers(0, 300),
    layer_cost=st.integers(1, 5),
    embedding_cost=st.integers(0, 20),
    head_cost=st.integers(0, 60),
)


def assign(model: ModelTerms, claims: list[int], min_stages: int) -> list[LayerRange]:
    """What one worker after another gets; a claim that is refused gets nothing."""
    assigned: list[LayerRange] = []
    for claim_mb in claims:
        try:
            assigned.append(allocate(model, assigned, claim_mb, min_stages=min_stages))
        except ClaimTooSmall:
            continue
    return assigned


# ---- The formula ----


def test_the_claim_formula_is_the_manuals() -> None:
    """Section 03: ceil((layers * mem_per_layer_mb + global_tensor_mb) * 100 / usable_vram_pct)."""
    model = terms_of(usable_pct=90)
    assert model.claim_mb(LayerRange(5, 15)) == -(-560 * 100 // 90)
    assert model.claim_mb(LayerRange(0, 10)) == -(-660 * 100 // 90)
    assert model.claim_mb(LayerRange(20, 30)) == -(-670 * 100 // 90)
    assert model.claim_mb(LayerRange(0, 30)) == -(-(30 * 56 + 210) * 100 // 90)
    assert terms_of(min_mb=256).claim_mb(LayerRange(5, 6)) == 256


@given(terms, st.integers(1, 40))
def test_the_formulas_answer_is_granted_and_one_megabyte_less_covers_one_layer_fewer(
    model: ModelTerms, layers: int
) -> None:
    assume(layers < model.total_layers)
    claim_mb = model.claim_mb(LayerRange(0, layers))
    assume(claim_mb > model.min_mb)
    granted = allocate(model, [], claim_mb)
    assert granted.start == 0
    assert len(granted) >= layers
    used_mb = layers * model.mem_per_layer_mb + model.embedding_mb
    if -(-used_mb * 100 // model.usable_pct) == claim_mb and layers > 1:
        fewer = allocate(model, [], claim_mb - 1)
        assert fewer == LayerRange(0, len(fewer))
        assert len(fewer) < layers


@pytest.mark.parametrize("figure", [{"total_layers": 0}, {"usable_pct": 101}, {"kv_mb": -1}, {"layer_cost": 0}])
def test_terms_that_make_no_sense_are_refused(figure: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        terms_of(**figure)


# ---- Splitting ----


@pytest.mark.parametrize("min_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("head_cost", [0, 8, 500])
def test_as_many_ample_workers_as_stages_cover_every_layer_once(min_stages: int, head_cost: int) -> None:
    assigned = assign(terms_of(head_cost=head_cost), [AMPLE_MB] * min_stages, min_stages)
    assert sorted(layer for layers in assigned for layer in layers) == list(range(30))
    assert len(assigned) == min_stages


def test_a_heavy_head_gets_fewer_layers() -> None:
    assert balanced_cuts(terms_of(head_cost=8), 3) == (0, 12, 25, 30)
    assert balanced_cuts(terms_of(head_cost=0), 3) == (0, 10, 20, 30)
    assert balanced_cuts(terms_of(head_cost=500), 3) == (0, 14, 29, 30)


def test_one_ample_worker_gets_the_whole_model_where_no_split_is_asked_for() -> None:
    assert allocate(terms_of(), [], AMPLE_MB) == LayerRange(0, 30)


@given(terms, st.integers(1, 45))
def test_a_balanced_split_is_a_partition_and_no_partition_has_a_cheaper_maximum(model: ModelTerms, parts: int) -> None:
    cuts = balanced_cuts(model, parts)
    ranges = [LayerRange(a, b) for a, b in pairwise(cuts)]
    assert (cuts[0], cuts[-1]) == (0, model.total_layers)
    assert len(ranges) == min(parts, model.total_layers)
    worst = max(model.cost(layers) for layers in ranges)
    # A greedy walk under any smaller bound needs more parts: so the maximum is the least one.
    needed, start = 1, 0
    for layer in range(model.total_layers):
        if model.cost(LayerRange(start, layer + 1)) > worst - 1:
            needed, start = needed + 1, layer
    single = max(model.cost(LayerRange(layer, layer + 1)) for layer in range(model.total_layers))
    assert needed > parts or single > worst - 1


# ---- Holes, replicas, bounds ----


def test_holes_come_first_then_the_thinnest_stretch() -> None:
    model = terms_of(head_cost=0)
    thirds = [LayerRange(0, 10), LayerRange(10, 20), LayerRange(20, 30)]
    assert allocate(model, [thirds[0], thirds[2]], AMPLE_MB, min_stages=3) == thirds[1]
    assert allocate(model, [*thirds, thirds[0], thirds[2]], AMPLE_MB, min_stages=3) == thirds[1]
    assert allocate(model, thirds, AMPLE_MB, min_stages=3) == thirds[0]


def test_a_claim_good_for_the_middle_is_refused_the_ends() -> None:
    """M-ALLOC-4: with only the ends missing, a claim that holds neither of them becomes a replica of the middle."""
    model = terms_of()
    middle = LayerRange(1, 29)
    claim_mb = model.claim_mb(LayerRange(5, 6))
    assert allocate(model, [], claim_mb) == LayerRange(1, 2)
    grant = allocate(model, [middle], claim_mb)
    assert middle.contains(grant)


def test_a_claim_that_holds_no_layer_is_told_what_would_do() -> None:
    model = terms_of(min_mb=10)
    needed = model.claim_mb(LayerRange(5, 6))
    with pytest.raises(ClaimTooSmall, match=f"{needed} MB is the least"):
        allocate(model, [], needed - 1)
    allocate(model, [], needed)


def test_a_claim_below_the_floor_is_refused() -> None:
    with pytest.raises(ClaimTooSmall, match="256 MB"):
        allocate(terms_of(min_mb=256), [], 255)


def test_a_node_that_names_its_layers_gets_those() -> None:
    model = terms_of()
    assert allocate(model, [], AMPLE_MB, min_stages=3, wanted=LayerRange(4, 27)) == LayerRange(4, 27)
    assert allocate(model, [LayerRange(0, 30)], AMPLE_MB, wanted=LayerRange(4, 27)) == LayerRange(4, 27)
    assert allocate(model, [LayerRange(0, 10)], AMPLE_MB, wanted=LayerRange(4, 27)) == LayerRange(10, 27)
    with pytest.raises(InvalidRequest) as caught:
        allocate(model, [], AMPLE_MB, wanted=LayerRange(20, 31))
    assert caught.value.param == "layers"


def test_a_node_that_names_its_layers_leaves_one_for_each_other_stage() -> None:
    assert allocate(terms_of(), [], AMPLE_MB, min_stages=3, wanted=LayerRange(0, 30)) == LayerRange(0, 28)


def test_a_node_that_names_more_than_it_can_hold_gets_what_fits() -> None:
    model = terms_of()
    claim_mb = model.claim_mb(LayerRange(10, 13))
    assert allocate(model, [], claim_mb, wanted=LayerRange(10, 20)) == LayerRange(10, 13)


@given(terms, st.lists(st.integers(1, 3000), max_size=12), st.integers(1, 6))
def test_no_grant_exceeds_its_claim_and_coverage_never_shrinks(
    model: ModelTerms, claims: list[int], min_stages: int
) -> None:
    assigned: list[LayerRange] = []
    for claim_mb in claims:
        before = sum(len(part) for part in walk(assigned, model.total_layers).covered)
        try:
            granted = allocate(model, assigned, claim_mb, min_stages=min_stages)
        except ClaimTooSmall:
            assert all(model.claim_mb(LayerRange(layer, layer + 1)) > claim_mb for layer in range(model.total_layers))
            continue
        assert granted == allocate(model, assigned, claim_mb, min_stages=min_stages)
        assert model.claim_mb(granted) <= claim_mb
        assert granted.end <= model.total_layers
        assigned.append(granted)
        assert sum(len(part) for part in walk(assigned, model.total_layers).covered) >= before
    if min_stages > 1 and model.total_layers >= min_stages:
        longest = max((len(layers) for layers in assigned), default=0)
        assert longest <= model.total_layers - (min_stages - 1)


@given(terms, st.integers(1, 6), st.integers(1, 12))
def test_ample_claims_make_a_mesh_healthy_once_there_are_enough(model: ModelTerms, min_stages: int, extra: int) -> None:
    ample_mb = model.claim_mb(LayerRange(0, model.total_layers))
    assigned = assign(model, [ample_mb] * (min_stages + extra), min_stages)
    assert walk(assigned[:min_stages], model.total_layers).health == "healthy"
    # Extra workers are replicas whose ends are the others' ends, so that they can take their place.
    edges = {edge for layers in assigned[:min_stages] for edge in layers.as_tuple()}
    assert all(edge in edges for layers in assigned for edge in layers.as_tuple())
