"""A worker's leases that count no more, as an orchestrator keeps them on disk and settles by them.

One row per peer, beside the ledger and not part of its journal.
"""

from __future__ import annotations

from tessella_p2p.wire.envelope import Message, decode_message, encode_message
from tessella_p2p.wire.messages import Count, TimeMs


class Revocation(Message):
    """Leases up to ``serial`` were taken away ``at`` (Unix milliseconds)."""

    serial: Count
    at: TimeMs


def encode_revocation(revocation: Revocation) -> bytes:
    """The bytes of a row."""
    return encode_message(revocation)


def decode_revocation(row: bytes) -> Revocation:
    """The revocation in ``row``.

    Raises:
        MalformedMessage: damaged, or written by a newer version.
    """
    return decode_message(Revocation, row)
