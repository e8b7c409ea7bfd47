"""Work under a ticket that names an identity: it is on that one's account, and on nobody else's."""

from __future__ import annotations

from typing import Any

import pytest

from tessella_p2p.base.errors import RemoteProtocolError
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.ledger.accounts import ISSUANCE, Transfer
from tessella_p2p.ledger.changes import ProofSettled
from tessella_p2p.ledger.evidence import Code, SettlementTerms, verify_proof
from tessella_p2p.ledger.federation import _check_settled
from tessella_p2p.wire.envelope import seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import TICKET, Ticket
from tests.ledger.proving import (
    HOUR,
    LAYERS,
    NOW,
    ORCHESTRATOR,
    RECIPE,
    REQUESTER,
    ROOT,
    ROUTE,
    TERMS,
    WEEK,
    PaperLedger,
    credits_for,
    key_of,
    proof_body,
    seal_proof,
)

IDENTITY = key_of("identity")
EACH = credits_for(LayerRange(10, 20), 300)
TODAY = NOW // (24 * HOUR)
MIDDLE = ROUTE[1].key


def ticket_for(identity: NodeKey, request_id: str = "request-1", requester: NodeKey = REQUESTER) -> bytes:
    body = Ticket(
        request_id=request_id,
        requester=requester.peer_id,
        manifest_root=ROOT,
        recipe=RECIPE,
        tier="Leech",
        max_positions=1000,
        open_before=NOW + HOUR,
        settle_before=NOW + WEEK,
        identity=identity.peer_id,
    )
    return seal(ORCHESTRATOR, TICKET, body, sequence=1, now_ms=NOW, ttl_ms=HOUR)


def proof(index: int = 1, identity: NodeKey = IDENTITY, **changes: Any) -> bytes:
    request_id = changes.get("request_id", "request-1")
    return seal_proof(proof_body(index, sealed_ticket=ticket_for(identity, request_id), **changes), ROUTE[index].key)


def paying_ledger(**micro_credits: int) -> PaperLedger:
    ledger = PaperLedger(SettlementTerms(ORCHESTRATOR.peer_id, {ROOT: LAYERS}, requester_pays=True))
    for name, amount in micro_credits.items():
        ledger.state.accounts.apply(Transfer(ISSUANCE, key_of(name).peer_id, amount))
    return ledger


def test_where_requesters_pay_the_identity_is_charged_and_the_entry_is_not() -> None:
    ledger = paying_ledger(identity=2 * EACH, requester=2 * EACH)
    assert ledger.settle(proof()).micro_credits == EACH
    assert ledger.balance(IDENTITY) == EACH
    assert ledger.balance(REQUESTER) == 2 * EACH
    assert ledger.balance(MIDDLE) == EACH


def test_an_identity_that_cannot_pay_never_goes_below_zero_whatever_the_entry_has() -> None:
    ledger = paying_ledger(requester=100 * EACH)
    settled = ledger.settle(proof())
    assert (settled.status, settled.code, settled.micro_credits) == ("held", Code.REQUESTER_CANNOT_PAY, 0)
    assert IDENTITY.peer_id in str(settled.reason)
    assert (ledger.balance(IDENTITY), ledger.balance(REQUESTER)) == (0, 100 * EACH)


def test_issuance_is_bounded_by_identity_however_many_entries_ask_in_its_name() -> None:
    ledger = PaperLedger(SettlementTerms(ORCHESTRATOR.peer_id, {ROOT: LAYERS}, issuance_per_day=EACH))
    assert ledger.settle(proof()).micro_credits == EACH
    assert ledger.state.issued(IDENTITY.peer_id, TODAY) == EACH
    assert ledger.state.issued(REQUESTER.peer_id, TODAY) == 0
    other = key_of("another entry")
    body = proof_body(
        1, request_id="request-2", requester=other, sealed_ticket=ticket_for(IDENTITY, "request-2", requester=other)
    )
    held = ledger.settle(seal_proof(body, MIDDLE))
    assert (held.status, held.code, held.micro_credits) == ("held", Code.ISSUANCE_BOUND, 0)
    own = seal_proof(proof_body(1, request_id="request-3"), MIDDLE)
    assert ledger.settle(own).micro_credits == EACH, "the entry's own tickets are on its own account"


def test_an_identity_that_works_for_itself_gains_nothing_where_requesters_pay() -> None:
    ledger = paying_ledger()
    assert ledger.settle(proof(identity=MIDDLE)).status == "settled"
    assert ledger.balance(MIDDLE) == 0
    assert ledger.state.accounts.get(ISSUANCE).micro_credits == 0


@pytest.mark.parametrize("said", [None, REQUESTER.peer_id, key_of("a victim").peer_id])
def test_a_followed_orchestrator_cannot_put_work_on_another_account(said: str | None) -> None:
    raw = proof()
    ledger = PaperLedger()
    ledger.settle(raw)
    (change,) = ledger.changes
    assert isinstance(change, ProofSettled)
    assert change.payer == IDENTITY.peer_id
    work = verify_proof(raw, TERMS, NOW)
    _check_settled(change, work)
    with pytest.raises(RemoteProtocolError, match="something else than the proof"):
        _check_settled(change.model_copy(update={"identity": said}), work)
