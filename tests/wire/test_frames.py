"""Bulk frames: any bytes give a frame or a typed error, and every bound is checked before a payload is allocated."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import InvalidStep, MalformedMessage, RemoteProtocolError, VersionMismatch
from tessella_p2p.base.ids import SessionId
from tessella_p2p.base.limits import MAX_EPOCHS, MAX_HOP_BYTES, MAX_POSITIONS, MAX_STAGES
from tessella_p2p.wire.frames import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    DType,
    Flag,
    Frame,
    Kind,
    TraceEntry,
    encode_frame,
    parse_header,
    parse_payload,
)

U32 = st.integers(0, 2**32 - 1)
TRACES = st.lists(st.builds(TraceEntry, U32, U32, U32, U32), max_size=4).map(tuple)
SESSIONS = st.binary(min_size=16, max_size=16).map(SessionId)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(Kind))
    is_tensor = kind in (Kind.STEP, Kind.TOKEN)
    dtype = draw(st.sampled_from([d for d in DType if d is not DType.NONE])) if is_tensor else DType.NONE
    rows = draw(st.integers(1, 5)) if is_tensor else 0
    size = rows * draw(st.integers(1, 5)) * dtype.size if is_tensor else draw(st.integers(0, 100))
    return Frame(
        kind=kind,
        session=draw(SESSIONS),
        epoch=draw(st.integers(0, MAX_EPOCHS - 1)),
        step=draw(st.integers(0, 2**31 - 1)),
        position=draw(st.integers(0, MAX_POSITIONS - rows)),
        rows=rows,
        dtype=dtype,
        flags=draw(st.sampled_from([Flag.NONE, Flag.SAMPLE])),
        trace=draw(TRACES),
        body=draw(st.binary(min_size=size, max_size=size)),
    )


def parse(data: bytes) -> Frame:
    return parse_payload(parse_header(data[:HEADER_BYTES]), data[HEADER_BYTES:])


@given(frames())
@settings(max_examples=100, deadline=None)
def test_a_frame_parses_as_it_was(frame: Frame) -> None:
    assert parse(encode_frame(frame)) == frame


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES + 100) | st.binary(max_size=HEADER_BYTES - 1))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_frame_or_a_typed_error(data: bytes) -> None:
    try:
        frame = parse(data)
    except RemoteProtocolError:
        return
    assert encode_frame(frame) == data


@given(frames(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_frame_is_another_frame_or_a_typed_error(frame: Frame, data: st.DataObject) -> None:
    raw = bytearray(encode_frame(frame))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        again = parse(bytes(raw))
    except RemoteProtocolError:
        return
    assert encode_frame(again) == raw


STEP = Frame(Kind.STEP, SessionId(bytes(16)), epoch=3, step=4, position=5, rows=2, dtype=DType.F32, body=bytes(16))


def header(**change: int | bytes) -> bytes:
    """The header of `STEP` with other fields."""
    names = (
        "version",
        "kind",
        "dtype",
        "flags",
        "session",
        "epoch",
        "step",
        "position",
        "rows",
        "trace",
        "length",
        "checksum",
    )
    layout = struct.Struct(">BBBB16sIIIIIII")
    fields = dict(zip(names, layout.unpack(encode_frame(STEP)[:HEADER_BYTES]), strict=True))
    return layout.pack(*(fields | change).values())


def test_the_unchanged_header_parses() -> None:
    parsed = parse_header(header())
    assert (parsed.kind, parsed.rows, parsed.payload_bytes) == (Kind.STEP, 2, 16)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": 0},
        {"kind": 7},
        {"dtype": 5},
        {"dtype": 0},  # a tensor without a type
        {"flags": 2},
        {"epoch": MAX_EPOCHS},
        {"step": 1 << 31},
        {"position": MAX_POSITIONS},
        {"position": MAX_POSITIONS - 1},
        {"position": 2**32 - 1, "rows": 2**32 - 1},
        {"rows": 0},
        {"rows": 3},
        {"trace": MAX_STAGES + 1},
        {"trace": 2},  # more than the payload holds
        {"length": 0},
        {"length": 15},
        {"length": MAX_HOP_BYTES + 8},
        {"length": 2**32 - 8},
        {"kind": Kind.OPEN},  # a control frame with a type
        {"kind": Kind.OPEN, "dtype": 0, "length": MAX_CONTROL_BYTES + 1},
    ],
    ids=str,
)
def test_a_field_out_of_bounds_is_refused_before_the_payload_is_read(change: dict[str, int]) -> None:
    with pytest.raises(MalformedMessage):
        parse_header(header(**change))


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_names_both(version: int) -> None:
    with pytest.raises(VersionMismatch, match=rf"{version}.*version 1"):
        parse_header(header(version=version))


def test_the_longest_hop_is_accepted() -> None:
    assert parse_header(header(length=MAX_HOP_BYTES)).payload_bytes == MAX_HOP_BYTES


@pytest.mark.parametrize("size", [0, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_a_header_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(MalformedMessage):
        parse_header(bytes(size))


def test_a_payload_that_is_not_the_headers_is_refused() -> None:
    parsed = parse_header(header())
    with pytest.raises(InvalidStep, match="checksum"):
        parse_payload(parsed, bytes(15) + b"\1")
    with pytest.raises(MalformedMessage):
        parse_payload(parsed, bytes(17))


def test_the_body_is_a_view_of_the_payload_behind_the_trace() -> None:
    frame = Frame(STEP.kind, STEP.session, epoch=0, rows=1, dtype=DType.U32, trace=(TraceEntry(1, 2, 3),), body=b"abcd")
    payload = bytearray(encode_frame(frame)[HEADER_BYTES:])
    parsed = parse_payload(parse_header(encode_frame(frame)[:HEADER_BYTES]), payload)
    assert isinstance(parsed.body, memoryview)
    assert parsed.body.obj is payload
    assert bytes(parsed.body) == b"abcd"


def test_times_that_do_not_fit_are_capped_not_wrapped() -> None:
    frame = Frame(
        STEP.kind, STEP.session, epoch=0, rows=1, dtype=DType.U32, trace=(TraceEntry(2**40, 1, 2),), body=b"abcd"
    )
    assert parse(encode_frame(frame)).trace == (TraceEntry(2**32 - 1, 1, 2),)


def test_the_checksum_is_crc_32_over_trace_and_body() -> None:
    data = encode_frame(STEP)
    assert int.from_bytes(data[44:48], "big") == zlib.crc32(data[HEADER_BYTES:])
