"""The port that every role talks to: streams between authenticated peers.

``libp2p_host.py`` implements it over py-libp2p (TCP, Noise, Yamux), ``memory.py`` in one process under virtual time. One contract
suite (``tests/net/test_contract.py``) runs against both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import trio

from tessella_p2p.base.ids import PeerId


class Stream(Protocol):
    """A bidirectional byte stream to one authenticated peer.

    One task may send while another receives; two tasks may not do the same. Cancelling a call neither loses received bytes nor
    leaves half of a sent buffer's frame on the wire; a cancelled `send_all` may have sent any prefix, so reset the stream after it.
    """

    @property
    def peer(self) -> PeerId:
        """Who is at the other end, as the channel authenticated it."""
        ...

    async def receive_some(self, max_bytes: int) -> bytes | bytearray | memoryview:
        """At least one byte, at most ``max_bytes``; empty at the end of the stream.

        Raises:
            StreamReset: when the stream or its connection broke.
        """
        ...

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send ``data``; waits while the peer's window is full. Deadlines are the caller's.

        Raises:
            StreamReset: when the stream or its connection broke.
        """
        ...

    async def send_eof(self) -> None:
        """Half-close: no more data from this side."""
        ...

    async def aclose(self) -> None:
        """Close both directions gracefully; never raises a transport error."""
        ...

    async def reset(self) -> None:
        """Abort both directions at once; never raises a transport error."""
        ...


@runtime_checkable
class DirectStream(Protocol):
    """What a `Stream` may offer besides: its bytes cross between the socket and a plain function, without a task in between.

    A task that is woken costs tens of microseconds, several times that on cold caches, and a frame of a hop would wake one at each end.
    """

    def send_nowait(self, data: bytes | bytearray | memoryview) -> bool:
        """Send all of ``data`` at once; False when that would have to wait, and nothing was sent. No task may be in `send_all`.

        Raises:
            StreamReset: when the stream or its connection broke.
        """
        ...

    def offer_to(self, taker: Callable[[memoryview], int] | None) -> None:
        """Show each piece that arrives to ``taker`` first, from now on; None ends that.

        It is asked only while nothing waits to be received, from within whatever task reads the socket. It may neither block nor raise,
        and returns how many bytes it took off the front; the rest is received as usual.
        """
        ...


Handler = Callable[[Stream], Awaitable[None]]
"""Serves one inbound stream. Whatever it raises is caught, logged and counted, and the stream is reset; when it returns, the
stream is closed."""


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """A peer is connected."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """The last connection to a peer is gone."""

    peer: PeerId


NetworkEvent = PeerConnected | PeerDisconnected


class Network(Protocol):
    """One node's access to the others. Every method that waits can be cancelled at any time."""

    @property
    def peer_id(self) -> PeerId:
        """This node's identity."""
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs (without ``/p2p``) at which this node says it can be dialled."""
        ...

    def add_addresses(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Remember where ``peer`` may be dialled (bounded; malformed ones are dropped)."""
        ...

    async def connect(self, address: str) -> PeerId:
        """Dial a multiaddr that ends in ``/p2p/<peer id>``; the peer id is the pin.

        Raises:
            ConfigurationError: when the multiaddr has no ``/p2p`` part.
            DialError: unreachable, or somebody else answers there.
        """
        ...

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """Open a stream, dialling first where needed. A stream to this node itself is a pipe within the process.

        Raises:
            DialError: the peer cannot be reached, or its address is unknown.
            VersionMismatch: the peer does not serve ``protocol``.
            StreamReset: the connection broke meanwhile.
        """
        ...

    def serve(self, protocol: str, handler: Handler) -> None:
        """Answer inbound streams of ``protocol`` with ``handler``, each in a task of its own."""
        ...

    def connected_peers(self) -> tuple[PeerId, ...]:
        """Peers with a live connection."""
        ...

    def events(self) -> trio.MemoryReceiveChannel[NetworkEvent]:
        """A new subscription to events from now on; a subscriber that falls 256 behind loses the oldest."""
        ...

    async def disconnect(self, peer: PeerId) -> None:
        """Close every connection to ``peer``."""
        ...
