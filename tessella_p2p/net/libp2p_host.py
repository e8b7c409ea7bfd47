"""`net.network.Network` over py-libp2p: TCP, Noise, Yamux.

The library dials, authenticates and keeps the table of connections; the changes it needs are in ``libp2p_patches.py``. Streams bypass
its wrappers: a stream of this network is a stream of the muxer. Every connection carries a stream of ``/tessella/ping/1`` in each
direction, so that a frozen or unplugged peer is noticed and its streams raise `StreamReset`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import structlog
import trio
from libp2p.abc import INetStream
from libp2p.custom_types import StreamHandlerFn
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.basic_host import BasicHost
from libp2p.host.ping import ID as LIBP2P_PING
from libp2p.host.ping import PingService
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.identify import identify_handler_for
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.peer.id import ID
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from tessella_p2p.base.errors import (
    ConfigurationError,
    DialError,
    MalformedMessage,
    RemoteProtocolError,
    StreamReset,
    TransportError,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    CLOSE_TIMEOUT_S,
    DIAL_STAGGER_S,
    DIAL_TIMEOUT_S,
    NEGOTIATE_TIMEOUT_S,
    PING_INTERVAL_S,
    PING_TIMEOUT_S,
)
from tessella_p2p.net import multistream
from tessella_p2p.net.libp2p_patches import GuardedSwarm, build_swarm, describe
from tessella_p2p.net.libp2p_streams import FastConnection, as_port_stream, peer_id_of
from tessella_p2p.net.listening import announced_addresses, bind, listening_addresses
from tessella_p2p.net.names import resolve
from tessella_p2p.net.network import Handler, NetworkEvent, PeerConnected, PeerDisconnected, Stream
from tessella_p2p.net.ping import answer_pings, watch_pings
from tessella_p2p.net.serving import AddressBook, EventFan, Handlers
from tessella_p2p.wire.keys import NodeKey, public_key_of
from tessella_p2p.wire.protocols import PING

log = structlog.get_logger(__name__)


class Libp2pNetwork:
    """One node's access to its peers. Make it with `open`.

    Args:
        swarm: what dials and accepts.
        key: this node's identity.
        addresses: at which this node says it can be dialled.
        ping_interval_s, ping_timeout_s: how often each connection is probed, and how long an answer may take.
    """

    def __init__(
        self,
        swarm: GuardedSwarm,
        key: NodeKey,
        addresses: tuple[str, ...],
        nursery: trio.Nursery,
        *,
        ping_interval_s: float,
        ping_timeout_s: float,
    ) -> None:
        self._swarm = swarm
        self._peer_id = key.peer_id
        self._addresses = addresses
        self._nursery = nursery
        self._ping_interval_s = ping_interval_s
        self._ping_timeout_s = ping_timeout_s
        self._connections: dict[PeerId, list[SwarmConn]] = {}
        self._round_trips: dict[PeerId, float] = {}
        self._dialling: dict[PeerId, trio.Lock] = {}
        self._book = AddressBook()
        self._events = EventFan()
        self._handlers = Handlers()
        self._handlers.add(PING, answer_pings)
        self._library_handlers = _library_handlers(swarm, addresses)
        swarm.set_stream_handler(self._serve_inbound)
        swarm.on_connected = self._on_connected

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        key: NodeKey,
        listen: Sequence[str],
        announce: Sequence[str] = (),
        *,
        muxer: Literal["fast", "stock"] = "fast",
        ping_interval_s: float = PING_INTERVAL_S,
        ping_timeout_s: float = PING_TIMEOUT_S,
    ) -> AsyncIterator[Libp2pNetwork]:
        """Run a network for the length of an ``async with`` block. Several of them in one task must be closed last in, first out.

        Args:
            key: this node's identity.
            listen: ``/ip4|ip6/<address>/tcp/<port>``; port 0 takes a free one; none at all makes a node that only dials.
            announce: what to report in `addresses` instead of the listening addresses; port 0 stands for the listening port.
            muxer: ``stock`` runs py-libp2p's session and muxer, which need half the guards and a quarter of the speed for granted.

        Raises:
            PortInUseError: names the address; nothing was started.
            ConfigurationError: for an address that cannot be listened on.
        """
        listeners = await bind(listen)
        addresses = announced_addresses(announce, listening_addresses(listeners))
        swarm = build_swarm(key, fast=muxer == "fast")
        failure: Exception | None = None
        async with background_trio_service(swarm), trio.open_nursery() as nursery:
            network = cls(
                swarm, key, addresses, nursery, ping_interval_s=ping_interval_s, ping_timeout_s=ping_timeout_s
            )
            if listeners:
                nursery.start_soon(trio.serve_listeners, swarm.accept, listeners)
            log.info("network_started", peer_id=key.peer_id, addresses=addresses, muxer=muxer)
            try:
                yield network
            except Exception as error:  # noqa: BLE001 - carried past the nurseries: the caller gets its own error, not a group
                failure = error
            finally:
                await network._shut_down()
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _shut_down(self) -> None:
        everybody = [connection for connections in self._connections.values() for connection in connections]
        await self._swarm.close_all(everybody, CLOSE_TIMEOUT_S)
        self._events.close()

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
        self._book.add(peer, [address for address in addresses if _parsed(address) is not None])

    async def connect(self, address: str) -> PeerId:
        """See `net.network.Network`."""
        where, separator, pin = address.rpartition("/p2p/")
        parsed = _parsed(where)
        if not separator or parsed is None:
            raise ConfigurationError(f"{address!r} is no multiaddr that ends in /p2p/<peer id>")
        peer = PeerId(pin)
        try:
            public_key_of(peer)
        except MalformedMessage as error:
            raise ConfigurationError(f"{address!r} does not end in a peer id: {error}") from error
        if peer != self._peer_id and self._live(peer) is None:
            await self._dial(peer, (where,))
        self._book.add(peer, (where,))
        return peer

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """See `net.network.Network`."""
        if peer == self._peer_id:
            return self._handlers.open_to_self(peer, protocol, self._nursery)
        connection = self._live(peer) or await self._dial(peer, self._book.of(peer))
        return await self._open_on(connection, peer, protocol)

    def serve(self, protocol: str, handler: Handler) -> None:
        """Answer inbound streams of ``protocol`` with ``handler``, each in a task of its own."""
        self._handlers.add(protocol, handler)

    def connected_peers(self) -> tuple[PeerId, ...]:
        """Peers with a live connection."""
        return tuple(peer for peer in self._connections if self._live(peer) is not None)

    def events(self) -> trio.MemoryReceiveChannel[NetworkEvent]:
        """A new subscription to events from now on; a subscriber that falls 256 behind loses the oldest."""
        return self._events.subscribe()

    async def disconnect(self, peer: PeerId) -> None:
        """Close every connection to ``peer``."""
        await self._swarm.close_all(list(self._connections.get(peer, ())), CLOSE_TIMEOUT_S)

    # ---- Beyond the port

    @property
    def handler_failures(self) -> int:
        """Handlers that ended with an exception, over all protocols."""
        return self._handlers.failures.total()

    def round_trip_s(self, peer: PeerId) -> float | None:
        """The last ping's round trip to a connected peer, or None before the first."""
        return self._round_trips.get(peer)

    # ---- Connections

    def _live(self, peer: PeerId) -> SwarmConn | None:
        connections = self._connections.get(peer, ())
        return next((connection for connection in connections if not connection.muxed_conn.is_closed), None)

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> SwarmConn:
        if not addresses:
            raise DialError(f"no address of {peer} is known")
        lock = self._dialling.setdefault(peer, trio.Lock())
        try:
            async with lock:
                return self._live(peer) or await self._race(peer, addresses)
        finally:
            if not lock.statistics().locked:
                self._dialling.pop(peer, None)

    async def _race(self, peer: PeerId, addresses: Sequence[str]) -> SwarmConn:
        """Try the addresses side by side, each a little after the one before; the first that authenticates wins."""
        failures: list[str] = []
        with trio.move_on_after(DIAL_TIMEOUT_S) as deadline:
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    failed = trio.Event()
                    nursery.start_soon(self._try, peer, address, failures, failed, nursery.cancel_scope)
                    with trio.move_on_after(DIAL_STAGGER_S):
                        await failed.wait()
        connection = self._live(peer)
        if connection is None:
            if deadline.cancelled_caught:
                failures.append(f"no answer within {DIAL_TIMEOUT_S:g} s")
            raise DialError(f"{peer} cannot be reached: {'; '.join(failures)[:600]}")
        return connection

    async def _try(
        self, peer: PeerId, address: str, failures: list[str], failed: trio.Event, race: trio.CancelScope
    ) -> None:
        try:
            for resolved in await resolve(address):
                try:
                    await self._swarm.dial_addr(Multiaddr(resolved), ID.from_base58(peer))
                except BaseLibp2pError as error:
                    failures.append(f"{resolved}: {describe(error)}")
                else:
                    race.cancel()
                    return
            failed.set()
        except Exception as error:  # noqa: BLE001 - the library's dialling raises many types; each is one failed address
            failures.append(f"{address}: {describe(error)}")
            failed.set()

    def _on_connected(self, connection: SwarmConn) -> None:
        peer = peer_id_of(connection.muxed_conn.peer_id)
        first = not self._connections.get(peer)
        self._connections.setdefault(peer, []).append(connection)
        if first:
            log.info("peer_connected", peer=peer)
            self._events.publish(PeerConnected(peer))
        self._nursery.start_soon(self._watch, peer, connection)

    async def _watch(self, peer: PeerId, connection: SwarmConn) -> None:
        """Ping a connection until it ends, and take it off the table."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._probe, peer, connection)
                await connection.event_closed.wait()
                nursery.cancel_scope.cancel()
        finally:
            self._connections[peer].remove(connection)
            if not self._connections[peer]:
                del self._connections[peer]
                self._round_trips.pop(peer, None)
                log.info("peer_disconnected", peer=peer)
                self._events.publish(PeerDisconnected(peer))

    async def _probe(self, peer: PeerId, connection: SwarmConn) -> None:
        await trio.sleep(self._ping_interval_s)
        try:
            with trio.fail_after(self._ping_timeout_s):
                stream = await self._open_on(connection, peer, PING)
            async for round_trip_s in watch_pings(stream, self._ping_interval_s, self._ping_timeout_s):
                self._round_trips[peer] = round_trip_s
        except (trio.TooSlowError, TransportError) as error:
            log.info("peer_silent", peer=peer, timeout_s=self._ping_timeout_s, reason=str(error))
            await _drop(connection)
        except RemoteProtocolError as error:
            log.info("peer_without_ping", peer=peer, reason=str(error))  # another libp2p: it lives by TCP alone

    # ---- Streams

    async def _open_on(self, connection: SwarmConn, peer: PeerId, protocol: str) -> Stream:
        muxed = connection.muxed_conn
        stream: Stream
        if isinstance(muxed, FastConnection):
            stream = muxed.yamux.open_stream()
        else:
            try:
                stream = as_port_stream(await muxed.open_stream(), peer)
            except BaseLibp2pError as error:
                raise StreamReset(f"no stream to {peer}: {error}") from error
        try:
            with trio.fail_after(NEGOTIATE_TIMEOUT_S):
                await multistream.select(stream, protocol)
        except BaseException as error:  # a cancellation, too, has to leave no stream behind
            with trio.CancelScope(shield=True):
                await stream.reset()
            if isinstance(error, trio.TooSlowError):
                raise StreamReset(f"{peer} did not settle on {protocol} within {NEGOTIATE_TIMEOUT_S:g} s") from error
            raise
        return stream

    async def _serve_inbound(self, net_stream: INetStream) -> None:
        """Settle the protocol of a stream that a peer opened, and serve it. Raises nothing: the library would end the host."""
        peer = peer_id_of(net_stream.muxed_conn.peer_id)
        stream = as_port_stream(net_stream.muxed_stream, peer)  # type: ignore[attr-defined]
        try:
            with trio.fail_after(NEGOTIATE_TIMEOUT_S):
                protocol = await multistream.answer(stream, {*self._handlers.protocols, *self._library_handlers})
        except (TransportError, RemoteProtocolError, trio.TooSlowError) as error:
            log.info("stream_refused", peer=peer, reason=str(error) or "no protocol asked for in time")
            await stream.reset()
            return
        if protocol is None:
            await stream.aclose()
        elif protocol in self._library_handlers:
            serve = self._library_handlers[protocol]
            await self._handlers.guard(protocol, stream, lambda: serve(net_stream))
        else:
            await self._handlers.run(protocol, stream)


async def _drop(connection: SwarmConn) -> None:
    """End a connection whose other end does not answer: no good-byes."""
    if isinstance(connection.muxed_conn, FastConnection):
        connection.muxed_conn.yamux.abort("the peer does not answer pings")
    with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_TIMEOUT_S):
        await connection.close()


def _parsed(address: str) -> Multiaddr | None:
    try:
        parsed = Multiaddr(address)
        list(parsed.items())
    except Exception:  # noqa: BLE001 - the parser's errors have no common type, and "no address" is the only verdict
        return None
    return parsed if address else None


def _library_handlers(swarm: GuardedSwarm, addresses: tuple[str, ...]) -> dict[str, StreamHandlerFn]:
    """Identify and ping, so that any libp2p tool can look at this node. It asks nobody: what it must know comes in signed records."""
    host = BasicHost(swarm, addrs_factory=lambda _: [Multiaddr(address) for address in addresses])
    swarm.notifees = [notifee for notifee in swarm.notifees if type(notifee).__name__ != "_IdentifyNotifee"]
    return {IDENTIFY: identify_handler_for(host), LIBP2P_PING: PingService(host).handle_ping}
