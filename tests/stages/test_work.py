"""What a stage can prove is what its receiver signed for, whatever the order of steps, receipts and cuts."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import InvalidSignature, MalformedMessage, RemoteProtocolError
from tessella_p2p.base.limits import (
    DIGEST_MARK_POSITIONS,
    MAX_POSITIONS,
    MAX_PROOF_BYTES,
    MAX_PROOF_MARKS,
    MAX_ROUTE_BYTES,
)
from tessella_p2p.stages.work import MAX_STALE_RECEIPTS, MAX_UNCONFIRMED_STEPS, WorkMeter, seal_receipt
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import ClockSequencer, encode_message
from tests.stages.openings import NOW, STAGES, STRANGER, sealed, ticket

KEY, SESSION, OPENED = b"k" * 32, b"s" * 16, b"o" * 32
SENDER, RECEIVER = STAGES[0], STAGES[1]
ROW, OUT = 8, 12  # bytes of a row that comes in, and of one that goes out


def keyed(data: bytes) -> bytes:
    return hashlib.blake2b(OPENED + data, key=KEY, digest_size=32).digest()


def rows(count: int, width: int, salt: int = 0) -> bytes:
    return bytes((i * 31 + salt) % 256 for i in range(count * width))


def receipt(positions: int, digest: bytes, signer: Any = RECEIVER, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "request_id": "request-1",
        "session": SESSION,
        "epoch": 0,
        "sender": SENDER.peer_id,
        "positions": positions,
        "digest": digest,
    }
    return seal_receipt(m.ReceiptBody(**(fields | changes)), signer, ClockSequencer(), NOW)


def confirm(meter: WorkMeter, raw: bytes) -> None:
    meter.confirm(raw, receiver=RECEIVER.peer_id, sender=SENDER.peer_id, request_id="request-1", key=(SESSION, 0))


def worked(steps: list[int]) -> tuple[WorkMeter, bytes, bytes]:
    """A meter after steps of so many rows, and all that came in and went out."""
    total = sum(steps)
    inputs, outputs = rows(total, ROW), rows(total, OUT, 7)
    meter, at = WorkMeter(KEY, OPENED), 0
    for count in steps:
        meter.receive(count, inputs[at * ROW : (at + count) * ROW])
        meter.finish(outputs[at * OUT : (at + count) * OUT], compute_us=5)
        at += count
    return meter, inputs, outputs


CUTS = st.lists(st.integers(1, 300), min_size=1, max_size=12)


@given(CUTS)
def test_digests_and_marks_do_not_depend_on_how_rows_were_cut(steps: list[int]) -> None:
    meter, inputs, outputs = worked(steps)
    total = sum(steps)
    assert (meter.positions, meter.received, meter.compute_us) == (total, total, 5 * len(steps))
    assert meter.input_receipt() == (total, keyed(inputs))
    confirm(meter, receipt(total, keyed(outputs)))
    assert meter.confirmed is not None
    assert meter.confirmed.boundary.input_digest == keyed(inputs)
    assert [mark.positions for mark in meter.marks()] == list(
        range(DIGEST_MARK_POSITIONS, total + 1, DIGEST_MARK_POSITIONS)
    )
    for mark in meter.marks():
        assert mark.input == keyed(inputs[: mark.positions * ROW])
        assert mark.output == keyed(outputs[: mark.positions * OUT])


@given(CUTS, st.data())
def test_receipts_for_any_step_ends_confirm_exactly_so_far(steps: list[int], data: st.DataObject) -> None:
    meter, inputs, outputs = worked(steps)
    ends = [sum(steps[: i + 1]) for i in range(len(steps))]
    for end in sorted(data.draw(st.sets(st.sampled_from(ends)))):
        confirm(meter, receipt(end, keyed(outputs[: end * OUT])))
        assert meter.confirmed is not None
        assert meter.confirmed.boundary.positions == end
        assert meter.confirmed.boundary.input_digest == keyed(inputs[: end * ROW])
        assert meter.unconfirmed_steps == sum(1 for other in ends if other > end)
        assert all(mark.positions <= end for mark in meter.marks())


def test_rows_are_signed_for_when_they_arrive_not_when_they_are_computed() -> None:
    meter = WorkMeter(KEY, OPENED)
    meter.receive(3, rows(3, ROW))
    meter.receive(2, rows(2, ROW, 9))
    assert meter.input_receipt() == (5, keyed(rows(3, ROW) + rows(2, ROW, 9)))
    assert (meter.positions, meter.unconfirmed_steps) == (0, 0)


def test_a_tails_output_is_its_tokens_and_a_step_without_one_waits_for_no_receipt() -> None:
    meter = WorkMeter(KEY, OPENED)
    meter.receive(300, rows(300, ROW))
    meter.finish(b"")
    assert meter.unconfirmed_steps == 0, "an entry signs for tokens: it has nothing to sign before the first one"
    meter.receive(4, rows(4, ROW))
    meter.finish(b"\x01\x00\x00\x00", is_token=True)
    confirm(meter, receipt(304, keyed(b"\x30\x01\x00\x00\x01\x00\x00\x00")))
    assert meter.confirmed is not None
    assert [mark.output for mark in meter.marks()] == [keyed(b"")]


@given(CUTS, st.data())
def test_a_mark_stands_behind_the_row_that_the_first_draw_follows(steps: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(steps) - 1))
    total, at = sum(steps), sum(steps[: first + 1])
    inputs, outputs = rows(total, ROW), rows(total, OUT, 7)
    meter, done = WorkMeter(KEY, OPENED), 0
    for index, count in enumerate(steps):
        meter.receive(count, inputs[done * ROW : (done + count) * ROW], draws=index >= first)
        meter.finish(outputs[done * OUT : (done + count) * OUT])
        done += count

    def marked(data: bytes, width: int) -> bytes:
        return keyed(data[: at * width] + b"\xff" * 4 + data[at * width :])

    assert meter.input_receipt() == (total, marked(inputs, ROW))
    confirm(meter, receipt(total, marked(outputs, OUT)))
    for mark in meter.marks():
        if mark.positions < at:
            assert mark.output == keyed(outputs[: mark.positions * OUT])
        else:
            assert mark.output == marked(outputs[: mark.positions * OUT], OUT)
            assert mark.input == marked(inputs[: mark.positions * ROW], ROW)


HONEST_DIGEST = keyed(rows(4, OUT, 7))
WRONG_RECEIPTS: dict[str, tuple[bytes, type[RemoteProtocolError]]] = {
    "another digest": (receipt(4, keyed(b"other")), RemoteProtocolError),
    "an unkeyed digest": (receipt(4, hashlib.blake2b(rows(4, OUT, 7), digest_size=32).digest()), RemoteProtocolError),
    "more than was sent": (receipt(5, HONEST_DIGEST), RemoteProtocolError),
    "no step's end": (receipt(3, HONEST_DIGEST), RemoteProtocolError),
    "another request": (receipt(4, HONEST_DIGEST, request_id="request-2"), RemoteProtocolError),
    "another session": (receipt(4, HONEST_DIGEST, session=b"t" * 16), RemoteProtocolError),
    "another epoch": (receipt(4, HONEST_DIGEST, epoch=1), RemoteProtocolError),
    "another sender": (receipt(4, HONEST_DIGEST, sender=STAGES[2].peer_id), InvalidSignature),
    "signed by the sender": (receipt(4, HONEST_DIGEST, signer=SENDER), InvalidSignature),
    "signed by a stranger": (receipt(4, HONEST_DIGEST, signer=STRANGER), InvalidSignature),
    "a ticket": (ticket(), InvalidSignature),
    "no envelope": (b"signed", MalformedMessage),
}


@pytest.mark.parametrize(("raw", "error"), WRONG_RECEIPTS.values(), ids=WRONG_RECEIPTS)
def test_a_receipt_that_does_not_fit_confirms_nothing(raw: bytes, error: type[RemoteProtocolError]) -> None:
    meter, _, _ = worked([4])
    with pytest.raises(error):
        confirm(meter, raw)
    assert meter.confirmed is None


@given(st.binary(max_size=300))
def test_any_bytes_for_a_receipt_give_a_typed_error(raw: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        confirm(worked([4])[0], raw)


def test_an_older_receipt_changes_nothing_and_a_flood_of_them_is_refused() -> None:
    meter, _, outputs = worked([4, 4])
    confirm(meter, receipt(8, keyed(outputs)))
    newest = meter.confirmed
    older = receipt(4, keyed(outputs[: 4 * OUT]))
    for _ in range(MAX_STALE_RECEIPTS):
        confirm(meter, older)
    assert meter.confirmed is newest
    with pytest.raises(RemoteProtocolError):
        confirm(meter, older)


def test_a_receiver_that_signs_for_nothing_is_not_worked_for_without_end() -> None:
    meter = WorkMeter(KEY, OPENED)
    for _ in range(MAX_UNCONFIRMED_STEPS):
        meter.receive(1, b"x")
        meter.finish(b"y")
    meter.receive(1, b"x")
    with pytest.raises(RemoteProtocolError):
        meter.finish(b"y")


def test_the_longest_sessions_marks_fit_into_a_proof_and_are_also_a_neighbours() -> None:
    meter, at = WorkMeter(KEY, OPENED), 0
    chunk = 1 << 16
    body = bytes(chunk)
    ends = []
    while at < MAX_POSITIONS:
        meter.receive(chunk, body)
        meter.finish(body)
        at += chunk
        ends.append(at)
    digest = hashlib.blake2b(OPENED, key=KEY, digest_size=32)
    signed: list[bytes] = []
    for end in ends:
        digest.update(body)
        signed.append(receipt(end, digest.digest()))
    confirm(meter, signed[1])  # 131,072 positions: every mark
    before = meter.marks()
    assert len(before) == MAX_PROOF_MARKS
    confirm(meter, signed[-1])
    marks = meter.marks()
    assert len(marks) == MAX_PROOF_MARKS
    assert marks[-1].positions == MAX_POSITIONS
    assert {mark.positions for mark in marks} & {mark.positions for mark in before}
    assert meter.confirmed is not None
    proof = m.Proof(
        request_id="r" * 64,
        ticket=ticket(),
        lease=sealed().open,
        route=bytes(MAX_ROUTE_BYTES),
        session=SESSION,
        epoch=0,
        opened_at=NOW,
        manifest_root=bytes(32),
        recipe="f32",
        layers=(0, 4),
        positions=MAX_POSITIONS,
        input_digest=bytes(32),
        output_digest=bytes(32),
        marks=marks,
        receipt=meter.confirmed.receipt,
        compute_us=1 << 50,
    )
    assert len(encode_message(proof)) < MAX_PROOF_BYTES - 1024
