"""A network that keeps what its node received: the evidence for what a role never sees."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from tessella_p2p.base.ids import PeerId
from tessella_p2p.net.network import Handler, Network, NetworkEvent, Stream


class RecordingStream:
    """A stream whose received bytes are kept; implements `net.network.Stream`."""

    def __init__(self, stream: Stream, received: list[bytes]) -> None:
        self._stream = stream
        self._received = received

    @property
    def peer(self) -> PeerId:
        """Who is at the other end."""
        return self._stream.peer

    async def receive_some(self, max_bytes: int) -> bytes | bytearray | memoryview:
        """Receive, and keep a copy."""
        part = await self._stream.receive_some(max_bytes)
        self._received.append(bytes(part))
        return part

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


class RecordingNetwork:
    """A network that keeps every byte that its node receives, on streams of either direction; implements `net.network.Network`.

    Args:
        network: does the work.
        received: where the bytes go, in the order of their arrival.
    """

    def __init__(self, network: Network, received: list[bytes]) -> None:
        self._network = network
        self._received = received

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
        return RecordingStream(await self._network.open_stream(peer, protocol), self._received)

    def serve(self, protocol: str, handler: Handler) -> None:
        """See `net.network.Network`."""

        async def recorded(stream: Stream) -> None:
            await handler(RecordingStream(stream, self._received))

        self._network.serve(protocol, recorded)

    def connected_peers(self) -> tuple[PeerId, ...]:
        """See `net.network.Network`."""
        return self._network.connected_peers()

    def events(self) -> trio.MemoryReceiveChannel[NetworkEvent]:
        """See `net.network.Network`."""
        return self._network.events()

    async def disconnect(self, peer: PeerId) -> None:
        """See `net.network.Network`."""
        await self._network.disconnect(peer)
