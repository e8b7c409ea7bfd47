"""Whole meshes of Kademlia machines in virtual time, with dead, frozen and lying peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import MalformedMessage
from tessella_p2p.dht.keyspace import Contact, record_key
from tessella_p2p.dht.requests import (
    Declined,
    Find,
    Found,
    Reply,
    Request,
    Store,
    Stored,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from tessella_p2p.dht.stage_records import signed_stage
from tessella_p2p.wire import cbor
from tests.dht.kad_mesh import ROOT, START_MS, KadMesh, KadNode, make_record, node_key, tampered

KEY = record_key(ROOT)


def joined(size: int, seed: int = 1) -> KadMesh:
    mesh = KadMesh(size, seed)
    mesh.join_all(10.0)
    return mesh


def publish(mesh: KadMesh, *numbers: int, sequence: int = 1) -> None:
    for number in numbers:
        node = mesh.nodes[number]
        query = mesh.put(node, KEY, make_record(node.key, sequence=sequence, now_ms=mesh.now_ms))
        assert mesh.run_query(node, query).stored >= 1


def found_by(mesh: KadMesh, node: KadNode) -> tuple[int, float]:
    """How many values a get finds, and how long it takes."""
    query, begun = mesh.get(node, KEY), mesh.now
    outcome = mesh.run_query(node, query)
    return len(outcome.values), node.outcomes[query][0] - begun


def test_every_node_joins_and_finds_what_others_store() -> None:
    mesh = KadMesh(60)
    took = mesh.join_all(10.0)
    assert len(took) == 59
    assert max(took) < 6.0
    publish(mesh, 5, 17, 40)
    for node in mesh.nodes[::6]:
        values, seconds = found_by(mesh, node)
        assert values == 3
        assert seconds < 1.0


def test_a_tenth_dead_and_a_tenth_frozen_slow_a_get_but_hide_nothing() -> None:
    mesh = joined(60)
    publish(mesh, 5, 17, 40)
    for number in range(20, 26):
        mesh.nodes[number].dead = True
    for number in range(30, 36):
        mesh.nodes[number].frozen = True
    for number in (0, 3, 8, 12, 44, 50, 58):
        values, seconds = found_by(mesh, mesh.nodes[number])
        assert values == 3
        assert seconds < 2.0


def test_a_node_alone_finishes_every_query() -> None:
    mesh = KadMesh(1)
    node = mesh.nodes[0]
    record = make_record(node.key)
    put, get = mesh.put(node, KEY, record), mesh.get(node, KEY)
    assert node.outcomes[put][1].stored == 1
    assert node.outcomes[get][1].values == (record,)


def test_a_republished_record_replaces_the_old_one_everywhere() -> None:
    mesh = joined(30)
    for sequence in (1, 2, 3):
        publish(mesh, 7, sequence=sequence)
    query = mesh.get(mesh.nodes[20], KEY)
    (raw,) = mesh.run_query(mesh.nodes[20], query).values
    assert signed_stage(raw).envelope.sequence == 3


def test_the_second_put_skips_the_lookup_until_a_peer_fails() -> None:
    mesh = joined(40)
    publish(mesh, 7)
    before = mesh.num_messages
    publish(mesh, 7, sequence=2)
    assert mesh.num_messages - before <= 40
    for node in mesh.nodes[20:]:
        node.dead = True
    publish(mesh, 7, sequence=3)
    publish(mesh, 7, sequence=4)
    assert found_by(mesh, mesh.nodes[2])[0] == 1


def test_meshes_larger_than_k_meet_through_one_node() -> None:
    mesh = KadMesh(80)
    for half in (mesh.nodes[:40], mesh.nodes[40:]):
        for node in half[1:]:
            mesh.run_query(node, mesh.join(node, half[0]))
    publish(mesh, 45, 60)
    assert found_by(mesh, mesh.nodes[5])[0] == 0
    for node in mesh.nodes[1:40]:
        mesh.run_query(node, mesh.join(node, mesh.nodes[40]))
    publish(mesh, 45, 60, sequence=2)
    for node in mesh.nodes[:40:5]:
        assert found_by(mesh, node)[0] == 2


def test_a_join_that_brings_nothing_new_costs_next_to_nothing() -> None:
    mesh = joined(60)
    for number in (7, 23, 51):
        node, size = mesh.nodes[number], len(mesh.nodes[number].machine.table)
        outcome = mesh.run_query(node, mesh.join(node, mesh.nodes[2]))
        assert outcome.hops
        assert outcome.messages <= 8
        assert len(node.machine.table) >= size


def test_a_node_that_lost_most_of_its_contacts_fills_its_table_again() -> None:
    mesh = joined(60)
    node = mesh.nodes[30]
    size = len(node.machine.table)
    for contact in node.machine.table.contacts()[: size - 3]:
        node.machine.table.failed(contact.peer_id, unreachable=True)
    mesh.run_query(node, mesh.join(node, mesh.nodes[2]))
    assert len(node.machine.table) > 0.8 * size


def test_records_are_gone_after_their_time() -> None:
    mesh = joined(20)
    publish(mesh, 5)
    mesh.run_until(mesh.now + 60)
    assert found_by(mesh, mesh.nodes[9])[0] == 0


def liar_withholds(request: Request, reply: Reply) -> Reply:
    return replace(reply, body=Found(())) if isinstance(reply.body, Found) else replace(reply, body=Stored())


def liar_forges(request: Request, reply: Reply) -> Reply:
    good = make_record(node_key(777), now_ms=START_MS)
    bad = (b"junk", tampered(good), make_record(node_key(778), root=b"\x01" * 32))
    return replace(reply, body=Found(reply.body.contacts, bad)) if isinstance(reply.body, Found) else reply


def liar_sends_elsewhere(request: Request, reply: Reply) -> Reply:
    if not isinstance(reply.body, Found):
        return reply
    moved = tuple(Contact(contact.peer_id, ("/mem/nowhere",)) for contact in reply.body.contacts)
    ghosts = tuple(Contact(node_key(5000 + i).peer_id, ("/mem/nowhere",)) for i in range(5))
    return replace(reply, body=Found((*ghosts, *moved)[:20]))


def liar_refuses(request: Request, reply: Reply) -> Reply:
    return replace(reply, body=Declined("overloaded", "no"))


def liar_answers_the_wrong_question(request: Request, reply: Reply) -> Reply:
    return replace(reply, body=Stored() if isinstance(reply.body, Found) else Found(()))


@pytest.mark.parametrize(
    "lie", [liar_withholds, liar_forges, liar_sends_elsewhere, liar_refuses, liar_answers_the_wrong_question]
)
def test_a_fifth_of_lying_peers_can_withhold_but_not_deceive(lie: Callable[[Request, Reply], Reply]) -> None:
    mesh = joined(50)
    for number in range(20, 30):
        mesh.nodes[number].lie = lie
    publish(mesh, 5, 17, 40)
    sizes = [len(node.machine.table) for node in mesh.nodes]
    for node in mesh.nodes[:20:3]:
        query = mesh.get(node, KEY)
        signers = [signed_stage(raw).envelope.signer for raw in mesh.run_query(node, query).values]
        assert sorted(signers) == sorted(mesh.nodes[number].key.peer_id for number in (5, 17, 40))
    for node, size in zip(mesh.nodes, sizes, strict=True):
        assert len(node.machine.table) >= size - 11, "nobody but liars lost a place"


def test_a_reply_from_another_peer_or_to_no_request_changes_nothing() -> None:
    mesh = joined(10)
    node = mesh.nodes[3]
    before = node.machine.table.contacts()
    for request_id in range(200):
        mesh._reply(mesh.nodes[7], node, Reply(request_id, Found((), ())))
    assert node.machine.table.contacts() == before


def test_the_same_seed_gives_the_same_messages_at_the_same_times() -> None:
    def trace() -> list[tuple[float, int, int, int]]:
        mesh = joined(25, seed=9)
        publish(mesh, 4)
        found_by(mesh, mesh.nodes[11])
        return mesh.trace

    assert trace() == trace()


CONTACT = st.builds(
    Contact,
    st.integers(1, 50).map(lambda number: node_key(number).peer_id),
    st.lists(st.text(min_size=1, max_size=20), max_size=3).map(tuple),
)


@given(
    st.integers(0, 2**53 - 1),
    st.lists(st.text(min_size=1, max_size=30), max_size=8).map(tuple),
    st.one_of(
        st.builds(Find, st.binary(min_size=32, max_size=32), st.booleans()),
        st.builds(Store, st.binary(min_size=32, max_size=32), st.binary(min_size=1, max_size=99)),
    ),
)
@settings(max_examples=50)
def test_requests_survive_the_wire(number: int, addresses: tuple[str, ...], body: Find | Store) -> None:
    request = Request(number, addresses, body)
    assert decode_request(encode_request(request)) == request


@given(
    st.integers(0, 2**53 - 1),
    st.one_of(
        st.builds(
            Found,
            st.lists(CONTACT, max_size=20).map(tuple),
            st.lists(st.binary(min_size=1, max_size=99), max_size=5).map(tuple),
        ),
        st.builds(Stored),
        st.builds(Declined, st.sampled_from(["overloaded", "expired"]), st.text(max_size=100)),
    ),
)
@settings(max_examples=50)
def test_replies_survive_the_wire(to: int, body: Found | Stored | Declined) -> None:
    reply = Reply(to, body)
    assert decode_reply(encode_reply(reply)) == reply


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_typed_error(data: bytes) -> None:
    for decode in (decode_request, decode_reply):
        with pytest.raises(MalformedMessage):
            decode(data)


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "found", "contacts": [b"\x00"]},
        {"kind": "found", "contacts": [cbor.encode({"peer_id": "x", "addresses": []})]},
        {"kind": "found", "contacts": [cbor.encode({"peer_id": node_key(1).peer_id, "addresses": ["a" * 257]})]},
        {"kind": "found", "contacts": [cbor.encode({"peer_id": node_key(1).peer_id + " ", "addresses": ["a"]})]},
        {"kind": "found", "contacts": [b"x"] * 21},
        {"kind": "found", "contacts": [], "values": [b"v"] * 65},
        {"kind": "found", "contacts": [], "values": [b""]},
        {"kind": "stolen"},
    ],
)
def test_a_reply_out_of_bounds_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        decode_reply(cbor.encode({"to": 1, "body": body}))
