"""What verdicts rest on stays beside the ledger for a while, and audits under way until they end."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tessella_p2p.base.errors import LocalProtocolError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import AUDIT_EVIDENCE_S, PROOF_GRACE_S, TICKET_OPEN_S, TICKET_SETTLE_S
from tessella_p2p.ledger import audit_evidence
from tessella_p2p.ledger.audit_evidence import AuditEvidence, OpenAudit
from tessella_p2p.ledger.changes import Slashed, VerdictReached
from tessella_p2p.ledger.store import LedgerStore, Recorded
from tests.ledger.proving import NOW, WORKERS

WORKER = WORKERS[0].peer_id
KEPT_MS = int(AUDIT_EVIDENCE_S * 1000)
EVIDENCE = AuditEvidence(b"a sealed proof", (b"a sealed report", b"another one"))


def opened(path: Path) -> LedgerStore:
    return LedgerStore(path / "ledger", 16 << 20, sync=False)


def verdict(number: int, peer: PeerId = WORKER) -> VerdictReached:
    return VerdictReached(
        audit_id=number.to_bytes(16, "big"), peer=peer, verdict="failed", code="wrong_output", reason="it is wrong"
    )


def fine(number: int, peer: PeerId = WORKER) -> Slashed:
    return Slashed(peer=peer, micro_credits=7, reason="it lied", by="audit", audit_id=number.to_bytes(16, "big"))


def test_a_verdict_its_slash_and_its_evidence_are_one_transaction_and_come_once(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as store:
        assert store.record_verdict(verdict(1), NOW, fine(1), EVIDENCE) == Recorded(1, evidence_kept=True)
        assert store.record_verdict(verdict(1), NOW, fine(1), EVIDENCE) is None
        assert store.account(WORKER).micro_credits == -7
        assert store.total() == 0
    with closing(opened(tmp_path)) as store:
        assert store.audit_evidence(1) == EVIDENCE
        assert store.audit_evidence(2) is None
        assert store.kept_reports([1, 2, 3]) == {1: 2}
        assert store.replay().content() == store.content()


def test_evidence_is_kept_for_its_time_which_is_longer_than_any_proofs(tmp_path: Path) -> None:
    assert AUDIT_EVIDENCE_S >= TICKET_OPEN_S + TICKET_SETTLE_S + PROOF_GRACE_S
    with closing(opened(tmp_path)) as store:
        store.record_verdict(verdict(1), NOW, None, EVIDENCE)
        store.record_verdict(verdict(2), NOW + 1, None, EVIDENCE)
        assert not store.expire(NOW + KEPT_MS - 1)
        assert store.expire(NOW + KEPT_MS)
        assert store.kept_reports([1, 2]) == {2: 2}
        assert not store.expire(NOW + KEPT_MS)
        assert [entry.change.kind for _, entry in store.journal()] == ["verdict_reached"] * 2


def test_so_much_evidence_is_kept_and_what_is_kept_is_not_pushed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_evidence, "MAX_AUDIT_EVIDENCE", 2)
    with closing(opened(tmp_path)) as store:
        kept = [store.record_verdict(verdict(number), NOW, fine(number), EVIDENCE) for number in range(1, 4)]
        assert [one is not None and one.evidence_kept for one in kept] == [True, True, False]
        assert store.account(WORKER).micro_credits == -21, "a verdict does not hang on its evidence"


def test_evidence_is_in_a_backup_and_survives_a_restore(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as store:
        store.record_verdict(verdict(1), NOW, None, EVIDENCE)
        store.begin_audit(OpenAudit(bytes(16), "odd", b"proof"))
        store.backup(tmp_path / "backup")
    with closing(LedgerStore(tmp_path / "backup", 16 << 20, sync=False)) as restored:
        restored.begin_chain(NOW + 1)
        assert restored.audit_evidence(1) == EVIDENCE
        assert restored.open_audits() == [OpenAudit(bytes(16), "odd", b"proof")]


def test_audits_under_way_outlive_the_process_in_a_bounded_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_evidence, "MAX_KEPT_AUDITS", 2)
    audits = [OpenAudit(bytes([number]) * 16, "sampled", b"proof") for number in range(3)]
    with closing(opened(tmp_path)) as store:
        assert [store.begin_audit(audit) for audit in audits] == [True, True, False]
    with closing(opened(tmp_path)) as store:
        assert store.open_audits() == audits[:2]
        store.end_audit(audits[0].audit_id)
        store.end_audit(audits[2].audit_id)  # never kept
        assert store.open_audits() == audits[1:2]


@pytest.mark.parametrize("row", [b"\xff", b"\x00", b"\x82\x61a\x00"])
def test_a_damaged_row_is_this_nodes_own_trouble(tmp_path: Path, row: bytes) -> None:
    with closing(opened(tmp_path)) as store:
        with store._environment.write() as transaction:
            transaction.put("audit_evidence", (1).to_bytes(8, "big"), row)
            transaction.put("open_audits", bytes(16), row)
        with pytest.raises(LocalProtocolError):
            store.audit_evidence(1)
        with pytest.raises(LocalProtocolError):
            store.open_audits()
