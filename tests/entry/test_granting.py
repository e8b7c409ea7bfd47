"""Grants of an entry for its callers, asked of an orchestrator that runs."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from tessella_p2p.base.errors import DelegationRefused, NoRoute, RemoteProtocolError
from tessella_p2p.base.limits import MICRO_PER_CREDIT
from tessella_p2p.entry.api import Caller
from tessella_p2p.entry.granting import Grant, Granting
from tessella_p2p.entry.plan import EntryContext
from tessella_p2p.entry.reach import Reach
from tessella_p2p.entry.routes import Route
from tessella_p2p.entry.tickets import HeldTicket
from tessella_p2p.stages.hop_links import HopLinks
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import ClockSequencer, open_envelope, seal
from tests.orchestrator.paper_workers import MODEL_ID, ORCHESTRATOR, RECIPE, ROOT, key_of
from tests.orchestrator.test_orchestrator_service import Bench, run_bench

ENTRY = key_of("entry")
IDENTITY = key_of("identity")
Scenario = Callable[[Bench, Granting], Awaitable[None]]


def _no_route() -> Route:
    raise NoRoute("no route is needed here")


def run_granting(scenario: Scenario, path: Path) -> None:
    async def with_granting(made: Bench) -> None:
        network = await made.network_of(ENTRY)
        counter = itertools.count()
        context = EntryContext(
            network=network,
            key=ENTRY,
            clock=made.clock,
            sequencer=ClockSequencer(),
            links=HopLinks(network, 1.0),
            random_bytes=lambda size: next(counter).to_bytes(size, "big"),
        )
        client = await made.client("entry")
        reach = Reach(trio.current_time(), 3600.0, lambda _: None)
        granting = Granting(context, client, reach, MODEL_ID, ROOT, _no_route)
        rich = {IDENTITY.peer_id: 2_000 * MICRO_PER_CREDIT, ENTRY.peer_id: MICRO_PER_CREDIT}
        made.orchestrator.settling.foreign_balance = lambda peer: rich.get(peer, 0)
        await scenario(made, granting)

    run_bench(with_granting, path)


def caller(made: Bench, tier: m.Tier | None = None, entry: str = "entry", ttl_ms: int = 60_000) -> Caller:
    """Somebody for whom `IDENTITY` stands."""
    body = m.Delegation(entry=key_of(entry).peer_id)
    raw = seal(IDENTITY, m.DELEGATION, body, sequence=1, now_ms=made.clock.unix_ms(), ttl_ms=ttl_ms)
    return Caller("key-1", raw, tier)


def ticket_of(grant: Grant) -> m.Ticket:
    assert grant.ticket is not None
    return open_envelope(grant.ticket, m.TICKET, now_ms=None).message(m.Ticket)


def test_a_caller_with_an_identity_gets_its_tier_and_is_named_in_the_ticket(tmp_path: Path) -> None:
    async def scenario(made: Bench, granting: Granting) -> None:
        own = await granting.grant(granting.new_request_id(), RECIPE, 10, Caller())
        assert (own.tier, ticket_of(own).identity, ticket_of(own).payer) == ("Standard", None, ENTRY.peer_id)
        theirs = await granting.grant(granting.new_request_id(), RECIPE, 10, caller(made))
        assert (theirs.tier, ticket_of(theirs).payer) == ("VIP", IDENTITY.peer_id)
        assert ticket_of(theirs).requester == ENTRY.peer_id
        assert (
            await granting.grant(granting.new_request_id(), RECIPE, 10, caller(made, "Standard"))
        ).tier == "Standard"
        assert (
            await granting.grant(granting.new_request_id(), RECIPE, 10, Caller("key-2", tier="Leech"))
        ).tier == "Leech"

    run_granting(scenario, tmp_path)


def test_a_delegation_that_does_not_count_ends_the_request_and_not_the_entrys_reach(tmp_path: Path) -> None:
    async def scenario(made: Bench, granting: Granting) -> None:
        for refused in (caller(made, entry="another entry"), caller(made, ttl_ms=0)):
            with pytest.raises(DelegationRefused):
                await granting.grant(granting.new_request_id(), RECIPE, 10, refused)
        assert (await granting.grant(granting.new_request_id(), RECIPE, 10, Caller())).ticket is not None

    run_granting(scenario, tmp_path)


def test_in_an_outage_held_tickets_are_for_the_entrys_own_callers_within_their_tier(tmp_path: Path) -> None:
    async def scenario(made: Bench, granting: Granting) -> None:
        minted = await granting.grant(granting.new_request_id(), RECIPE, 100, Caller())
        assert minted.ticket is not None
        held = HeldTicket(minted.request_id, RECIPE, 100, "Standard", minted.open_before, minted.ticket)
        granting._held.put(held)
        granting._reach.lost()
        for other in (caller(made), caller(made, "VIP"), Caller("key-2", tier="Leech")):
            unpaid = await granting.grant(granting.new_request_id(), RECIPE, 10, other)
            assert (unpaid.tier, unpaid.ticket) == ("Leech", None)
        own = await granting.grant(granting.new_request_id(), RECIPE, 10, Caller("key-3", tier="Standard"))
        assert (own.tier, own.ticket) == ("Standard", minted.ticket)
        assert granting.num_held == 0

    run_granting(scenario, tmp_path)


@pytest.mark.parametrize("change", [{"identity": None}, {"identity": key_of("a victim").peer_id}, {"tier": "VIP"}])
def test_a_ticket_on_another_account_or_of_a_better_tier_is_not_used(tmp_path: Path, change: dict[str, object]) -> None:
    async def scenario(made: Bench, granting: Granting) -> None:
        client = granting._client
        assert client is not None
        honest = client.ask

        async def doctored(body: m.SessionGrant, answer: type[m.Granted], timeout_s: float) -> m.Granted:
            granted = await honest(body, answer, timeout_s)
            ticket = open_envelope(granted.ticket, m.TICKET, now_ms=None).message(m.Ticket).model_copy(update=change)
            now_ms = made.clock.unix_ms()
            return m.Granted(tier=ticket.tier, ticket=seal(ORCHESTRATOR, m.TICKET, ticket, sequence=9, now_ms=now_ms))

        client.ask = doctored  # type: ignore[method-assign, assignment]
        with pytest.raises(RemoteProtocolError, match="another account, or of a better tier"):
            await granting.grant(granting.new_request_id(), RECIPE, 10, caller(made, "Standard"))

    run_granting(scenario, tmp_path)
