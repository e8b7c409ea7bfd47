"""The Kademlia of one node as a state machine: events in, effects out, no I/O, no clock, no randomness of its own.

    event            effects
    RequestReceived  SendReply
    ReplyReceived    SendRequest…, QueryFinished…    (a reply to no open request is ignored)
    RequestFailed    SendRequest…, QueryFinished…
    TimerFired       SendRequest…, QueryFinished…    (due at `Kademlia.next_deadline`)
    Join, Get, Put, Refresh   SendRequest…, QueryFinished
    Abandon          QueryFinished, with what was found so far

A request has two deadlines. The soft one follows three median round trips and frees the request's slot in its lookup; the hard one
gives the request up and counts as a strike against the peer.

Nothing that a peer says is believed beyond what it can prove. A contact is a hint whom to dial next. A value counts only if
`records.check_value` accepts it, and peers whose values are all invalid do not count towards a quorum. So a lying node can withhold,
and no more.

Source: Kademlia (see `keyspace`), sections 2.3 to 2.5, without caching along the path and without republishing by others: values live
for a minute, and their signers publish them again.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tessella_p2p.base.errors import LocalProtocolError, RefusalError, RemoteProtocolError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    KAD_ALPHA,
    KAD_HARD_S,
    KAD_K,
    KAD_MAX_ADDRESSES,
    KAD_MAX_QUERIES,
    KAD_SOFT_DEFAULT_S,
    KAD_SOFT_MAX_S,
    KAD_SOFT_MIN_S,
    KAD_TARGETS_S,
    MAX_BOOTSTRAP,
    MAX_REFUSAL_CHARS,
    MAX_WATCHED,
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
from tessella_p2p.dht.keyspace import KEY_BYTES, Contact
from tessella_p2p.dht.lookup import Lookup
from tessella_p2p.dht.records import RecordStore, check_value
from tessella_p2p.dht.requests import Declined, Find, Found, Reply, Request, Store, Stored
from tessella_p2p.dht.routing_table import RoutingTable

_ROUND_TRIPS = 32
"""Round trips that the median is taken over."""
_ROUND_TRIPS_NEEDED = 8


@dataclass(slots=True)
class _Query:
    """A query in progress; ``open`` counts its lookups and stores that are not over."""

    number: int
    event: Join | Get | Put | Refresh
    open: int = 0
    messages: int = 0
    hops: int = 0
    stored: int = 0
    widened: bool = False
    table_size: int = 0
    newest: dict[PeerId, tuple[int, bytes]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Targets:
    """Where the last `Put` of a key stored its value, for the next ones."""

    peers: list[Contact]
    until: float
    table_size: int


@dataclass(slots=True)
class _Open:
    """A request without an answer; ``lookup`` is None for a store."""

    contact: Contact
    query: _Query
    lookup: Lookup | None
    sent_at: float


class Kademlia:
    """One node's Kademlia.

    Args:
        own: this node.
        addresses: where it can be dialled; without any it asks and stays out of others' tables.
        rng: the only source of randomness (refresh targets, the store's salt).
    """

    def __init__(self, own: PeerId, addresses: Iterable[str], rng: random.Random) -> None:
        self.table = RoutingTable(own)
        self.store = RecordStore(rng.randbytes(16))
        self._own = own
        self._addresses: tuple[str, ...] = ()
        self.set_addresses(addresses)
        self._rng = rng
        self._queries: dict[int, _Query] = {}
        self._requests: dict[int, _Open] = {}
        self._deadlines: list[tuple[float, int, bool]] = []
        self._targets: dict[bytes, _Targets] = {}
        self._widening = 0  # the number of the last join that looked the farther buckets up
        self._last_id = 0
        self._round_trips: deque[float] = deque(maxlen=_ROUND_TRIPS)
        self._soft_s = KAD_SOFT_DEFAULT_S
        self._effects: list[Effect] = []

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Say where this node can be dialled from now on; the first few count."""
        self._addresses = tuple(addresses)[:KAD_MAX_ADDRESSES]

    def next_deadline(self) -> float:
        """When `TimerFired` is due, in the seconds of ``now``; infinity for never."""
        while self._deadlines and self._deadlines[0][1] not in self._requests:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        """Take an event; returns what to do.

        Args:
            event: what happened.
            now: monotonic seconds, for deadlines.
            now_ms: Unix milliseconds, for the validity of records.

        Raises:
            LocalProtocolError: the caller broke a rule (a query number in use, too many queries). Never for what a peer did.
        """
        match event:
            case RequestReceived():
                self._answer(event, now_ms)
            case ReplyReceived():
                self._take_reply(event, now, now_ms)
            case RequestFailed():
                self._fail(event.request_id, now, now_ms, unreachable=True)
            case TimerFired():
                self._take_time(now, now_ms)
            case Abandon():
                query = self._queries.get(event.query)
                if query is not None:
                    self._finish(query)
            case Join() | Get() | Put() | Refresh():
                self._start(event, now, now_ms)
        effects, self._effects = self._effects, []
        return effects

    # ---- Serving ----

    def _answer(self, event: RequestReceived, now_ms: int) -> None:
        request = event.request
        self.table.add(Contact(event.sender, request.addresses), from_itself=True)
        body: Found | Stored | Declined
        match request.body:
            case Find():
                body = self._found(request.body, event.sender, now_ms)
            case Store():
                body = self._stored(request.body, event.sender, now_ms)
        self._effects.append(SendReply(Reply(request.id, body)))

    def _found(self, find: Find, sender: PeerId, now_ms: int) -> Found:
        contacts = self.table.closest(int.from_bytes(find.key, "big"), KAD_K, without=sender)
        return Found(tuple(contacts), self.store.get(find.key, now_ms) if find.values else ())

    def _stored(self, store: Store, sender: PeerId, now_ms: int) -> Stored | Declined:
        try:
            self.store.put(store.key, store.value, sender, now_ms)
        except (RemoteProtocolError, RefusalError) as error:
            return Declined(error.code, str(error)[:MAX_REFUSAL_CHARS])
        return Stored()

    # ---- Asking ----

    def _start(self, event: Join | Get | Put | Refresh, now: float, now_ms: int) -> None:
        if event.query in self._queries:
            raise LocalProtocolError(f"query {event.query} is in progress")
        if len(self._queries) >= KAD_MAX_QUERIES:
            raise LocalProtocolError(f"over {KAD_MAX_QUERIES} queries at a time")
        query = self._queries[event.query] = _Query(event.query, event)
        match event:
            case Join():
                self._join(query, event.seeds[:MAX_BOOTSTRAP], now, now_ms)
            case Get():
                own = self.store.get(event.key, now_ms)
                self._take_values(query, own, now_ms)
                self._look_up(query, int.from_bytes(event.key, "big"), now, now_ms, quorum=event.quorum, hits=bool(own))
            case Put():
                targets = self._targets.get(event.key)
                if targets is None or now >= targets.until or len(self.table) > 1.25 * targets.table_size:
                    self._look_up(query, int.from_bytes(event.key, "big"), now, now_ms)
                else:
                    self._store_at(query, event, targets.peers, now, now_ms)
            case Refresh():
                self.store.expire(now_ms)
                self._look_up(query, self.table.target_of_refresh(self._rng), now, now_ms)

    def _join(self, query: _Query, seeds: Sequence[Contact], now: float, now_ms: int) -> None:
        """Look this node up from the seeds on, whoever else is known: so two meshes meet, however large they are.

        A node that has joined before asks only those that it does not know yet; mostly that is the seed alone.
        """
        query.table_size = len(self.table)
        for seed in seeds:
            self.table.add(seed, from_itself=False)
        joined = self._widening > 0
        lookup = Lookup(
            self.table.own_key,
            self._own,
            seeds,
            known=self._known,
            settled=lambda peer: joined and self.table.find(peer) is not None,
            alpha=KAD_ALPHA,
        )
        query.open += 1
        self._step(query, lookup, now, now_ms)

    def _look_up(
        self, query: _Query, target: int, now: float, now_ms: int, *, quorum: int = 0, hits: bool = False
    ) -> None:
        lookup = Lookup(
            target, self._own, self.table.closest(target, KAD_K), known=self._known, quorum=quorum, alpha=KAD_ALPHA
        )
        lookup.hits = int(hits)
        query.open += 1
        self._step(query, lookup, now, now_ms)

    def _step(self, query: _Query, lookup: Lookup, now: float, now_ms: int) -> None:
        """Ask whom the lookup wants to ask; go on with the query when it is over."""
        if lookup.done:
            return
        for contact in lookup.next_requests():
            find = Find(lookup.target.to_bytes(KEY_BYTES, "big"), lookup.quorum > 0)
            self._send(contact, find, query, lookup, now)
        if lookup.done:
            self._look_up_done(query, lookup, now, now_ms)

    def _look_up_done(self, query: _Query, lookup: Lookup, now: float, now_ms: int) -> None:
        query.open -= 1
        query.hops = query.hops or lookup.hops
        match query.event:
            case Put() as put:
                peers = lookup.closest()
                self._targets.pop(put.key, None)
                self._targets[put.key] = _Targets(peers, now + KAD_TARGETS_S, len(self.table))
                if len(self._targets) > MAX_WATCHED:
                    del self._targets[next(iter(self._targets))]
                self._store_at(query, put, peers, now, now_ms)
            case Join() if not query.widened and self._has_news(query):
                query.widened = True
                self._widening = query.number
                targets = self.table.targets_after_join(self._rng)
                query.open += 1  # held while the lookups start, some of which may be over at once
                for target in targets:
                    self._look_up(query, target, now, now_ms)
                query.open -= 1
            case _:
                pass
        if not query.open and query.number in self._queries:
            self._finish(query)

    def _has_news(self, query: _Query) -> bool:
        """Whether a join found so many that the farther buckets are worth looking up: the first one, when meshes meet, after losses.

        A node joins through each of its bootstrap nodes, and again from time to time; mostly that brings nothing new.
        """
        return self._widening not in self._queries and len(self.table) > 1.25 * query.table_size

    def _store_at(self, query: _Query, put: Put, peers: list[Contact], now: float, now_ms: int) -> None:
        """Send the value to the closest peers, and keep it here if this node is one of them."""
        target = int.from_bytes(put.key, "big")
        if len(peers) < KAD_K or self.table.own_key ^ target < peers[-1].key ^ target:
            peers = peers[: KAD_K - 1]
            try:
                self.store.put(put.key, put.value, self._own, now_ms)
                query.stored += 1
            except (RemoteProtocolError, RefusalError):
                pass  # full, or the record expired while the lookup ran: the others say the same
        query.open += len(peers)
        for contact in peers:
            self._send(contact, Store(put.key, put.value), query, None, now)
        if not peers and not query.open:
            self._finish(query)

    def _send(self, contact: Contact, body: Find | Store, query: _Query, lookup: Lookup | None, now: float) -> None:
        self._last_id += 1
        request_id = self._last_id
        query.messages += 1
        self._requests[request_id] = _Open(contact, query, lookup, now)
        heapq.heappush(self._deadlines, (now + KAD_HARD_S, request_id, True))
        if lookup is not None:
            heapq.heappush(self._deadlines, (now + self._soft_s, request_id, False))
        self._effects.append(SendRequest(contact, Request(request_id, self._addresses, body)))

    # ---- Answers, failures, time ----

    def _take_reply(self, event: ReplyReceived, now: float, now_ms: int) -> None:
        request = self._requests.get(event.reply.to)
        if request is None or request.contact.peer_id != event.sender:
            return
        del self._requests[event.reply.to]
        query, lookup = request.query, request.lookup
        self.table.add(request.contact, from_itself=False)
        self._note_round_trip(now - request.sent_at)
        if lookup is None:
            query.stored += isinstance(event.reply.body, Stored)
            self._store_done(query)
            return
        peer = request.contact.peer_id
        if lookup.done or query.number not in self._queries:
            return
        if not isinstance(event.reply.body, Found):
            lookup.failed(peer)
        else:
            found = event.reply.body
            valid = bool(lookup.quorum) and self._take_values(query, found.values, now_ms)
            lookup.answered(peer, found.contacts, has_values=valid)
        if lookup.done:
            self._look_up_done(query, lookup, now, now_ms)
        else:
            self._step(query, lookup, now, now_ms)

    def _known(self, said: Contact) -> Contact:
        """A contact as the table knows it; hearsay only for peers that it does not know, so that no liar can have one dropped."""
        return self.table.find(said.peer_id) or said

    def _take_values(self, query: _Query, values: Iterable[bytes], now_ms: int) -> bool:
        """Keep the newest valid value of each signer; returns whether any was valid."""
        if not isinstance(query.event, Get):
            return False
        valid = False
        for raw in values:
            try:
                envelope = check_value(query.event.key, raw, now_ms).envelope
            except RemoteProtocolError:
                continue
            valid = True
            newest = query.newest.get(envelope.signer)
            if newest is None or newest[0] < envelope.sequence:
                query.newest[envelope.signer] = (envelope.sequence, envelope.raw)
        return valid

    def _note_round_trip(self, seconds: float) -> None:
        self._round_trips.append(seconds)
        if len(self._round_trips) >= _ROUND_TRIPS_NEEDED:
            median = sorted(self._round_trips)[len(self._round_trips) // 2]
            self._soft_s = min(max(3 * median, KAD_SOFT_MIN_S), KAD_SOFT_MAX_S)

    def _take_time(self, now: float, now_ms: int) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id, hard = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is None:
                continue
            if hard:
                self._fail(request_id, now, now_ms, unreachable=False)
            elif request.lookup is not None and request.query.number in self._queries:
                request.lookup.slow(request.contact.peer_id)
                self._step(request.query, request.lookup, now, now_ms)

    def _fail(self, request_id: int, now: float, now_ms: int, *, unreachable: bool) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        peer = request.contact.peer_id
        self.table.failed(peer, unreachable=unreachable)
        if request.lookup is None:
            if isinstance(request.query.event, Put):
                self._targets.pop(request.query.event.key, None)
            self._store_done(request.query)
            return
        request.lookup.failed(peer)
        if request.query.number in self._queries:
            self._step(request.query, request.lookup, now, now_ms)

    def _store_done(self, query: _Query) -> None:
        query.open -= 1
        if not query.open and query.number in self._queries:
            self._finish(query)

    def _finish(self, query: _Query) -> None:
        del self._queries[query.number]
        values = tuple(raw for _, raw in query.newest.values())
        self._effects.append(QueryFinished(query.number, values, query.stored, query.hops, query.messages))
