"""A route covers every layer once, in order, with ready stages of one recipe; what is missing is named."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.dht.stage_records import VerifiedStage
from tessella_p2p.entry.routes import choose_route, no_route
from tessella_p2p.wire.keys import NodeKey

PEERS = [NodeKey(bytes([i]) * 32).peer_id for i in range(8)]
TOTAL = 6


def stage(peer: int, start: int, end: int, queue: int = 0, state: str = "ready") -> VerifiedStage:
    return VerifiedStage(
        peer_id=PEERS[peer],
        addresses=(),
        layers=LayerRange(start, end),
        total_layers=TOTAL,
        recipe="f32",
        model_id="m",
        manifest_root=bytes(32),
        queue_depth=queue,
        state=state,  # type: ignore[arg-type]
        max_positions=100,
        sequence=1,
        lease_serial=1,
        lease_expires_at=1,
        orchestrator=PEERS[7],
        issued_at=0,
        expires_at=1,
        raw=b"",
    )


ranges = st.tuples(st.integers(0, TOTAL - 1), st.integers(1, TOTAL)).filter(lambda r: r[0] < r[1])


@given(st.lists(st.tuples(ranges, st.integers(0, 3)), max_size=8))
def test_a_route_is_a_chain_over_every_layer(offers: list[tuple[tuple[int, int], int]]) -> None:
    stages = [stage(peer, *layers, queue) for peer, (layers, queue) in enumerate(offers)]
    route = choose_route(stages, TOTAL, {}, PeerId("self"))
    if route is None:
        return
    edges = [0, *(s.layers.end for s in route.stages)]
    assert [s.layers.start for s in route.stages] == edges[:-1]
    assert edges[-1] == TOTAL
    assert len({s.peer_id for s in route.stages}) == len(route.stages)


@given(st.permutations([(0, 0, 3), (1, 0, 3), (2, 3, 6), (3, 3, 6)]))
def test_the_choice_does_not_depend_on_the_order_of_the_records(order: list[tuple[int, int, int]]) -> None:
    route = choose_route([stage(*each) for each in order], TOTAL, {}, PeerId("self"))
    assert route == choose_route([stage(*each) for each in sorted(order)], TOTAL, {}, PeerId("self"))


def test_the_shorter_queue_wins_and_a_recent_failure_counts_more() -> None:
    stages = [stage(0, 0, 6, queue=5), stage(1, 0, 6, queue=1)]
    first = choose_route(stages, TOTAL, {}, PeerId("self"))
    assert first is not None
    assert first.stages[0].peer_id == PEERS[1]
    second = choose_route(stages, TOTAL, {PEERS[1]: 100.0}, PeerId("self"))
    assert second is not None
    assert second.stages[0].peer_id == PEERS[0]


def test_a_draining_stage_is_not_used_and_its_layers_are_named() -> None:
    stages = [stage(0, 0, 3), stage(1, 3, 6, state="draining")]
    assert choose_route(stages, TOTAL, {}, PeerId("self")) is None
    error = no_route("m", stages, TOTAL)
    assert error.missing == ((3, 6),)
    assert "3–6" in str(error)


def test_a_saturated_stage_is_used_only_where_nobody_else_has_its_layers() -> None:
    stages = [stage(0, 0, 3), stage(1, 3, 6, state="saturated"), stage(2, 3, 6, queue=1000)]
    others = choose_route(stages, TOTAL, {PEERS[2]: 1000.0}, PeerId("self"))
    assert others is not None
    assert [each.peer_id for each in others.stages] == [PEERS[0], PEERS[2]]
    alone = choose_route(stages[:2], TOTAL, {}, PeerId("self"))
    assert alone is not None
    assert [each.peer_id for each in alone.stages] == [PEERS[0], PEERS[1]]


def test_overlapping_ranges_that_do_not_join_are_no_route() -> None:
    assert choose_route([stage(0, 0, 4), stage(1, 3, 6)], TOTAL, {}, PeerId("self")) is None


def test_no_route_goes_through_a_canary_even_where_nobody_else_has_its_layers() -> None:
    canary = replace(stage(1, 3, 6), canary=True)
    assert choose_route([stage(0, 0, 3), canary], TOTAL, {}, PeerId("self")) is None
    assert no_route("m", [stage(0, 0, 3), canary], TOTAL).missing == ((3, 6),)
    found = choose_route([stage(0, 0, 3), canary, stage(2, 3, 6, queue=50)], TOTAL, {}, PeerId("self"))
    assert found is not None
    assert [each.peer_id for each in found.stages] == [PEERS[0], PEERS[2]]
