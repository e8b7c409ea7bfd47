"""The shell around `gossip.Gossip`: a one-way stream to each neighbour of the moment, and the batches of those who chose this node."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import trio

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import RemoteProtocolError, TransportError, VersionMismatch
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    GOSSIP_IDLE_S,
    GOSSIP_MAX_STREAMS,
    GOSSIP_QUEUED_BATCHES,
    KAD_DIAL_S,
    KAD_STREAMS_PER_PEER,
    MAX_ENVELOPE_BYTES,
    MAX_SWARM_RECORDS,
)
from tessella_p2p.dht.gossip import Gossip, SendBatch
from tessella_p2p.dht.inbound import InboundStreams
from tessella_p2p.dht.messages import HeartbeatBatch, encode_batch
from tessella_p2p.dht.patience import extend
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.network import Network, Stream
from tessella_p2p.wire.envelope import decode_message
from tessella_p2p.wire.protocols import GOSSIP

log = structlog.get_logger(__name__)

_NO_GOSSIP_S = 300.0
"""A peer that does not speak gossip is left alone for so long."""


@dataclass(slots=True, eq=False)
class _Link:
    """An outbound stream, or one that is being opened."""

    peer: PeerId
    batches: trio.MemorySendChannel[tuple[bytes, ...]]


class GossipStreams:
    """Gossip over a network; `run` has to run in a nursery for anything to leave.

    Args:
        network: this node's network.
        clock: the date, for the validity of records.
        rng: the node's generator.
        deliver: called with each record that is news to this node.
    """

    def __init__(
        self, network: Network, clock: WallClock, rng: random.Random, deliver: Callable[[bytes], None]
    ) -> None:
        self.core = Gossip(rng)
        self._network = network
        self._clock = clock
        self._deliver = deliver
        self._links: dict[PeerId, _Link] = {}
        self._silent: dict[PeerId, float] = {}
        self._nursery: trio.Nursery | None = None
        self._timer: trio.CancelScope | None = None
        self._inbound = InboundStreams(KAD_STREAMS_PER_PEER, GOSSIP_MAX_STREAMS)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Pass heartbeats on until cancelled; started once they are taken."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._network.serve(GOSSIP, self._serve)
            task_status.started()
            while True:
                with trio.CancelScope(deadline=self.core.next_deadline()) as self._timer:
                    await trio.sleep_forever()
                self._flush()

    def say(self, raw: bytes) -> None:
        """Send this node's own record to the neighbours of the moment."""
        self.core.say(raw, trio.current_time())
        self._rearm()

    def _rearm(self) -> None:
        # Most calls change nothing, and to set a deadline costs more than to look at it.
        if self._timer is not None and self.core.next_deadline() < self._timer.deadline:
            self._timer.deadline = self.core.next_deadline()

    def _flush(self) -> None:
        now = trio.current_time()
        peers = [peer for peer in self._network.connected_peers() if self._silent.get(peer, now) <= now]
        for effect in self.core.flush(peers, now):
            self._send(effect)

    def _send(self, effect: SendBatch) -> None:
        link = self._links.get(effect.peer)
        if link is None:
            assert self._nursery is not None, "GossipStreams.run is not running"
            sender, receiver = trio.open_memory_channel[tuple[bytes, ...]](GOSSIP_QUEUED_BATCHES)
            link = self._links[effect.peer] = _Link(effect.peer, sender)
            self._nursery.start_soon(self._run_link, link, receiver)
        try:
            link.batches.send_nowait(effect.records)
        except trio.WouldBlock:
            log.debug("heartbeats_dropped", peer_id=effect.peer)

    async def _run_link(self, link: _Link, batches: trio.MemoryReceiveChannel[tuple[bytes, ...]]) -> None:
        """Send a neighbour its batches until it is none any more."""
        try:
            with trio.fail_after(KAD_DIAL_S):
                stream = await self._network.open_stream(link.peer, GOSSIP)
            try:
                with trio.CancelScope() as patience:  # for a neighbour of the past, and for one that takes nothing
                    while True:
                        extend(patience, GOSSIP_IDLE_S)
                        await send_message(stream, encode_batch(await batches.receive()))
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                    await stream.aclose()
        except VersionMismatch:
            self._leave_alone(link.peer)
        except (TransportError, RemoteProtocolError, trio.TooSlowError) as error:
            log.debug("gossip_stream_not_opened", peer_id=link.peer, reason=str(error))
        finally:
            if self._links.get(link.peer) is link:
                del self._links[link.peer]

    def _leave_alone(self, peer: PeerId) -> None:
        self._silent[peer] = trio.current_time() + _NO_GOSSIP_S
        if len(self._silent) > MAX_SWARM_RECORDS:
            del self._silent[next(iter(self._silent))]

    async def _serve(self, stream: Stream) -> None:
        """Take one inbound stream's batches; records that are none close it."""
        with self._inbound.place(stream.peer) as has_place:
            if not has_place or not await self._take_batches(stream):
                await stream.reset()

    async def _take_batches(self, stream: Stream) -> bool:
        """Take batches until the stream ends; False where this side has to end it."""
        try:
            with trio.CancelScope() as patience:
                while True:
                    extend(patience, 4 * GOSSIP_IDLE_S)
                    message = await receive_message(stream, MAX_ENVELOPE_BYTES)
                    if message is None:
                        return True
                    self._take(stream.peer, decode_message(HeartbeatBatch, message))
        except (TransportError, RemoteProtocolError) as error:
            log.debug("gossip_stream_closed", peer_id=stream.peer, reason=str(error))
        return False

    def _take(self, source: PeerId, batch: HeartbeatBatch) -> None:
        received = self.core.receive(source, batch.records, trio.current_time(), self._clock.unix_ms())
        for raw in received.fresh:
            self._deliver(raw)
        self._rearm()
        if received.num_invalid:
            # An honest neighbour checked what it passes on; a record that expired on the way is not worth a new stream, though.
            log.debug("invalid_heartbeats", peer_id=source, number=received.num_invalid)
