"""Networks that look at what passes through them: a copy of what a node received, or the chains that it opens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from tessella_p2p.base.ids import PeerId
from tessella_p2p.net.network import Handler, Network, NetworkEvent, Stream
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import decode_message, open_envelope
from tessella_p2p.wire.frames import HEADER_BYTES, Kind, parse_header, parse_payload
from tessella_p2p.wire.messages import CHAIN_OPEN, ChainOpen, OpenFrame


class ForwardedStream:
    """A stream that passes everything on; implements `net.network.Stream`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def peer(self) -> PeerId:
        """Who is at the other end."""
        return self._stream.peer

    async def receive_some(self, max_bytes: int) -> bytes | bytearray | memoryview:
        """See `net.network.Stream`."""
        return await self._stream.receive_some(max_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `net.network.Stream`."""
        await self._stream.send_all(data)

    async def send_eof(self) -> None:
        """See `net.network.Stream`."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """See `net.network.Stream`."""
        await self._stream.aclose()

    async def reset(self) -> None:
        """See `net.network.Stream`."""
        await self._stream.reset()


class ForwardedNetwork:
    """A network that passes everything on; implements `net.network.Network`."""

    def __init__(self, network: Network) -> None:
        self._network = network

    @property
    def peer_id(self) -> PeerId:
        """This node's identity."""
        return self._network.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where this node says it can be dialled."""
        return self._network.addresses

    def add_addresses(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """See `net.network.Network`."""
        self._network.add_addresses(peer, addresses)

    async def connect(self, address: str) -> PeerId:
        """See `net.network.Network`."""
        return await self._network.connect(address)

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """See `net.network.Network`."""
        return await self._network.open_stream(peer, protocol)

    def serve(self, protocol: str, handler: Handler) -> None:
        """See `net.network.Network`."""
        self._network.serve(protocol, handler)

    def connected_peers(self) -> tuple[PeerId, ...]:
        """See `net.network.Network`."""
        return self._network.connected_peers()

    def events(self) -> trio.MemoryReceiveChannel[NetworkEvent]:
        """See `net.network.Network`."""
        return self._network.events()

    async def disconnect(self, peer: PeerId) -> None:
        """See `net.network.Network`."""
        await self._network.disconnect(peer)


class RecordingStream(ForwardedStream):
    """A stream whose received bytes are kept."""

    def __init__(self, stream: Stream, received: list[bytes]) -> None:
        super().__init__(stream)
        self._received = received

    async def receive_some(self, max_bytes: int) -> bytes | bytearray | memoryview:
        """Receive, and keep a copy."""
        part = await self._stream.receive_some(max_bytes)
        self._received.append(bytes(part))
        return part


class RecordingNetwork(ForwardedNetwork):
    """A network that keeps every byte that its node receives, on streams of either direction: the evidence for what it never sees.

    Args:
        network: does the work.
        received: where the bytes go, in the order of their arrival.
    """

    def __init__(self, network: Network, received: list[bytes]) -> None:
        super().__init__(network)
        self._received = received

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """See `net.network.Network`."""
        return RecordingStream(await self._network.open_stream(peer, protocol), self._received)

    def serve(self, protocol: str, handler: Handler) -> None:
        """See `net.network.Network`."""

        async def recorded(stream: Stream) -> None:
            await handler(RecordingStream(stream, self._received))

        self._network.serve(protocol, recorded)


class ChainTapStream(ForwardedStream):
    """An outbound hop stream that tells of the chain-opens which leave on it."""

    def __init__(self, stream: Stream, opened: Callable[[ChainOpen, PeerId], None]) -> None:
        super().__init__(stream)
        self._opened = opened
        self._unparsed = bytearray()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Look at whole frames, then send."""
        self._unparsed += data
        while len(self._unparsed) >= HEADER_BYTES:
            header = parse_header(self._unparsed[:HEADER_BYTES])
            end = HEADER_BYTES + header.payload_bytes
            if len(self._unparsed) < end:
                break
            if header.kind is Kind.OPEN:
                frame = parse_payload(header, bytes(self._unparsed[HEADER_BYTES:end]))
                envelope = open_envelope(
                    decode_message(OpenFrame, bytes(frame.body)).open, domain=CHAIN_OPEN, now_ms=None
                )
                self._opened(envelope.message(ChainOpen), envelope.signer)
            del self._unparsed[:end]
        await self._stream.send_all(data)


class ChainTapNetwork(ForwardedNetwork):
    """A network that tells of every chain which its node opens or passes on.

    Args:
        network: does the work.
        opened: called with each chain-open and the entry that signed it, just before it leaves.
    """

    def __init__(self, network: Network, opened: Callable[[ChainOpen, PeerId], None]) -> None:
        super().__init__(network)
        self._opened = opened

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """See `net.network.Network`."""
        stream = await self._network.open_stream(peer, protocol)
        return ChainTapStream(stream, self._opened) if protocol == protocols.HOP else stream
