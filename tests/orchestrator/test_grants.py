"""Tickets and tiers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import InvalidRequest, Overloaded, UnknownModel
from tessella_p2p.base.limits import MICRO_PER_CREDIT
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.grants import Grants, GrantTerms, tier_of
from tessella_p2p.orchestrator.terms import ServedModel
from tessella_p2p.wire.envelope import open_envelope
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import TICKET, Granted, SessionGrant, Ticket
from tests.orchestrator.paper_workers import MODEL, MODEL_ID, NOW, ORCHESTRATOR, RECIPE, ROOT, TERMS, key_of

REQUESTER = key_of("requester")


def request(**changes: object) -> SessionGrant:
    fields: dict[str, object] = {
        "request_id": "request-1",
        "model_id": MODEL_ID,
        "manifest_root": ROOT,
        "recipe": RECIPE,
        "max_positions": 100,
    }
    return SessionGrant.model_validate({**fields, **changes})


def ask(grants: Grants, now_ms: int = NOW, requester: NodeKey = REQUESTER, **changes: object) -> Granted:
    return grants.grant(requester.peer_id, request(**changes), micro_credits=1, sequence=7, now_ms=now_ms)


@pytest.mark.parametrize(
    ("micro_credits", "tier"),
    [
        (-1, "Leech"),
        (0, "Leech"),
        (1, "Standard"),
        (1000 * MICRO_PER_CREDIT, "Standard"),
        (1000 * MICRO_PER_CREDIT + 1, "VIP"),
    ],
)
def test_the_balance_decides_the_tier(micro_credits: int, tier: str) -> None:
    assert tier_of(micro_credits) == tier


def test_a_ticket_says_who_may_open_what_until_when() -> None:
    granted = ask(Grants(ORCHESTRATOR, Catalogue([MODEL])))
    envelope = open_envelope(granted.ticket, TICKET, now_ms=NOW, signer=ORCHESTRATOR.peer_id)
    hour = 3_600_000
    assert envelope.message(Ticket) == Ticket(
        request_id="request-1",
        requester=REQUESTER.peer_id,
        manifest_root=ROOT,
        recipe=RECIPE,
        tier="Standard",
        max_positions=100,
        open_before=NOW + hour,
        settle_before=NOW + hour + 7 * 24 * hour,
    )
    assert granted.tier == "Standard"


def test_a_ticket_is_for_one_drift_class_of_a_recipe_that_is_served() -> None:
    model = ServedModel(MODEL_ID, ROOT, bytes(32), 30, {("torch-f16", "*"): TERMS})
    granted = ask(Grants(ORCHESTRATOR, Catalogue([model])), recipe="torch-f16@2.13.0-cuda-sm90x132-00000001")
    envelope = open_envelope(granted.ticket, TICKET, now_ms=NOW, signer=ORCHESTRATOR.peer_id)
    assert envelope.message(Ticket).recipe == "torch-f16@2.13.0-cuda-sm90x132-00000001"
    for refused in ("torch-f16@", "f16", "torch-f32@2.13.0-avx2-00000001"):
        with pytest.raises(UnknownModel):
            ask(Grants(ORCHESTRATOR, Catalogue([model])), recipe=refused)


@pytest.mark.parametrize("change", [{"model_id": "other"}, {"manifest_root": bytes(32)}, {"recipe": "int4"}])
def test_what_is_not_served_gets_no_ticket(change: dict[str, Any]) -> None:
    with pytest.raises(UnknownModel):
        ask(Grants(ORCHESTRATOR, Catalogue([MODEL])), **change)


@pytest.mark.parametrize("positions", [0, 1001])
def test_a_ticket_is_for_a_bounded_number_of_positions(positions: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(Grants(ORCHESTRATOR, Catalogue([MODEL]), GrantTerms(max_positions=1000)), max_positions=positions)
    assert caught.value.param == "max_positions"


def test_a_requester_that_asks_too_often_waits_and_others_do_not() -> None:
    grants = Grants(ORCHESTRATOR, Catalogue([MODEL]), GrantTerms(rate_per_s=2, burst=3))
    for _ in range(3):
        ask(grants)
    with pytest.raises(Overloaded):
        ask(grants)
    ask(grants, requester=key_of("somebody else"))
    with pytest.raises(Overloaded):
        ask(grants, NOW + 499)
    ask(grants, NOW + 500)
    with pytest.raises(Overloaded):
        ask(grants, NOW + 500)


def test_after_a_clock_was_set_back_nobody_waits_for_it_to_come_round() -> None:
    ahead = NOW + 3_600_000
    grants = Grants(ORCHESTRATOR, Catalogue([MODEL]), GrantTerms(rate_per_s=1, burst=2), max_requesters=1)
    for _ in range(2):
        ask(grants, ahead)
    with pytest.raises(Overloaded):
        ask(grants, NOW)
    ask(grants, NOW + 1000)
    ask(grants, NOW, requester=key_of("another"))


def test_a_request_that_is_refused_costs_nothing() -> None:
    grants = Grants(ORCHESTRATOR, Catalogue([MODEL]), GrantTerms(rate_per_s=1, burst=1))
    for _ in range(5):
        with pytest.raises(UnknownModel):
            ask(grants, recipe="int4")
    ask(grants)


def test_the_requesters_that_are_remembered_are_bounded() -> None:
    grants = Grants(ORCHESTRATOR, Catalogue([MODEL]), GrantTerms(rate_per_s=1, burst=10), max_requesters=2)
    for name in ("one", "two"):
        ask(grants, requester=key_of(name))
    with pytest.raises(Overloaded, match="too many requesters"):
        ask(grants, requester=key_of("three"))
    ask(grants, NOW + 10_000, requester=key_of("three"))


@given(st.lists(st.integers(0, 400), min_size=1, max_size=60))
def test_no_requester_ever_exceeds_its_rate(gaps_ms: list[int]) -> None:
    grants = Grants(ORCHESTRATOR, Catalogue([MODEL]), GrantTerms(rate_per_s=5, burst=4))
    now_ms, granted = NOW, 0
    for gap_ms in gaps_ms:
        now_ms += gap_ms
        try:
            ask(grants, now_ms)
        except Overloaded:
            continue
        granted += 1
        assert granted * 1000 <= 4 * 1000 + (now_ms - NOW) * 5
