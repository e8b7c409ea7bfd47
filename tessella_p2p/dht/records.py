"""The multi-valued record store of one DHT node.

A key is the SHA-256 of a manifest root, its values are the stage records of that model's peers: one for each signer, the one with
the highest sequence. A node stores for others without knowing any orchestrator, so it cannot judge leases; it judges what it can:

- the record is signed by the very peer that sends it (nobody stores for another, nobody replays another's);
- it is unexpired, and valid for no longer than records may be;
- the key is the one of the record's own manifest root;
- its sequence is higher than the stored one's.

Order of eviction, when a key or the whole store is full: expired values first; then a value of the signer that has the most values
here; among equals the one that draws the highest lot, the SHA-256 of a salt that only this node knows and the signer. The newcomer
takes part. So a peer with many values loses its own first, an identity cannot be made to fit, and of a crowd of invented identities
each has the same chance as an honest peer, however often it tries.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tessella_p2p.base.errors import InvalidSignature, MalformedMessage, Overloaded, Replayed
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    KAD_MAX_KEYS_PER_SIGNER,
    KAD_MAX_RECORDS,
    KAD_MAX_VALUES,
    KAD_REPLY_VALUE_BYTES,
)
from tessella_p2p.dht.keyspace import record_key
from tessella_p2p.dht.stage_records import SignedStage, check_record_time, signed_stage
from tessella_p2p.wire.envelope import Envelope


@dataclass(frozen=True, slots=True)
class _Place:
    """One value and the lot of its signer."""

    key: bytes
    envelope: Envelope
    lot: bytes


def check_value(key: bytes, raw: bytes, now_ms: int) -> SignedStage:
    """A value that may stand under ``key``: what a store accepts, and what a reader takes from a reply.

    Raises:
        MalformedMessage, VersionMismatch, InvalidSignature, Expired: says what is wrong.
    """
    signed = signed_stage(raw)
    check_record_time(signed.envelope, now_ms)
    if record_key(signed.record.manifest_root) != key:
        raise MalformedMessage(f"a stage record of {signed.envelope.signer} under the key of another model")
    return signed


class RecordStore:
    """Values by key and signer, bounded.

    Args:
        salt: secret random bytes of this node, for the lots.
        max_values: places of one key.
        max_records: places of all keys.
    """

    def __init__(self, salt: bytes, *, max_values: int = KAD_MAX_VALUES, max_records: int = KAD_MAX_RECORDS) -> None:
        self._salt = salt
        self._max_values = max_values
        self._max_records = max_records
        self._values: dict[bytes, dict[PeerId, _Place]] = {}
        self._held: dict[PeerId, int] = {}
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def put(self, key: bytes, raw: bytes, sender: PeerId, now_ms: int) -> None:
        """Store a value, in the place of the same signer's older one. The same value again is accepted and changes nothing.

        Raises:
            MalformedMessage, VersionMismatch, InvalidSignature, Expired: the value may not stand there.
            Replayed: a value of this signer with this or a higher sequence is there.
            Overloaded: the store is full, and the newcomer is the one to go.
        """
        envelope = check_value(key, raw, now_ms).envelope
        if envelope.signer != sender:
            raise InvalidSignature(f"{sender} stores a record of {envelope.signer}; a peer stores its own only")
        old = self._values.get(key, {}).get(sender)
        if old is not None:
            if envelope.raw == old.envelope.raw:
                return
            if envelope.sequence <= old.envelope.sequence:
                raise Replayed(f"sequence {envelope.sequence} of {sender} after {old.envelope.sequence}")
            self._values[key][sender] = _Place(key, envelope, old.lot)
            return
        if self._held.get(sender, 0) >= KAD_MAX_KEYS_PER_SIGNER:
            raise Overloaded(f"{sender} has values under {KAD_MAX_KEYS_PER_SIGNER} keys here")
        place = _Place(key, envelope, hashlib.sha256(self._salt + sender.encode()).digest())
        self._make_room(place, now_ms)
        self._values.setdefault(key, {})[sender] = place
        self._held[sender] = self._held.get(sender, 0) + 1
        self._total += 1

    def get(self, key: bytes, now_ms: int) -> tuple[bytes, ...]:
        """The unexpired values of ``key`` that fit a reply; short ones first, so that long ones crowd nobody out."""
        places = self._values.get(key, {}).values()
        raws = sorted((p.envelope.raw for p in places if p.envelope.expires_at > now_ms), key=len)
        fitting: list[bytes] = []
        room = KAD_REPLY_VALUE_BYTES
        for raw in raws:
            room -= len(raw)
            if room < 0:
                break
            fitting.append(raw)
        return tuple(fitting)

    def expire(self, now_ms: int) -> None:
        """Forget what is over."""
        for key in list(self._values):
            self._expire_key(key, now_ms)

    def _expire_key(self, key: bytes, now_ms: int) -> None:
        for place in list(self._values.get(key, {}).values()):
            if place.envelope.expires_at <= now_ms:
                self._drop(place)

    def _make_room(self, newcomer: _Place, now_ms: int) -> None:
        """Free a place for ``newcomer`` by the order that the module states; raises Overloaded when it is itself the one to go."""
        if len(self._values.get(newcomer.key, {})) >= self._max_values:
            self._expire_key(newcomer.key, now_ms)
        if self._total >= self._max_records:
            self.expire(now_ms)
        if len(self._values.get(newcomer.key, {})) >= self._max_values:
            rivals = list(self._values[newcomer.key].values())
        elif self._total >= self._max_records:
            rivals = [place for values in self._values.values() for place in values.values()]
        else:
            return
        mine = (self._held.get(newcomer.envelope.signer, 0) + 1, newcomer.lot)
        loser = max(rivals, key=self._rank)
        if mine >= self._rank(loser):
            raise Overloaded(
                "this node stores as many records as it may; the others of the k closest have room or other lots"
            )
        self._drop(loser)

    def _rank(self, place: _Place) -> tuple[int, bytes]:
        return self._held[place.envelope.signer], place.lot

    def _drop(self, place: _Place) -> None:
        signer = place.envelope.signer
        values = self._values[place.key]
        del values[signer]
        if not values:
            del self._values[place.key]
        self._held[signer] -= 1
        if not self._held[signer]:
            del self._held[signer]
        self._total -= 1
