"""A worker that is taken out of the mesh has its leases taken away: who follows is told, and what it shows of them counts no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from tessella_p2p.base.errors import Blacklisted, NotAuthorized
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    LEASE_TTL_S,
    MAX_ENVELOPE_BYTES,
    MAX_LISTED_BYTES,
    MAX_LISTED_REVOCATIONS,
    MAX_REVOCATIONS,
    REVOCATION_KEPT_S,
    REVOCATION_TOLD_S,
    TOPOLOGY_PAUSE_S,
)
from tessella_p2p.ledger.revocation import Revocation
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.member import Announced, Deregistered, Excluded, KeepRevocation, Registered, TimePassed
from tessella_p2p.orchestrator.members import Members
from tessella_p2p.orchestrator.membership import Membership
from tessella_p2p.orchestrator.news import Listing, News
from tessella_p2p.orchestrator.revocations import Revocations
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import encode_message
from tests.orchestrator.paper_workers import MODEL, NOW, ORCHESTRATOR, PaperWorker, key_of, lease_of, register
from tests.orchestrator.test_orchestrator_service import Bench, run_bench, serve_stage
from tests.orchestrator.test_topology import announce, pass_time, signers, subscriber

T = TypeVar("T")
LIAR = key_of("liar").peer_id


def numbered(count: int) -> list[PeerId]:
    return [key_of(f"worker {number}").peer_id for number in range(count)]


# ---- The core ----


def test_whatever_was_issued_is_taken_away_and_what_is_issued_later_is_not() -> None:
    revocations = Revocations()
    assert revocations.revoke(LIAR, 7, NOW) == [KeepRevocation(LIAR, Revocation(serial=7, at=NOW))]
    assert [revocations.covers(LIAR, serial) for serial in (0, 7, 8)] == [True, True, False]
    assert not revocations.covers(key_of("other").peer_id, 1)


def test_it_is_told_until_nobody_counts_the_lease_and_kept_until_nothing_settles_under_it() -> None:
    revocations = Revocations()
    revocations.revoke(LIAR, 7, NOW)
    told, kept = NOW + int(REVOCATION_TOLD_S * 1000), NOW + int(REVOCATION_KEPT_S * 1000)
    assert revocations.listed(told - 1) == (m.RevokedLease(peer_id=LIAR, serial=7),)
    assert revocations.listed(told) == ()
    assert revocations.pass_time(kept - 1) == []
    assert revocations.covers(LIAR, 7)
    assert revocations.pass_time(kept) == [KeepRevocation(LIAR, None)]
    assert not revocations.covers(LIAR, 7)


def test_as_many_as_fit_into_an_answer_are_told_the_newest_first() -> None:
    revocations, peers = Revocations(), numbered(MAX_LISTED_REVOCATIONS + 5)
    for number, peer in enumerate(peers):
        revocations.revoke(peer, 2**52, NOW + number)
    told = revocations.listed(NOW)
    assert [each.peer_id for each in told] == peers[: -MAX_LISTED_REVOCATIONS - 1 : -1]
    stages = m.Stages(records=(), health="healthy", issuer=LIAR, revoked=told)
    assert len(encode_message(stages)) + MAX_LISTED_BYTES < MAX_ENVELOPE_BYTES


def test_at_the_bound_the_oldest_is_forgotten() -> None:
    revocations, peers = Revocations(), numbered(MAX_REVOCATIONS)
    for peer in peers:
        revocations.revoke(peer, 1, NOW)
    revocations.revoke(peers[0], 2, NOW)  # now the newest
    assert revocations.revoke(LIAR, 3, NOW)[1:] == [KeepRevocation(peers[1], None)]
    assert revocations.covers(peers[0], 2)


def test_a_revocation_is_news_once() -> None:
    def listing(*serials: int) -> Listing:
        revoked = tuple(m.RevokedLease(peer_id=LIAR, serial=serial) for serial in serials)
        return Listing.of(m.Stages(records=(), health="incomplete", revoked=revoked))

    news = News()
    assert [each.serial for each in news.since(listing(1)).revoked] == [1]
    assert news.since(listing(1)).revoked == ()
    assert [each.serial for each in news.since(listing(2)).revoked] == [2]


# ---- Members ----


def members_with(worker: str) -> tuple[Members, PaperWorker]:
    members = Members(ORCHESTRATOR, Catalogue([MODEL]))
    made = PaperWorker(members, worker)
    made.register()
    return members, made


def test_an_excluded_worker_shows_its_lease_in_vain_and_a_new_one_counts() -> None:
    members, worker = members_with("worker")
    members.handle(Excluded(worker.peer), NOW)
    assert members.revocations.covers(worker.peer, worker.serial)
    later = NOW + int(LEASE_TTL_S * 1000) + 1
    members.handle(TimePassed(), later)  # it is forgotten, so its lease alone would take it in again
    assert members.get(worker.peer) is None
    body = m.Announce(serial=worker.serial, queue_depth=0, state="ready", record=worker.record(later))
    with pytest.raises(NotAuthorized, match="taken away"):
        members.handle(Announced(worker.peer, body), later)
    worker.register()
    assert not members.revocations.covers(worker.peer, worker.serial)


def test_a_worker_that_leaves_by_itself_keeps_its_lease() -> None:
    members, worker = members_with("worker")
    members.handle(Deregistered(worker.peer, m.Deregister()), NOW)
    assert not members.revocations.covers(worker.peer, worker.serial)


def test_who_is_no_member_any_more_has_its_leases_taken_away_all_the_same() -> None:
    members, worker = members_with("worker")
    stranger = key_of("forgotten").peer_id
    members.handle(Excluded(stranger), NOW)
    assert members.revocations.covers(stranger, worker.serial)
    members.handle(Registered(stranger, register()), NOW)
    member = members.get(stranger)
    assert member is not None
    assert not members.revocations.covers(stranger, member.serial)


# ---- On the network ----


async def blacklist(made: Bench, peer: PeerId) -> None:
    made.store.set_blacklisted(peer, True, "it lied", made.clock.unix_ms())
    await made.orchestrator.membership.exclude(peer)


def test_subscribers_and_askers_are_told_within_a_second(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        _, lease = await serve_stage(made, "liar")
        reader = await subscriber(made, "reader")
        await pass_time(TOPOLOGY_PAUSE_S)
        await blacklist(made, LIAR)
        await pass_time(TOPOLOGY_PAUSE_S + 0.1)
        (revoked,) = reader.lists[-1].revoked
        assert revoked.peer_id == LIAR
        assert revoked.serial >= lease_of(lease).serial
        assert reader.lists[-1].issuer == ORCHESTRATOR.peer_id
        listed = await (await made.client("asker")).ask(m.ListStages(), m.Stages)
        assert listed.revoked == (revoked,)
        assert signers(listed) == set()

    run_bench(scenario, tmp_path)


def test_a_revoked_worker_that_goes_on_announcing_is_refused(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        client, lease = await serve_stage(made, "liar")
        await blacklist(made, LIAR)
        with pytest.raises(Blacklisted):
            await announce(made, "liar", client, lease)
        with pytest.raises(Blacklisted):
            await client.call(register())
        made.store.set_blacklisted(LIAR, False, "it was a mistake", made.clock.unix_ms())
        with pytest.raises(NotAuthorized):  # off the blacklist, its lease is as bad as before
            await announce(made, "liar", client, lease)
        _, newer = await serve_stage(made, "liar")
        listed = await client.ask(m.ListStages(), m.Stages)
        assert signers(listed) == {LIAR}
        assert all(lease_of(newer).serial > each.serial for each in listed.revoked)

    run_bench(scenario, tmp_path)


def test_a_peer_that_is_not_allowed_any_more_has_its_leases_taken_away(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        await serve_stage(made, "liar")
        await serve_stage(made, "honest")
        await made.orchestrator.admit_only(frozenset({key_of("honest").peer_id, key_of("reader").peer_id}))
        listed = await (await made.client("reader")).ask(m.ListStages(), m.Stages)
        assert [each.peer_id for each in listed.revoked] == [LIAR]
        assert signers(listed) == {key_of("honest").peer_id}

    run_bench(scenario, tmp_path)


def test_a_blacklisting_after_the_look_at_the_blacklist_and_before_the_registration_counts(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        membership, store = made.orchestrator.membership, made.store
        looks = 0

        async def slow(call: Callable[[], T]) -> T:
            """What a thread has read, the event loop hears of later."""
            nonlocal looks
            read = call()
            if read is False and not looks:
                looks += 1
                store.set_blacklisted(LIAR, True, "it lied", made.clock.unix_ms())
                await slowed.exclude(LIAR)
            return read

        slowed = Membership(
            replace(membership._context, run_blocking=slow), made.orchestrator.catalogue, membership.core
        )
        with pytest.raises(Blacklisted):
            await slowed.handlers()[m.Register](LIAR, register())
        assert looks == 1
        assert store.is_blacklisted(LIAR)

    run_bench(scenario, tmp_path)


def test_revocations_outlive_the_orchestrators_process(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger", 1 << 24, sync=False)
    kept = {LIAR: Revocation(serial=7, at=NOW), key_of("other").peer_id: Revocation(serial=5, at=NOW - 1)}
    store.keep_assignments({}, 9, kept)
    store.keep_assignments({}, 0, {key_of("other").peer_id: None})
    store.close()
    again = LedgerStore(tmp_path / "ledger", 1 << 24, sync=False)
    assert again.revocations() == {LIAR: Revocation(serial=7, at=NOW)}
    revocations = Revocations()
    revocations.restore(again.revocations())
    assert revocations.covers(LIAR, 7)
    again.close()
