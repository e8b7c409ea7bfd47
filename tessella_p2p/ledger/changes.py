"""What the ledger's journal holds: one change after another, from which the whole state follows.

Changes are messages: canonical CBOR, every field bounded, unknown fields refused. So a journal of a newer version is refused by
name instead of being read wrongly.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tessella_p2p.wire.envelope import Message, decode_message, encode_message
from tessella_p2p.wire.messages import (
    Count,
    Digest,
    DigestMark,
    Epoch,
    Layers,
    Peer,
    Positions,
    RequestName,
    Session,
    TimeMs,
)


class ProofSettled(Message):
    """A proof was accepted and, where something was due, paid.

    ``paid_positions`` is up to which position each layer counts as paid afterwards; ``micro_credits`` what this change pays;
    ``complete`` whether everything that was due is paid; ``points`` the digests that neighbours are compared with.
    """

    kind: Literal["proof_settled"] = "proof_settled"
    requester: Peer
    request_id: RequestName
    settle_before: TimeMs
    worker: Peer
    session: Session
    epoch: Epoch
    layers: Layers
    paid_positions: Positions
    micro_credits: Count
    complete: bool
    day: Count
    payload_digest: Digest
    upstream: Peer
    downstream: Peer
    points: tuple[DigestMark, ...]


class TicketsExpired(Message):
    """Facts of tickets that can no longer settle at ``before`` (Unix milliseconds) are dropped, oldest first, a bounded number."""

    kind: Literal["tickets_expired"] = "tickets_expired"
    before: TimeMs


Change = ProofSettled | TicketsExpired


class JournalEntry(Message):
    """One entry of the journal; its sequence is its key."""

    at: TimeMs
    change: Annotated[Change, Field(discriminator="kind")]


def encode_entry(entry: JournalEntry) -> bytes:
    """The bytes of an entry."""
    return encode_message(entry)


def decode_entry(data: bytes) -> JournalEntry:
    """The entry in ``data``.

    Raises:
        MalformedMessage: damaged, or written by a newer version.
    """
    return decode_message(JournalEntry, data)
