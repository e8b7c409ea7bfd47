"""Between py-libp2p's interfaces and ours: our muxer as it sees it, and its muxer's streams as we see them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType

import structlog
import trio
from libp2p.abc import IMuxedConn, IMuxedStream
from libp2p.connection_types import ConnectionType
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)
from multiaddr import Multiaddr

from tessella_p2p.base.errors import Overloaded, StreamReset
from tessella_p2p.base.ids import PeerId
from tessella_p2p.net.network import Stream
from tessella_p2p.net.noise_session import NoiseSession
from tessella_p2p.net.yamux import YamuxConnection
from tessella_p2p.net.yamux_stream import YamuxStream

log = structlog.get_logger(__name__)


def peer_id_of(peer: ID) -> PeerId:
    """Our form of py-libp2p's peer id."""
    return PeerId(peer.to_base58())


class FastConnection(IMuxedConn):
    """`YamuxConnection` in the interface that py-libp2p's swarm drives."""

    def __init__(self, conn: NoiseSession, peer_id: ID) -> None:
        self.peer_id = peer_id
        self.event_started = trio.Event()
        self.secured_conn = conn
        self.on_close: Callable[[], Awaitable[None]] | None = None
        self.yamux = YamuxConnection(conn, peer_id_of(peer_id), is_initiator=conn.is_initiator)

    @property
    def is_initiator(self) -> bool:
        """Whether this side dialled."""
        return self.yamux.is_initiator

    @property
    def is_established(self) -> bool:
        """Whether streams can be opened."""
        return self.event_started.is_set() and not self.is_closed

    @property
    def is_closed(self) -> bool:
        """Whether it is over."""
        return self.yamux.closed.is_set()

    async def start(self) -> None:
        """Serve the connection to its end; the swarm runs this as a task."""
        self.event_started.set()
        try:
            await self.yamux.run(self.secured_conn.take_unread())
        finally:
            if self.on_close is not None:
                await self.on_close()

    async def close(self) -> None:
        """Say good-bye and end."""
        await self.yamux.close()

    async def open_stream(self) -> IMuxedStream:
        """A new stream for py-libp2p's own protocols."""
        try:
            return LibraryStream(self.yamux.open_stream(), self)
        except (StreamReset, Overloaded) as error:
            raise MuxedConnUnavailable(str(error)) from error

    async def accept_stream(self) -> IMuxedStream:
        """The next inbound stream."""
        try:
            return LibraryStream(await self.yamux.accept_stream(), self)
        except StreamReset as error:
            raise MuxedConnUnavailable(str(error)) from error

    def get_transport_addresses(self) -> list[Multiaddr]:
        """The other end's address."""
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        """Direct or relayed."""
        return self.secured_conn.get_connection_type()


class LibraryStream(IMuxedStream):
    """`YamuxStream` as py-libp2p's protocols (identify, ping) read and write it."""

    def __init__(self, stream: YamuxStream, connection: FastConnection) -> None:
        self.stream = stream
        self.muxed_conn = connection

    async def read(self, n: int | None = None) -> bytes:
        """At most ``n`` bytes."""
        try:
            data = bytes(await self.stream.receive_some(n if n is not None and n > 0 else 1 << 16))
        except StreamReset as error:
            raise MuxedStreamReset(str(error)) from error
        if not data:
            raise MuxedStreamEOF("the peer ended the stream")
        return data

    async def write(self, data: bytes) -> None:
        """Send all of ``data``."""
        try:
            await self.stream.send_all(data)
        except StreamReset as error:
            raise MuxedStreamError(str(error)) from error

    async def close(self) -> None:
        """End this side."""
        await self.stream.aclose()

    async def reset(self) -> None:
        """Abort both sides."""
        await self.stream.reset()

    def set_deadline(self, ttl: int) -> None:
        """Not supported: deadlines are the caller's, as trio has them."""
        raise NotImplementedError("use trio.fail_after around the call")

    def get_remote_address(self) -> tuple[str, int] | None:
        """The other end's host and port."""
        connection = self.muxed_conn
        assert isinstance(connection, FastConnection)
        return connection.secured_conn.get_remote_address()

    async def __aenter__(self) -> LibraryStream:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()


class StockStream:
    """A stream of py-libp2p's own muxer as a `net.network.Stream`.

    That muxer loses bytes when a read is cancelled and cuts a frame when a write is, so a cancelled call here ends the connection:
    crude, but nobody ever goes on with a damaged stream. It neither enforces the receive window nor waits longer than 5 s for credit;
    that is what the fast muxer is for.
    """

    def __init__(self, stream: IMuxedStream, peer: PeerId) -> None:
        self._stream = stream
        self._peer = peer
        self._eof_received = False

    @property
    def peer(self) -> PeerId:
        """Who is at the other end."""
        return self._peer

    async def receive_some(self, max_bytes: int) -> bytes:
        """See `net.network.Stream`; cancelling it ends the connection."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._eof_received:
            return b""
        try:
            data = await self._stream.read(max_bytes)
        except MuxedStreamEOF as error:
            if self._lost():
                raise StreamReset(f"the connection to {self._peer} is gone") from error
            data = b""
        except BaseLibp2pError as error:
            raise StreamReset(f"the stream to {self._peer} is gone: {error}") from error
        except trio.Cancelled:
            await self._drop_connection()
            raise
        self._eof_received = not data
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `net.network.Stream`; cancelling it ends the connection."""
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            await self._stream.write(bytes(data))
        except BaseLibp2pError as error:
            raise StreamReset(f"the stream to {self._peer} is gone: {error}") from error
        except trio.Cancelled:
            await self._drop_connection()
            raise

    def _lost(self) -> bool:
        return self._stream.muxed_conn.is_closed or not getattr(self._stream, "recv_closed", True)

    async def _drop_connection(self) -> None:
        log.info("connection_dropped", peer=self._peer, reason="a call was cancelled on the stock muxer")
        with trio.CancelScope(shield=True), trio.move_on_after(1):
            await self._stream.muxed_conn.close()

    async def send_eof(self) -> None:
        """See `net.network.Stream`."""
        try:
            await self._stream.close()
        except BaseLibp2pError as error:
            raise StreamReset(f"the stream to {self._peer} is gone: {error}") from error

    async def aclose(self) -> None:
        """See `net.network.Stream`."""
        try:
            await self._stream.close()
        except BaseLibp2pError as error:
            log.debug("close_failed", peer=self._peer, reason=str(error))

    async def reset(self) -> None:
        """See `net.network.Stream`."""
        try:
            await self._stream.reset()
        except BaseLibp2pError as error:
            log.debug("reset_failed", peer=self._peer, reason=str(error))


def as_port_stream(stream: IMuxedStream, peer: PeerId) -> Stream:
    """The stream in our interface."""
    return stream.stream if isinstance(stream, LibraryStream) else StockStream(stream, peer)
