"""One stream of a Yamux connection: its buffer, its windows, its ends. The state table is in ``yamux.py``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import trio

from tessella_p2p.base.errors import LocalProtocolError, RemoteProtocolError, StreamReset
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import KIB
from tessella_p2p.net.yamux_frames import (
    DATA,
    FIN,
    FRAMES_PER_SEND,
    HEADER,
    INITIAL_WINDOW_BYTES,
    MAX_FRAME_DATA_BYTES,
    RST,
    WINDOW_UPDATE,
    Buffer,
)

if TYPE_CHECKING:
    from tessella_p2p.net.yamux import YamuxConnection

SMALL_CHUNK_BYTES = 16 * KIB


class YamuxStream:
    """One stream; implements `net.network.Stream`."""

    def __init__(self, connection: YamuxConnection, stream_id: int) -> None:
        self._connection = connection
        self.stream_id = stream_id
        self._chunks: deque[memoryview | bytearray] = deque()
        self._head_offset = 0
        self._receive_window = INITIAL_WINDOW_BYTES
        self._consumed = 0
        self._send_window = INITIAL_WINDOW_BYTES
        self._eof_received = False
        self._eof_sent = False
        self._lingering = False
        self._broken: str | None = None
        self._readable: trio.Event | None = None
        self._writable: trio.Event | None = None
        self._taker: Callable[[memoryview], int] | None = None
        self.extra_window = 0

    @property
    def peer(self) -> PeerId:
        """Who is at the other end."""
        return self._connection.peer

    async def receive_some(self, max_bytes: int) -> bytes | bytearray | memoryview:
        """See `net.network.Stream`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._chunks:
            if self._lingering:
                self._raise_broken()
            if self._eof_received:
                return b""
            if self._broken is not None:
                self._raise_broken()
            if self._readable is not None:
                raise LocalProtocolError("two tasks receive from one stream")
            self._readable = trio.Event()
            try:
                await self._readable.wait()
            finally:
                self._readable = None
        return self._take(max_bytes)

    def _take(self, max_bytes: int) -> bytes | memoryview:
        """Bytes from the front of the buffer; from here to the caller nothing is awaited."""
        head = self._chunks[0]
        end = min(len(head), self._head_offset + max_bytes)
        part = head[self._head_offset : end]
        if end == len(head):
            self._chunks.popleft()
            self._head_offset = 0
        else:
            self._head_offset = end
        self._count_consumed(len(part))
        return part if isinstance(part, memoryview) else bytes(part)

    def _count_consumed(self, size_bytes: int) -> None:
        """Give back what was read, half a window at a time."""
        self._consumed += size_bytes
        if self._consumed >= (INITIAL_WINDOW_BYTES + self.extra_window) // 2 and not self._eof_received:
            self._receive_window += self._consumed
            self._connection.emit(WINDOW_UPDATE, 0, self.stream_id, self._consumed)
            self._consumed = 0

    def offer_to(self, taker: Callable[[memoryview], int] | None) -> None:
        """See `net.network.DirectStream`."""
        self._taker = taker

    def send_nowait(self, data: bytes | bytearray | memoryview) -> bool:
        """See `net.network.DirectStream`."""
        self._check_sendable()
        size_bytes = len(data)
        if size_bytes > min(self._send_window, FRAMES_PER_SEND * MAX_FRAME_DATA_BYTES) or self._connection.is_backed_up:
            return False
        with memoryview(data) as view:
            self._connection.put(
                [
                    b"".join((HEADER.pack(0, DATA, 0, self.stream_id, len(part)), part))
                    for part in (
                        view[at : at + MAX_FRAME_DATA_BYTES] for at in range(0, size_bytes, MAX_FRAME_DATA_BYTES)
                    )
                ]
            )
        self._send_window -= size_bytes
        return True

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `net.network.Stream`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        with memoryview(data) as source, source.cast("B") as view:
            sent = 0
            self._check_sendable()
            while sent < len(view):
                await self._credit()
                await self._connection.room_to_send()
                self._check_sendable()
                pieces: list[Buffer] = []
                while sent < len(view) and self._send_window and len(pieces) < FRAMES_PER_SEND:
                    size = min(len(view) - sent, self._send_window, MAX_FRAME_DATA_BYTES)
                    pieces.append(HEADER.pack(0, DATA, 0, self.stream_id, size) + view[sent : sent + size])
                    self._send_window -= size
                    sent += size
                self._connection.put(pieces)
                if sent < len(view):
                    await trio.lowlevel.checkpoint()

    async def _credit(self) -> None:
        self._check_sendable()
        while not self._send_window:
            if self._writable is not None:
                raise LocalProtocolError("two tasks send on one stream")
            self._writable = trio.Event()
            try:
                await self._writable.wait()
            finally:
                self._writable = None
            self._check_sendable()

    def _check_sendable(self) -> None:
        if self._broken is not None:
            self._raise_broken()
        if self._eof_sent:
            raise StreamReset(f"the stream to {self.peer} is closed for sending")

    def _raise_broken(self) -> NoReturn:
        raise StreamReset(f"the stream to {self.peer} is gone: {self._broken or 'closed here'}")

    async def send_eof(self) -> None:
        """See `net.network.Stream`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._broken is not None:
            self._raise_broken()
        self._send_fin()

    def _send_fin(self) -> None:
        if self._eof_sent or self._broken is not None:
            return
        self._eof_sent = True
        self._connection.emit(DATA, FIN, self.stream_id)
        if self._writable is not None:
            self._writable.set()
        if self._eof_received:
            self._connection.forget(self)

    async def aclose(self) -> None:
        """See `net.network.Stream`. Bytes that were not read are dropped, and a peer that goes on sending is told by a reset."""
        self._send_fin()
        self._lingering = True
        if self._readable is not None:
            self._readable.set()
        if self._chunks:
            self._chunks.clear()
            self.reset_now("closed here with bytes unread")  # else a peer without credit would wait for ever
        elif not self._eof_received and self._broken is None:
            self._connection.linger(self)
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """See `net.network.Stream`."""
        self.reset_now("reset here")
        self._lingering = True  # whatever is buffered is not for reading any more
        self._chunks.clear()
        await trio.lowlevel.checkpoint()

    def reset_now(self, reason: str) -> None:
        """Break the stream and tell the peer."""
        if self._broken is not None or (self._eof_sent and self._eof_received):
            return
        self._connection.emit(DATA, RST, self.stream_id)
        self._connection.forget(self)
        self.break_off(reason)

    # Called by the connection.

    def break_off(self, reason: str) -> None:
        """The stream is over; whoever waits is told. What the peer had finished sending can still be read."""
        if self._broken is None:
            self._broken = reason
        if not self._eof_received:
            self._chunks.clear()
        for event in (self._readable, self._writable):
            if event is not None:
                event.set()

    def announce(self, length: int) -> None:
        """A DATA frame of ``length`` bytes begins.

        Raises:
            RemoteProtocolError: it overruns the window, or follows the peer's own FIN.
        """
        if self._eof_received and length:
            raise RemoteProtocolError("data after the end of a stream")
        if length > self._receive_window:
            raise RemoteProtocolError(f"{length} bytes overrun the receive window of {self._receive_window}")
        self._receive_window -= length

    def deliver(self, piece: memoryview) -> None:
        """Bytes of an announced frame arrived."""
        if self._lingering:
            self.reset_now("closed here, and the peer went on sending")
        if self._broken is not None:
            return
        if self._taker is not None and not self._chunks:
            taken = self._taker(piece)
            self._count_consumed(taken)
            if taken == len(piece):
                return
            piece = piece[taken:]
            if self._broken is not None:  # what the taker did with the first part ended the stream
                return
        if len(piece) >= SMALL_CHUNK_BYTES:
            self._chunks.append(piece)
        else:
            # Small pieces are copied together: kept as they are, each would pin the whole packet it came in.
            last = self._chunks[-1] if self._chunks else None
            if isinstance(last, bytearray) and len(last) < SMALL_CHUNK_BYTES:
                last += piece
            else:
                self._chunks.append(bytearray(piece))
        if self._readable is not None:
            self._readable.set()

    def end_received(self) -> None:
        """The peer sent FIN."""
        self._eof_received = True
        if self._readable is not None:
            self._readable.set()
        if self._eof_sent:
            self._connection.forget(self)

    def add_credit(self, length: int) -> None:
        """The peer granted ``length`` more bytes.

        Raises:
            RemoteProtocolError: credit beyond 2³² − 1.
        """
        if self._send_window + length > 0xFFFF_FFFF:
            raise RemoteProtocolError("a window beyond 2^32 - 1 bytes")
        self._send_window += length
        if self._writable is not None and self._send_window:
            self._writable.set()

    def grant_extra(self, size_bytes: int) -> None:
        """Widen the receive window; the connection tells the peer."""
        self.extra_window = size_bytes
        self._receive_window += size_bytes
