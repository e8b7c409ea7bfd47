"""A line for every kind of entry, in one line, and pages that fit into an answer."""

from __future__ import annotations

from typing import get_args

import pytest

from tessella_p2p.base.limits import MAX_LISTED_BYTES, MAX_PAGE_ROWS
from tessella_p2p.ledger.changes import (
    BlacklistChanged,
    ChainBegun,
    Change,
    JournalEntry,
    Slashed,
    TicketsExpired,
    VerdictReached,
)
from tessella_p2p.orchestrator.ledger_lines import ledger_line, within_an_answer
from tessella_p2p.wire.envelope import encode_message
from tessella_p2p.wire.messages import LedgerLine, LedgerLines
from tests.ledger.proving import NOW, PaperLedger, key_of, proof_body, seal_proof
from tests.ledger.proving import WORKERS as PROVERS

PEER = key_of("peer").peer_id
AUDIT = bytes(16)


def settled() -> Change:
    ledger = PaperLedger()
    ledger.settle(seal_proof(proof_body(1), PROVERS[1]))
    return ledger.changes[0]


EXAMPLES: tuple[tuple[Change, int, str], ...] = (
    (settled(), 3_000_000, "layers 10–20, 300 positions, epoch 0; paid by issuance"),
    (TicketsExpired(before=5), 0, "tickets that had to settle before 5 are forgotten"),
    (Slashed(peer=PEER, micro_credits=5, reason="a\x1b[2J\nlie", by="operator"), -5, "by operator: a [2J lie"),
    (
        Slashed(peer=PEER, micro_credits=5, reason="", by="audit", audit_id=AUDIT),
        -5,
        "by audit 0000000000000000",
    ),
    (
        VerdictReached(audit_id=AUDIT, peer=PEER, verdict="failed", code="output_mismatch", reason="row 3"),
        0,
        "audit 0000000000000000 failed (output_mismatch): row 3",
    ),
    (BlacklistChanged(peer=PEER, blacklisted=True, reason="caught"), 0, "put on the blacklist: caught"),
    (
        ChainBegun(chain=2, after=7, after_hash=bytes(32)),
        0,
        "chain 2 begins: restored from a backup that ended with entry 7",
    ),
)


@pytest.mark.parametrize(("change", "micro_credits", "text"), EXAMPLES, ids=lambda value: getattr(value, "kind", ""))
def test_a_line_says_what_was_moved_and_why(change: Change, micro_credits: int, text: str) -> None:
    line = ledger_line(9, JournalEntry(at=NOW, change=change))
    assert (line.sequence, line.at, line.kind) == (9, NOW, change.kind)
    assert (line.micro_credits, line.text) == (micro_credits, text)


def test_every_kind_of_entry_has_an_example() -> None:
    assert {type(change) for change, _, _ in EXAMPLES} == set(get_args(Change))


def test_a_page_of_the_longest_lines_fits_into_an_answer() -> None:
    line = LedgerLine(
        sequence=2**53 - 1,
        at=2**53 - 1,
        kind="blacklist_changed",
        peer_id=PEER,
        requester=PEER,
        request_id="r" * 64,
        micro_credits=-(2**53),
        text="€" * 512,
    )
    page = within_an_answer([line] * MAX_PAGE_ROWS)
    assert 0 < len(page) < MAX_PAGE_ROWS
    assert len(encode_message(LedgerLines(head=1, entries=page))) <= MAX_LISTED_BYTES
    assert len(within_an_answer([line.model_copy(update={"text": ""})] * MAX_PAGE_ROWS)) == MAX_PAGE_ROWS
