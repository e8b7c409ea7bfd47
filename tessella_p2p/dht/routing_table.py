"""The routing table: who this node knows, by distance.

Bucket ``i`` holds up to k peers whose distance has its highest bit at ``i``, longest-known first, and beside it a few that wait for
a place. Whoever is in stays in while it answers (Kademlia, section 2.2: long-lived peers live on, and a flood of new identities
displaces nobody who is alive).

What a peer says of its own addresses beats hearsay: a third peer that names wrong addresses cannot move a known one.
"""

from __future__ import annotations

import random

from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import KAD_K, KAD_REPLACEMENTS
from tessella_p2p.dht.keyspace import KEY_BITS, Contact, key_of_peer

_STRIKES = 2
"""Silences in a row after which a peer loses its place even if nobody waits for it."""
_REFRESHED_BITS = 24
"""Buckets below the nearest known peer by more than this are always empty and not worth a lookup at joining."""


class RoutingTable:
    """K-buckets around one peer.

    Args:
        own: the peer in the middle; it is never an entry itself.
        size: k, the places of one bucket.
    """

    def __init__(self, own: PeerId, size: int = KAD_K) -> None:
        self.own_key = key_of_peer(own)
        self._size = size
        self._buckets: dict[int, dict[PeerId, Contact]] = {}
        self._waiting: dict[int, dict[PeerId, Contact]] = {}
        self._strikes: dict[PeerId, int] = {}

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self._buckets.values())

    def find(self, peer: PeerId) -> Contact | None:
        """The entry of ``peer``, if it has a place."""
        bucket = self._buckets.get(self._index(peer))
        return bucket.get(peer) if bucket else None

    def contacts(self) -> tuple[Contact, ...]:
        """Everybody who has a place, nearest bucket first."""
        return tuple(contact for i in sorted(self._buckets) for contact in self._buckets[i].values())

    def add(self, contact: Contact, *, from_itself: bool) -> None:
        """Note that a peer was heard of and is alive: it answered, or asked.

        Args:
            contact: the peer.
            from_itself: whether its addresses are its own words; hearsay does not replace known addresses.
        """
        index = self._index(contact.peer_id)
        if index < 0 or not contact.addresses:
            return
        peer = contact.peer_id
        self._strikes.pop(peer, None)
        bucket = self._buckets.setdefault(index, {})
        known = bucket.pop(peer, None)
        if known is not None or len(bucket) < self._size:
            bucket[peer] = contact if known is None or from_itself else known
            self._waiting.get(index, {}).pop(peer, None)
            return
        waiting = self._waiting.setdefault(index, {})
        known = waiting.pop(peer, None)
        waiting[peer] = contact if known is None or from_itself else known
        if len(waiting) > KAD_REPLACEMENTS:
            del waiting[next(iter(waiting))]

    def failed(self, peer: PeerId, *, unreachable: bool) -> None:
        """Note that a peer did not answer.

        It loses its place at once when it cannot be reached or somebody waits for the place, else at the second silence in a row.
        """
        index = self._index(peer)
        bucket, waiting = self._buckets.get(index, {}), self._waiting.get(index, {})
        if peer not in bucket:
            waiting.pop(peer, None)
            return
        strikes = self._strikes.get(peer, 0) + 1
        if not (unreachable or waiting or strikes >= _STRIKES):
            self._strikes[peer] = strikes
            return
        del bucket[peer]
        self._strikes.pop(peer, None)
        if waiting:
            newest, contact = waiting.popitem()
            bucket[newest] = contact
        if not bucket:
            del self._buckets[index]

    def closest(self, key: int, count: int, *, without: PeerId | None = None) -> list[Contact]:
        """The ``count`` known peers closest to ``key``, closest first.

        Only as many buckets are looked at as are needed: those that agree with the key longer than this node does are all closer
        than those that agree less.
        """
        index = (self.own_key ^ key).bit_length() - 1
        found = list(self._buckets.get(index, {}).values()) if index >= 0 else []
        if len(found) <= count:
            for i, bucket in self._buckets.items():
                if i < index:
                    found += bucket.values()
        if len(found) <= count:
            for i in sorted(i for i in self._buckets if i > index):
                found += self._buckets[i].values()
                if len(found) > count:
                    break
        if without is not None:
            found = [contact for contact in found if contact.peer_id != without]
        found.sort(key=lambda contact: contact.key ^ key)
        return found[:count]

    def targets_after_join(self, rng: random.Random) -> list[int]:
        """A random key in each bucket farther than the nearest peer that still has free places (Kademlia, section 2.3)."""
        if not self._buckets:
            return []
        lowest = max(min(self._buckets) + 1, KEY_BITS - _REFRESHED_BITS)
        return [self._random_key(i, rng) for i in range(lowest, KEY_BITS) if len(self._buckets.get(i, {})) < self._size]

    def target_of_refresh(self, rng: random.Random) -> int:
        """A random key in one of the buckets in use; the own key while there are none."""
        if not self._buckets:
            return self.own_key
        return self._random_key(rng.randint(min(self._buckets), max(self._buckets)), rng)

    def _random_key(self, index: int, rng: random.Random) -> int:
        return self.own_key ^ (1 << index | rng.getrandbits(index) if index else 1)

    def _index(self, peer: PeerId) -> int:
        """The bucket of ``peer``; -1 for the own peer."""
        return (self.own_key ^ key_of_peer(peer)).bit_length() - 1
