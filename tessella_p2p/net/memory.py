"""`net.network.Network` in one process, under virtual time: the simulation's network, with faults on demand.

A `MemoryFabric` is everything between the nodes: one-way latencies that are drawn once per pair, losses that cost a retransmission
timeout, partitions, freezes and crashes. Messages are callbacks in a `VirtualClock`. Streams and connections behave as the real ones:
ordered, with a window, broken when the other end crashes (one latency later), when a partition or a freeze outlasts the ping
timeout, or on request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from tessella_p2p.base.errors import ConfigurationError, DialError, MalformedMessage, StreamReset, VersionMismatch
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import DIAL_TIMEOUT_S, NEGOTIATE_TIMEOUT_S
from tessella_p2p.net.memory_fabric import NOTICE_S, Connection, MemoryFabric, constant_latency, log_normal_latency
from tessella_p2p.net.network import Handler, NetworkEvent, PeerConnected, PeerDisconnected, Stream
from tessella_p2p.net.pipe import Parked, PipeStream, join
from tessella_p2p.net.serving import AddressBook, EventFan, Handlers
from tessella_p2p.wire.keys import public_key_of

__all__ = ["MemoryFabric", "MemoryNetwork", "MemoryStream", "constant_latency", "log_normal_latency"]

REDIAL_S = 1.0
"""How often a dial into a partition knocks again."""


class MemoryStream(PipeStream):
    """One end of a stream between two nodes."""

    def __init__(self, node: MemoryNetwork, peer: PeerId, connection: Connection) -> None:
        super().__init__(peer)
        self.node = node
        self._connection = connection
        self._sent: deque[tuple[Callable[..., None], tuple[bytes | memoryview | int, ...]]] = deque()
        self._stalled = 0
        self._over = False
        self._last_arrival_s = 0.0
        connection.streams[self] = None

    def _post(self, arrive: Callable[..., None], *args: bytes | memoryview | int) -> None:
        self._sent.append((arrive, args))
        self._schedule()

    def _schedule(self) -> None:
        fabric = self.node.fabric
        self._last_arrival_s = max(self._last_arrival_s, fabric.arrival_s(self._connection.latency))
        fabric.clock.call_at(self._last_arrival_s, self._arrive)

    def _arrive(self) -> None:
        """The oldest message that is under way arrives, or waits for the end of a partition."""
        if not self._sent:
            return
        fabric = self.node.fabric
        if fabric.silent(self.node.peer_id, self._peer):
            self._stalled += 1
            return
        fabric.num_messages += 1
        arrive, args = self._sent.popleft()
        arrive(*args)
        self._leave_if_over()

    def resume(self) -> None:
        """Send on what a partition held back."""
        stalled, self._stalled = self._stalled, 0
        for _ in range(stalled):
            self._schedule()

    def break_off(self) -> None:
        """The connection is gone, and with it what was under way."""
        self._sent.clear()
        self._on_reset()

    def give_up(self) -> None:
        """The stream was refused, or its opener left: tell the other end."""
        self._closed = True
        self._abort()

    def _ended(self) -> None:
        self._over = True
        self._leave_if_over()

    def _leave_if_over(self) -> None:
        if self._over and not self._sent:
            self._connection.streams.pop(self, None)


@dataclass(eq=False, slots=True)
class _Waiting:
    """A call that waits for an answer from the other side."""

    parked: Parked = field(default_factory=Parked)
    answer: object = None
    abandoned: bool = False

    def set(self, answer: object) -> None:
        if not self.abandoned and self.answer is None:
            self.answer = answer
            self.parked.wake()

    async def wait(self, timeout_s: float) -> object:
        try:
            with trio.move_on_after(timeout_s):
                while self.answer is None:
                    await self.parked.wait()
        finally:
            self.abandoned = True
        return self.answer


class MemoryNetwork:
    """One node on a `MemoryFabric`. Make it with `open`."""

    def __init__(self, fabric: MemoryFabric, peer_id: PeerId, address: str | None, nursery: trio.Nursery) -> None:
        self.fabric = fabric
        self._peer_id = peer_id
        self._nursery = nursery
        self.connections: dict[PeerId, Connection] = {}
        self.alive = True
        self._dialling: dict[PeerId, trio.Lock] = {}
        self._book = AddressBook()
        self._events = EventFan()
        self._handlers = Handlers()
        self._addresses = (fabric.join(self, address),)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, fabric: MemoryFabric, peer_id: PeerId, address: str | None = None
    ) -> AsyncIterator[MemoryNetwork]:
        """Be on the network for the length of an ``async with`` block.

        Args:
            fabric: what lies between the nodes.
            peer_id: this node.
            address: its multiaddr; a fresh one when None.
        """
        if fabric.has(peer_id):
            raise ConfigurationError(f"{peer_id} is on this network already")
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            network = cls(fabric, peer_id, address, nursery)
            try:
                yield network
            except Exception as error:  # noqa: BLE001 - carried past the nursery: the caller gets its own error, not a group
                failure = error
            finally:
                fabric._leave(network)
                network._events.close()
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    # ---- The port

    @property
    def peer_id(self) -> PeerId:
        """This node's identity."""
        return self._peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs (without ``/p2p``) at which this node says it can be dialled."""
        return self._addresses

    def add_addresses(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Remember where ``peer`` may be dialled (bounded; malformed ones are dropped)."""
        self._book.add(peer, [address for address in addresses if address.startswith("/")])

    async def connect(self, address: str) -> PeerId:
        """See `net.network.Network`."""
        where, separator, pin = address.rpartition("/p2p/")
        peer = PeerId(pin)
        try:
            public_key_of(peer)
        except MalformedMessage as error:
            raise ConfigurationError(f"{address!r} is no multiaddr that ends in /p2p/<peer id>") from error
        if not separator or not where.startswith("/"):
            raise ConfigurationError(f"{address!r} is no multiaddr that ends in /p2p/<peer id>")
        await trio.lowlevel.checkpoint()
        if peer != self._peer_id:
            await self._connection_to(peer, (where,))
        self._book.add(peer, (where,))
        return peer

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """See `net.network.Network`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if peer == self._peer_id:
            return self._handlers.open_to_self(peer, protocol, self._nursery)
        connection = await self._connection_to(peer, self._book.of(peer))
        far = connection.far if connection.near is self else connection.near
        near_end = MemoryStream(self, peer, connection)
        far_end = MemoryStream(far, self._peer_id, connection)
        join(near_end, far_end)
        answer = _Waiting()
        near_end._post(lambda: far._accept(protocol, far_end, answer))
        verdict: object = None
        try:
            verdict = await answer.wait(NEGOTIATE_TIMEOUT_S)
        finally:
            if verdict is not True:
                near_end.give_up()
        if isinstance(verdict, VersionMismatch):
            raise verdict
        if verdict is None or not connection.alive:
            raise StreamReset(f"no stream of {protocol} to {peer}: the connection broke or stays silent")
        return near_end

    def serve(self, protocol: str, handler: Handler) -> None:
        """Answer inbound streams of ``protocol`` with ``handler``, each in a task of its own."""
        self._handlers.add(protocol, handler)

    def connected_peers(self) -> tuple[PeerId, ...]:
        """Peers with a live connection."""
        return tuple(self.connections)

    def events(self) -> trio.MemoryReceiveChannel[NetworkEvent]:
        """A new subscription to events from now on; a subscriber that falls 256 behind loses the oldest."""
        return self._events.subscribe()

    async def disconnect(self, peer: PeerId) -> None:
        """Close every connection to ``peer``."""
        connection = self.connections.get(peer)
        if connection is not None:
            self._hang_up(connection)
        await trio.lowlevel.checkpoint()

    # ---- Beyond the port

    @property
    def handler_failures(self) -> int:
        """Handlers that ended with an exception, over all protocols."""
        return self._handlers.failures.total()

    def round_trip_s(self, peer: PeerId) -> float | None:
        """The round trip to a connected peer."""
        connection = self.connections.get(peer)
        return None if connection is None else 2 * connection.latency

    # ---- Connections

    async def _connection_to(self, peer: PeerId, addresses: Sequence[str]) -> Connection:
        connection = self.connections.get(peer)
        if connection is not None:
            return connection
        if not addresses:
            raise DialError(f"no address of {peer} is known")
        lock = self._dialling.setdefault(peer, trio.Lock())
        try:
            async with lock:
                return self.connections.get(peer) or await self._dial(peer, addresses)
        finally:
            if not lock.statistics().locked:
                self._dialling.pop(peer, None)

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> Connection:
        fabric, failures = self.fabric, []
        for address in addresses:
            answer = _Waiting()
            latency = fabric.one_way_s(self._peer_id, peer)
            fabric.clock.call_at(fabric.arrival_s(latency), self._knock, peer, address, latency, answer)
            verdict = await answer.wait(DIAL_TIMEOUT_S)
            if isinstance(verdict, Connection) and verdict.alive:
                return verdict
            failures.append(f"{address}: {verdict if isinstance(verdict, str) else 'no answer'}")
        raise DialError(f"{peer} cannot be reached: {'; '.join(failures)}")

    def _knock(self, peer: PeerId, address: str, latency: float, answer: _Waiting) -> None:
        """A dial reaches its address."""
        fabric = self.fabric
        if answer.abandoned or not self.alive:
            return
        if fabric.silent(self._peer_id, peer):
            fabric.clock.call_at(fabric.clock.now + REDIAL_S, self._knock, peer, address, latency, answer)
            return
        far = fabric.at(address)
        back_s = fabric.arrival_s(latency)
        if far is None:
            fabric.clock.call_at(back_s, answer.set, "connection refused")
        elif far.peer_id != peer:
            fabric.clock.call_at(back_s, answer.set, f"{far.peer_id} answers there")
        else:
            # One connection per pair: two dials that cross meet in the one that arrived first.
            connection = (
                far.connections.get(self._peer_id) or self.connections.get(peer) or Connection(self, far, latency)
            )
            if self._peer_id not in far.connections:
                far._adopt(self._peer_id, connection)
            fabric.clock.call_at(back_s, self._connected, peer, connection, answer)

    def _connected(self, peer: PeerId, connection: Connection, answer: _Waiting) -> None:
        if not self.alive or not connection.alive:
            answer.set("connection refused")
            return
        if peer not in self.connections:
            self._adopt(peer, connection)
        answer.set(self.connections[peer])

    def _adopt(self, peer: PeerId, connection: Connection) -> None:
        self.connections[peer] = connection
        self._events.publish(PeerConnected(peer))

    def forget(self, connection: Connection) -> None:
        """The connection is gone."""
        peer = (connection.far if connection.near is self else connection.near).peer_id
        if self.connections.get(peer) is connection:
            del self.connections[peer]
            self._events.publish(PeerDisconnected(peer))

    def _hang_up(self, connection: Connection) -> None:
        """End a connection here at once, and at the other end one latency later."""
        other = connection.far if connection.near is self else connection.near
        connection.break_off(only=self)
        clock = self.fabric.clock
        clock.call_at(clock.now + connection.latency, self._tell_end, connection, other)

    def _tell_end(self, connection: Connection, other: MemoryNetwork) -> None:
        if self.fabric.silent(self._peer_id, other.peer_id):
            clock = self.fabric.clock  # nobody hears the good-bye; the other end notices the silence
            clock.call_at(clock.now + NOTICE_S, connection.break_off, other)
        else:
            connection.break_off(only=other)

    def die(self) -> None:
        """The node is gone: crashed, or closed."""
        if self.alive:
            self.alive = False
            for connection in list(self.connections.values()):
                self._hang_up(connection)
            self._events.close()
            self._nursery.cancel_scope.cancel()

    def _accept(self, protocol: str, stream: MemoryStream, answer: _Waiting) -> None:
        """The other side opens a stream."""
        if not self.alive:
            return
        if protocol in self._handlers.protocols:
            self._nursery.start_soon(self._handlers.run, protocol, stream)
            stream._post(lambda: answer.set(True))
            return
        base = protocol.rpartition("/")[0] + "/"
        served = ", ".join(sorted(each for each in self._handlers.protocols if each.startswith(base)))
        others = f"; it serves {served}" if served else ""
        stream._post(lambda: answer.set(VersionMismatch(f"{self._peer_id} does not serve {protocol}{others}")))
