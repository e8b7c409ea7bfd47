"""``/yamux/1.0.0``: many streams on one encrypted connection.

Wire: https://github.com/hashicorp/yamux/blob/master/spec.md. A frame is 12 bytes of header (version, type, flags, stream, length) and,
for DATA, ``length`` bytes. This side writes one frame into one Noise packet, so the other side decrypts once for each frame.

    stream, as one side sees it            sends                    receives
    ───────────────────────────            ─────                    ────────
    open                                   DATA, WINDOW_UPDATE      DATA, WINDOW_UPDATE
      send_eof() → half closed             FIN, WINDOW_UPDATE       DATA, WINDOW_UPDATE
      FIN received → reads give the end    DATA                     WINDOW_UPDATE
      both → forgotten                     –                        –
      aclose() → lingering                 FIN                      DATA is answered with RST
      reset(), RST received, connection    RST                      ignored
        lost → broken

Rules that py-libp2p's muxer does not keep and this one does: the receive window is enforced; a sender without credit waits (the caller
owns the deadline); nothing is awaited between taking bytes from a buffer and giving them to the caller, or between sealing a frame
and handing it to the socket, so a cancelled call neither loses bytes nor cuts a frame; every queue has a bound in ``base/limits.py``;
whatever a peer sends gives a value or a `RemoteProtocolError` that ends this connection and no other.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from itertools import islice

import structlog
import trio

from tessella_p2p.base.errors import Overloaded, RemoteProtocolError, StreamReset, TessellaError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    CLOSE_TIMEOUT_S,
    CONNECTION_EXTRA_WINDOW_BYTES,
    MAX_STREAMS_PER_DIRECTION,
    MAX_UNSENT_BYTES,
    MAX_UNSENT_CONTROL_BYTES,
    STREAM_WINDOW_BYTES,
)
from tessella_p2p.net.corking import hold_back
from tessella_p2p.net.yamux_frames import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    INITIAL_WINDOW_BYTES,
    MAX_FRAME_DATA_BYTES,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    Buffer,
    FrameHeader,
    FrameParser,
    PacketChannel,
)
from tessella_p2p.net.yamux_stream import YamuxStream

log = structlog.get_logger(__name__)


class YamuxConnection:
    """All streams to one peer on one encrypted connection.

    Args:
        channel: the encrypted session; owned and closed by this object.
        peer: who is at its other end.
        is_initiator: whether this side dialled; it gets the odd stream ids.
    """

    def __init__(self, channel: PacketChannel, peer: PeerId, *, is_initiator: bool) -> None:
        self.peer = peer
        self.is_initiator = is_initiator
        self.closed = trio.Event()
        """Set when the connection is over; every stream is broken by then."""
        self.reason = ""
        self._channel = channel
        self._parser = FrameParser()
        self._receiving: YamuxStream | None = None
        self._header = FrameHeader(PING, 0, 0, 0)
        self._frame_left = 0
        self._streams: dict[int, YamuxStream] = {}
        self._lingering: OrderedDict[int, YamuxStream] = OrderedDict()
        self._next_id = 1 if is_initiator else 2
        self._last_remote_id = 0
        self._extra_left = CONNECTION_EXTRA_WINDOW_BYTES
        self._accept_send, self._accept_receive = trio.open_memory_channel[YamuxStream](MAX_STREAMS_PER_DIRECTION)
        self._corked: list[Buffer] = []  # frames that leave at the end of a `corked` block
        self._unsent: deque[Buffer] = deque()  # sealed; the first one may be on its way
        self._unsent_bytes = 0
        self._unsent_control_bytes = 0
        self._to_write = trio.Event()
        self._drained: trio.Event | None = None
        self._scope = trio.CancelScope()

    # ---- Streams

    def open_stream(self) -> YamuxStream:
        """A new stream; usable at once.

        Raises:
            StreamReset: the connection is gone.
            Overloaded: `MAX_STREAMS_PER_DIRECTION` are open.
        """
        self._check_open()
        if self._count(own=True) >= MAX_STREAMS_PER_DIRECTION:
            raise Overloaded(
                f"{MAX_STREAMS_PER_DIRECTION} streams to {self.peer} are open; reuse streams or close some"
            )
        stream = YamuxStream(self, self._next_id)
        self._next_id += 2
        self._streams[stream.stream_id] = stream
        self._introduce(stream, SYN)
        return stream

    async def accept_stream(self) -> YamuxStream:
        """The next stream that the peer opened.

        Raises:
            StreamReset: the connection is gone.
        """
        try:
            return await self._accept_receive.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError) as error:
            raise StreamReset(f"the connection to {self.peer} is gone: {self.reason}") from error

    @property
    def num_streams(self) -> int:
        """Open streams of both directions, lingering ones included."""
        return len(self._streams)

    def _count(self, *, own: bool) -> int:
        return sum(
            1 for sid in self._streams if (sid % 2 == 1) == (self.is_initiator == own) and sid not in self._lingering
        )

    def _introduce(self, stream: YamuxStream, flag: int) -> None:
        extra = min(STREAM_WINDOW_BYTES - INITIAL_WINDOW_BYTES, self._extra_left)
        self._extra_left -= extra
        stream.grant_extra(extra)
        self.emit(WINDOW_UPDATE, flag, stream.stream_id, extra)

    def forget(self, stream: YamuxStream) -> None:
        """Both ends are done with the stream."""
        if self._streams.pop(stream.stream_id, None) is not None:
            self._extra_left += stream.extra_window
        self._lingering.pop(stream.stream_id, None)

    def linger(self, stream: YamuxStream) -> None:
        """The stream is closed here and waits for the peer's end; the longest waiting one is reset beyond a bound."""
        if stream.stream_id not in self._streams:
            return
        self._lingering[stream.stream_id] = stream
        if len(self._lingering) > MAX_STREAMS_PER_DIRECTION:
            next(iter(self._lingering.values())).reset_now("closed here, and the peer never ended it")

    # ---- Sending

    def emit(self, kind: int, flags: int, stream_id: int, length: int = 0) -> None:
        """Queue a frame without data; on a connection that is gone it goes nowhere, and the streams have been told already."""
        if self.closed.is_set():
            return
        if self.is_backed_up:
            self._unsent_control_bytes += HEADER.size
        try:
            self.put([HEADER.pack(0, kind, flags, stream_id, length)])
        except StreamReset as error:
            self.abort(str(error))

    @property
    def is_backed_up(self) -> bool:
        """Whether sent bytes wait behind a full socket."""
        return bool(self._unsent)

    def put(self, pieces: list[Buffer]) -> None:
        """Send frames, each whole or not at all, in order: at once where the socket takes them, else by the writer task.

        They are sealed here in either case, so that this side encrypts while the other one empties the socket; in a `corked` block at
        its end, as many to a packet as it holds.

        Raises:
            StreamReset: the connection is gone.
        """
        self._check_open()
        if hold_back(self._uncork):
            self._corked += pieces
        else:
            self._send(pieces)

    def _uncork(self) -> None:
        corked, self._corked = self._corked, []
        if self.closed.is_set():
            return
        packets: list[Buffer] = []
        together: list[Buffer] = []
        size_bytes = 0
        for piece in corked:
            if together and size_bytes + len(piece) > HEADER.size + MAX_FRAME_DATA_BYTES:
                packets.append(b"".join(together))
                together, size_bytes = [], 0
            together.append(piece)
            size_bytes += len(piece)
        packets.append(b"".join(together))
        try:
            self._send(packets)
        except StreamReset as error:
            self.abort(str(error))
        except Exception:  # our own bug must end this connection, not whoever sent on another one in the same moment
            log.exception("connection_failed", peer=self.peer)
            self.abort("an error in this node's muxer")

    def _send(self, packets: list[Buffer]) -> None:
        wire = memoryview(self._channel.seal(packets))
        if not self._unsent:
            wire = wire[self._channel.write_nowait(wire) :]
        if wire:
            self._unsent.append(wire)
            self._unsent_bytes += len(wire)
            self._to_write.set()

    async def room_to_send(self) -> None:
        """Wait while `MAX_UNSENT_BYTES` wait behind the socket."""
        while self._unsent_bytes >= MAX_UNSENT_BYTES:
            self._check_open()
            if self._drained is None:
                self._drained = trio.Event()
            await self._drained.wait()

    async def _write(self) -> None:
        while True:
            await self._to_write.wait()
            while self._unsent:
                count, size_bytes = 0, 0
                while count < len(self._unsent) and size_bytes < MAX_FRAME_DATA_BYTES:
                    size_bytes += len(self._unsent[count])
                    count += 1
                wire = self._unsent[0] if count == 1 else b"".join(islice(self._unsent, count))
                await self._channel.write_all(wire)
                if self.closed.is_set():  # which emptied the queue
                    return
                for _ in range(count):
                    self._unsent.popleft()
                self._account(len(wire))
            self._to_write = trio.Event()

    def _account(self, sent_bytes: int) -> None:
        self._unsent_bytes -= sent_bytes
        if not self._unsent:
            self._unsent_control_bytes = 0
        if self._drained is not None and self._unsent_bytes < MAX_UNSENT_BYTES:
            self._drained.set()
            self._drained = None

    # ---- Receiving

    def receive(self, packet: Buffer) -> None:
        """Act on the plaintext of one packet; answers go through `put`.

        Raises:
            RemoteProtocolError: the peer broke a rule.
        """
        begin = self._deliver_plain_data(packet)
        if begin == len(packet) or self.closed.is_set():
            return
        for item in self._parser.feed(memoryview(packet)[begin:] if begin else packet):
            if isinstance(item, FrameHeader):
                self._on_header(item)
            else:
                if self._receiving is not None:
                    self._receiving.deliver(item)
                self._frame_left -= len(item)
                if not self._frame_left:
                    self._on_flags(self._header, self._receiving)
            if self.closed.is_set():  # an answer found the socket broken: nobody is left for what follows
                return
            self._check_answers()

    def _deliver_plain_data(self, packet: Buffer) -> int:
        """Deliver the whole DATA frames of open streams at the front of a packet, as nearly all are; returns where they end."""
        begin = 0
        while not self._parser.is_inside_a_frame and len(packet) - begin > HEADER.size and not self.closed.is_set():
            version, kind, flags, stream_id, length = HEADER.unpack_from(packet, begin)
            stream = self._streams.get(stream_id)
            end = begin + HEADER.size + length
            if version or kind != DATA or flags or not length or end > len(packet) or stream is None:
                break
            stream.announce(length)
            stream.deliver(memoryview(packet)[begin + HEADER.size : end])
            self._check_answers()
            begin = end
        return begin

    def _check_answers(self) -> None:
        if self._unsent_control_bytes > MAX_UNSENT_CONTROL_BYTES:
            raise RemoteProtocolError("the peer asks for answers faster than it takes them")

    def _on_header(self, header: FrameHeader) -> None:
        if header.kind == PING:
            if header.flags & SYN:
                self.emit(PING, ACK, 0, header.length)
            return
        if header.kind == GO_AWAY:
            raise StreamReset(f"the peer said good-bye (code {header.length})")
        stream = self._accept(header) if header.flags & SYN else self._streams.get(header.stream_id)
        if header.kind == WINDOW_UPDATE:
            if stream is not None:
                stream.add_credit(header.length)
        else:
            if stream is not None:
                stream.announce(header.length)
            elif header.length > STREAM_WINDOW_BYTES:
                raise RemoteProtocolError(f"{header.length} bytes for a stream that is not open")
            if header.length:
                self._header, self._receiving, self._frame_left = header, stream, header.length
                return
        self._on_flags(header, stream)

    def _accept(self, header: FrameHeader) -> YamuxStream | None:
        """A stream that the peer opens; None when it may not have another."""
        stream_id = header.stream_id
        if stream_id <= self._last_remote_id or (stream_id % 2 == 1) == self.is_initiator:
            raise RemoteProtocolError(f"stream id {stream_id} is not the peer's next one")
        self._last_remote_id = stream_id
        if self._count(own=False) >= MAX_STREAMS_PER_DIRECTION:
            log.info("stream_refused", peer=self.peer, open=MAX_STREAMS_PER_DIRECTION)
            self.emit(WINDOW_UPDATE, RST, stream_id)
            return None
        stream = YamuxStream(self, stream_id)
        try:
            self._accept_send.send_nowait(stream)
        except trio.WouldBlock:
            self.emit(WINDOW_UPDATE, RST, stream_id)
            return None
        self._streams[stream_id] = stream
        self._introduce(stream, ACK)
        return stream

    def _on_flags(self, header: FrameHeader, stream: YamuxStream | None) -> None:
        self._receiving = None
        if stream is None:
            return
        if header.flags & RST:
            self.forget(stream)
            stream.break_off("reset by the peer")
        elif header.flags & FIN:
            stream.end_received()

    # ---- Life

    async def run(self, unread: Buffer = b"") -> None:
        """Serve the connection until it ends, whoever ends it; never raises because of the peer.

        Args:
            unread: plaintext that was received before, while the muxer was negotiated.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._guarded, self._read, unread)
                    nursery.start_soon(self._guarded, self._write)
        finally:
            self.abort("closed here")
            with trio.CancelScope(shield=True):
                await self._channel.close()

    async def _guarded(self, task: Callable[..., Awaitable[None]], *args: Buffer) -> None:
        try:
            await task(*args)
        except StreamReset as error:
            self.abort(str(error))
        except TessellaError as error:
            log.warning("connection_dropped", peer=self.peer, error=error.code, reason=str(error))
            self.abort(str(error))
        except Exception:  # our own bug must end this connection, not the node that holds a thousand others
            log.exception("connection_failed", peer=self.peer)
            self.abort("an error in this node's muxer")

    async def _read(self, unread: Buffer) -> None:
        self.receive(unread)
        while True:
            self.receive(await self._channel.receive_packet())

    async def close(self) -> None:
        """Say good-bye, give what is queued a moment to leave, and end the connection. Cancellation ends it at once."""
        try:
            if not self.closed.is_set():
                self.emit(GO_AWAY, 0, 0, 0)
                with trio.move_on_after(CLOSE_TIMEOUT_S):
                    while self._unsent and not self.closed.is_set():
                        if self._drained is None:
                            self._drained = trio.Event()
                        await self._drained.wait()
        finally:
            self.abort("closed here")

    def abort(self, reason: str) -> None:
        """End the connection now; every stream is broken with ``reason``."""
        if self.closed.is_set():
            return
        self.reason = reason
        self.closed.set()
        for stream in list(self._streams.values()):
            stream.break_off(f"the connection is gone ({reason})")
        self._streams.clear()
        self._lingering.clear()
        self._unsent.clear()
        self._accept_send.close()
        if self._drained is not None:
            self._drained.set()
        self._scope.cancel()

    def _check_open(self) -> None:
        if self.closed.is_set():
            raise StreamReset(f"the connection to {self.peer} is gone: {self.reason}")
