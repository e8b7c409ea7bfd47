"""Running digests: keyed, and blind to how rows were cut."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.stages.digest import RunningDigest

KEY = bytes(range(32))


@given(parts=st.lists(st.binary(max_size=64), max_size=20))
def test_chunks_leave_no_trace(parts: list[bytes]) -> None:
    digest = RunningDigest(KEY)
    for part in parts:
        digest.update(memoryview(part))
    assert digest.digest() == hashlib.blake2b(b"".join(parts), key=KEY, digest_size=32).digest()


def test_reading_a_digest_does_not_end_it() -> None:
    digest = RunningDigest(KEY)
    digest.update(b"one")
    before = digest.digest()
    assert digest.digest() == before
    digest.update(b"two")
    assert digest.digest() != before


def test_another_key_gives_another_digest() -> None:
    ours, theirs = RunningDigest(KEY), RunningDigest(KEY[::-1])
    for digest in (ours, theirs):
        digest.update(b"rows")
    assert ours.digest() != theirs.digest()
