"""Heartbeats by gossip, as a pure core: each record goes once from each node to a few random neighbours.

A node says its own record every few seconds. Whoever hears a record for the first time passes it on, in the next batch, to its
neighbours of the moment: a random few of the connected peers, some of which others replace in each heartbeat period. With f neighbours
each, a heartbeat misses a given node with a chance of about e^-f, and soon takes other ways.

What is passed on: records that are well formed, signed, in their time and newer than the last one of the same signer; whether a
lease counts is for readers to say, who pin different orchestrators. What a neighbour hands over and what one signer causes are
limited, and so is every table.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tessella_p2p.base.errors import RemoteProtocolError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    GOSSIP_FANOUT,
    GOSSIP_MAX_BATCH,
    GOSSIP_MAX_BATCH_BYTES,
    GOSSIP_MAX_QUEUED,
    GOSSIP_ROTATED,
    GOSSIP_SEEN,
    GOSSIP_SIGNER_BURST,
    GOSSIP_SIGNER_PER_S,
    GOSSIP_SOURCE_BURST,
    GOSSIP_SOURCE_PER_S,
    GOSSIP_TICK_MAX_S,
    GOSSIP_TICK_PER_SIGNER_S,
    GOSSIP_TICK_S,
    HEARTBEAT_S,
    MAX_SWARM_RECORDS,
)
from tessella_p2p.dht.rate_limit import RateLimit
from tessella_p2p.dht.stage_records import SignedStage, check_record_time, signed_stage


@dataclass(frozen=True, slots=True)
class SendBatch:
    """Send these records to a neighbour; dropping them is no error, the next heartbeat follows."""

    peer: PeerId
    records: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Received:
    """What became of a batch: records to look at, and how many were refused as no valid records (the source's fault)."""

    fresh: tuple[bytes, ...]
    num_invalid: int
    num_limited: int


@dataclass(frozen=True, slots=True)
class _Queued:
    raw: bytes
    source: PeerId | None
    signer: PeerId | None


class Gossip:
    """The gossip of one node.

    Args:
        rng: draws the neighbours.
        fanout: neighbours at a time, at most.
    """

    def __init__(self, rng: random.Random, fanout: int = GOSSIP_FANOUT) -> None:
        self._rng = rng
        self._fanout = fanout
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._newest: OrderedDict[PeerId, int] = OrderedDict()
        self._queue: list[_Queued] = []
        self._due = math.inf
        self._neighbours: tuple[PeerId, ...] = ()
        self._drawn_at = -math.inf
        self._per_source: RateLimit[PeerId] = RateLimit(GOSSIP_SOURCE_PER_S, GOSSIP_SOURCE_BURST)
        self._per_signer: RateLimit[PeerId] = RateLimit(GOSSIP_SIGNER_PER_S, GOSSIP_SIGNER_BURST)

    def next_deadline(self) -> float:
        """When the next batch is due, in the seconds of ``now``; infinity for never."""
        return self._due

    def say(self, raw: bytes, now: float) -> None:
        """Queue this node's own record; it is due at once."""
        self._remember(hashlib.sha256(raw).digest())
        self._queue.append(_Queued(raw, None, None))
        self._due = now

    def receive(self, source: PeerId, records: Sequence[bytes], now: float, now_ms: int) -> Received:
        """Take a batch from a neighbour; what is new is queued for the next batch.

        Args:
            source: the neighbour, as the stream authenticated it.
            records: envelopes, unverified.
            now: monotonic seconds.
            now_ms: Unix milliseconds, for the validity of records.
        """
        fresh: list[bytes] = []
        granted = self._per_source.take(source, now, len(records))
        num_invalid, num_limited = 0, len(records) - granted
        for raw in records[:granted]:
            digest = hashlib.sha256(raw).digest()
            if digest in self._seen:
                continue
            try:
                signed = signed_stage(raw)
                check_record_time(signed.envelope, now_ms)
            except RemoteProtocolError:
                num_invalid += 1
                continue
            self._remember(digest)
            if self._is_newer(signed):
                if not self._per_signer.allows(signed.envelope.signer, now):
                    num_limited += 1
                    continue
                fresh.append(signed.envelope.raw)
                self._enqueue(signed, source, now)
        return Received(tuple(fresh), num_invalid, num_limited)

    def flush(self, connected: Sequence[PeerId], now: float) -> list[SendBatch]:
        """The batches that are due, for neighbours among the connected peers.

        A record goes neither back to where it came from nor to its signer.
        """
        if now < self._due:
            return []
        queue, self._queue = self._queue, []
        self._due = math.inf
        batches: list[SendBatch] = []
        for peer in self._draw(connected, now):
            records = [q.raw for q in queue if peer not in (q.source, q.signer)]
            batches += [SendBatch(peer, batch) for batch in _split(records)]
        return batches

    def _draw(self, connected: Sequence[PeerId], now: float) -> tuple[PeerId, ...]:
        """The neighbours that are still connected, without the oldest few once a period is over, and others in their places."""
        if now >= self._drawn_at + HEARTBEAT_S:
            self._drawn_at = now
            if len(connected) > self._fanout:
                self._neighbours = self._neighbours[GOSSIP_ROTATED:]
        kept = [peer for peer in self._neighbours if peer in connected]
        others = [peer for peer in sorted(connected) if peer not in kept]
        self._neighbours = (*kept, *self._rng.sample(others, min(len(others), self._fanout - len(kept))))
        return self._neighbours

    def _is_newer(self, signed: SignedStage) -> bool:
        """Whether this is the signer's newest record so far; remembers it if so."""
        signer, sequence = signed.envelope.signer, signed.envelope.sequence
        if sequence <= self._newest.get(signer, -1):
            return False
        self._newest[signer] = sequence
        self._newest.move_to_end(signer)
        if len(self._newest) > MAX_SWARM_RECORDS:
            self._newest.popitem(last=False)
        return True

    def _enqueue(self, signed: SignedStage, source: PeerId, now: float) -> None:
        if len(self._queue) < GOSSIP_MAX_QUEUED:
            self._queue.append(_Queued(signed.envelope.raw, source, signed.envelope.signer))
            tick_s = max(GOSSIP_TICK_S, min(GOSSIP_TICK_MAX_S, GOSSIP_TICK_PER_SIGNER_S * len(self._newest)))
            self._due = min(self._due, now + tick_s)

    def _remember(self, digest: bytes) -> None:
        self._seen[digest] = None
        if len(self._seen) > GOSSIP_SEEN:
            self._seen.popitem(last=False)


def _split(records: Sequence[bytes]) -> Iterable[tuple[bytes, ...]]:
    """Batches within the limits of count and size."""
    if records and len(records) <= GOSSIP_MAX_BATCH and sum(map(len, records)) <= GOSSIP_MAX_BATCH_BYTES:
        yield tuple(records)  # as nearly always
        return
    batch: list[bytes] = []
    size_bytes = 0
    for raw in records:
        if batch and (len(batch) >= GOSSIP_MAX_BATCH or size_bytes + len(raw) > GOSSIP_MAX_BATCH_BYTES):
            yield tuple(batch)
            batch, size_bytes = [], 0
        batch.append(raw)
        size_bytes += len(raw)
    if batch:
        yield tuple(batch)
