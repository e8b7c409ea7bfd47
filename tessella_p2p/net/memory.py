"""`net.network.Network` in one process, under virtual time: the simulation's network, with faults on demand.

A `MemoryFabric` is everything between the nodes: one-way latencies that are drawn once per pair, losses that cost a retransmission
timeout, partitions, freezes and crashes. Messages are callbacks in a `VirtualClock`. Streams and connections behave as the real ones:
ordered, with a window, broken when the other end crashes (one latency later), when a partition or a freeze outlasts the ping
timeout, or on request.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog
import trio

from tessella_p2p.base.errors import ConfigurationError, DialError, MalformedMessage, StreamReset, VersionMismatch
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import DIAL_TIMEOUT_S, NEGOTIATE_TIMEOUT_S, PING_INTERVAL_S, PING_TIMEOUT_S
from tessella_p2p.net.network import Handler, NetworkEvent, PeerConnected, PeerDisconnected, Stream
from tessella_p2p.net.pipe import Parked, PipeStream, join
from tessella_p2p.net.serving import AddressBook, EventFan, Handlers
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.wire.keys import public_key_of

log = structlog.get_logger(__name__)

Latency = Callable[[random.Random], float]

RETRANSMIT_S = 0.2
"""What one loss costs."""
REDIAL_S = 1.0
"""How often a dial into a partition knocks again."""
NOTICE_S = PING_INTERVAL_S + PING_TIMEOUT_S
"""How long a silent connection lasts."""


def constant_latency(one_way_s: float) -> Latency:
    """Every pair is ``one_way_s`` apart."""
    return lambda rng: one_way_s


def log_normal_latency(median_s: float = 0.05, sigma: float = 0.5) -> Latency:
    """One-way latencies of the Internet's shape: many near the median, some far out."""
    return lambda rng: median_s * math.exp(rng.gauss(0.0, sigma))


class MemoryFabric:
    """What lies between the nodes of a simulation.

    Args:
        rng: seeded; every draw of the network comes from it.
        clock: the clock that trio runs under.
        latency: draws the one-way latency of a pair, once.
        loss: probability in [0, 1) that a message is lost and sent again `RETRANSMIT_S` later.
    """

    def __init__(
        self, rng: random.Random, clock: VirtualClock, latency: Latency | None = None, loss: float = 0.0
    ) -> None:
        if not 0.0 <= loss < 1.0:
            raise ConfigurationError(f"a loss of {loss} is no probability below 1")
        self.clock = clock
        self._rng = rng
        self._latency = latency or log_normal_latency()
        self._loss = loss
        self._latencies: dict[tuple[PeerId, PeerId], float] = {}
        self._nodes: dict[PeerId, MemoryNetwork] = {}
        self._by_address: dict[str, MemoryNetwork] = {}
        self._groups: Mapping[PeerId, int] = {}
        self._frozen: dict[PeerId, None] = {}
        self._num_joined = 0
        self.num_messages = 0
        """Messages delivered so far."""

    # ---- Faults

    def partition(self, groups: Mapping[PeerId, int]) -> None:
        """Cut the network: peers of different groups (0 where none is named) do not hear each other until `heal`."""
        self._groups = dict(groups)
        self._expect_silence()

    def heal(self) -> None:
        """End the partition; what was sent meanwhile on connections that live arrives now."""
        self._groups = {}
        self._release()

    def freeze(self, peer: PeerId) -> None:
        """Nothing leaves ``peer`` or reaches it until `thaw`; its connections stay open until the others notice."""
        self._frozen[peer] = None
        self._expect_silence()

    def thaw(self, peer: PeerId) -> None:
        """End a freeze."""
        self._frozen.pop(peer, None)
        self._release()

    def crash(self, peer: PeerId) -> None:
        """The process of ``peer`` dies: its streams break at once, the other ends of them one latency later.

        Its `MemoryNetwork` is dead from here; open another one with the same peer id for the restart.
        """
        node = self._nodes.get(peer)
        if node is not None:
            self._leave(node)

    def silent(self, a: PeerId, b: PeerId) -> bool:
        """Whether nothing passes between the two."""
        if a in self._frozen or b in self._frozen:
            return True
        return bool(self._groups) and self._groups.get(a, 0) != self._groups.get(b, 0)

    def _expect_silence(self) -> None:
        for connection in self._connections():
            if self.silent(connection.near.peer_id, connection.far.peer_id) and not connection.doomed:
                connection.doomed = True
                self.clock.call_at(self.clock.now + NOTICE_S, self._notice, connection)

    def _notice(self, connection: Connection) -> None:
        connection.doomed = False
        if self.silent(connection.near.peer_id, connection.far.peer_id):
            connection.break_off()

    def _release(self) -> None:
        for connection in self._connections():
            if not self.silent(connection.near.peer_id, connection.far.peer_id):
                for stream in list(connection.streams):
                    stream.resume()

    def _connections(self) -> list[Connection]:
        return [each for node in self._nodes.values() for each in node.connections.values() if each.near is node]

    # ---- Nodes and messages

    def join(self, node: MemoryNetwork, address: str | None) -> str:
        """Put a node on the network; its address."""
        self._num_joined += 1
        host = 0x0A000000 + self._num_joined  # 10.0.0.1 and on
        where = address or f"/ip4/{'.'.join(str(host >> shift & 255) for shift in (24, 16, 8, 0))}/tcp/4001"
        self._nodes[node.peer_id] = self._by_address[where] = node
        return where

    def _leave(self, node: MemoryNetwork) -> None:
        if self._nodes.get(node.peer_id) is node:
            del self._nodes[node.peer_id]
            for address in [address for address, other in self._by_address.items() if other is node]:
                del self._by_address[address]
        node.die()

    def has(self, peer: PeerId) -> bool:
        """Whether a node of that identity is on the network."""
        return peer in self._nodes

    def at(self, address: str) -> MemoryNetwork | None:
        """The node that listens at an address."""
        return self._by_address.get(address)

    def one_way_s(self, a: PeerId, b: PeerId) -> float:
        """The latency between two peers."""
        pair = (a, b) if a < b else (b, a)
        latency = self._latencies.get(pair)
        if latency is None:
            latency = self._latencies[pair] = self._latency(self._rng)
        return latency

    def arrival_s(self, latency: float) -> float:
        """When a message that leaves now arrives."""
        time_s = self.clock.now + latency
        if self._loss:
            while self._rng.random() < self._loss:
                time_s += RETRANSMIT_S
        return time_s


class Connection:
    """Two connected nodes, and the streams between them."""

    __slots__ = ("alive", "doomed", "far", "latency", "near", "streams")

    def __init__(self, near: MemoryNetwork, far: MemoryNetwork, latency: float) -> None:
        self.near = near
        self.far = far
        self.latency = latency
        self.streams: dict[MemoryStream, None] = {}
        self.alive = True
        self.doomed = False

    def break_off(self, only: MemoryNetwork | None = None) -> None:
        """End it, for both nodes or for one of them."""
        self.alive = False
        for stream in [stream for stream in self.streams if only is None or stream.node is only]:
            stream.break_off()
        for node in (self.near, self.far):
            if only is None or node is only:
                node.forget(self)


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
        for peer in [peer for peer, other in self.connections.items() if other is connection]:
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
