"""What liars spread: each lie is refused, for the reason that it was made for."""

from __future__ import annotations

import random

import pytest

from simulations.hostile import lying_records
from tessella_p2p.base.errors import (
    Expired,
    InvalidSignature,
    MalformedMessage,
    NotAuthorized,
    RefusalError,
    RemoteProtocolError,
    TessellaError,
)
from tessella_p2p.dht.gossip import Gossip
from tessella_p2p.dht.keyspace import record_key
from tessella_p2p.dht.records import RecordStore
from tessella_p2p.dht.stage_records import verify_stage
from tests.dht.kad_mesh import ORCHESTRATOR, ROOT, START_MS, make_record, node_key

HONEST, LIAR = node_key(1), node_key(2)
PINS = frozenset({ORCHESTRATOR.peer_id})
LIES = lying_records(LIAR, make_record(HONEST), START_MS, 10**6)

REASONS: dict[str, type[TessellaError]] = {
    "stolen lease": NotAuthorized,
    "lease of nobody": NotAuthorized,
    "wider than its lease": NotAuthorized,
    "expired": Expired,
    "of the future": Expired,
    "valid for a day": MalformedMessage,
    "forged": InvalidSignature,
    "cut": MalformedMessage,
}


def test_the_honest_record_that_they_are_made_from_is_used() -> None:
    assert verify_stage(make_record(HONEST), pins=PINS, now_ms=START_MS).peer_id == HONEST.peer_id


def test_every_lie_has_its_reason() -> None:
    assert LIES.keys() == REASONS.keys()


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_by_every_reader(lie: str) -> None:
    with pytest.raises(REASONS[lie]):
        verify_stage(LIES[lie], pins=PINS, now_ms=START_MS)


@pytest.mark.parametrize("lie", [lie for lie, error in REASONS.items() if error is not NotAuthorized])
def test_what_anybody_can_see_through_is_neither_stored_nor_passed_on(lie: str) -> None:
    gossip = Gossip(random.Random(1))
    assert gossip.receive(LIAR.peer_id, [LIES[lie]], 0.0, START_MS).fresh == ()
    store = RecordStore(b"salt")
    with pytest.raises((RemoteProtocolError, RefusalError)):
        store.put(record_key(ROOT), LIES[lie], LIAR.peer_id, START_MS)
