"""Signed envelopes: what was sealed opens once, by whom and when it was meant; every twin that differs in one thing is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import (
    Expired,
    InvalidSignature,
    MalformedMessage,
    Overloaded,
    RemoteProtocolError,
    Replayed,
    TessellaError,
    VersionMismatch,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    CLOCK_SKEW_MS,
    HEARTBEAT_S,
    MAX_ENVELOPE_BYTES,
    MAX_MEMBERS,
    MAX_OPEN_REQUESTS,
    REQUEST_TTL_MS,
)
from tessella_p2p.wire import cbor
from tessella_p2p.wire.envelope import (
    ANYONE,
    ClockSequencer,
    Envelope,
    ReplayGuard,
    open_envelope,
    peek_sequence,
    peek_signer,
    seal,
)
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import Deregister, ReportFailure

NOW = 1_700_000_000_000
ALICE, BOB, EVE = (NodeKey(bytes([i]) * 32) for i in (1, 2, 3))
MESSAGE = ReportFailure(peer_id=EVE.peer_id, code="hop_timeout")


def sealed(key: NodeKey = ALICE, sequence: int = 7, now_ms: int = NOW, ttl_ms: int = REQUEST_TTL_MS) -> bytes:
    return seal(key, "request", MESSAGE, sequence=sequence, now_ms=now_ms, audience=BOB.peer_id, ttl_ms=ttl_ms)


def opened(raw: bytes, *, domain: str = "request", now_ms: int | None = NOW) -> Envelope:
    return open_envelope(raw, domain, now_ms=now_ms, audience=BOB.peer_id, signer=ALICE.peer_id)


def fields_of(raw: bytes) -> list[object]:
    fields = cbor.decode(raw)
    assert isinstance(fields, list)
    return fields


def resigned(fields: list[object], key: NodeKey = ALICE) -> bytes:
    """An envelope of any fields whose signature is right: what a malicious peer can make."""
    return cbor.encode([*fields[:8], key.sign(cbor.encode(["tessella-envelope", *fields[:8]]))])


@given(
    sequence=st.integers(0, 2**53 - 1),
    now_ms=st.integers(0, 2**53 - 1 - 10**9),
    ttl_ms=st.integers(1, 10**9),
    code=st.from_regex(r"[a-z_]{1,20}", fullmatch=True),
)
@settings(max_examples=50, deadline=None)
def test_what_was_sealed_opens_as_it_was(sequence: int, now_ms: int, ttl_ms: int, code: str) -> None:
    message = ReportFailure(peer_id=EVE.peer_id, code=code)
    raw = seal(ALICE, "d", message, sequence=sequence, now_ms=now_ms, ttl_ms=ttl_ms)
    envelope = open_envelope(raw, "d", now_ms=now_ms)
    assert envelope.message(ReportFailure) == message
    assert (envelope.signer, envelope.audience, envelope.sequence) == (ALICE.peer_id, ANYONE, sequence)
    assert (envelope.issued_at, envelope.expires_at, envelope.raw) == (now_ms, now_ms + ttl_ms, raw)
    assert (peek_signer(raw), peek_sequence(raw)) == (ALICE.peer_id, sequence)


def test_another_domain_audience_or_signer_is_refused() -> None:
    raw = sealed()
    with pytest.raises(InvalidSignature, match="domain"):
        opened(raw, domain="lease")
    with pytest.raises(InvalidSignature, match="addressed to"):
        open_envelope(raw, "request", now_ms=NOW, audience=EVE.peer_id)
    with pytest.raises(InvalidSignature, match="addressed to"):
        open_envelope(raw, "request", now_ms=NOW)  # a request is no record
    with pytest.raises(InvalidSignature, match="signed by"):
        opened(sealed(key=EVE))


def test_no_field_can_be_edited() -> None:
    for index, value in {
        1: "lease",
        2: EVE.peer_id,
        3: ANYONE,
        4: 8,
        5: NOW + 1,
        6: NOW + 10**9,
        7: b"\xa0",
        8: bytes(64),
    }.items():
        fields = fields_of(sealed())
        fields[index] = value
        with pytest.raises(InvalidSignature):
            open_envelope(
                cbor.encode(fields),
                str(fields[1]),
                now_ms=NOW,
                audience=str(fields[3]),
                signer=None,
            )


@pytest.mark.parametrize("size", [0, 63, 65, 1000])
def test_a_signature_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(InvalidSignature):
        opened(cbor.encode([*fields_of(sealed())[:8], bytes(size)]))


def test_a_signature_over_the_payload_alone_is_refused() -> None:
    fields = fields_of(sealed())
    assert isinstance(fields[7], bytes)
    for stolen in (ALICE.sign(fields[7]), ALICE.sign(cbor.encode(fields[:8]))):
        with pytest.raises(InvalidSignature):
            opened(cbor.encode([*fields[:8], stolen]))


def test_time_windows_are_kept_to_the_millisecond() -> None:
    raw = sealed()
    assert opened(raw, now_ms=NOW + REQUEST_TTL_MS - 1)
    with pytest.raises(Expired, match="expired"):
        opened(raw, now_ms=NOW + REQUEST_TTL_MS)
    assert opened(raw, now_ms=NOW - CLOCK_SKEW_MS)
    with pytest.raises(Expired, match="in the future"):
        opened(raw, now_ms=NOW - CLOCK_SKEW_MS - 1)
    assert opened(raw, now_ms=None).sequence == 7  # evidence: judged by other times


def test_an_unsigned_edit_never_tells_the_time() -> None:
    """The signature is judged first: an expired forgery is a forgery."""
    fields = fields_of(sealed())
    fields[4] = 9
    with pytest.raises(InvalidSignature):
        opened(cbor.encode(fields), now_ms=NOW + 10**9)


@pytest.mark.parametrize(
    ("index", "value", "error"),
    [
        (0, 2, VersionMismatch),
        (0, True, MalformedMessage),
        (0, "1", MalformedMessage),
        (1, "x" * 33, MalformedMessage),
        (1, b"request", MalformedMessage),
        (2, "x" * 65, MalformedMessage),
        (2, "12D3KooW", MalformedMessage),
        (2, ALICE.peer_id + " ", MalformedMessage),
        (2, "new\nline", MalformedMessage),
        (3, "x" * 100_000, MalformedMessage),
        (4, -1, MalformedMessage),
        (4, 2**53, MalformedMessage),  # no answer could repeat it
        (4, 1.0, MalformedMessage),
        (4, True, MalformedMessage),
        (5, -1, MalformedMessage),
        (6, 2**53, MalformedMessage),
        (6, NOW - 1, MalformedMessage),  # before its issue
        (6, None, MalformedMessage),
        (7, "text", MalformedMessage),
        (8, None, MalformedMessage),
    ],
)
def test_a_field_of_another_form_is_refused_whoever_signed_it(
    index: int, value: object, error: type[TessellaError]
) -> None:
    fields = fields_of(sealed())
    fields[index] = value
    raw = resigned(fields) if index < 8 else cbor.encode(fields)
    with pytest.raises(error) as caught:
        open_envelope(raw, "request", now_ms=NOW, audience=BOB.peer_id)
    assert len(str(caught.value)) < 500, "an error does not repeat a peer's bytes at length"


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw + b"\0",
        lambda raw: raw[:-1],
        lambda raw: b"",
        lambda raw: cbor.encode(fields_of(raw)[:8]),
        lambda raw: cbor.encode([*fields_of(raw), 0]),
        lambda raw: cbor.encode({"v": 1}),
        lambda raw: b"\x98\x09" + raw[1:],  # the list's length in two bytes
        lambda raw: b"\x9f" + raw[1:] + b"\xff",  # an indefinite list
        lambda raw: raw[:1] + b"\x18\x01" + raw[2:],  # the version in two bytes
        lambda raw: raw + bytes(MAX_ENVELOPE_BYTES),
    ],
    ids=[
        "trailing",
        "cut",
        "empty",
        "eight fields",
        "ten fields",
        "a map",
        "long length",
        "indefinite",
        "long integer",
        "too long",
    ],
)
def test_other_bytes_around_the_same_content_are_refused(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(MalformedMessage):
        opened(change(sealed()))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xa0",
        cbor.encode({"kind": "report_failure", "peer_id": EVE.peer_id}),
        cbor.encode({"kind": "report_failure", "peer_id": EVE.peer_id, "code": "x", "extra" * 10_000: 1}),
        cbor.encode({"kind": "report_failure", "peer_id": EVE.peer_id, "code": 5}),
        cbor.encode({"kind": "other" * 10_000, "peer_id": EVE.peer_id, "code": "x"}),
        cbor.encode([]),
        cbor.encode(MESSAGE.model_dump()) + b"\0",
        bytes.fromhex("a264636f6465617864636f64656179"),  # a duplicate key
    ],
)
def test_a_signed_payload_that_is_no_such_message_is_refused(payload: bytes) -> None:
    fields = fields_of(sealed())
    fields[7] = payload
    envelope = opened(resigned(fields))
    with pytest.raises(MalformedMessage) as caught:
        envelope.message(ReportFailure)
    assert len(str(caught.value)) < 600


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_a_typed_error(data: bytes) -> None:
    with pytest.raises((MalformedMessage, VersionMismatch)):
        opened(data)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_flipped_bit_is_a_typed_error(data: st.DataObject) -> None:
    raw = bytearray(sealed())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(RemoteProtocolError):
        opened(bytes(raw))


# ---- Replays ----


def test_a_request_is_accepted_once_whatever_the_order() -> None:
    guard = ReplayGuard()
    later, earlier = opened(sealed(sequence=9)), opened(sealed(sequence=8))
    guard.check(later, NOW)
    guard.check(earlier, NOW)
    for envelope in (later, earlier):
        with pytest.raises(Replayed, match="used sequence"):
            guard.check(envelope, NOW)


def test_a_request_from_the_future_is_remembered_until_it_is_over() -> None:
    guard = ReplayGuard()
    arrival = NOW - CLOCK_SKEW_MS
    envelope = opened(sealed(), now_ms=arrival)
    guard.check(envelope, arrival)
    for passed in range(0, CLOCK_SKEW_MS + REQUEST_TTL_MS, 10_000):
        moment = arrival + passed
        assert opened(envelope.raw, now_ms=moment)  # still in its window
        with pytest.raises(Replayed):
            guard.check(envelope, moment)


def test_signers_and_domains_do_not_share_sequences() -> None:
    guard = ReplayGuard()
    envelope = opened(sealed())
    guard.check(envelope, NOW)
    guard.check(replace(envelope, signer=EVE.peer_id), NOW)
    guard.check(replace(envelope, domain="other"), NOW)


def test_a_request_may_not_outlive_the_memory_of_it() -> None:
    with pytest.raises(RemoteProtocolError, match="at most"):
        ReplayGuard().check(opened(sealed(ttl_ms=REQUEST_TTL_MS + 1)), NOW)


def test_a_full_guard_refuses_new_requests_and_forgets_none_that_is_valid() -> None:
    guard = ReplayGuard(max_entries=2)
    first, second, third = (opened(sealed(sequence=i)) for i in range(3))
    guard.check(first, NOW)
    guard.check(second, NOW)
    with pytest.raises(Overloaded):
        guard.check(third, NOW)
    with pytest.raises(Replayed):
        guard.check(first, NOW)
    after = NOW + REQUEST_TTL_MS + CLOCK_SKEW_MS
    guard.check(opened(sealed(sequence=3, now_ms=after), now_ms=after), after)


def test_after_a_clock_was_set_back_there_is_room_for_new_requests_and_the_others_stay_known() -> None:
    guard = ReplayGuard(max_entries=2)
    ahead = NOW + 3_600_000
    early = opened(sealed(sequence=0, now_ms=ahead), now_ms=ahead)
    guard.check(early, ahead)
    for sequence in range(1, 5):
        moment = NOW + sequence * (REQUEST_TTL_MS + CLOCK_SKEW_MS)
        guard.check(opened(sealed(sequence=sequence, now_ms=moment), now_ms=moment), moment)
    with pytest.raises(Replayed):
        guard.check(early, ahead + 1)


def test_the_heartbeats_of_a_full_mesh_take_half_of_the_room_at_most() -> None:
    remembered_s = (REQUEST_TTL_MS + CLOCK_SKEW_MS) / 1000
    assert MAX_MEMBERS * remembered_s / HEARTBEAT_S <= MAX_OPEN_REQUESTS / 2


def test_signers_who_take_all_they_can_get_leave_room_for_others() -> None:
    guard = ReplayGuard(max_entries=640, max_per_signer=40)
    envelope = opened(sealed())
    for number in range(16):  # as many as would fill it, were there no more to it than the bound for each
        with suppress(Overloaded):
            for sequence in range(41):
                guard.check(replace(envelope, signer=PeerId(f"greedy {number}"), sequence=sequence), NOW)
    for sequence in range(10):
        guard.check(replace(envelope, signer=EVE.peer_id, sequence=sequence), NOW)


def test_one_signer_cannot_take_the_room_of_another() -> None:
    guard = ReplayGuard(max_entries=10, max_per_signer=2)
    for sequence in range(2):
        guard.check(opened(sealed(sequence=sequence)), NOW)
    with pytest.raises(Overloaded):
        guard.check(opened(sealed(sequence=2)), NOW)
    guard.check(open_envelope(sealed(EVE, sequence=0), "request", now_ms=NOW, audience=BOB.peer_id), NOW)
    after = NOW + REQUEST_TTL_MS + CLOCK_SKEW_MS
    guard.check(opened(sealed(sequence=3, now_ms=after), now_ms=after), after)


# ---- Sequences ----


@given(st.lists(st.integers(0, 2**45), min_size=1, max_size=20), st.integers(0, 2**60))
def test_sequences_rise_whatever_the_clock_does(clock: list[int], floor: int) -> None:
    sequencer = ClockSequencer(floor)
    given_out = [sequencer.next("d", now_ms) for now_ms in clock]
    assert given_out == sorted(set(given_out))
    assert given_out[0] > floor
    assert sequencer.floor == given_out[-1]


def test_deregister_has_no_field_to_play_with() -> None:
    raw = seal(ALICE, "request", Deregister(), sequence=1, now_ms=NOW, audience=PeerId(BOB.peer_id))
    assert opened(raw).message(Deregister) == Deregister()
