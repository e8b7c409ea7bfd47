"""The digest of everything that crossed a stage's boundary, in order: what receipts, proofs and audits compare (pure)."""

from __future__ import annotations

import hashlib

from tessella_p2p.stages.engine import Buffer

DIGEST_BYTES = 32


class RunningDigest:
    """BLAKE2b-256 (RFC 7693) under a session's digest key, over row after row; how the rows were cut into steps leaves no trace.

    It is keyed because a plain digest of one embedding row is inverted by trying every token.

    Args:
        key: the session's 32-byte digest key.
    """

    __slots__ = ("_hash",)

    def __init__(self, key: bytes) -> None:
        self._hash = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES)

    def update(self, rows: Buffer) -> None:
        """Append the bytes of whole rows."""
        self._hash.update(rows)

    def digest(self) -> bytes:
        """32 bytes for all that was appended so far; more may follow."""
        return self._hash.digest()
