"""Gossip as a pure core: each record once, bounded, over many nodes."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.limits import (
    GOSSIP_FANOUT,
    GOSSIP_MAX_BATCH,
    GOSSIP_SIGNER_BURST,
    GOSSIP_SOURCE_BURST,
    HEARTBEAT_S,
)
from tessella_p2p.dht.gossip import Gossip
from tessella_p2p.dht.rate_limit import RateLimit
from tests.dht.kad_mesh import START_MS, make_record, node_key, tampered

PEERS = [node_key(number).peer_id for number in range(1, 60)]


def test_a_new_record_is_passed_on_once_and_neither_back_nor_to_its_signer() -> None:
    gossip = Gossip(random.Random(1))
    raw = make_record(node_key(1))
    assert gossip.receive(PEERS[5], [raw, raw], 0.0, START_MS).fresh == (raw,)
    assert gossip.receive(PEERS[6], [raw], 0.1, START_MS).fresh == ()
    batches = gossip.flush([PEERS[0], PEERS[5], PEERS[6], PEERS[7]], gossip.next_deadline())
    assert sorted(batch.peer for batch in batches) == sorted([PEERS[6], PEERS[7]])
    assert all(batch.records == (raw,) for batch in batches)
    assert gossip.flush(PEERS, 100.0) == []


def test_the_fan_out_is_bounded_and_changes_with_time() -> None:
    gossip = Gossip(random.Random(1))
    met: dict[str, None] = {}
    for beat in range(12):
        now = beat * HEARTBEAT_S
        gossip.say(make_record(node_key(1), sequence=beat + 1), now)
        batches = gossip.flush(PEERS, now)
        assert len(batches) == GOSSIP_FANOUT
        met.update(dict.fromkeys(batch.peer for batch in batches))
    assert len(met) > 2 * GOSSIP_FANOUT


def test_forged_expired_and_older_records_are_not_passed_on() -> None:
    gossip = Gossip(random.Random(1))
    key = node_key(1)
    new = make_record(key, sequence=9)
    bad = [tampered(new), make_record(key, sequence=10, now_ms=START_MS - 60_000), b"junk"]
    received = gossip.receive(PEERS[5], [*bad, new, make_record(key, sequence=8)], 0.0, START_MS)
    assert received.fresh == (new,)
    assert received.num_invalid == 3


def test_what_one_source_and_one_signer_cause_is_limited() -> None:
    gossip = Gossip(random.Random(1))
    many = [make_record(node_key(1), sequence=i) for i in range(1, 40)]
    received = gossip.receive(PEERS[5], many, 0.0, START_MS)
    assert len(received.fresh) == GOSSIP_SIGNER_BURST
    junk = gossip.receive(PEERS[5], [b"x%d" % i for i in range(2 * GOSSIP_SOURCE_BURST)], 0.0, START_MS)
    assert junk.num_invalid + len(many) == GOSSIP_SOURCE_BURST
    assert junk.num_limited > 0
    other = make_record(node_key(2))
    assert gossip.receive(PEERS[6], [other], 0.0, START_MS).fresh == (other,)


def test_batches_keep_their_bounds() -> None:
    gossip = Gossip(random.Random(1))
    raws = [make_record(node_key(number)) for number in range(1, 2 * GOSSIP_MAX_BATCH)]
    gossip.receive(PEERS[-1], raws, 0.0, START_MS)
    batches = gossip.flush([node_key(999).peer_id], 10.0)
    assert [len(batch.records) for batch in batches] == [GOSSIP_MAX_BATCH, GOSSIP_MAX_BATCH - 1]


def test_a_heartbeat_reaches_almost_every_node_of_a_mesh() -> None:
    nodes = {peer: Gossip(random.Random(number)) for number, peer in enumerate(PEERS)}
    reached = 0
    for beat in range(10):
        raw = make_record(node_key(1), sequence=beat + 1)
        now = beat * HEARTBEAT_S
        nodes[PEERS[0]].say(raw, now)
        for _ in range(12):
            for peer, gossip in nodes.items():
                for batch in gossip.flush([other for other in PEERS if other != peer], now):
                    reached += len(nodes[batch.peer].receive(peer, batch.records, now, START_MS).fresh)
            now += 0.3
    assert reached >= 0.99 * 10 * (len(PEERS) - 1)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 2)), max_size=60))
@settings(max_examples=50)
def test_a_rate_limit_gives_no_more_than_its_burst_and_rate(steps: list[tuple[str, float]]) -> None:
    limit: RateLimit[str] = RateLimit(2.0, 5.0)
    now, allowed = 0.0, 0
    for who, pause in steps:
        now += pause
        allowed += limit.allows(who, now) and who == "a"
    assert allowed <= 5.0 + 2.0 * now + 1e-6
