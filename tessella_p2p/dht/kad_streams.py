"""The shell around `kademlia.Kademlia`: one long-lived stream for each peer that is asked, and the answers to those who ask.

A stream that this node opened carries its requests one way and the replies the other; the peer's own requests come on a stream that
the peer opened. So no request waits for another, and none pays for a dial or a negotiation but the first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import trio

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import MalformedMessage, Overloaded, RemoteProtocolError, TransportError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    KAD_DIAL_S,
    KAD_HARD_S,
    KAD_IDLE_S,
    KAD_LANE_REQUESTS,
    KAD_LOOKUP_S,
    KAD_MAX_QUERIES,
    KAD_MAX_STREAMS,
    KAD_REQUEST_BURST,
    KAD_REQUESTS_PER_S,
    KAD_STREAMS_PER_PEER,
    MAX_ENVELOPE_BYTES,
)
from tessella_p2p.dht.events import (
    Abandon,
    Effect,
    Event,
    Get,
    Join,
    Put,
    QueryFinished,
    Refresh,
    ReplyReceived,
    RequestFailed,
    RequestReceived,
    SendReply,
    SendRequest,
    TimerFired,
)
from tessella_p2p.dht.inbound import InboundStreams
from tessella_p2p.dht.kademlia import Kademlia
from tessella_p2p.dht.keyspace import Contact
from tessella_p2p.dht.patience import extend
from tessella_p2p.dht.rate_limit import RateLimit
from tessella_p2p.dht.requests import Reply, Request, decode_reply, decode_request, encode_reply, encode_request
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.network import Network, Stream
from tessella_p2p.wire.protocols import KAD

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Lane:
    """An outbound stream, or one that is being opened; ``waiting`` are the requests without a reply, ``patience`` ends with the next
    reply's time."""

    peer: PeerId
    requests: trio.MemorySendChannel[Request]
    waiting: dict[int, None]
    patience: trio.CancelScope


@dataclass(slots=True)
class _Waiter:
    finished: trio.Event
    outcome: QueryFinished | None = None


class KadStreams:
    """A Kademlia that talks over a network.

    Queries (`join`, `get`, `put`, `refresh`) that start before `run` does wait for it; each request has its deadlines, and so has each
    query but a join.

    Args:
        network: this node's network.
        clock: the date, for the validity of records.
        rng: the node's generator.
    """

    def __init__(self, network: Network, clock: WallClock, rng: random.Random) -> None:
        self.machine = Kademlia(network.peer_id, network.addresses, rng)
        self._network = network
        self._clock = clock
        self._lanes: dict[PeerId, _Lane] = {}
        self._nursery: trio.Nursery | None = None
        self._started = trio.Event()
        self._timer: trio.CancelScope | None = None
        self._waiters: dict[int, _Waiter] = {}
        self._last_query = 0
        self._slots = trio.CapacityLimiter(KAD_MAX_QUERIES)
        self._limit: RateLimit[PeerId] = RateLimit(KAD_REQUESTS_PER_S, KAD_REQUEST_BURST)
        self._inbound = InboundStreams(KAD_STREAMS_PER_PEER, KAD_MAX_STREAMS)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started once requests are answered."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._network.serve(KAD, self._serve)
            self._started.set()
            task_status.started()
            while True:
                with trio.CancelScope(deadline=self.machine.next_deadline()) as self._timer:
                    await trio.sleep_forever()
                self._handle(TimerFired())

    async def join(self, seeds: tuple[Contact, ...]) -> QueryFinished:
        """Enter the mesh through peers; cancellation gives the query up."""
        return await self._query(lambda number: Join(number, seeds), math.inf)

    async def get(self, key: bytes, deadline_s: float = KAD_LOOKUP_S) -> QueryFinished:
        """Look values up; after the deadline, what was found until then. Cancellation gives the query up."""
        return await self._query(lambda number: Get(number, key), deadline_s)

    async def put(self, key: bytes, value: bytes, deadline_s: float = KAD_LOOKUP_S) -> QueryFinished:
        """Store a value at the closest peers, see `get`."""
        return await self._query(lambda number: Put(number, key, value), deadline_s)

    async def refresh(self) -> QueryFinished:
        """Refresh one bucket, and say anew where this node can be dialled."""
        self.machine.set_addresses(self._network.addresses)
        return await self._query(Refresh, KAD_LOOKUP_S)

    async def _query(self, event: Callable[[int], Join | Get | Put | Refresh], deadline_s: float) -> QueryFinished:
        await self._started.wait()
        async with self._slots:
            self._last_query += 1
            number = self._last_query
            waiter = self._waiters[number] = _Waiter(trio.Event())
            try:
                self._handle(event(number))
                with trio.move_on_after(deadline_s):
                    await waiter.finished.wait()
            finally:
                if waiter.outcome is None:
                    self._handle(Abandon(number))
                del self._waiters[number]
        assert waiter.outcome is not None
        return waiter.outcome

    def _handle(self, event: Event) -> Reply | None:
        """Drive the machine; returns the reply to a received request."""
        reply: Reply | None = None
        for effect in self._effects_of(event):
            match effect:
                case SendRequest():
                    self._send(effect)
                case SendReply():
                    reply = effect.reply
                case QueryFinished():
                    waiter = self._waiters[effect.query]
                    waiter.outcome = effect
                    waiter.finished.set()
        # Most events change nothing, and to set a deadline costs more than to look at it.
        if self._timer is not None and self.machine.next_deadline() < self._timer.deadline:
            self._timer.deadline = self.machine.next_deadline()
        return reply

    def _effects_of(self, event: Event) -> list[Effect]:
        return self.machine.handle(event, trio.current_time(), self._clock.unix_ms())

    # ---- Asking ----

    def _send(self, effect: SendRequest) -> None:
        peer = effect.contact.peer_id
        lane = self._lanes.get(peer)
        if lane is None:
            assert self._nursery is not None, "queries wait for run()"
            sender, receiver = trio.open_memory_channel[Request](KAD_LANE_REQUESTS)
            lane = self._lanes[peer] = _Lane(peer, sender, {}, trio.CancelScope())
            self._nursery.start_soon(self._run_lane, lane, receiver, effect.contact.addresses)
        if len(lane.waiting) >= KAD_LANE_REQUESTS:
            # A peer that owes so many replies is frozen; the machine hears of it from its own deadlines.
            return
        if not lane.waiting:
            lane.patience.deadline = trio.current_time() + 2 * KAD_HARD_S
        lane.waiting[effect.request.id] = None
        lane.requests.send_nowait(effect.request)

    async def _run_lane(
        self, lane: _Lane, requests: trio.MemoryReceiveChannel[Request], addresses: tuple[str, ...]
    ) -> None:
        """Open a peer's stream and carry requests and replies until it breaks or is idle; then fail what waits."""
        try:
            self._network.add_addresses(lane.peer, addresses)
            with trio.fail_after(KAD_DIAL_S):
                stream = await self._network.open_stream(lane.peer, KAD)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send_requests, stream, requests, nursery.cancel_scope)
                    await self._receive_replies(lane, stream)
                    nursery.cancel_scope.cancel()
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                    await stream.reset()
        except (TransportError, RemoteProtocolError, trio.TooSlowError) as error:
            log.debug("kad_stream_not_opened", peer_id=lane.peer, reason=str(error))
        finally:
            if self._lanes.get(lane.peer) is lane:
                del self._lanes[lane.peer]
        for request_id in lane.waiting:
            self._handle(RequestFailed(request_id))

    async def _send_requests(
        self, stream: Stream, requests: trio.MemoryReceiveChannel[Request], scope: trio.CancelScope
    ) -> None:
        try:
            # A peer that takes nothing replies to nothing either, so the patience for replies ends this too.
            async for request in requests:
                await send_message(stream, encode_request(request))
        except TransportError as error:
            log.debug("kad_stream_broke", peer_id=stream.peer, reason=str(error))
        scope.cancel()

    async def _receive_replies(self, lane: _Lane, stream: Stream) -> None:
        """Take replies until the stream ends, misbehaves, or says nothing for too long (idle, or a frozen peer)."""
        with trio.CancelScope() as lane.patience:
            try:
                while True:
                    patience_s = 2 * KAD_HARD_S if lane.waiting else KAD_IDLE_S
                    lane.patience.deadline = trio.current_time() + patience_s
                    message = await receive_message(stream, MAX_ENVELOPE_BYTES)
                    if message is None:
                        return
                    reply = decode_reply(message)
                    if reply.to not in lane.waiting:
                        raise MalformedMessage(f"{lane.peer} replied to no request")
                    del lane.waiting[reply.to]
                    self._handle(ReplyReceived(lane.peer, reply))
            except (TransportError, RemoteProtocolError) as error:
                log.debug("kad_stream_broke", peer_id=lane.peer, reason=str(error))

    # ---- Answering ----

    async def _serve(self, stream: Stream) -> None:
        """Answer one inbound stream; requests of one stream are answered in order, one at a time."""
        with self._inbound.place(stream.peer) as has_place:
            if not has_place or not await self._answer_all(stream):
                await stream.reset()

    async def _answer_all(self, stream: Stream) -> bool:
        """Answer until the stream ends; False where this side has to end it."""
        try:
            with trio.CancelScope() as patience:
                while True:
                    extend(patience, 2 * KAD_IDLE_S)  # for a peer that asks nothing, and for one that takes no reply
                    message = await receive_message(stream, MAX_ENVELOPE_BYTES)
                    if message is None:
                        return True
                    await send_message(stream, self._answer(stream.peer, message))
        except (TransportError, RemoteProtocolError, Overloaded) as error:
            log.debug("kad_stream_closed", peer_id=stream.peer, reason=str(error))
        return False

    def _answer(self, peer: PeerId, message: bytes) -> bytes:
        if not self._limit.allows(peer, trio.current_time()):
            raise Overloaded(f"{peer} asks more than {KAD_REQUESTS_PER_S:.0f} times a second")
        reply = self._handle(RequestReceived(peer, decode_request(message)))
        assert reply is not None, "the machine answers every request"
        return encode_reply(reply)
