"""The swarm view: which stages there are, merged from the DHT, gossip and the orchestrator's list.

The sources bring the same signed records, so none is trusted and none is needed: of each peer the verified record with the highest
sequence counts. Liveness comes from heartbeats. Two missed ones make a stage stale, three offline. A peer whose heartbeats do not
reach this node (it never heard one, or the peer went on signing records after the last one heard) is alive until its record expires.

An entry stays for a while after it is over, so that an older record of the same peer cannot come back in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tessella_p2p.base.errors import Overloaded
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    CLOCK_SKEW_MS,
    HEARTBEAT_S,
    MAX_SWARM_RECORDS,
    MAX_SWARM_REVOCATIONS,
    OFFLINE_AFTER_MISSED,
    OUTAGE_GRACE_S,
    STALE_AFTER_MISSED,
)
from tessella_p2p.dht.stage_records import RECORD_TTL_MS, VerifiedStage, lease_counts, verify_stage
from tessella_p2p.model.coverage import Coverage, walk

Source = Literal["dht", "gossip", "orchestrator", "own"]
Liveness = Literal["live", "stale", "offline"]

_HEARTBEAT_MS = round(HEARTBEAT_S * 1000)
_ON_THE_WAY_MS = 2_500
"""What a heartbeat may take through the mesh; one that is later than this counts as missed."""
_REMEMBER_MS = RECORD_TTL_MS + CLOCK_SKEW_MS


@dataclass(frozen=True, slots=True)
class StageStatus:
    """A stage and how alive it seems, for people and their screens."""

    stage: VerifiedStage
    liveness: Liveness
    sources: tuple[Source, ...]


@dataclass(slots=True)
class _Entry:
    stage: VerifiedStage
    received_at: int
    heartbeat_at: int | None
    """When gossip last brought a newer record."""
    heartbeat_issued_at: int
    sources: dict[Source, int]


class SwarmView:
    """The merged view of one node.

    Args:
        pins: orchestrators whose leases count.
        max_records: bound over all models.
        outage_grace_s: how long an expired lease counts while no orchestrator can be reached.
    """

    def __init__(
        self,
        pins: frozenset[PeerId],
        *,
        max_records: int = MAX_SWARM_RECORDS,
        outage_grace_s: float = OUTAGE_GRACE_S,
    ) -> None:
        self.pins = pins
        self.orchestrator_reachable = True
        """False lets expired leases count for the outage grace."""
        self._outage_grace_ms = round(outage_grace_s * 1000)
        self._max_records = max_records
        self._entries: dict[PeerId, _Entry] = {}
        self._serials: dict[tuple[PeerId, PeerId], int] = {}
        self._revoked: dict[tuple[PeerId, PeerId], int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def observe(self, raw: bytes, source: Source, now_ms: int) -> VerifiedStage | None:
        """Take a record from any source.

        Returns:
            The stage if it is news; None when a record of this peer that is as new or newer is known.

        Raises:
            RemoteProtocolError, NotAuthorized: the record may not be used, see `verify_stage`; nothing was changed.
            Overloaded: more live stages than the view may hold.
        """
        stage = verify_stage(
            raw,
            pins=self.pins,
            now_ms=now_ms,
            orchestrator_reachable=self.orchestrator_reachable,
            outage_grace_ms=self._outage_grace_ms,
            serials=self._serials,
            revoked=self._revoked,
        )
        entry = self._entries.get(stage.peer_id)
        if entry is not None and stage.sequence <= entry.stage.sequence:
            if stage.raw == entry.stage.raw:
                self._note_source(entry, source, now_ms)
            return None
        if entry is None:
            self._make_room(now_ms)
            entry = self._entries[stage.peer_id] = _Entry(stage, now_ms, None, 0, {})
        self._note_serial(stage)
        entry.stage, entry.received_at = stage, now_ms
        self._note_source(entry, source, now_ms)
        return stage

    def revoke(self, issuer: PeerId, serials: Mapping[PeerId, int]) -> bool:
        """Take note of leases that their issuer took away: no record under one of them is used any more, whoever brings it.

        Args:
            issuer: who signed those leases, and says so.
            serials: by peer, up to which serial.

        Returns:
            Whether there is one that was not known.
        """
        if issuer not in self.pins:
            return False
        has_news = False
        for peer, serial in serials.items():
            known = self._revoked.pop((issuer, peer), -1)
            self._revoked[issuer, peer] = max(serial, known)
            has_news = has_news or serial > known
            if len(self._revoked) > MAX_SWARM_REVOCATIONS:
                del self._revoked[next(iter(self._revoked))]
        return has_news

    def liveness(self, peer: PeerId, now_ms: int) -> Liveness:
        """How alive a peer's stage seems; ``offline`` for an unknown one."""
        entry = self._entries.get(peer)
        return "offline" if entry is None else self._liveness(entry, now_ms)

    def stages(
        self, manifest_root: bytes, recipe: str | None, now_ms: int, *, with_draining: bool = False
    ) -> tuple[VerifiedStage, ...]:
        """Live, leased stages of a model that serve, saturated ones included and canaries not, by range and then by peer.

        Args:
            manifest_root: the model.
            recipe: only stages of this recipe; None for every one.
            now_ms: the time to judge by.
            with_draining: also stages that finish their sessions and take no new ones.
        """
        found = [
            entry.stage
            for entry in self._entries.values()
            if entry.stage.manifest_root == manifest_root
            and (recipe is None or entry.stage.recipe == recipe)
            and not entry.stage.canary
            and (with_draining or entry.stage.state != "draining")
            and self._liveness(entry, now_ms) == "live"
        ]
        return tuple(sorted(found, key=lambda stage: (stage.layers, stage.peer_id)))

    def recipes(self, manifest_root: bytes, now_ms: int) -> tuple[str, ...]:
        """The published recipes that live, ready stages of a model have, sorted."""
        return tuple(sorted({stage.recipe for stage in self.stages(manifest_root, None, now_ms)}))

    def coverage(self, manifest_root: bytes, recipe: str, total_layers: int, now_ms: int) -> Coverage:
        """The coverage walk over the live, serving stages of a model and recipe."""
        return walk((stage.layers for stage in self.stages(manifest_root, recipe, now_ms)), total_layers)

    def statuses(self, now_ms: int) -> tuple[StageStatus, ...]:
        """Every remembered stage with its liveness, offline ones included, by peer."""
        return tuple(
            StageStatus(entry.stage, self._liveness(entry, now_ms), tuple(sorted(entry.sources)))
            for _, entry in sorted(self._entries.items())
        )

    def stage_of(self, peer: PeerId, now_ms: int) -> VerifiedStage | None:
        """The live stage of one peer."""
        entry = self._entries.get(peer)
        return entry.stage if entry is not None and self._liveness(entry, now_ms) == "live" else None

    def _liveness(self, entry: _Entry, now_ms: int) -> Liveness:
        stage = entry.stage
        if stage.expires_at <= now_ms or not lease_counts(
            stage.lease_expires_at,
            now_ms,
            orchestrator_reachable=self.orchestrator_reachable,
            outage_grace_ms=self._outage_grace_ms,
        ):
            return "offline"
        pair = (stage.orchestrator, stage.peer_id)
        if self._serials.get(pair, 0) > stage.lease_serial or self._revoked.get(pair, -1) >= stage.lease_serial:
            return "offline"
        if entry.heartbeat_at is None or stage.issued_at > entry.heartbeat_issued_at + _HEARTBEAT_MS:
            return "live"
        missed = (now_ms - entry.heartbeat_at - _ON_THE_WAY_MS) // _HEARTBEAT_MS
        if missed >= OFFLINE_AFTER_MISSED:
            return "offline"
        return "stale" if missed >= STALE_AFTER_MISSED else "live"

    def _note_source(self, entry: _Entry, source: Source, now_ms: int) -> None:
        """The same bytes beat once, however often a neighbour repeats them."""
        entry.sources[source] = now_ms
        if source == "gossip" and entry.stage.issued_at > entry.heartbeat_issued_at:
            entry.heartbeat_at, entry.heartbeat_issued_at = now_ms, entry.stage.issued_at

    def _note_serial(self, stage: VerifiedStage) -> None:
        """Remember the newest serial; the least recently renewed is forgotten at the bound."""
        pair = (stage.orchestrator, stage.peer_id)
        self._serials[pair] = max(stage.lease_serial, self._serials.pop(pair, 0))
        if len(self._serials) > 4 * self._max_records:
            del self._serials[next(iter(self._serials))]

    def _make_room(self, now_ms: int) -> None:
        """Forget what is long over; at the bound, whoever is not alive."""
        if len(self._entries) < self._max_records:
            return
        for peer, entry in list(self._entries.items()):
            if entry.received_at + _REMEMBER_MS <= now_ms:
                del self._entries[peer]
        if len(self._entries) < self._max_records:
            return
        for peer, entry in self._entries.items():
            if self._liveness(entry, now_ms) != "live":
                del self._entries[peer]
                return
        raise Overloaded(f"the swarm view holds {self._max_records} live stages")
