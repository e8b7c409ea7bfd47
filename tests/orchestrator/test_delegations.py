"""An entry that asks in an identity's name: whose balance counts, who is charged, and what is no leave to do so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import Blacklisted, DelegationRefused, Overloaded
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import DELEGATION_TTL_S, MICRO_PER_CREDIT
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.grants import Grants, GrantTerms, identity_behind
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import open_envelope, seal
from tests.orchestrator.paper_workers import MODEL, MODEL_ID, NOW, ORCHESTRATOR, RECIPE, ROOT, key_of
from tests.orchestrator.test_orchestrator_service import Bench, run_bench

ENTRY = key_of("entry")
IDENTITY = key_of("identity")
DAY_MS = 86_400_000
YEAR_MS = int(DELEGATION_TTL_S * 1000)
RICH = 2_000 * MICRO_PER_CREDIT


def delegation(**changes: Any) -> bytes:
    """What lets `ENTRY` ask in the name of `IDENTITY` for a day."""
    fields: dict[str, Any] = {
        "key": IDENTITY,
        "domain": m.DELEGATION,
        "entry": ENTRY.peer_id,
        "now_ms": NOW,
        "ttl_ms": DAY_MS,
        **changes,
    }
    body = m.Delegation(entry=fields["entry"])
    return seal(fields["key"], fields["domain"], body, sequence=1, now_ms=fields["now_ms"], ttl_ms=fields["ttl_ms"])


def request(raw: bytes | None = None, tier: m.Tier | None = None, request_id: str = "request-1") -> m.SessionGrant:
    return m.SessionGrant(
        request_id=request_id,
        model_id=MODEL_ID,
        manifest_root=ROOT,
        recipe=RECIPE,
        max_positions=100,
        delegation=raw,
        tier=tier,
    )


def ticket_of(granted: m.Granted) -> m.Ticket:
    return open_envelope(granted.ticket, m.TICKET, now_ms=None, signer=ORCHESTRATOR.peer_id).message(m.Ticket)


def test_whoever_brings_no_delegation_asks_for_itself() -> None:
    assert identity_behind(request(), ENTRY.peer_id, NOW) is None
    assert identity_behind(request(delegation(key=ENTRY)), ENTRY.peer_id, NOW) is None, "it lets itself"


def test_a_delegation_names_the_identity_that_signed_it_for_this_entry() -> None:
    assert identity_behind(request(delegation()), ENTRY.peer_id, NOW) == IDENTITY.peer_id
    assert identity_behind(request(delegation(ttl_ms=YEAR_MS)), ENTRY.peer_id, NOW + YEAR_MS - 1) == IDENTITY.peer_id


@pytest.mark.parametrize(
    ("changes", "now_ms", "why"),
    [
        ({"entry": key_of("another entry").peer_id}, NOW, "lets .* ask in its name, not"),
        ({"ttl_ms": DAY_MS}, NOW + DAY_MS, "expired"),
        ({"now_ms": NOW + 10 * 60_000}, NOW, "in the future"),
        ({"ttl_ms": 2 * YEAR_MS}, NOW, "366 days at most"),
        ({"domain": m.TICKET}, NOW, "domain"),
    ],
    ids=["other entry's", "expired", "not yet", "too long", "other domain"],
)
def test_what_is_no_leave_for_this_entry_now_is_refused(changes: dict[str, Any], now_ms: int, why: str) -> None:
    with pytest.raises(DelegationRefused, match=why):
        identity_behind(request(delegation(**changes)), ENTRY.peer_id, now_ms)


def test_a_forged_delegation_is_refused() -> None:
    true = delegation()
    of_another = true.replace(IDENTITY.peer_id.encode(), key_of("somebody rich").peer_id.encode())
    assert of_another != true
    for forged in (of_another, true[:-1] + bytes([true[-1] ^ 1])):
        with pytest.raises(DelegationRefused):
            identity_behind(request(forged), ENTRY.peer_id, NOW)


@given(st.binary(min_size=1, max_size=300), st.integers(0, 299))
def test_any_bytes_for_a_delegation_are_refused_and_break_nothing(junk: bytes, at: int) -> None:
    true = delegation()
    for raw in (junk, true[:at] + junk + true[at:]):
        with pytest.raises(DelegationRefused):
            identity_behind(request(raw[:1024]), ENTRY.peer_id, NOW)


@pytest.mark.parametrize("most", ["VIP", "Standard", "Leech", None])
def test_a_tier_is_never_better_than_was_asked_for_nor_than_the_balance_gives(most: m.Tier | None) -> None:
    ranks = ("Leech", "Standard", "VIP")
    for micro_credits, by_balance in ((0, "Leech"), (1, "Standard"), (RICH, "VIP")):
        grants = Grants(ORCHESTRATOR, Catalogue([MODEL]))
        granted = grants.grant(ENTRY.peer_id, request(tier=most), micro_credits=micro_credits, sequence=1, now_ms=NOW)
        expected = by_balance if most is None else min(most, by_balance, key=ranks.index)
        assert (granted.tier, ticket_of(granted).tier) == (expected, expected)


def test_a_ticket_names_who_opens_and_beside_it_who_pays() -> None:
    grants = Grants(ORCHESTRATOR, Catalogue([MODEL]))
    granted = grants.grant(ENTRY.peer_id, request(), micro_credits=1, sequence=1, now_ms=NOW, identity=IDENTITY.peer_id)
    ticket = ticket_of(granted)
    assert (ticket.requester, ticket.identity, ticket.payer) == (ENTRY.peer_id, IDENTITY.peer_id, IDENTITY.peer_id)


def test_a_grant_counts_for_the_entry_and_for_the_identity() -> None:
    grants = Grants(ORCHESTRATOR, Catalogue([MODEL]), GrantTerms(rate_per_s=1, burst=2))

    def ask(entry: str, identity: str | None) -> None:
        grants.grant(
            key_of(entry).peer_id,
            request(),
            micro_credits=1,
            sequence=1,
            now_ms=NOW,
            identity=None if identity is None else key_of(identity).peer_id,
        )

    ask("one", "identity")
    ask("two", "identity")
    with pytest.raises(Overloaded):
        ask("three", "identity")
    ask("one", None)
    with pytest.raises(Overloaded):
        ask("one", "another")
    ask("three", "another")
    ask("three", None)  # what was refused above took nothing of its own


def test_where_there_is_no_room_for_the_identity_the_entry_loses_no_grant() -> None:
    grants = Grants(ORCHESTRATOR, Catalogue([MODEL]), GrantTerms(rate_per_s=1, burst=1), max_requesters=1)

    def ask(identity: PeerId | None) -> m.Granted:
        return grants.grant(ENTRY.peer_id, request(), micro_credits=1, sequence=1, now_ms=NOW, identity=identity)

    with pytest.raises(Overloaded, match="too many requesters"):
        ask(IDENTITY.peer_id)
    assert ask(None).tier == "Standard"


def test_the_identitys_balance_decides_and_its_blacklisting_counts(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        now_ms = made.clock.unix_ms()
        rich = {IDENTITY.peer_id: RICH}
        made.orchestrator.settling.foreign_balance = lambda peer: rich.get(peer, 0)
        client = await made.client("entry")
        raw = delegation(now_ms=now_ms)
        assert (await client.ask(request(), m.Granted)).tier == "Leech"
        assert (await client.ask(request(raw, request_id="r2"), m.Granted)).tier == "VIP"
        assert (await client.ask(request(raw, "Standard", "r3"), m.Granted)).tier == "Standard"
        thief = await made.client("another entry")
        with pytest.raises(DelegationRefused):
            await thief.ask(request(raw, request_id="r4"), m.Granted)
        made.store.set_blacklisted(IDENTITY.peer_id, True, "it lied", now_ms)
        with pytest.raises(Blacklisted, match="in whose name"):
            await client.ask(request(raw, request_id="r5"), m.Granted)
        assert (await client.ask(request(request_id="r6"), m.Granted)).tier == "Leech", "the entry did nothing wrong"

    run_bench(scenario, tmp_path)
