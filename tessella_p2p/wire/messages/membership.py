"""Workers and their stages: registration, leases, heartbeats, assignments."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tessella_p2p.base.limits import MAX_ADDRESS_CHARS, MAX_LISTED_REVOCATIONS, MAX_LISTED_STAGES, MAX_MODEL_LAYERS
from tessella_p2p.wire.envelope import Message
from tessella_p2p.wire.messages.types import (
    Addresses,
    CanaryMode,
    Count,
    Digest,
    Health,
    Layers,
    Name,
    Peer,
    Positions,
    Reason,
    Sealed,
)


class Lease(Message):
    """The orchestrator's signed certificate of an assignment. Domain `LEASE`, audience anyone.

    The work of a ``canary`` is never paid, and no honest entry routes through it.
    """

    serial: Count
    peer_id: Peer
    model_id: Name
    manifest_root: Digest
    recipe: Name
    layers: Layers
    canary: bool = False


StageState = Literal["ready", "draining", "saturated"]
"""``draining``: sessions end, none begins. ``saturated``: the engine failed too often; none begins for a while."""


class StageRecord(Message):
    """A peer's statement of a stage it serves. Domain `STAGE_RECORD`, audience anyone; the signer is the peer."""

    addresses: Addresses
    model_id: Name
    manifest_root: Digest
    recipe: Name
    layers: Layers
    total_layers: Annotated[int, Field(ge=1, le=MAX_MODEL_LAYERS)]
    lease: Sealed
    queue_depth: Count = 0
    state: StageState = "ready"
    max_positions: Positions
    canary: bool = False


Instance = Annotated[bytes, Field(min_length=16, max_length=16)]
"""16 random bytes of one process: they tell a key that is used twice from a worker that was started again."""


class Register(Message):
    """A worker asks for a range. The signer is the worker."""

    kind: Literal["register"] = "register"
    addresses: Addresses
    api_url: Annotated[str, Field(max_length=MAX_ADDRESS_CHARS)] | None = None
    canary: CanaryMode = "off"
    claim_mb: Annotated[int, Field(ge=1, le=1 << 24)]
    device: Name
    model_id: Name
    total_layers: Annotated[int, Field(ge=1, le=MAX_MODEL_LAYERS)]
    manifest_root: Digest
    contract_hash: Digest
    recipe: Name
    layers: Layers | None = None
    instance: Instance | None = None


class Ready(Message):
    """The range of lease ``serial`` is loaded and serves."""

    kind: Literal["ready"] = "ready"
    serial: Count
    record: Sealed
    instance: Instance | None = None


class Announce(Message):
    """Heartbeat: liveness, queue depth and, while serving, the newest stage record.

    ``prepared`` is the serial of an order's lease, whose layers are loaded beside the ones that are served (see `UpdateAssignment`).
    """

    kind: Literal["announce"] = "announce"
    serial: Count
    queue_depth: Count
    state: Literal["loading", "ready", "draining", "saturated"]
    record: Sealed | None = None
    prepared: Count | None = None
    instance: Instance | None = None


class Deregister(Message):
    """A worker leaves."""

    kind: Literal["deregister"] = "deregister"


class ListStages(Message):
    """Which stages of a model are there; anyone may ask."""

    kind: Literal["list_stages"] = "list_stages"
    manifest_root: Digest | None = None


class ReportFailure(Message):
    """A peer failed the signer: a counter, not a verdict."""

    kind: Literal["report_failure"] = "report_failure"
    peer_id: Peer
    code: Name


class Assigned(Message):
    """Answer to `Register` and, with a renewed lease, to `Announce`: what to serve, and the peers to dial."""

    kind: Literal["assigned"] = "assigned"
    model_id: Name
    layers: Layers
    lease: Sealed
    records: Annotated[tuple[Sealed, ...], Field(max_length=MAX_LISTED_STAGES)] = ()


class Acknowledged(Message):
    """Done; nothing to tell."""

    kind: Literal["acknowledged"] = "acknowledged"


class RevokedLease(Message):
    """Leases of ``peer_id`` up to this serial count no more, whatever their times say; a newer one does."""

    peer_id: Peer
    serial: Count


class Stages(Message):
    """Answer to `ListStages`: stage records, as their peers signed them, what is missing, and which leases were taken away.

    ``issuer`` is who signed the ``revoked`` leases, and this answer: nobody revokes another one's.
    """

    kind: Literal["stages"] = "stages"
    records: Annotated[tuple[Sealed, ...], Field(max_length=MAX_LISTED_STAGES)]
    health: Health
    missing: Annotated[tuple[Layers, ...], Field(max_length=MAX_MODEL_LAYERS)] = ()
    issuer: Peer | None = None
    revoked: Annotated[tuple[RevokedLease, ...], Field(max_length=MAX_LISTED_REVOCATIONS)] = ()


class Subscribe(Message):
    """The first message of a topology stream: what is to be told, at each change, about one model. The signer is the asker."""

    kind: Literal["subscribe"] = "subscribe"
    manifest_root: Digest


class UpdateAssignment(Message):
    """An order to a worker: other layers are yours from now on. Domain `ORDER`, audience the worker, signer the orchestrator.

    ``beside``: load them beside the layers that you serve, and go on serving those until this order comes again without it. Both fit
    the claim then. Without it, and where they are not loaded yet, the open sessions end first.
    """

    kind: Literal["update_assignment"] = "update_assignment"
    model_id: Name
    layers: Layers
    lease: Sealed
    reason: Reason
    beside: bool = False
