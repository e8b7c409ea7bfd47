"""A head signs for what its entry sent, at a step's end; whatever else it signs is found out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import RemoteProtocolError
from tessella_p2p.base.ids import SessionId
from tessella_p2p.stages.sent_work import SentWork
from tessella_p2p.stages.work import MAX_STALE_RECEIPTS, MAX_UNCONFIRMED_STEPS, WorkMeter
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import seal
from tests.stages.openings import ENTRY, STAGES, key_of

HEAD = STAGES[0]
KEY, OPENED = b"k" * 32, b"o" * 32
SESSION = SessionId(b"s" * 16)


def receipt(positions: int, digest: bytes, *, signer: Any = HEAD, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "request_id": "request",
        "session": SESSION,
        "epoch": 0,
        "sender": ENTRY.peer_id,
        "positions": positions,
        "digest": digest,
    }
    return seal(signer, m.RECEIPT, m.ReceiptBody(**(fields | changes)), sequence=1, now_ms=1, audience=ENTRY.peer_id)


def confirm(work: SentWork, raw: bytes) -> bool:
    return work.confirm(raw, receiver=HEAD.peer_id, sender=ENTRY.peer_id, request_id="request", key=(SESSION, 0))


def ids(first: int, rows: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in range(first, first + rows))


def sent(steps: Sequence[tuple[int, bool]]) -> tuple[SentWork, WorkMeter]:
    """An entry that sent these steps, and a head that received none of them yet."""
    work = SentWork(KEY, OPENED)
    position = 0
    for rows, draws in steps:
        work.send(rows, ids(position, rows), draws=draws)
        position += rows
    return work, WorkMeter(KEY, OPENED)


STEPS = [(4, False), (4, False), (3, True), (1, True), (1, True)]


@given(st.lists(st.tuples(st.integers(1, 2000), st.booleans()), min_size=1, max_size=6), st.sets(st.integers(0, 5)))
def test_an_honest_heads_receipts_are_right_whenever_they_come(steps: list[tuple[int, bool]], at: set[int]) -> None:
    work, head = sent(steps)
    position = 0
    for index, (rows, draws) in enumerate(steps):
        head.receive(rows, ids(position, rows), draws=draws)
        position += rows
        if index in at:
            assert confirm(work, receipt(*head.input_receipt()))
            assert work.signed == position
            assert work.unsigned_steps == len(steps) - index - 1


@pytest.mark.parametrize(
    "forge",
    [
        lambda positions, digest: receipt(positions, digest, signer=key_of("stranger")),
        lambda positions, digest: receipt(positions, digest, session=b"x" * 16),
        lambda positions, digest: receipt(positions, digest, epoch=1),
        lambda positions, digest: receipt(positions, digest, request_id="other"),
        lambda positions, digest: receipt(positions, digest, sender=HEAD.peer_id),
        lambda positions, digest: receipt(positions, b"x" * 32),
        lambda positions, digest: receipt(positions - 1, digest),
        lambda positions, digest: receipt(positions + 1, digest),
        lambda positions, digest: receipt(99, digest),
        lambda positions, digest: b"no receipt",
    ],
    ids=["signer", "session", "epoch", "request", "sender", "bytes", "inside a step", "next step", "beyond", "garbage"],
)
def test_the_hostile_twins_of_a_right_receipt_are_refused(forge: Any) -> None:
    work, head = sent(STEPS)
    head.receive(4, ids(0, 4))
    with pytest.raises(RemoteProtocolError):
        confirm(work, forge(*head.input_receipt()))
    assert work.signed == 0


def test_a_receipt_for_nothing_new_is_taken_a_few_times() -> None:
    work, head = sent(STEPS)
    head.receive(4, ids(0, 4))
    raw = receipt(*head.input_receipt())
    assert confirm(work, raw)
    for _ in range(MAX_STALE_RECEIPTS):
        assert not confirm(work, raw)
    with pytest.raises(RemoteProtocolError):
        confirm(work, raw)


def test_a_head_that_signs_for_nothing_gets_a_bounded_number_of_steps() -> None:
    work = SentWork(KEY, OPENED)
    for _ in range(MAX_UNCONFIRMED_STEPS):
        work.send(1, ids(0, 1), draws=True)
    with pytest.raises(RemoteProtocolError, match="no receipt"):
        work.send(1, ids(0, 1), draws=True)
