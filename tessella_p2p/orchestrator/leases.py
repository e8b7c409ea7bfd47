"""Leases: numbered for ever, signed, and never before their numbers are durable (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import LEASE_SERIAL_BLOCK, LEASE_TTL_S
from tessella_p2p.orchestrator.member import RaiseSerialFloor
from tessella_p2p.orchestrator.terms import ServedModel
from tessella_p2p.wire.envelope import seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import LEASE, Lease

LEASE_TTL_MS = int(LEASE_TTL_S * 1000)


@dataclass(frozen=True, slots=True)
class IssuedLease:
    """A sealed lease and its serial; ``effects`` are to be run before it leaves."""

    serial: int
    sealed: bytes
    expires_at: int
    effects: tuple[RaiseSerialFloor, ...]


class Leases:
    """Issues leases.

    Args:
        key: signs them.
        serial_floor: the durable floor of serials; all that are issued are above it.
    """

    def __init__(self, key: NodeKey, serial_floor: int) -> None:
        self._key = key
        self._serial = serial_floor
        self._durable_floor = serial_floor

    @property
    def issuer(self) -> PeerId:
        """Who signs."""
        return self._key.peer_id

    @property
    def newest(self) -> int:
        """The highest serial that was issued, or may have been by a process before."""
        return self._serial

    def issue(
        self, peer: PeerId, model: ServedModel, recipe: str, layers: LayerRange, *, canary: bool, now_ms: int
    ) -> IssuedLease:
        """A lease of ``layers`` for ``peer``, for `LEASE_TTL_S` from ``now_ms``."""
        self._serial += 1
        effects: tuple[RaiseSerialFloor, ...] = ()
        if self._serial > self._durable_floor:
            self._durable_floor = self._serial + LEASE_SERIAL_BLOCK
            effects = (RaiseSerialFloor(self._durable_floor),)
        lease = Lease(
            serial=self._serial,
            peer_id=peer,
            model_id=model.model_id,
            manifest_root=model.manifest_root,
            recipe=recipe,
            layers=layers.as_tuple(),
            canary=canary,
        )
        sealed = seal(self._key, LEASE, lease, sequence=self._serial, now_ms=now_ms, ttl_ms=LEASE_TTL_MS)
        return IssuedLease(self._serial, sealed, now_ms + LEASE_TTL_MS, effects)
