"""What we change in py-libp2p, each change with its reason. Written against 0.8.1, which ``pyproject.toml`` pins.

``tests/net/test_libp2p_patches.py`` fails when another version is installed, and has a test per change that says whether the library
still needs it. Nothing is patched in place but one constant: the rest are subclasses that `net.libp2p_host` builds its host from.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import structlog
import trio
from libp2p.abc import IMuxedConn, INetConn, ISecureConn
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.trio import TrioTCPStream
from libp2p.network import swarm as libp2p_swarm
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from tessella_p2p.base.limits import (
    HANDSHAKE_TIMEOUT_S,
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_PER_PEER,
    MAX_HALF_OPEN,
    MAX_HALF_OPEN_PER_ADDRESS,
)
from tessella_p2p.net.libp2p_streams import FastConnection, peer_id_of
from tessella_p2p.net.noise_session import FastNoise
from tessella_p2p.net.yamux_frames import PROTOCOL_ID as YAMUX_ID
from tessella_p2p.wire.keys import NodeKey

log = structlog.get_logger(__name__)

LIBP2P_VERSION = "0.8.1"
_MAX_REASON_CHARS = 300
_MAX_CAUSES = 16


class StockYamux(Yamux):
    """py-libp2p's muxer with the constructor that every muxer but it has."""

    def __init__(self, conn: ISecureConn, peer_id: ID) -> None:
        super().__init__(conn, peer_id, is_initiator=conn.is_initiator)


class MuxerChoice(MuxerMultistream):
    """Negotiates the muxer and builds the class that was registered for it.

    The library's own ``new_conn`` builds its `Yamux` for ``/yamux/1.0.0`` whatever was registered.
    """

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """The muxed connection on ``conn``."""
        protocol, muxer = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        return self._annotate_connection(muxer(conn, peer_id), conn, protocol)


class HalfOpen:
    """Accepted sockets whose handshake has not finished, oldest first.

    The library lets silent sockets fill its only table, so that 400 of them keep every new peer out. Here the oldest one gives way to a
    newcomer, first among those of the newcomer's own address: whoever is silent makes room for whoever speaks.
    """

    def __init__(self) -> None:
        self._scopes: OrderedDict[trio.CancelScope, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scopes)

    @contextmanager
    def admit(self, address: str) -> Iterator[trio.CancelScope]:
        """A scope for one handshake; it is cancelled when the handshake has to give way."""
        same = [scope for scope, other in self._scopes.items() if other == address]
        if len(same) >= MAX_HALF_OPEN_PER_ADDRESS:
            self._evict(same[0])
        elif len(self._scopes) >= MAX_HALF_OPEN:
            self._evict(next(iter(self._scopes)))
        with trio.CancelScope() as scope:
            self._scopes[scope] = address
            try:
                yield scope
            finally:
                self._scopes.pop(scope, None)

    def _evict(self, scope: trio.CancelScope) -> None:
        self._scopes.pop(scope)
        scope.cancel()


class NoAutoConnector(AutoConnector):
    """Dials nobody. The library's dials known peers until it has half of the allowed connections, whatever its minimum is set to."""

    async def maybe_connect(self) -> None:
        """Off."""


class GuardedSwarm(Swarm):
    """py-libp2p's swarm: it dials, secures, negotiates and registers; accepting, limits and closing are ours.

    - The library takes one of 250 inbound slots per connection and returns it when the swarm ends, not when the connection does: after
      250 visitors nobody can connect. `accept` needs no slot; live connections are counted.
    - It prunes connections by the streams that it knows of (ours it does not) and dials whomever it likes when there are few. Which
      connections to keep is this node's business: both are off.
    - It closes connections one after the other: 6 s for 30. `close_all` does it at once, within a bound.
    """

    def __init__(self, key_pair: KeyPair, upgrader: TransportUpgrader) -> None:
        peer_id = ID.from_pubkey(key_pair.public_key)
        peerstore = PeerStore()
        peerstore.add_key_pair(peer_id, key_pair)
        super().__init__(
            peer_id,
            peerstore,
            upgrader,
            transports=[TCP()],
            retry_config=RetryConfig(max_retries=0),
            connection_config=ConnectionConfig(
                max_connections=MAX_CONNECTIONS,
                high_watermark=MAX_CONNECTIONS,
                low_watermark=0,
                min_connections=0,
                inbound_upgrade_timeout=HANDSHAKE_TIMEOUT_S,
                outbound_upgrade_timeout=HANDSHAKE_TIMEOUT_S,
            ),
        )
        self.auto_connector = NoAutoConnector(self)
        self.half_open = HalfOpen()
        self.on_connected: Callable[[SwarmConn], None] | None = None
        """Called for each connection that was registered, in either direction."""

    async def accept(self, stream: trio.SocketStream) -> None:
        """Serve one accepted socket until its connection ends; never raises because of what comes over it."""
        tcp = TrioTCPStream(stream)
        remote = tcp.get_remote_address() or ("unknown", 0)
        muxed: IMuxedConn | None = None
        with self.half_open.admit(remote[0]):
            try:
                muxed = await self.upgrade_inbound_raw_conn(RawConnection(tcp, False), Multiaddr("/ip4/0.0.0.0/tcp/0"))
            except Exception as error:  # noqa: BLE001 - garbage raises many types; none may end more than this socket
                log.info("handshake_failed", address=remote[0], reason=describe(error))
        if muxed is not None:
            # trio closes the socket when this task ends
            await (muxed.yamux.closed if isinstance(muxed, FastConnection) else muxed.event_closed).wait()  # type: ignore[attr-defined]

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> SwarmConn:
        """Register a connection, unless its peer has `MAX_CONNECTIONS_PER_PEER` already."""
        if len(self.get_connections(muxed_conn.peer_id)) >= MAX_CONNECTIONS_PER_PEER:
            raise SwarmException(f"{peer_id_of(muxed_conn.peer_id)} has {MAX_CONNECTIONS_PER_PEER} connections already")
        connection = await super().add_conn(muxed_conn, direction)
        if self.on_connected is not None:
            self.on_connected(connection)
        return connection

    async def close_all(self, connections: Sequence[INetConn], timeout_s: float) -> None:
        """Close connections side by side; what is not done in time is abandoned to the end of the swarm."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + timeout_s):
            async with trio.open_nursery() as nursery:
                for connection in connections:
                    nursery.start_soon(connection.close)

    def _trim_connections(self, peer_id: ID) -> None:
        """Off: see the class."""

    def _schedule_prune(self) -> None:
        """Off: see the class."""

    def _schedule_auto_connect(self) -> None:
        """Off: see the class."""


def build_swarm(key: NodeKey, *, fast: bool) -> GuardedSwarm:
    """A swarm that speaks TCP, Noise and Yamux and nothing else (the library's defaults also offer plaintext and secio).

    Args:
        key: this node's identity. The Noise static key is a fresh X25519 key that the identity signs.
        fast: our session and muxer; else the library's.
    """
    quiet_libp2p()
    libp2p_swarm._HAPPY_EYEBALLS_DELAY = (
        0  # every dial waits it out, also with one address; `Libp2pNetwork` staggers by itself
    )
    key_pair = create_new_key_pair(key.seed)
    noise = FastNoise if fast else NoiseTransport
    upgrader = TransportUpgrader(
        {NOISE_ID: noise(key_pair, noise_privkey=create_x25519_key_pair().private_key)},
        {},
        negotiate_timeout=int(HANDSHAKE_TIMEOUT_S),
    )
    upgrader.muxer_multistream = MuxerChoice(
        {TProtocol(YAMUX_ID): FastConnection if fast else StockYamux}, int(HANDSHAKE_TIMEOUT_S)
    )
    return GuardedSwarm(key_pair, upgrader)


def quiet_libp2p() -> None:
    """Drop the library's records below error: it formats them for every frame, and some name what it carries.

    Its errors go where the process's logs go; by itself it keeps them from there.
    """
    for name in ("libp2p", "multiaddr", "anyio_service"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.ERROR)
        logger.propagate = True
    logging.getLogger("libp2p.transport").setLevel(logging.CRITICAL)  # a dial that fails is a `DialError` of ours


def describe(error: BaseException) -> str:
    """What an error comes to, at most 300 characters: what the system said, or the first message and the innermost one.

    Between the two the library repeats itself, with the peer's id in each sentence.
    """
    cause = _innermost(error)
    if isinstance(cause, PeerIDMismatchesPubkey):
        return "another peer answers there, with another key"
    if isinstance(cause, OSError) and cause.errno and cause.strerror:
        return (os.strerror(cause.errno) if cause.errno > 0 else cause.strerror)[:_MAX_REASON_CHARS]
    first, last = (str(each) or type(each).__name__ for each in (error, cause))
    return (first if last in first else f"{first}: {last}")[:_MAX_REASON_CHARS]


def _innermost(error: BaseException) -> BaseException:
    """The end of the chain of causes, through the first error of each group."""
    for _ in range(_MAX_CAUSES):
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
        if inner is None:
            break
        error = inner
    return error
