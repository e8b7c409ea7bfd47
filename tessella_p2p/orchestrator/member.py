"""What the orchestrator knows of one worker, what may happen to it, and what follows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.ledger.assignments import Assignment
from tessella_p2p.ledger.revocation import Revocation
from tessella_p2p.wire.messages import (
    Acknowledged,
    Announce,
    Assigned,
    CanaryMode,
    Deregister,
    Ready,
    Register,
    UpdateAssignment,
)


class MemberState(StrEnum):
    """See the picture in ``members``."""

    PENDING_LOAD = "PendingLoad"
    READY = "Ready"
    HEALTHY = "Healthy"
    DRAINING = "Draining"
    OFFLINE = "Offline"
    LEFT = "Left"


SERVING = (MemberState.READY, MemberState.HEALTHY)
"""States of a member that has its range loaded and takes sessions."""


ASSIGNED = (MemberState.PENDING_LOAD, MemberState.READY, MemberState.HEALTHY)
"""States in which a member's layers count as taken."""


@dataclass(frozen=True, slots=True)
class Move:
    """Other layers that a worker was ordered to serve, and does not serve yet.

    Attributes:
        layers: what it is to serve.
        serial: of the lease for them.
        lease: that lease, sealed.
        lease_expires_at: Unix milliseconds.
        until: when the order is forgotten (Unix milliseconds).
        prepared: the worker has said that it loaded them beside what it serves.
    """

    layers: LayerRange
    serial: int
    lease: bytes
    lease_expires_at: int
    until: int
    prepared: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """One worker. ``record`` is its newest stage record, sealed; ``lease`` the newest lease of ``layers``, sealed.

    ``addresses`` is empty for a worker that is known from before a restart of the orchestrator, until its record brings them;
    ``api_url`` and ``instance`` are None until it says them again. ``claim_mb`` is 0 and ``device`` None where nobody remembers what it
    registered with. ``bound`` is its own bound on its layers, ``canary`` how it answers where it is one.
    """

    peer_id: PeerId
    model_id: str
    manifest_root: bytes
    recipe: str
    layers: LayerRange
    state: MemberState
    serial: int
    lease: bytes
    lease_expires_at: int
    last_seen: int
    silent_until: int
    addresses: tuple[str, ...] = ()
    queue_depth: int = 0
    record: bytes | None = field(default=None, repr=False)
    record_sequence: int = -1
    record_expires_at: int = 0
    claim_mb: int = 0
    device: str | None = None
    bound: LayerRange | None = None
    canary: CanaryMode = "off"
    api_url: str | None = None
    instance: bytes | None = field(default=None, repr=False)
    move: Move | None = None

    @property
    def is_canary(self) -> bool:
        """Whether it answers with a known-wrong tensor: then it is a copy of a range, and never covers it."""
        return self.canary != "off"

    @property
    def taken(self) -> tuple[LayerRange, ...]:
        """The layers that the allocator counts as this worker's: what it holds, and what it was ordered to."""
        held = (self.layers,) if self.state in ASSIGNED else ()
        return held if self.move is None else (*held, self.move.layers)


@dataclass(frozen=True, slots=True)
class Registered:
    """A verified `Register` of ``peer``."""

    peer: PeerId
    request: Register


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified `Ready` of ``peer``."""

    peer: PeerId
    request: Ready


@dataclass(frozen=True, slots=True)
class Announced:
    """A verified `Announce` of ``peer``."""

    peer: PeerId
    request: Announce


@dataclass(frozen=True, slots=True)
class Deregistered:
    """A verified `Deregister` of ``peer``."""

    peer: PeerId
    request: Deregister


@dataclass(frozen=True, slots=True)
class Excluded:
    """``peer`` was put on the blacklist, or taken off the allow-list: it leaves, whatever it does, and its leases count no more."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class MoveOrdered:
    """``peer`` is to serve ``layers``; ``beside``: to load them, and to go on with what it has until it is told again."""

    peer: PeerId
    layers: LayerRange
    beside: bool
    reason: str


@dataclass(frozen=True, slots=True)
class MoveAbandoned:
    """The order to ``peer`` did not arrive, or was refused."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time went on: who is silent for too long is gone."""


MemberEvent = Registered | Loaded | Announced | Deregistered | Excluded | MoveOrdered | MoveAbandoned | TimePassed


@dataclass(frozen=True, slots=True)
class RaiseSerialFloor:
    """Make durable that lease serials up to ``value`` may have been used."""

    value: int


@dataclass(frozen=True, slots=True)
class KeepAssignment:
    """Make durable what ``peer`` is assigned; None: that it is assigned nothing."""

    peer: PeerId
    assignment: Assignment | None


@dataclass(frozen=True, slots=True)
class KeepRevocation:
    """Make durable which leases of ``peer`` were taken away, and tell of it; None: forget it."""

    peer: PeerId
    revocation: Revocation | None


@dataclass(frozen=True, slots=True)
class SendAnswer:
    """Answer the request of the event."""

    body: Assigned | Acknowledged


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Send ``body`` to ``peer``, which is at ``addresses``."""

    peer: PeerId
    addresses: tuple[str, ...]
    body: UpdateAssignment


@dataclass(frozen=True, slots=True)
class TopologyChanged:
    """A member's state, its layers or its order are others now; ``before`` is None for a new member."""

    peer: PeerId
    before: MemberState | None
    after: MemberState


MemberEffect = RaiseSerialFloor | KeepAssignment | KeepRevocation | SendAnswer | SendOrder | TopologyChanged
