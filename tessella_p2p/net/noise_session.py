"""The fast half of ``/noise``: packets of an established session, on a socket, without a copy or a wake-up too many.

The handshake is py-libp2p's (``Noise_XX_25519_ChaChaPoly_SHA256``, libp2p's noise specification); what follows it is ours and byte for
byte the same on the wire: a packet is a 2-byte big-endian length, then at most 65,535 bytes of ChaCha20-Poly1305 ciphertext whose
nonce counts packets. py-libp2p receives each packet with two system calls and copies it four times; here one ``recv_into`` fills a
buffer that usually holds several packets, and one ``send`` carries several.

`NoisePackets` does no I/O. `NoiseSession` puts it on a connection. `FastNoise` is the security transport that py-libp2p is given.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import trio
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from libp2p.abc import IRawConnection, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.network.connection.exceptions import RawConnError
from libp2p.peer.id import ID
from libp2p.security.base_session import BaseSession
from libp2p.security.noise.io import NoiseTransportReadWriter
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.security.secure_session import SecureSession
from multiaddr import Multiaddr

from tessella_p2p.base.errors import RemoteProtocolError, StreamReset
from tessella_p2p.base.limits import KIB

Buffer = bytes | bytearray | memoryview

LENGTH_BYTES = 2
TAG_BYTES = 16
MAX_PACKET_BYTES = 65_535
MAX_PLAINTEXT_BYTES = MAX_PACKET_BYTES - TAG_BYTES
RECEIVE_BUFFER_BYTES = 256 * KIB + LENGTH_BYTES + MAX_PACKET_BYTES

_LENGTH = struct.Struct("!H")
_NONCE = struct.Struct("<4xQ")


class NoisePackets:
    """Seals and opens the packets of one session; no I/O.

    Args:
        send_key: 32 bytes of ChaCha20-Poly1305 key for what this side sends.
        receive_key: the same for what the other side sends.
    """

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._sealer = ChaCha20Poly1305(send_key)
        self._opener = ChaCha20Poly1305(receive_key)
        self._sent = 0
        self._opened = 0
        self._buffer = bytearray(RECEIVE_BUFFER_BYTES)
        self._start = 0
        self._end = 0

    def seal(self, pieces: Sequence[Buffer]) -> bytearray:
        """One packet for each piece of at most `MAX_PLAINTEXT_BYTES`, back to back. What is sealed must be sent, in order."""
        wire = bytearray(sum(map(len, pieces)) + (LENGTH_BYTES + TAG_BYTES) * len(pieces))
        at = 0
        with memoryview(wire) as view:
            for piece in pieces:
                size_bytes = len(piece) + TAG_BYTES
                _LENGTH.pack_into(wire, at, size_bytes)
                at += LENGTH_BYTES
                self._sealer.encrypt_into(_NONCE.pack(self._sent), piece, None, view[at : at + size_bytes])
                self._sent += 1
                at += size_bytes
        return wire

    def free_space(self) -> memoryview:
        """Where to receive into; release it, then call `received`."""
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._buffer) - self._end < LENGTH_BYTES + MAX_PACKET_BYTES:
            left = self._end - self._start
            self._buffer[:left] = self._buffer[self._start : self._end]
            self._start, self._end = 0, left
        return memoryview(self._buffer)[self._end :]

    def received(self, size_bytes: int) -> None:
        """``size_bytes`` were put at the start of the free space."""
        self._end += size_bytes

    def next_packet(self) -> bytes | None:
        """The plaintext of the next whole packet, or None.

        Raises:
            RemoteProtocolError: a packet that does not authenticate; the session is over.
        """
        held = self._end - self._start
        if held < LENGTH_BYTES:
            return None
        (size_bytes,) = _LENGTH.unpack_from(self._buffer, self._start)
        if held < LENGTH_BYTES + size_bytes:
            return None
        begin = self._start + LENGTH_BYTES
        with memoryview(self._buffer) as view:
            try:
                plaintext = self._opener.decrypt(_NONCE.pack(self._opened), view[begin : begin + size_bytes], None)
            except (InvalidTag, ValueError) as error:
                raise RemoteProtocolError("a packet of the encrypted session does not authenticate") from error
        self._opened += 1
        self._start = begin + size_bytes
        return plaintext


class NoiseSession(BaseSession):
    """An established session: what the handshake of py-libp2p gave, with our packets.

    One task receives and one sends; the muxer sees to that. Over anything but a plain TCP socket (a pre-shared key, a relay) it falls
    back to the raw connection's own reads and writes.
    """

    def __init__(self, handshaken: SecureSession) -> None:
        super().__init__(
            local_peer=handshaken.local_peer,
            local_private_key=handshaken.local_private_key,
            remote_peer=handshaken.remote_peer,
            remote_permanent_pubkey=handshaken.remote_permanent_pubkey,
            is_initiator=handshaken.is_initiator,
        )
        channel = handshaken.conn
        assert isinstance(channel, NoiseTransportReadWriter)
        protocol = channel.noise_state.noise_protocol
        self._packets = NoisePackets(protocol.cipher_state_encrypt.k, protocol.cipher_state_decrypt.k)
        self._raw: IRawConnection = channel.read_writer.read_write_closer  # type: ignore[assignment]
        tcp = getattr(getattr(self._raw, "stream", None), "stream", None)
        self._tcp = tcp if isinstance(tcp, trio.SocketStream) else None
        self._unread = memoryview(b"")

    def seal(self, pieces: Sequence[Buffer]) -> bytearray:
        """`NoisePackets.seal`."""
        return self._packets.seal(pieces)

    def write_nowait(self, wire: Buffer) -> int:
        """How many of the bytes the socket took at once; 0 when it is full or is no plain socket.

        Raises:
            StreamReset: the connection broke.
        """
        if self._tcp is None:
            return 0
        try:
            # trio has no send without a checkpoint, and a checkpoint between sealing and sending is what makes a cancelled write
            # leave half a packet on the wire. The socket is non-blocking; a closed one has no descriptor and raises.
            return os.write(self._tcp.socket.fileno(), wire)
        except BlockingIOError:
            return 0
        except (OSError, ValueError) as error:
            raise StreamReset(f"the connection broke while sending: {error}") from error

    async def write_all(self, wire: Buffer) -> None:
        """Send sealed bytes to the last one. Cancellation ruins the session.

        Raises:
            StreamReset: the connection broke.
        """
        try:
            if self._tcp is not None:
                await self._tcp.send_all(memoryview(wire))
            else:
                await self._raw.write(bytes(wire))
        except (trio.BrokenResourceError, trio.ClosedResourceError, IOException, RawConnError) as error:
            raise StreamReset(f"the connection broke while sending: {error}") from error

    async def receive_packet(self) -> bytes:
        """The plaintext of the next packet. Cancellation loses nothing.

        Raises:
            StreamReset: the connection broke or ended.
            RemoteProtocolError: the packet does not authenticate.
        """
        while (packet := self._packets.next_packet()) is None:
            await self._fill()
        return packet

    async def _fill(self) -> None:
        space = self._packets.free_space()
        try:
            if self._tcp is not None:
                size_bytes = await self._receive_into(space)
            else:
                data = await self._raw.read(min(len(space), MAX_PACKET_BYTES))
                size_bytes = len(data)
                space[:size_bytes] = data
        except (
            OSError,
            ValueError,
            trio.ClosedResourceError,
            IOException,
            RawConnError,
        ) as error:  # a closed socket: ValueError
            raise StreamReset(f"the connection broke while receiving: {error}") from error
        finally:
            space.release()
        if size_bytes == 0:
            raise StreamReset("the peer closed the connection")
        self._packets.received(size_bytes)

    async def _receive_into(self, space: memoryview) -> int:
        # Not trio's recv_into, which tries before it waits: after a short read there is nearly always nothing.
        assert self._tcp is not None
        while True:
            await trio.lowlevel.wait_readable(self._tcp.socket)
            try:
                return os.readv(self._tcp.socket.fileno(), [space])
            except BlockingIOError:
                continue

    # What py-libp2p calls while the muxer is negotiated.

    async def read(self, n: int | None = None) -> bytes:
        """At most ``n`` bytes, as py-libp2p's sessions give them."""
        if n == 0:
            return b""
        try:
            while not self._unread:
                self._unread = memoryview(await self.receive_packet())
        except (StreamReset, RemoteProtocolError) as error:
            raise ConnectionClosedError(str(error)) from error
        part = bytes(self._unread[:n])
        self._unread = self._unread[len(part) :]
        return part

    async def write(self, data: bytes) -> None:
        """Send all of ``data``."""
        view = memoryview(data)
        pieces = [view[at : at + MAX_PLAINTEXT_BYTES] for at in range(0, len(view), MAX_PLAINTEXT_BYTES)]
        try:
            await self.write_all(self.seal(pieces))
        except StreamReset as error:
            raise ConnectionClosedError(str(error)) from error

    def take_unread(self) -> memoryview:
        """What `read` has left of the last packet; the muxer starts with it."""
        unread, self._unread = self._unread, memoryview(b"")
        return unread

    async def close(self) -> None:
        """Close the connection below; buffered bytes are dropped."""
        await self._raw.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        """The other end's host and port."""
        return self._raw.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        """The other end's address as a multiaddr."""
        return self._raw.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        """Direct or relayed."""
        return self._raw.get_connection_type()


class FastNoise(NoiseTransport):
    """py-libp2p's Noise handshake, then `NoiseSession`."""

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        """Answer a handshake."""
        return _fast(await super().secure_inbound(conn))

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        """Start a handshake with the holder of ``peer_id``'s key, and nobody else."""
        return _fast(await super().secure_outbound(conn, peer_id))


def _fast(session: ISecureConn) -> NoiseSession:
    assert isinstance(session, SecureSession)
    return NoiseSession(session)
