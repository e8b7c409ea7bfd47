"""What a reader believes of a stage record, and the view that is made of such records."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import (
    Expired,
    InvalidSignature,
    MalformedMessage,
    NotAuthorized,
    Overloaded,
    RefusalError,
    RemoteProtocolError,
)
from tessella_p2p.dht.stage_records import verify_stage
from tessella_p2p.dht.swarm_view import Source, SwarmView
from tests.dht.kad_mesh import ORCHESTRATOR, ROOT, START_MS, make_lease, make_record, node_key, tampered

PINS = frozenset({ORCHESTRATOR.peer_id})
KEY = node_key(1)
PEER = KEY.peer_id
HOUR_MS = 3_600_000


def test_a_right_record_gives_the_stage_that_it_states() -> None:
    raw = make_record(KEY, sequence=7, layers=(10, 20), serial=3)
    stage = verify_stage(raw, pins=PINS, now_ms=START_MS + 59_999)
    assert (stage.peer_id, stage.layers.as_tuple(), stage.total_layers) == (PEER, (10, 20), 30)
    assert (stage.sequence, stage.lease_serial, stage.orchestrator) == (7, 3, ORCHESTRATOR.peer_id)
    assert (stage.recipe, stage.manifest_root, stage.state) == ("f32", ROOT, "ready")
    assert stage.raw == raw


GOOD = make_record(KEY)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (tampered(GOOD), InvalidSignature),
        (make_record(KEY, now_ms=START_MS - 60_000), Expired),
        (make_record(KEY, now_ms=START_MS + 60_001), Expired),
        (make_record(KEY, ttl_ms=60_001), MalformedMessage),
        (make_record(KEY, layers=(20, 31)), MalformedMessage),
        (make_record(KEY, lease=make_lease(PEER, by=node_key(2))), NotAuthorized),
        (make_record(KEY, lease=make_lease(PEER, by=KEY)), NotAuthorized),
        (make_record(KEY, lease=make_lease(node_key(2).peer_id)), NotAuthorized),
        (make_record(KEY, lease=make_lease(PEER, layers=(0, 9))), NotAuthorized),
        (make_record(KEY, lease=make_lease(PEER, recipe="int4")), NotAuthorized),
        (make_record(KEY, lease=make_lease(PEER, root=b"\x01" * 32)), NotAuthorized),
        (make_record(KEY, lease=make_lease(PEER, canary=True)), NotAuthorized),
        (make_record(KEY, lease=make_lease(PEER), canary=True), NotAuthorized),
        (make_record(KEY, lease=make_lease(PEER, ttl_ms=0)), Expired),
        (make_record(KEY, lease=make_lease(PEER, now_ms=START_MS + 60_001)), Expired),
        (make_record(KEY, lease=tampered(make_lease(PEER))), InvalidSignature),
        (make_record(KEY, lease=b"no lease"), MalformedMessage),
        (make_record(KEY, lease=make_record(KEY)), InvalidSignature),
        (make_lease(PEER), InvalidSignature),
    ],
)
def test_the_hostile_twins_of_a_right_record_are_refused(raw: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        verify_stage(raw, pins=PINS, now_ms=START_MS)
    view = SwarmView(PINS)
    with pytest.raises(error):
        view.observe(raw, "dht", START_MS)
    assert len(view) == 0


def test_without_pins_nothing_is_believed() -> None:
    with pytest.raises(NotAuthorized):
        verify_stage(GOOD, pins=frozenset(), now_ms=START_MS)


@given(st.binary(max_size=300))
@settings(max_examples=100)
def test_any_bytes_give_a_typed_error(raw: bytes) -> None:
    with pytest.raises((RemoteProtocolError, RefusalError)):
        verify_stage(raw, pins=PINS, now_ms=START_MS)


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
@settings(max_examples=150)
def test_a_record_with_any_byte_changed_is_refused(position: int, change: int) -> None:
    raw = bytearray(GOOD)
    raw[position] ^= change
    with pytest.raises((RemoteProtocolError, RefusalError)):
        verify_stage(bytes(raw), pins=PINS, now_ms=START_MS)


def test_an_expired_lease_counts_for_the_outage_grace_only_while_the_orchestrator_is_away() -> None:
    lease = make_lease(PEER, now_ms=START_MS - HOUR_MS)
    raw = make_record(KEY, lease=lease)
    with pytest.raises(Expired):
        verify_stage(raw, pins=PINS, now_ms=START_MS)
    assert verify_stage(raw, pins=PINS, now_ms=START_MS, orchestrator_reachable=False).lease_serial == 1
    late = make_record(KEY, lease=make_lease(PEER, now_ms=START_MS - 25 * HOUR_MS))
    with pytest.raises(Expired):
        verify_stage(late, pins=PINS, now_ms=START_MS, orchestrator_reachable=False)


def test_a_lease_is_superseded_by_a_newer_serial_of_the_same_peer() -> None:
    view = SwarmView(PINS)
    view.observe(make_record(KEY, sequence=1, serial=5), "dht", START_MS)
    with pytest.raises(NotAuthorized, match="superseded"):
        view.observe(make_record(KEY, sequence=2, serial=4), "dht", START_MS)
    view.observe(make_record(node_key(2), sequence=2, serial=4), "dht", START_MS)
    assert len(view.stages(ROOT, "f32", START_MS)) == 2


def test_the_highest_sequence_wins_whatever_the_source_and_order() -> None:
    view = SwarmView(PINS)
    assert view.observe(make_record(KEY, sequence=5, layers=(0, 10)), "orchestrator", START_MS) is not None
    assert view.observe(make_record(KEY, sequence=4, layers=(10, 20)), "gossip", START_MS) is None
    assert view.observe(make_record(KEY, sequence=5, layers=(10, 20)), "gossip", START_MS) is None
    assert view.observe(make_record(KEY, sequence=6, layers=(20, 30)), "dht", START_MS) is not None
    (stage,) = view.stages(ROOT, None, START_MS)
    assert stage.layers.as_tuple() == (20, 30)


def test_a_short_lived_record_cannot_be_replaced_by_the_older_one_it_superseded() -> None:
    view = SwarmView(PINS)
    older = make_record(KEY, sequence=1)
    view.observe(make_record(KEY, sequence=2, ttl_ms=5_000, state="draining"), "dht", START_MS)
    assert view.observe(older, "gossip", START_MS + 6_000) is None
    assert view.stages(ROOT, None, START_MS + 6_000, with_draining=True) == ()


def test_missed_heartbeats_make_a_stage_stale_and_then_offline() -> None:
    view = SwarmView(PINS)
    view.observe(make_record(KEY, sequence=1), "gossip", START_MS)
    assert view.liveness(PEER, START_MS + 12_400) == "live"
    assert view.liveness(PEER, START_MS + 12_500) == "stale"
    assert view.stages(ROOT, None, START_MS + 12_500) == ()
    assert view.liveness(PEER, START_MS + 17_500) == "offline"
    view.observe(make_record(KEY, sequence=2, now_ms=START_MS + 17_500), "gossip", START_MS + 17_500)
    assert view.liveness(PEER, START_MS + 17_500) == "live"


def test_repeating_an_old_heartbeat_keeps_nobody_alive() -> None:
    view = SwarmView(PINS)
    raw = make_record(KEY, sequence=1)
    for second in range(18):
        view.observe(raw, "gossip", START_MS + second * 1000)
    assert view.liveness(PEER, START_MS + 17_500) == "offline"


def test_a_peer_that_gossip_does_not_reach_lives_by_its_records() -> None:
    view = SwarmView(PINS)
    view.observe(make_record(KEY, sequence=1), "dht", START_MS)
    assert view.liveness(PEER, START_MS + 59_000) == "live"
    view.observe(make_record(KEY, sequence=2, now_ms=START_MS + 10_000), "gossip", START_MS + 10_000)
    view.observe(make_record(KEY, sequence=3, now_ms=START_MS + 30_000), "dht", START_MS + 30_000)
    assert view.liveness(PEER, START_MS + 60_000) == "live"
    assert view.liveness(PEER, START_MS + 90_000) == "offline"


def test_a_lease_that_runs_out_takes_the_stage_with_it_unless_there_is_an_outage() -> None:
    view = SwarmView(PINS)
    view.observe(make_record(KEY, lease=make_lease(PEER, ttl_ms=10_000)), "dht", START_MS)
    assert view.stages(ROOT, None, START_MS + 10_000) == ()
    view.orchestrator_reachable = False
    assert len(view.stages(ROOT, None, START_MS + 10_000)) == 1


def test_coverage_counts_ready_live_stages_of_one_recipe() -> None:
    view = SwarmView(PINS)
    view.observe(make_record(node_key(1), layers=(0, 10)), "dht", START_MS)
    view.observe(make_record(node_key(2), layers=(10, 20), state="draining"), "dht", START_MS)
    view.observe(make_record(node_key(3), layers=(20, 30)), "dht", START_MS)
    view.observe(make_record(node_key(4), layers=(10, 20), recipe="int4"), "dht", START_MS)
    coverage = view.coverage(ROOT, "f32", 30, START_MS)
    assert coverage.health == "degraded"
    assert [hole.as_tuple() for hole in coverage.holes] == [(10, 20)]
    view.observe(make_record(node_key(5), layers=(10, 20)), "dht", START_MS)
    assert view.coverage(ROOT, "f32", 30, START_MS).health == "healthy"


def test_a_canary_is_remembered_and_never_among_the_stages_that_serve() -> None:
    view = SwarmView(PINS)
    view.observe(make_record(KEY, canary=True, layers=(0, 30)), "dht", START_MS)
    assert view.stages(ROOT, "f32", START_MS, with_draining=True) == ()
    assert view.recipes(ROOT, START_MS) == ()
    assert view.coverage(ROOT, "f32", 30, START_MS).num_covered == 0
    (status,) = view.statuses(START_MS)
    assert status.stage.canary


def test_a_view_lists_the_recipes_that_are_served() -> None:
    view = SwarmView(PINS)
    view.observe(make_record(node_key(1), recipe="torch-f32@b"), "dht", START_MS)
    view.observe(make_record(node_key(2), recipe="f32"), "dht", START_MS)
    view.observe(make_record(node_key(3), recipe="torch-f32@a", state="draining"), "dht", START_MS)
    view.observe(make_record(node_key(4), recipe="torch-f32@b"), "dht", START_MS)
    assert view.recipes(ROOT, START_MS) == ("f32", "torch-f32@b")
    assert view.recipes(bytes(32), START_MS) == ()


def test_a_full_view_refuses_newcomers_while_everybody_lives_and_forgets_the_dead_first() -> None:
    view = SwarmView(PINS, max_records=3)
    for number in (1, 2, 3):
        view.observe(make_record(node_key(number)), "gossip", START_MS)
    with pytest.raises(Overloaded):
        view.observe(make_record(node_key(4)), "gossip", START_MS)
    later = START_MS + 20_000
    sources: tuple[Source, ...] = ("dht", "gossip")
    for number, source in zip((4, 5), sources, strict=True):
        view.observe(make_record(node_key(number), now_ms=later), source, later)
    assert len(view) == 3
    assert {stage.peer_id for stage in view.stages(ROOT, None, later)} == {node_key(4).peer_id, node_key(5).peer_id}
