"""Routing table, lookup and record store on their own."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import Expired, InvalidSignature, MalformedMessage, Overloaded, Replayed
from tessella_p2p.base.limits import KAD_K, KAD_MAX_KEYS_PER_SIGNER, KAD_MAX_LOOKUP_PEERS
from tessella_p2p.dht.keyspace import Contact, record_key
from tessella_p2p.dht.lookup import Lookup
from tessella_p2p.dht.records import RecordStore
from tessella_p2p.dht.routing_table import RoutingTable
from tests.dht.kad_mesh import ROOT, START_MS, make_record, node_key, tampered

PEERS = [node_key(number).peer_id for number in range(1, 200)]
CONTACTS = [Contact(peer, (f"/mem/{i}",)) for i, peer in enumerate(PEERS)]
OWN = PEERS[0]
KEY = record_key(ROOT)


def table_of(contacts: list[Contact]) -> RoutingTable:
    table = RoutingTable(OWN)
    for contact in contacts:
        table.add(contact, from_itself=True)
    return table


@given(st.integers(0, 2**256 - 1), st.integers(1, 30))
@settings(max_examples=50)
def test_closest_gives_the_nearest_entries_of_the_whole_table(key: int, count: int) -> None:
    table = table_of(CONTACTS)
    expected = sorted(table.contacts(), key=lambda contact: contact.key ^ key)[:count]
    assert table.closest(key, count) == expected


def test_newcomers_displace_nobody_who_lives() -> None:
    table = table_of(CONTACTS)
    before = dict.fromkeys(table.contacts())
    for number in range(1000, 1200):
        table.add(Contact(node_key(number).peer_id, ("/mem/x",)), from_itself=True)
    assert all(contact in table.contacts() for contact in before)


def test_an_unreachable_peer_makes_way_for_one_that_waits() -> None:
    table = table_of(CONTACTS)
    size = len(table)
    farthest = table.contacts()[-1]
    table.failed(farthest.peer_id, unreachable=True)
    assert table.find(farthest.peer_id) is None
    assert len(table) == size


def test_one_silence_is_forgiven_and_an_answer_wipes_it_out() -> None:
    table = table_of(CONTACTS[1:3])
    peer = PEERS[1]
    for _ in range(3):
        table.failed(peer, unreachable=False)
        assert table.find(peer) is not None
        table.add(CONTACTS[1], from_itself=False)
    table.failed(peer, unreachable=False)
    table.failed(peer, unreachable=False)
    assert table.find(peer) is None


def test_hearsay_does_not_move_a_known_peer() -> None:
    table = table_of(CONTACTS[1:2])
    table.add(Contact(PEERS[1], ("/mem/elsewhere",)), from_itself=False)
    assert table.find(PEERS[1]) == CONTACTS[1]
    table.add(Contact(PEERS[1], ("/mem/moved",)), from_itself=True)
    assert table.find(PEERS[1]) == Contact(PEERS[1], ("/mem/moved",))


def test_neither_itself_nor_who_cannot_be_dialled_is_an_entry() -> None:
    assert len(table_of([CONTACTS[0], Contact(PEERS[1], ())])) == 0


@given(st.integers(0, 2**256 - 1), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_lookup_ends_whatever_peers_do_and_asks_each_at_most_twice(target: int, seed: int) -> None:
    rng = random.Random(seed)
    lookup = Lookup(target, OWN, rng.sample(CONTACTS, 3))
    asked: dict[str, int] = {}
    flying: list[Contact] = []
    for _ in range(2000):
        for contact in lookup.next_requests():
            asked[contact.peer_id] = asked.get(contact.peer_id, 0) + 1
            flying.append(contact)
        if not flying:
            break
        contact = flying[rng.randrange(len(flying))]
        match rng.randrange(4):
            case 0:
                lookup.slow(contact.peer_id)
                continue
            case 1:
                lookup.failed(contact.peer_id)
            case _:
                named = [Contact(c.peer_id, (f"/mem/{rng.randrange(9)}",)) for c in rng.sample(CONTACTS, 30)]
                lookup.answered(contact.peer_id, named)
        flying.remove(contact)
    assert lookup.done
    assert OWN not in asked
    assert max(asked.values(), default=0) <= 2


@given(st.integers(0, 2**256 - 1))
@settings(max_examples=30, deadline=None)
def test_a_lookup_among_honest_peers_finds_the_closest(target: int) -> None:
    lookup = Lookup(target, OWN, CONTACTS[1:4])
    while not lookup.done:
        for contact in lookup.next_requests():
            rng = random.Random(contact.key)
            near = sorted(CONTACTS, key=lambda c: c.key ^ target)[: KAD_K // 2]
            lookup.answered(contact.peer_id, [*near, *rng.sample(CONTACTS, KAD_K // 2)])
    nearest = sorted(CONTACTS[1:], key=lambda c: c.key ^ target)[: KAD_K // 2 - 1]
    assert lookup.closest()[: len(nearest)] == nearest


def test_a_lookup_keeps_a_bounded_number_of_contacts() -> None:
    crowd = [Contact(node_key(number).peer_id, ("/mem/0",)) for number in range(10_000, 11_500)]
    lookup = Lookup(0, OWN, CONTACTS[1:4])
    for start in range(0, len(crowd), KAD_K):
        for contact in lookup.next_requests():
            lookup.answered(contact.peer_id, crowd[start : start + KAD_K])
    assert len(lookup._order) <= KAD_MAX_LOOKUP_PEERS


def test_the_store_takes_a_peers_own_record_and_its_newer_ones() -> None:
    store = RecordStore(b"salt")
    key = node_key(1)
    first, second = make_record(key, sequence=1), make_record(key, sequence=2)
    store.put(KEY, first, key.peer_id, START_MS)
    store.put(KEY, first, key.peer_id, START_MS)
    store.put(KEY, second, key.peer_id, START_MS)
    assert store.get(KEY, START_MS) == (second,)
    with pytest.raises(Replayed):
        store.put(KEY, first, key.peer_id, START_MS)
    assert store.get(KEY, START_MS + 60_000) == ()
    store.expire(START_MS + 60_000)
    assert len(store) == 0


def test_the_store_refuses_what_may_not_stand_there() -> None:
    store = RecordStore(b"salt")
    key = node_key(1)
    good = make_record(key)
    hostile: list[tuple[bytes, bytes, int, type[Exception]]] = [
        (KEY, tampered(good), 1, InvalidSignature),
        (KEY, good, 2, InvalidSignature),
        (record_key(b"\x01" * 32), good, 1, MalformedMessage),
        (KEY, make_record(key, now_ms=START_MS - 60_000), 1, Expired),
        (KEY, make_record(key, now_ms=START_MS + 61_000), 1, Expired),
        (KEY, make_record(key, ttl_ms=60_001), 1, MalformedMessage),
        (KEY, make_record(key, layers=(20, 31)), 1, MalformedMessage),
        (KEY, b"\x00" * 17_000, 1, MalformedMessage),
        (KEY, b"", 1, MalformedMessage),
    ]
    for where, raw, sender, error in hostile:
        with pytest.raises(error):
            store.put(where, raw, node_key(sender).peer_id, START_MS)
    assert len(store) == 0


def test_one_peer_cannot_crowd_others_out_of_a_full_store() -> None:
    store = RecordStore(b"salt", max_records=20)
    for number in range(1, 13):
        store.put(KEY, make_record(node_key(number)), node_key(number).peer_id, START_MS)
    greedy = node_key(99)
    roots = [bytes([i]) * 32 for i in range(100, 100 + KAD_MAX_KEYS_PER_SIGNER + 1)]
    for root in roots[:-1]:
        store.put(record_key(root), make_record(greedy, root=root), greedy.peer_id, START_MS)
    with pytest.raises(Overloaded):
        store.put(record_key(roots[-1]), make_record(greedy, root=roots[-1]), greedy.peer_id, START_MS)
    late = node_key(50)
    store.put(KEY, make_record(late), late.peer_id, START_MS)
    assert len(store) == 20
    assert len(store.get(KEY, START_MS)) == 13


@given(st.binary(min_size=1, max_size=16))
@settings(max_examples=20, deadline=None)
def test_a_full_key_holds_the_same_signers_in_whatever_order_they_come(salt: bytes) -> None:
    keys = [node_key(number) for number in range(1, 11)]
    outcomes = []
    for order in (keys, keys[::-1], keys[5:] + keys[:5], keys + keys):
        store = RecordStore(salt, max_values=4)
        for sequence, key in enumerate(order, start=1):
            with contextlib.suppress(Overloaded):
                store.put(KEY, make_record(key, sequence=sequence), key.peer_id, START_MS)
        outcomes.append(sorted(store._values[KEY]))
        assert len(store) == 4
    assert all(outcome == outcomes[0] for outcome in outcomes)
