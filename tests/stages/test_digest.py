"""Running digests: keyed, and blind to how rows were cut."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.stages.digest import RunningDigest

KEY, OPENED = bytes(range(32)), b"o" * 32


@given(parts=st.lists(st.binary(max_size=64), max_size=20))
def test_chunks_leave_no_trace(parts: list[bytes]) -> None:
    digest = RunningDigest(KEY, OPENED)
    for part in parts:
        digest.update(memoryview(part))
    assert digest.digest() == hashlib.blake2b(OPENED + b"".join(parts), key=KEY, digest_size=32).digest()


def test_reading_a_digest_does_not_end_it() -> None:
    digest = RunningDigest(KEY, OPENED)
    digest.update(b"one")
    before = digest.digest()
    assert digest.digest() == before
    digest.update(b"two")
    assert digest.digest() != before


def test_another_key_or_another_open_gives_another_digest() -> None:
    digests = [RunningDigest(KEY, OPENED), RunningDigest(KEY[::-1], OPENED), RunningDigest(KEY, OPENED[1:] + b"x")]
    for digest in digests:
        digest.update(b"rows")
    assert len({digest.digest() for digest in digests}) == 3


def test_a_draw_is_digested_with_its_position() -> None:
    digests = [RunningDigest(KEY, OPENED) for _ in range(3)]
    for digest, position, token in zip(digests, (8, 9, 8), (b"\1\0\0\0", b"\1\0\0\0", b"\2\0\0\0"), strict=True):
        digest.update_draw(position, token)
    assert len({digest.digest() for digest in digests}) == 3
    eight = OPENED + bytes([8, 0, 0, 0, 1, 0, 0, 0])
    assert digests[0].digest() == hashlib.blake2b(eight, key=KEY, digest_size=32).digest()
