"""A mesh is split anew: what every plan keeps, and what it gains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.model.coverage import walk
from tessella_p2p.orchestrator.allocator import allocate
from tessella_p2p.orchestrator.layout import lay_out
from tessella_p2p.orchestrator.rebalance import Plan, plan_rebalance, plan_repair
from tessella_p2p.orchestrator.terms import ModelTerms
from tessella_p2p.orchestrator.waves import Holder

TOTAL = 12
EVEN = ModelTerms(total_layers=TOTAL, layer_mb=8, kv_mb=2, embedding_mb=0, head_mb=0, usable_pct=100)
HEAVY_ENDS = ModelTerms(
    total_layers=TOTAL, layer_mb=8, kv_mb=2, embedding_mb=30, head_mb=50, usable_pct=100, layer_cost=10, head_cost=25
)
AMPLE_MB = 10_000


def holder(
    name: str,
    start: int,
    end: int,
    *,
    claim_mb: int = AMPLE_MB,
    terms: ModelTerms | None = EVEN,
    bound: LayerRange | None = None,
) -> Holder:
    return Holder(PeerId(name), LayerRange(start, end), claim_mb, terms, bound)


def ends_of(plan: Plan, holders: Sequence[Holder]) -> dict[str, tuple[int, int]]:
    """What everybody holds afterwards."""
    after = {one.peer: one.layers for one in holders} | {move.peer: move.after for move in plan.moves}
    return {peer: layers.as_tuple() for peer, layers in sorted(after.items())}


def loaded(plan: Plan) -> int:
    """Layers that have to be loaded."""
    return sum(len(set(move.after) - set(move.before)) for move in plan.moves)


# ---- Examples ----


def test_a_lopsided_chain_is_evened_out() -> None:
    holders = [holder("a", 0, 8), holder("b", 8, 10), holder("c", 10, 12)]
    plan = plan_rebalance(TOTAL, holders)
    assert ends_of(plan, holders) == {"a": (0, 4), "b": (4, 8), "c": (8, 12)}
    assert (plan.dearest_before, plan.dearest_after) == (8, 4)


def test_a_balanced_mesh_is_left_alone() -> None:
    holders = [holder("a", 0, 4), holder("b", 4, 8), holder("c", 8, 12), holder("d", 4, 8)]
    assert plan_rebalance(TOTAL, holders).moves == ()


def test_balance_is_of_measured_cost_and_not_of_layers() -> None:
    holders = [holder(name, *layers, terms=HEAVY_ENDS) for name, *layers in (("a", 0, 4), ("b", 4, 8), ("c", 8, 12))]
    plan = plan_rebalance(TOTAL, holders)
    after = ends_of(plan, holders)
    assert after == {"a": (0, 5), "b": (5, 10), "c": (10, 12)}, (
        "two layers and the head take nearly as long as five layers"
    )
    assert (plan.dearest_before, plan.dearest_after) == (65, 50)


def test_replicas_fill_a_hole_and_the_others_stay() -> None:
    holders = [holder("a", 0, 4), holder("b", 0, 4), holder("c", 4, 8)]
    plan = plan_rebalance(TOTAL, holders, min_stages=3)
    assert [(move.peer, move.after.as_tuple()) for move in plan.moves] in ([("a", (8, 12))], [("b", (8, 12))])


def test_replicas_go_where_the_chain_is_thinnest() -> None:
    holders = [holder(name, 0, 4) for name in "abcd"] + [holder("e", 4, 8), holder("f", 8, 12)]
    plan = plan_rebalance(TOTAL, holders, min_stages=3)
    assert sorted(move.after.as_tuple() for move in plan.moves) == [(4, 8), (8, 12)]
    assert all(not wave.together for wave in plan.waves)


def test_more_stages_are_made_where_the_operator_asks_for_them() -> None:
    holders = [holder(name, 0, 12) for name in "abc"]
    assert plan_rebalance(TOTAL, holders, min_stages=1).moves == ()
    plan = plan_rebalance(TOTAL, holders, min_stages=3)
    assert sorted(ends_of(plan, holders).values()) == [(0, 4), (4, 8), (8, 12)]


def test_claims_that_differ_hold_parts_that_differ() -> None:
    small = EVEN.claim_mb(LayerRange(0, 2))
    holders = [holder("a", 0, 6), holder("b", 6, 8, claim_mb=small), holder("c", 8, 12)]
    plan = plan_rebalance(TOTAL, holders)
    assert ends_of(plan, holders) == {"a": (0, 5), "b": (5, 7), "c": (7, 12)}


def test_a_worker_with_a_bound_of_its_own_or_an_unknown_claim_stays() -> None:
    holders = [
        holder("a", 0, 2, bound=LayerRange(0, 2)),
        holder("b", 2, 9),
        holder("c", 9, 10),
        holder("d", 10, 12, terms=None),
    ]
    plan = plan_rebalance(TOTAL, holders)
    assert ends_of(plan, holders) == {"a": (0, 2), "b": (2, 6), "c": (6, 10), "d": (10, 12)}


def test_a_chain_without_replicas_moves_together_beside_what_it_serves() -> None:
    holders = [holder("a", 0, 8), holder("b", 8, 10), holder("c", 10, 12)]
    (wave,) = plan_rebalance(TOTAL, holders).waves
    assert wave.together
    assert all(move.beside for move in wave.moves)


def test_room_for_both_ranges_counts_the_process_once_and_the_ends_as_often_as_they_are_loaded() -> None:
    terms = ModelTerms(
        total_layers=TOTAL, layer_mb=10, kv_mb=0, embedding_mb=7, head_mb=0, overhead_mb=100, usable_pct=100
    )
    both = 100 + 3 * 10 + 7 + 4 * 10 + 7
    assert holder("a", 0, 3, terms=terms, claim_mb=both).fits_both(LayerRange(0, 3), LayerRange(0, 4))
    assert not holder("a", 0, 3, terms=terms, claim_mb=both - 1).fits_both(LayerRange(0, 3), LayerRange(0, 4))


def test_with_replicas_nobody_has_to_move_together() -> None:
    holders = [holder(f"{layers}{copy}", *layers) for layers in ((0, 8), (8, 10), (10, 12)) for copy in "xy"]
    plan = plan_rebalance(TOTAL, holders)
    assert not plan.waves[0].together
    assert len(plan.waves[0].moves) == 3, "one of each range"
    assert Counter(ends_of(plan, holders).values()) == {(0, 4): 2, (4, 8): 2, (8, 12): 2}


def test_a_big_mesh_moves_a_quarter_of_each_range_at_a_time_and_is_planned_in_seconds() -> None:
    holders = [holder(f"{i:04}", *((0, 8), (8, 10), (10, 12))[i % 3]) for i in range(1200)]
    plan = plan_rebalance(TOTAL, holders)
    assert len(plan.moves) >= 800
    assert max(len(wave.moves) for wave in plan.waves) <= 300
    assert len(plan.waves) < 30


# ---- Repairs ----


def test_a_replica_repairs_a_hole() -> None:
    holders = [holder("a", 0, 4), holder("b", 0, 4), holder("d", 8, 12)]
    plan = plan_repair(TOTAL, holders)
    assert [(move.before.as_tuple(), move.after.as_tuple()) for move in plan.moves] == [((0, 4), (4, 8))]


def test_nobody_leaves_a_range_of_its_own_for_a_hole() -> None:
    assert plan_repair(TOTAL, [holder("a", 0, 4), holder("d", 8, 12)]).moves == ()
    unknown = [holder("a", 0, 4, terms=None), holder("b", 0, 4, bound=LayerRange(0, 4)), holder("d", 8, 12)]
    assert plan_repair(TOTAL, unknown).moves == ()


def test_a_whole_mesh_needs_no_repair() -> None:
    assert plan_repair(TOTAL, [holder("a", 0, 12), holder("b", 0, 12)]).moves == ()


def test_the_range_of_one_that_is_not_counted_on_is_filled_by_a_replica_of_another() -> None:
    holders = [holder("a", 0, 6), holder("b", 0, 6), holder("c", 6, 12)]
    assert plan_repair(TOTAL, holders).moves == ()
    (move,) = plan_repair(TOTAL, holders, lost=[PeerId("c")]).moves
    assert (move.before.as_tuple(), move.after.as_tuple()) == ((0, 6), (6, 12))


def test_a_small_replica_fills_what_it_can_of_a_hole() -> None:
    small = EVEN.claim_mb(LayerRange(0, 2))
    holders = [holder("a", 0, 2, claim_mb=small), holder("b", 0, 2, claim_mb=small), holder("c", 8, 12)]
    (move,) = plan_repair(TOTAL, holders).moves
    assert move.after.as_tuple() == (2, 4)


# ---- Properties ----


@st.composite
def meshes(draw: st.DrawFn) -> list[Holder]:
    """Workers as an allocator and time leave them: any ranges within their claims, holes and overlaps included."""
    terms = draw(st.sampled_from([EVEN, HEAVY_ENDS]))
    found = []
    for index in range(draw(st.integers(1, 7))):
        start = draw(st.integers(0, TOTAL - 1))
        layers = LayerRange(start, draw(st.integers(start + 1, TOTAL)))
        spare_mb = draw(st.sampled_from([0, 10, 40, 200]))
        kind = draw(st.sampled_from(["free", "free", "free", "bound", "unknown"]))
        found.append(
            Holder(
                PeerId(f"{index}"),
                layers,
                terms.claim_mb(layers) + spare_mb,
                None if kind == "unknown" else terms,
                layers if kind == "bound" else None,
            )
        )
    return found


def states(plan: Plan, holders: Sequence[Holder]) -> Iterator[tuple[Counter[LayerRange], Counter[LayerRange], bool]]:
    """Before each wave, while it loads (those that change over together only change over), and whether they do."""
    ranges = Counter(one.layers for one in holders)
    for wave in plan.waves:
        during = ranges - Counter(move.before for move in wave.moves)
        yield ranges.copy(), during, wave.together
        ranges = during + Counter(move.after for move in wave.moves)
    yield ranges.copy(), ranges.copy(), False


def covered(ranges: Counter[LayerRange]) -> int:
    return walk(ranges, TOTAL).num_covered


@settings(max_examples=300, deadline=None)
@given(meshes(), st.integers(1, 4))
def test_what_every_plan_keeps(holders: list[Holder], min_stages: int) -> None:
    plan = plan_rebalance(TOTAL, holders, min_stages=min_stages)
    by_peer = {one.peer: one for one in holders}
    assert len({move.peer for move in plan.moves}) == len(plan.moves), "nobody moves twice"
    for move in plan.moves:
        mover = by_peer[move.peer]
        assert mover.may_move, "who stays, stays"
        assert mover.fits(move.after), "no range needs more than its worker's claim"
        assert move.before == mover.layers != move.after
        assert move.beside == mover.fits_both(move.before, move.after)
    least = 0
    for before, during, together in states(plan, holders):
        assert covered(before) >= least, "coverage never shrinks"
        least = covered(before)
        if not together:
            assert covered(during) >= least, "not even while a wave loads"
    whole = covered(Counter(one.layers for one in holders)) == TOTAL
    if whole and plan.moves:
        assert plan.dearest_after <= plan.dearest_before


@settings(max_examples=150, deadline=None)
@given(meshes(), st.integers(1, 4))
def test_a_plan_that_was_carried_out_leaves_nothing_to_do(holders: list[Holder], min_stages: int) -> None:
    plan = plan_rebalance(TOTAL, holders, min_stages=min_stages)
    after = {move.peer: move.after for move in plan.moves}
    moved = [Holder(one.peer, after.get(one.peer, one.layers), one.claim_mb, one.terms, one.bound) for one in holders]
    assert plan_rebalance(TOTAL, moved, min_stages=min_stages).moves == ()


@settings(max_examples=100, deadline=None)
@given(meshes().flatmap(lambda holders: st.tuples(st.just(holders), st.permutations(holders))))
def test_the_plan_does_not_depend_on_the_order_of_the_workers(orders: tuple[list[Holder], list[Holder]]) -> None:
    assert plan_rebalance(TOTAL, orders[0]) == plan_rebalance(TOTAL, orders[1])


@settings(max_examples=200, deadline=None)
@given(meshes())
def test_a_repair_is_one_move_that_covers_more_and_leaves_nothing_uncovered(holders: list[Holder]) -> None:
    plan = plan_repair(TOTAL, holders)
    assert len(plan.moves) <= 1
    for before, during, _ in states(plan, holders):
        assert covered(during) >= covered(before)
    if plan.moves:
        (*_, (last, _, _)) = states(plan, holders)
        assert covered(last) > covered(Counter(one.layers for one in holders))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(20, 150), min_size=1, max_size=8), st.integers(1, 3))
def test_what_the_allocator_gave_one_after_another_can_be_evened_out(claims: list[int], min_stages: int) -> None:
    holders: list[Holder] = []
    for index, claim_mb in enumerate(claims):
        layers = allocate(EVEN, [one.layers for one in holders], claim_mb, min_stages=min_stages)
        holders.append(Holder(PeerId(f"{index}"), layers, claim_mb, EVEN))
    before = covered(Counter(one.layers for one in holders))
    plan = plan_rebalance(TOTAL, holders, min_stages=min_stages)
    after = Counter(LayerRange(*layers) for layers in ends_of(plan, holders).values())
    assert covered(after) >= before
    if sum(claim_mb // 10 for claim_mb in claims) >= TOTAL and len(claims) >= min_stages:
        assert covered(after) == TOTAL, "the claims reach, so the mesh is whole"


# ---- Against all splits there are ----


def every_split(names: Sequence[str], parts: int, total: int) -> Iterator[dict[str, LayerRange]]:
    """Every way to cut ``total`` layers into ``parts`` and give them to as many of ``names``."""
    for cuts in combinations(range(1, total), parts - 1):
        ranges = [LayerRange(a, b) for a, b in pairwise([0, *cuts, total])]
        for owners in permutations(names, parts):
            yield dict(zip(owners, ranges, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_split_is_as_even_as_any_and_of_those_the_one_with_the_least_to_load(data: st.DataObject) -> None:
    total = 6
    terms = ModelTerms(total_layers=total, layer_mb=1, kv_mb=0, embedding_mb=0, head_mb=0, usable_pct=100, head_cost=1)
    parts = data.draw(st.integers(2, 3))
    cuts = sorted(data.draw(st.sets(st.integers(1, total - 1), min_size=parts - 1, max_size=parts - 1)))
    holders = [
        Holder(PeerId(f"{index}"), LayerRange(a, b), AMPLE_MB, terms)
        for index, (a, b) in enumerate(pairwise([0, *cuts, total]))
    ]
    plan = plan_rebalance(total, holders)
    current = {one.peer: one.layers for one in holders}
    ranked = [
        (
            max(terms.cost(layers) for layers in split.values()),
            sum(len(set(layers) - set(current[PeerId(name)])) for name, layers in split.items()),
        )
        for split in every_split([one.peer for one in holders], parts, total)
    ]
    assert (plan.dearest_after, loaded(plan)) == min(ranked)


@pytest.mark.parametrize("total", [300, 4096])
def test_many_layers_are_laid_out_without_looking_at_every_cut(total: int) -> None:
    terms = ModelTerms(total_layers=total, layer_mb=1, kv_mb=0, embedding_mb=0, head_mb=0, usable_pct=100)
    cuts = [0, total // 2, total // 2 + 10, total]
    holders = [Holder(PeerId(f"{i}"), LayerRange(a, b), AMPLE_MB, terms) for i, (a, b) in enumerate(pairwise(cuts))]
    plan = plan_rebalance(total, holders)
    assert plan.dearest_after == -(-total // 3)
    assert lay_out([LayerRange(0, total)], holders[:1], total - 1) is None


def test_the_new_chain_is_whole_before_the_last_copy_of_the_old_one_goes() -> None:
    """Four copies of the whole model, whose workers have no room for a second range, become three stages: nothing is ever lost."""
    claim_mb = EVEN.claim_mb(LayerRange(0, TOTAL))
    plan = plan_rebalance(TOTAL, [holder(name, 0, TOTAL, claim_mb=claim_mb) for name in "abcd"], min_stages=3)
    assert not any(move.beside for move in plan.moves)
    assert not any(wave.together for wave in plan.waves)
