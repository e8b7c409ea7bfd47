"""Frames of ``/yamux/1.0.0``: 12 bytes of header (version, type, flags, stream, length) and, for DATA, ``length`` bytes. No I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tessella_p2p.base.errors import RemoteProtocolError
from tessella_p2p.base.limits import KIB

Buffer = bytes | bytearray | memoryview

PROTOCOL_ID = "/yamux/1.0.0"
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
INITIAL_WINDOW_BYTES = 256 * KIB
MAX_FRAME_DATA_BYTES = 65_535 - 16 - 12
"""One frame with its header fills one Noise packet."""
FRAMES_PER_SEND = 8
HEADER = struct.Struct("!BBHII")


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The header of a frame; DATA with ``length`` > 0 is followed by its bytes in one or more pieces."""

    kind: int
    flags: int
    stream_id: int
    length: int


class FrameParser:
    """Cuts the bytes of a connection into headers and pieces of data; no I/O."""

    def __init__(self) -> None:
        self._partial = bytearray()
        self._data_left = 0

    @property
    def is_inside_a_frame(self) -> bool:
        """Whether the next byte belongs to a frame that has begun."""
        return bool(self._data_left or self._partial)

    def feed(self, packet: Buffer) -> Iterator[FrameHeader | memoryview]:
        """Headers, and after a DATA header the pieces that add up to its length.

        Raises:
            RemoteProtocolError: another version, or an unknown type.
        """
        view = memoryview(packet)
        while view:
            if self._data_left:
                piece = view[: self._data_left]
                view = view[len(piece) :]
                self._data_left -= len(piece)
                yield piece
                continue
            missing = HEADER.size - len(self._partial)
            self._partial += view[:missing]
            view = view[missing:]
            if len(self._partial) == HEADER.size:
                version, kind, flags, stream_id, length = HEADER.unpack(self._partial)
                self._partial.clear()
                if version != 0 or kind > GO_AWAY:
                    raise RemoteProtocolError(f"no yamux frame (version {version}, type {kind})")
                if kind == DATA:
                    self._data_left = length
                yield FrameHeader(kind, flags, stream_id, length)


class PacketChannel(Protocol):
    """What the muxer needs of the encrypted session below."""

    def seal(self, pieces: Sequence[Buffer]) -> bytearray:
        """Encrypt pieces, each into a packet; the result must be sent in order."""
        ...

    def write_nowait(self, wire: Buffer) -> int:
        """How much the socket took without waiting."""
        ...

    async def write_all(self, wire: Buffer) -> None:
        """Send it all."""
        ...

    async def receive_packet(self) -> bytes:
        """The next packet's plaintext."""
        ...

    async def close(self) -> None:
        """Close the socket."""
        ...
