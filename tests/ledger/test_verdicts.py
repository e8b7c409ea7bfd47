"""Verdicts, slashes and the blacklist: changes of the ledger, durable, and each counted once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tessella_p2p.base.errors import LocalProtocolError
from tessella_p2p.ledger.accounts import ISSUANCE
from tessella_p2p.ledger.changes import Slashed, VerdictReached
from tessella_p2p.ledger.evidence import Code
from tessella_p2p.ledger.reputation import CLEAN_SLATE, FAILED, PASSED, SLASHED, Reputation
from tessella_p2p.ledger.settlement import expire
from tessella_p2p.ledger.store import LedgerStore
from tests.ledger.proving import (
    NOW,
    REQUESTER,
    ROUTE,
    SESSION,
    TERMS,
    WEEK,
    WORKERS,
    PaperLedger,
    credits_for,
    proof_body,
    seal_proof,
)
from tests.ledger.test_settlement import TEN_LAYERS

LIAR = WORKERS[0].peer_id
AUDIT, OTHER_AUDIT = b"a" * 16, b"b" * 16


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerStore]:
    opened = LedgerStore(tmp_path / "ledger")
    yield opened
    assert opened.total() == 0
    assert opened.content() == opened.replay().content()
    opened.close()


def verdict(audit_id: bytes = AUDIT, peer: str = LIAR, **said: object) -> VerdictReached:
    return verdict_of({"audit_id": audit_id, "peer": peer, **said})


def verdict_of(said: dict[str, object]) -> VerdictReached:
    return VerdictReached.model_validate({"audit_id": AUDIT, "verdict": "failed", **said})


def test_a_slash_takes_credits_back_and_may_leave_an_account_below_zero(store: LedgerStore) -> None:
    store.settle([seal_proof(proof_body(0), ROUTE[0].key)], TERMS, NOW)
    earned = credits_for(TEN_LAYERS, 300)
    assert store.slash(LIAR, earned + 5, "it lied", "operator", NOW)
    assert store.account(LIAR).micro_credits == -5
    assert store.account(ISSUANCE).micro_credits == 5
    assert store.reputation(LIAR, NOW) == Reputation(CLEAN_SLATE + SLASHED, NOW, slashes=1)
    assert store.slash(LIAR, 0, "a warning", "operator", NOW)
    assert store.account(LIAR).micro_credits == -5
    assert store.reputation(LIAR, NOW).slashes == 2
    assert isinstance(store.newest(limit=1)[0][1].change, Slashed)


def test_an_audit_slashes_a_peer_once_and_each_peer_for_itself(store: LedgerStore) -> None:
    assert store.slash(LIAR, 100, "it lied", "audit", NOW, AUDIT)
    assert not store.slash(LIAR, 100, "it lied", "audit", NOW, AUDIT)
    assert store.slash(WORKERS[1].peer_id, 100, "it covered the lie", "audit", NOW, AUDIT)
    assert store.slash(LIAR, 100, "it lied again", "audit", NOW, OTHER_AUDIT)
    assert store.account(LIAR).micro_credits == -200
    assert store.head().sequence == 3


def test_a_verdict_is_counted_once_and_moves_the_reputation(store: LedgerStore) -> None:
    assert store.record_verdict(verdict(), NOW)
    assert not store.record_verdict(verdict(verdict="passed"), NOW + 1)
    assert store.record_verdict(verdict(OTHER_AUDIT, verdict="passed"), NOW)
    found = store.reputation(LIAR, NOW)
    assert (found.score, found.audits_failed, found.audits_passed) == (CLEAN_SLATE + FAILED + PASSED, 1, 1)
    assert store.reputation(LIAR, NOW + WEEK).score == CLEAN_SLATE + (FAILED + PASSED + 1) // 2
    assert store.reputation(WORKERS[1].peer_id, NOW) == Reputation(at=NOW)


def test_reputations_are_read_by_pages(store: LedgerStore) -> None:
    peers = sorted(key.peer_id for key in WORKERS)
    for number, peer in enumerate(peers):
        store.record_verdict(verdict(number.to_bytes(16, "big"), peer), NOW)
    first = store.reputations("", 4, NOW)
    assert [peer for peer, _ in first] == peers[:4]
    assert [peer for peer, _ in store.reputations(first[-1][0], 4, NOW)] == peers[4:]


def test_the_blacklist_changes_only_when_it_changes_and_outlives_a_restart(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger")
    assert not store.set_blacklisted(LIAR, False, "it never was", NOW)
    assert store.set_blacklisted(LIAR, True, "it lied", NOW)
    assert not store.set_blacklisted(LIAR, True, "again", NOW + 1)
    store.close()
    store = LedgerStore(tmp_path / "ledger")
    assert store.is_blacklisted(LIAR)
    assert store.blacklist() == [(LIAR, NOW, "it lied")]
    assert store.standing(LIAR)[1]
    assert store.set_blacklisted(LIAR, False, "it repented", NOW)
    assert not store.is_blacklisted(LIAR)
    assert store.blacklist() == []
    assert store.head().sequence == 2
    assert store.content() == store.replay().content()
    store.close()


def _held_proof(ledger: PaperLedger) -> bytes:
    """A proof that its neighbour, which came first, contradicts."""
    ledger.settle(seal_proof(proof_body(0, salt_out="edited"), ROUTE[0].key))
    odd = seal_proof(proof_body(1), ROUTE[1].key)
    assert ledger.settle(odd).code == Code.NEIGHBOUR_MISMATCH
    return odd


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ({"verdict": "passed"}, "settled"),
        ({"verdict": "failed"}, "held"),
        ({"verdict": "inconclusive"}, "held"),
        ({"verdict": "passed", "epoch": 1}, "held"),
        ({"verdict": "passed", "session": b"x" * 16}, "held"),
        ({"verdict": "passed", "peer": WORKERS[5].peer_id}, "held"),
        ({"verdict": "passed", "request_id": None}, "held"),
    ],
)
def test_a_proof_that_an_audit_has_passed_is_no_longer_held_for_its_neighbour(
    said: dict[str, object], status: str
) -> None:
    ledger = PaperLedger()
    odd = _held_proof(ledger)
    named = {"requester": REQUESTER.peer_id, "request_id": "request-1", "session": SESSION, "epoch": 0}
    ledger.state.apply(verdict_of({"peer": ROUTE[1].key.peer_id, **named, **said}), NOW)
    assert ledger.settle(odd).status == status
    assert ledger.state.accounts.total() == 0


def test_what_an_audit_has_passed_is_forgotten_with_its_ticket() -> None:
    ledger = PaperLedger()
    _held_proof(ledger)
    for request_id in ("request-1", "a request without a settled proof"):
        said = verdict(
            AUDIT if request_id == "request-1" else OTHER_AUDIT,
            ROUTE[1].key.peer_id,
            verdict="passed",
            requester=REQUESTER.peer_id,
            request_id=request_id.replace(" ", "-"),
            session=SESSION,
            epoch=0,
        )
        ledger.state.apply(said, NOW)
    assert len(ledger.tables.content()["cleared"]) == 1
    change = expire(ledger.state, NOW + WEEK)
    assert change is not None
    ledger.state.apply(change, NOW + WEEK)
    assert set(ledger.tables.content()) == {"accounts", "state", "reputation", "audits"}


def test_a_second_verdict_or_slash_for_an_audit_does_not_fit_the_state() -> None:
    ledger = PaperLedger()
    slash = Slashed(peer=LIAR, micro_credits=1, reason="", by="audit", audit_id=AUDIT)
    for change in (verdict(), slash):
        ledger.state.apply(change, NOW)
        with pytest.raises(LocalProtocolError):
            ledger.state.apply(change, NOW)
