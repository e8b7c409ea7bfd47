"""A lease that its orchestrator took away counts from no source, however good its record is; a newer one counts."""

from __future__ import annotations

import pytest

from tessella_p2p.base.errors import NotAuthorized
from tessella_p2p.base.limits import MAX_SWARM_REVOCATIONS
from tessella_p2p.dht.stage_records import verify_stage
from tessella_p2p.dht.swarm_view import Source, SwarmView
from tests.dht.kad_mesh import ORCHESTRATOR, ROOT, START_MS, make_record, node_key

PINS = frozenset({ORCHESTRATOR.peer_id})
KEY = node_key(1)
PEER = KEY.peer_id
SOURCES: tuple[Source, ...] = ("dht", "gossip", "orchestrator", "own")


def test_only_leases_up_to_the_revoked_serial_are_refused() -> None:
    revoked = {(ORCHESTRATOR.peer_id, PEER): 3}
    for serial in (1, 3):
        with pytest.raises(NotAuthorized, match="taken away"):
            verify_stage(make_record(KEY, serial=serial), pins=PINS, now_ms=START_MS, revoked=revoked)
    assert verify_stage(make_record(KEY, serial=4), pins=PINS, now_ms=START_MS, revoked=revoked).lease_serial == 4
    other = node_key(2)
    assert verify_stage(make_record(other), pins=PINS, now_ms=START_MS, revoked=revoked).peer_id == other.peer_id


@pytest.mark.parametrize("source", SOURCES)
def test_a_known_stage_is_gone_at_once_and_comes_back_from_no_source(source: Source) -> None:
    view = SwarmView(PINS)
    view.observe(make_record(KEY, serial=3), "gossip", START_MS)
    assert view.stages(ROOT, None, START_MS)
    assert view.revoke(ORCHESTRATOR.peer_id, {PEER: 3})
    assert view.stages(ROOT, None, START_MS) == ()
    assert view.stage_of(PEER, START_MS) is None
    with pytest.raises(NotAuthorized):
        view.observe(make_record(KEY, serial=3, sequence=2), source, START_MS)
    view.orchestrator_reachable = False  # no outage gives it back
    assert view.stages(ROOT, None, START_MS) == ()
    view.observe(make_record(KEY, serial=4, sequence=3), source, START_MS)
    assert [stage.lease_serial for stage in view.stages(ROOT, None, START_MS)] == [4]


def test_a_revocation_is_never_taken_back_by_an_older_one() -> None:
    view = SwarmView(PINS)
    assert view.revoke(ORCHESTRATOR.peer_id, {PEER: 3})
    assert not view.revoke(ORCHESTRATOR.peer_id, {PEER: 2})
    with pytest.raises(NotAuthorized):
        view.observe(make_record(KEY, serial=3), "dht", START_MS)


def test_nobody_revokes_what_another_orchestrator_issued() -> None:
    stranger = node_key(9).peer_id
    view = SwarmView(PINS | {node_key(8).peer_id})
    assert not view.revoke(stranger, {PEER: 3})
    assert view.revoke(node_key(8).peer_id, {PEER: 3})
    assert view.observe(make_record(KEY, serial=3), "dht", START_MS) is not None


def test_what_is_remembered_is_bounded() -> None:
    view = SwarmView(PINS)
    view.revoke(ORCHESTRATOR.peer_id, {PEER: 3})
    view.revoke(ORCHESTRATOR.peer_id, {node_key(2).peer_id: 3})
    assert view.revoke(ORCHESTRATOR.peer_id, {f"peer {n}": 1 for n in range(MAX_SWARM_REVOCATIONS - 1)})  # type: ignore[misc]
    assert view.observe(make_record(KEY, serial=3), "dht", START_MS) is not None
    with pytest.raises(NotAuthorized):
        view.observe(make_record(node_key(2), serial=3), "dht", START_MS)
