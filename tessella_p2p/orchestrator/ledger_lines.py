"""The journal for people: a line says what an entry moved, and why (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from tessella_p2p.base.limits import MAX_LISTED_BYTES
from tessella_p2p.ledger.changes import (
    BlacklistChanged,
    ChainBegun,
    JournalEntry,
    ProofSettled,
    Slashed,
    TicketsExpired,
    VerdictReached,
)
from tessella_p2p.wire.messages import LedgerLine

_MAX_TEXT_CHARS = 512
_LINE_BYTES = 384
"""At most what a line takes beside its text: two peer ids, a request id, a kind, three numbers and the names of the fields."""


def ledger_line(sequence: int, entry: JournalEntry, reports: int = 0) -> LedgerLine:
    """The line of one entry. ``micro_credits`` is what the peer's account gained, below 0 what it lost.

    Args:
        reports: how many auditors' reports are kept that it rests on.
    """
    change = entry.change
    peer: str | None = None
    requester: str | None = None
    request_id: str | None = None
    micro_credits = 0
    match change:
        case ProofSettled():
            peer, requester, request_id = change.worker, change.requester, change.request_id
            micro_credits = change.micro_credits
            start, end = change.layers
            paid_by = (change.identity or "the requester") if change.requester_pays else "issuance"
            text = f"layers {start}–{end}, {change.paid_positions} positions, epoch {change.epoch}; paid by {paid_by}"
            text += "" if change.complete else "; more is due"
        case TicketsExpired():
            text = f"tickets that had to settle before {change.before} are forgotten"
        case Slashed():
            peer, micro_credits = change.peer, -change.micro_credits
            text = f"by {_who(change)}: {change.reason}"
        case VerdictReached():
            peer, requester, request_id = change.peer, change.requester, change.request_id
            text = f"audit {change.audit_id.hex()[:16]} {change.verdict}{_because(change.code)}: {change.reason}"
        case BlacklistChanged():
            peer = change.peer
            text = f"{'put on' if change.blacklisted else 'taken off'} the blacklist: {change.reason}"
        case ChainBegun():
            text = f"chain {change.chain} begins: restored from a backup that ended with entry {change.after}"
    return LedgerLine(
        sequence=sequence,
        at=entry.at,
        kind=change.kind,
        peer_id=peer,
        requester=requester,
        request_id=request_id,
        micro_credits=micro_credits,
        text=_one_line(text),
        reports=reports,
    )


def within_an_answer(lines: Iterable[LedgerLine]) -> tuple[LedgerLine, ...]:
    """As many lines from the first one on as fit into one answer."""
    page: list[LedgerLine] = []
    left_bytes = MAX_LISTED_BYTES
    for line in lines:
        left_bytes -= _LINE_BYTES + len(line.text.encode())
        if left_bytes < 0:
            break
        page.append(line)
    return tuple(page)


def _who(change: Slashed) -> str:
    return change.by if change.audit_id is None else f"{change.by} {change.audit_id.hex()[:16]}"


def _because(code: str | None) -> str:
    return "" if code is None else f" ({code})"


def _one_line(text: str) -> str:
    """``text`` without what would break a line of a terminal or a log: reasons come from people and peers."""
    flat = "".join(character if character.isprintable() else " " for character in text).strip().removesuffix(":")
    return flat if len(flat) <= _MAX_TEXT_CHARS else f"{flat[: _MAX_TEXT_CHARS - 1]}…"
