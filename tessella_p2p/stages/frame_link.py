"""Whole frames over one stream, both ways (shell): hop streams and token streams alike.

Reading never waits for a session: a handler is asked about each header before its payload is read, takes a frame without blocking,
and what it does not want is read past, never stored. Writing has two lanes. Rows and tokens wait their turn, within bounds; receipts,
errors and closes are small, overtake them and never wait. A peer that takes nothing for too long loses the link.

On a `net.network.DirectStream` no task comes in between as long as nothing waits: a frame leaves within `FrameLink.send`, and one that
arrived whole reaches its handler from within the muxer. Everything else takes the long way, in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import trio

from tessella_p2p.base.errors import HopTimeout, InvalidStep, StreamReset
from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.base.limits import HOP_TIMEOUT_S, KIB, MAX_QUEUED_BYTES, MAX_QUEUED_CONTROL, MAX_QUEUED_FRAMES
from tessella_p2p.net.network import DirectStream, Stream
from tessella_p2p.wire.frames import HEADER_BYTES, Frame, Header, Kind, encode_frame, parse_header, parse_payload

_PIECE_BYTES = 256 * KIB
_JOIN_BYTES = 64 * KIB
_CLOSE_S = 1.0
_COPIED_BYTES = 16 * KIB
"""A shorter payload is copied out of the packet it came in, which it would keep in memory otherwise."""
_FRAMES_IN_A_ROW = 16
"""Then other tasks have their turn, however much a peer sent at once."""

LinkKey = tuple[SessionId, int]
"""(session, epoch)."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A frame without its payload: it was not wanted, or (``damaged``) its checksum was wrong."""

    header: Header
    damaged: bool


class FrameHandler(Protocol):
    """What a link does with what arrives. No method may block; a `TessellaError` out of any of them ends the link."""

    def wants(self, header: Header) -> bool:
        """Whether the payload is to be read. Nothing of it is allocated yet."""
        ...

    def take(self, frame: Frame) -> None:
        """A wanted frame."""
        ...

    def skipped(self, unread: Unread) -> None:
        """A frame that was not wanted, or came damaged."""
        ...


class FrameReader:
    """Frames out of a stream. Cancelling `receive` loses nothing.

    Args:
        stream: what is read.
        wants: asked once for each header.
    """

    def __init__(self, stream: Stream, wants: Callable[[Header], bool]) -> None:
        self._stream = stream
        self._wants = wants
        self._buffer = bytearray()
        self._header: Header | None = None
        self._left_to_skip = 0
        self._is_wanted = True
        self._frames_in_a_row = 0

    async def receive(self) -> Frame | Unread | None:
        """The next frame, or None at an end of the stream between two frames.

        Raises:
            MalformedMessage, VersionMismatch: the peer broke the framing; reset the stream.
            StreamReset: the stream broke, or ended inside a frame.
            TessellaError: whatever ``wants`` raised.
        """
        self._frames_in_a_row += 1
        if self._frames_in_a_row < _FRAMES_IN_A_ROW:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            self._frames_in_a_row = 0
            await trio.lowlevel.checkpoint()
        if self._header is None:
            while len(self._buffer) < HEADER_BYTES:
                if not await self._read_more():
                    return None
            self._header = header = parse_header(self._take(HEADER_BYTES))
            self._is_wanted = self._wants(header)
            self._left_to_skip = 0 if self._is_wanted else header.payload_bytes
        else:
            header = self._header
        while not self._skip() or (self._is_wanted and len(self._buffer) < header.payload_bytes):
            if not await self._read_more():
                raise StreamReset(f"the stream of {self._stream.peer} ended inside a frame")
        self._header = None
        if not self._is_wanted:
            return Unread(header, damaged=False)
        return self._parse(header, self._take(header.payload_bytes))

    def offer(self, piece: memoryview, handle: Callable[[Frame | Unread], None]) -> int:
        """Hand on the whole frames at the front of ``piece``, unless something came before them that is not handed on yet.

        A long frame's body is a view into ``piece``. At most `_FRAMES_IN_A_ROW` are handed on.

        Returns:
            how many bytes that were; the rest is for `receive`.

        Raises:
            as `receive`, and whatever ``handle`` raises.
        """
        if self._header is not None or self._buffer:
            return 0
        taken = 0
        for _ in range(_FRAMES_IN_A_ROW):
            begin = taken + HEADER_BYTES
            if len(piece) < begin:
                break
            header = parse_header(piece[taken:begin])
            end = begin + header.payload_bytes
            if len(piece) < end:
                break
            taken = end
            if self._wants(header):
                payload = piece[begin:end]
                handle(self._parse(header, payload if len(payload) > _COPIED_BYTES else bytes(payload)))
            else:
                handle(Unread(header, damaged=False))
        return taken

    @staticmethod
    def _parse(header: Header, payload: bytes | memoryview) -> Frame | Unread:
        try:
            return parse_payload(header, payload)
        except InvalidStep:
            return Unread(header, damaged=True)

    def _take(self, size_bytes: int) -> bytes:
        taken = bytes(memoryview(self._buffer)[:size_bytes])
        del self._buffer[:size_bytes]
        return taken

    def _skip(self) -> bool:
        """Drop what is to be skipped; True when nothing of it is left to come."""
        if self._left_to_skip:
            size_bytes = min(self._left_to_skip, len(self._buffer))
            del self._buffer[:size_bytes]
            self._left_to_skip -= size_bytes
        return not self._left_to_skip

    async def _read_more(self) -> bool:
        part = await self._stream.receive_some(_PIECE_BYTES)
        if not part:
            if self._buffer:
                raise StreamReset(f"the stream of {self._stream.peer} ended inside a frame")
            return False
        self._buffer += part
        return True


class FrameLink:
    """Both directions of one stream: `run` it in a nursery, send from any task.

    Args:
        stream: the link owns it from now on.
        stall_s: a peer that takes nothing for so long loses the link.
    """

    def __init__(self, stream: Stream, stall_s: float = HOP_TIMEOUT_S) -> None:
        self._stream = stream
        self._direct = stream if isinstance(stream, DirectStream) else None
        self._stall_s = stall_s
        self._bulk: deque[tuple[LinkKey, Kind, bytes]] = deque()
        self._bulk_bytes = 0
        self._control: deque[bytes] = deque()
        self._room = trio.lowlevel.ParkingLot()
        self._news = trio.Event()
        self._scope = trio.CancelScope()
        self._failure: Exception | None = None
        self._ending = False
        self._can_send_directly = False  # the writer is at rest
        self.lost = False

    @property
    def peer(self) -> PeerId:
        """Who is at the other end."""
        return self._stream.peer

    # ---- running ----

    async def run(self, handler: FrameHandler) -> None:
        """Move frames until either side ends the stream or it breaks; then the link is lost for good. Cancelled, it is reset.

        Raises:
            RemoteProtocolError, RefusalError: the peer broke a rule, or the handler had enough of it.
            StreamReset: the stream broke.
            HopTimeout: the peer took nothing for too long.
        """
        has_ended = False
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._until_over, self._write)
                    await self._until_over(lambda: self._read(handler))
            has_ended = self._failure is None
        finally:
            self.lost = True
            if self._direct is not None:
                self._direct.offer_to(None)
            self._bulk.clear()
            self._control.clear()
            self._room.unpark_all()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_S):
                await (self._stream.aclose() if has_ended else self._stream.reset())
        if self._failure is not None:
            raise self._failure

    async def _until_over(self, half: Callable[[], Awaitable[None]]) -> None:
        try:
            await half()
        except Exception as error:  # noqa: BLE001 - our caller gets it as it is, not in the nursery's group
            self._failure = self._failure or error
        self._scope.cancel()

    async def _read(self, handler: FrameHandler) -> None:
        reader = FrameReader(self._stream, handler.wants)

        def handle(item: Frame | Unread) -> None:
            if isinstance(item, Frame):
                handler.take(item)
            else:
                handler.skipped(item)

        def take(piece: memoryview) -> int:
            if self._scope.cancel_called:
                return 0
            try:
                return reader.offer(piece, handle)
            except Exception as error:  # noqa: BLE001 - as in `_until_over`; the muxer's other streams have no part in it
                self.abort(error)
                return 0

        if self._direct is not None:
            self._direct.offer_to(take)
        while (item := await reader.receive()) is not None:
            handle(item)

    async def _write(self) -> None:
        while True:
            data = self._next_batch()
            if not data and self._ending:
                return
            if not data:
                self._can_send_directly = self._direct is not None
                await self._news.wait()
                self._can_send_directly = False
                self._news = trio.Event()
                continue
            view = memoryview(data)
            for start in range(0, len(view), _PIECE_BYTES):
                with trio.move_on_after(self._stall_s) as patience:
                    await self._stream.send_all(view[start : start + _PIECE_BYTES])
                if patience.cancelled_caught:
                    raise HopTimeout(f"{self.peer} took nothing for {self._stall_s:g} s")

    def _next_batch(self) -> bytes:
        """Frames that leave in one send; empty when none wait."""
        parts: list[bytes] = []
        size_bytes = 0
        while size_bytes < _JOIN_BYTES:
            if self._control:
                part = self._control.popleft()
            elif self._bulk:
                part = self._bulk.popleft()[2]
                self._bulk_bytes -= len(part)
                self._room.unpark()
            else:
                break
            parts.append(part)
            size_bytes += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def abort(self, reason: Exception) -> None:
        """Reset the stream; `run` raises ``reason``."""
        self._failure = self._failure or reason
        self._scope.cancel()

    def end(self) -> None:
        """Send what waits, then close the stream; `run` returns."""
        self._ending = True
        self._news.set()

    # ---- sending ----

    async def send(self, frame: Frame, timeout_s: float) -> None:
        """Queue a frame of rows, a token or an open; waits while too much waits already. Cancelled, it is not sent.

        Raises:
            StreamReset: the link is lost.
            HopTimeout: there was no room for ``timeout_s``.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        data = encode_frame(frame)
        if self._sent_directly(data):
            return
        if not self._has_room(len(data)):
            with trio.move_on_after(timeout_s) as patience:
                while not self._has_room(len(data)):
                    await self._room.park()
            if patience.cancelled_caught:
                raise HopTimeout(f"{self.peer} took no frame for {timeout_s:g} s")
        if self._is_over():
            raise StreamReset(f"the stream to {self.peer} is gone")
        self._queue(frame, data)

    def send_nowait(self, frame: Frame, data: bytes) -> bool:
        """`send`, if that waits for nothing; False when it would, or when the link is lost. ``data`` is the frame, encoded already."""
        if self._sent_directly(data):
            return True
        if self._is_over() or not self._has_room(len(data)):
            return False
        self._queue(frame, data)
        return True

    def _sent_directly(self, data: bytes) -> bool:
        """Whether ``data`` could leave at once; frames that wait go first."""
        if not self._can_send_directly or self._bulk or self._control or self._is_over():
            return False
        assert self._direct is not None
        try:
            return self._direct.send_nowait(data)
        except StreamReset as error:
            self.abort(error)
            return False

    def _queue(self, frame: Frame, data: bytes) -> None:
        self._bulk.append(((frame.session, frame.epoch), frame.kind, data))
        self._bulk_bytes += len(data)
        self._news.set()

    def _is_over(self) -> bool:
        return self.lost or self._ending or self._scope.cancel_called

    def _has_room(self, size_bytes: int) -> bool:
        if not self._bulk or self._is_over():
            return True
        return len(self._bulk) < MAX_QUEUED_FRAMES and self._bulk_bytes + size_bytes <= MAX_QUEUED_BYTES

    def post(self, frame: Frame) -> bool:
        """Queue a receipt, an error or a close, ahead of everything else; False when the link is lost."""
        if self._is_over():
            return False
        data = encode_frame(frame)
        if self._sent_directly(data):
            return True
        if self._is_over():
            return False
        if len(self._control) >= MAX_QUEUED_CONTROL:
            self.abort(HopTimeout(f"{self.peer} reads nothing: {len(self._control)} receipts and errors wait"))
            return False
        self._control.append(data)
        self._news.set()
        return True

    def close_session(self, key: LinkKey) -> None:
        """Send nothing more of (session, epoch): what waits of it is dropped, and CLOSE goes ahead of everything else."""
        dropped = [item for item in self._bulk if item[0] == key]
        if dropped:
            self._bulk = deque(item for item in self._bulk if item[0] != key)
            self._bulk_bytes -= sum(len(item[2]) for item in dropped)
            self._room.unpark_all()
        if not any(
            kind is Kind.OPEN for _, kind, _ in dropped
        ):  # a CLOSE must not arrive before its OPEN, nor without one
            self.post(Frame(Kind.CLOSE, *key))
