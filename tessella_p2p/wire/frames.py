"""Bulk frames: a fixed binary header and raw bytes, inside the authenticated channel of a hop or token stream.

    offset size field
         0    1 version (1)
         1    1 kind
         2    1 dtype of the tensor
         3    1 flags
         4   16 session
        20    4 epoch
        24    4 step
        28    4 position of the first row
        32    4 rows
        36    4 trace entries × 16 bytes, before the tensor
        40    4 payload length (trace + body)
        44    4 CRC-32 of the payload

All numbers are big-endian; tensor bytes are little-endian, row-major ``[rows, width]``. The parser does no I/O: a shell reads
`HEADER_BYTES`, calls `parse_header`, which has checked every bound before a payload is allocated, then reads the payload and
calls `parse_payload`.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from tessella_p2p.base.errors import InvalidStep, MalformedMessage, VersionMismatch
from tessella_p2p.base.ids import SessionId
from tessella_p2p.base.limits import KIB, MAX_EPOCHS, MAX_HOP_BYTES, MAX_POSITIONS, MAX_STAGES

VERSION = 1
_HEADER = struct.Struct(">BBBB16sIIIIIII")
HEADER_BYTES = _HEADER.size
_TRACE = struct.Struct(">IIII")
TRACE_ENTRY_BYTES = _TRACE.size
MAX_CONTROL_BYTES = 192 * KIB
_MAX_STEP = 1 << 31


class Kind(IntEnum):
    """What a frame is."""

    OPEN = 1
    """Downstream: payload `OpenFrame`. Opens (session, epoch)."""
    STEP = 2
    """Downstream: token ids (to the head) or hidden states."""
    CLOSE = 3
    """Downstream: the session is over; free its KV, write the proof."""
    RECEIPT = 4
    """Upstream: an envelope of domain receipt, for what was received so far."""
    ERROR = 5
    """Upstream: payload `ErrorBody`. The (session, epoch) is over here and below."""
    TOKEN = 6
    """Token stream, tail → entry: one u32 token id for ``position``."""


class DType(IntEnum):
    """Element type of a body."""

    NONE = 0
    U32 = 1
    F32 = 2
    BF16 = 3
    F16 = 4

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return (0, 4, 4, 2, 2)[self]


class Flag(IntFlag):
    """Flags of a frame."""

    NONE = 0
    SAMPLE = 1
    """STEP: the tail samples after this step's last row."""


# An enum's own look-up costs as much as everything else about a header.
_KINDS = {int(kind): kind for kind in Kind}
_DTYPES = {int(dtype): dtype for dtype in DType}
_FLAGS = {int(flag): flag for flag in (Flag.NONE, Flag.SAMPLE)}


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """What one stage says of one step: microseconds of waiting, of computing, and from frame received to frame sent.

    ``cached_positions`` are those of the session so far that its prefix cache served.
    """

    queue_us: int
    compute_us: int
    total_us: int
    cached_positions: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header; every field is within its bound."""

    kind: Kind
    dtype: DType
    flags: Flag
    session: SessionId
    epoch: int
    step: int
    position: int
    rows: int
    trace_entries: int
    payload_bytes: int
    checksum: int

    @property
    def body_bytes(self) -> int:
        """What of the payload is body."""
        return self.payload_bytes - self.trace_entries * _TRACE.size


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. ``body`` holds ``rows × width`` elements of ``dtype``, or a control payload when dtype is NONE."""

    kind: Kind
    session: SessionId
    epoch: int
    step: int = 0
    position: int = 0
    rows: int = 0
    dtype: DType = DType.NONE
    flags: Flag = Flag.NONE
    trace: tuple[TraceEntry, ...] = ()
    body: bytes | bytearray | memoryview = b""


def encode_frame(frame: Frame) -> bytes:
    """The bytes of a frame.

    Raises:
        struct.error: a field that does not fit is our own bug.
    """
    trace = b"".join(
        _TRACE.pack(*(min(value, 0xFFFFFFFF) for value in (e.queue_us, e.compute_us, e.total_us, e.cached_positions)))
        for e in frame.trace
    )
    checksum = zlib.crc32(frame.body, zlib.crc32(trace))
    header = _HEADER.pack(
        VERSION,
        frame.kind,
        frame.dtype,
        frame.flags,
        frame.session,
        frame.epoch,
        frame.step,
        frame.position,
        frame.rows,
        len(frame.trace),
        len(trace) + len(frame.body),
        checksum,
    )
    return b"".join((header, trace, frame.body))


def parse_header(data: bytes | bytearray | memoryview) -> Header:
    """The header in ``data`` (exactly `HEADER_BYTES`).

    Raises:
        VersionMismatch: another version of the framing.
        MalformedMessage: an unknown kind, dtype or flag, or a field out of bounds.
    """
    if len(data) != HEADER_BYTES:
        raise MalformedMessage(f"a frame header of {len(data)} bytes; {HEADER_BYTES} are expected")
    version, kind, dtype, flags, session, epoch, step, position, rows, entries, length, checksum = _HEADER.unpack(data)
    if version != VERSION:
        raise VersionMismatch(f"frame version {version}; this node speaks version {VERSION}")
    parsed_kind, parsed_dtype, parsed_flags = _KINDS.get(kind), _DTYPES.get(dtype), _FLAGS.get(flags)
    if parsed_kind is None or parsed_dtype is None:
        raise MalformedMessage(f"unknown frame kind {kind} or dtype {dtype}")
    if parsed_flags is None:
        raise MalformedMessage(f"unknown frame flags {flags:#x}")
    if epoch >= MAX_EPOCHS or step >= _MAX_STEP or position + rows > MAX_POSITIONS or entries > MAX_STAGES:
        raise MalformedMessage("a frame field is out of bounds")
    body_bytes = length - entries * _TRACE.size
    is_tensor = parsed_kind in (Kind.STEP, Kind.TOKEN)
    if body_bytes < 0 or body_bytes > (MAX_HOP_BYTES if is_tensor else MAX_CONTROL_BYTES):
        raise MalformedMessage(f"a frame body of {body_bytes} bytes is out of bounds")
    if is_tensor != (parsed_dtype is not DType.NONE):
        raise MalformedMessage(f"a {parsed_kind.name} frame with dtype {parsed_dtype.name}")
    if is_tensor and (rows == 0 or body_bytes == 0 or body_bytes % (rows * parsed_dtype.size)):
        raise MalformedMessage(f"{body_bytes} bytes are no {rows} rows of {parsed_dtype.name}")
    return Header(
        parsed_kind,
        parsed_dtype,
        parsed_flags,
        SessionId(session),
        epoch,
        step,
        position,
        rows,
        entries,
        length,
        checksum,
    )


def parse_payload(header: Header, payload: bytes | bytearray | memoryview) -> Frame:
    """The frame of ``header`` whose payload is ``payload``; the body is a view into it, not a copy.

    Raises:
        MalformedMessage: when the payload has another length than its header says.
        InvalidStep: when the checksum is not the payload's.
    """
    if len(payload) != header.payload_bytes:
        raise MalformedMessage("the payload has another length than its header says")
    if zlib.crc32(payload) != header.checksum:
        raise InvalidStep(f"checksum mismatch in a {header.kind.name} frame")
    view = memoryview(payload)
    cut = header.trace_entries * _TRACE.size
    trace = tuple(TraceEntry(*_TRACE.unpack_from(view, i)) for i in range(0, cut, _TRACE.size))
    return Frame(
        header.kind,
        header.session,
        header.epoch,
        header.step,
        header.position,
        header.rows,
        header.dtype,
        header.flags,
        trace,
        view[cut:],
    )
