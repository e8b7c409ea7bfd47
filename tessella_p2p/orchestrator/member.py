"""What the orchestrator knows of one worker, what may happen to it, and what follows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.ledger.assignments import Assignment
from tessella_p2p.wire.messages import Acknowledged, Announce, Assigned, Deregister, Ready, Register


class MemberState(StrEnum):
    """See the picture in ``members``."""

    PENDING_LOAD = "PendingLoad"
    READY = "Ready"
    HEALTHY = "Healthy"
    DRAINING = "Draining"
    OFFLINE = "Offline"
    LEFT = "Left"


@dataclass(frozen=True, slots=True)
class Member:
    """One worker. ``record`` is its newest stage record, sealed; ``lease`` the newest lease, sealed.

    ``addresses`` is empty for a worker that is known from before a restart of the orchestrator, until its record brings them; ``claim_mb``
    is 0 and ``api_url`` None until it registers again.
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
    api_url: str | None = None


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
class TimePassed:
    """Time went on; see `Members.next_deadline`."""


MemberEvent = Registered | Loaded | Announced | Deregistered | TimePassed


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
class SendAnswer:
    """Answer the request of the event."""

    body: Assigned | Acknowledged


@dataclass(frozen=True, slots=True)
class TopologyChanged:
    """A member's state is another one now; ``before`` is None for a new member."""

    peer: PeerId
    before: MemberState | None
    after: MemberState


MemberEffect = RaiseSerialFloor | KeepAssignment | SendAnswer | TopologyChanged
