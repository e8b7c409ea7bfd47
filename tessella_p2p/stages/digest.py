"""The digest of everything that crossed a stage's boundary, in order: what receipts, proofs and audits compare (pure)."""

from __future__ import annotations

import hashlib

from tessella_p2p.stages.engine import Buffer

DIGEST_BYTES = 32
_FIRST_DRAW = b"\xff" * 4
"""No element of a row is that, whatever its dtype: token ids are smaller, and what is not finite is refused."""
_DRAW_BYTES = 4


class RunningDigest:
    """BLAKE2b-256 (RFC 7693) under a session's digest key, over row after row; how the rows were cut into steps leaves no trace.

    It is keyed because a plain digest of one embedding row is inverted by trying every token.

    Whoever signs a digest signs for what was asked as well, so nobody can show an auditor another request than the stage saw: it
    begins with the hash of the chain-open (route, sampling, seed), and has a mark behind the row after which the first token is
    drawn. From there on every row asks for a draw; see `intake`.

    Args:
        key: the session's 32-byte digest key.
        opened: SHA-256 of the chain-open envelope, `opening.open_hash`.
    """

    __slots__ = ("_hash",)

    def __init__(self, key: bytes, opened: bytes) -> None:
        self._hash = hashlib.blake2b(opened, key=key, digest_size=DIGEST_BYTES)

    def update(self, rows: Buffer) -> None:
        """Append the bytes of whole rows."""
        self._hash.update(rows)

    def mark_first_draw(self) -> None:
        """The row that was appended last is the first after which the tail draws."""
        self._hash.update(_FIRST_DRAW)

    def update_draw(self, position: int, drawn: Buffer) -> None:
        """Append a tail's output: the ``position`` that it is for, u32 little-endian, and the token id's bytes, or the vector's."""
        self._hash.update(position.to_bytes(_DRAW_BYTES, "little") + bytes(drawn))

    def digest(self) -> bytes:
        """32 bytes for all that was appended so far; more may follow."""
        return self._hash.digest()
