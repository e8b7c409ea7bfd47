"""What anybody may read of an orchestrator, and its answers. Tables are read by pages: ``after`` is the last key of the page before."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tessella_p2p.base.limits import (
    MAX_ADDRESS_CHARS,
    MAX_COUNTERS,
    MAX_FEDERATION_PEERS,
    MAX_MODEL_LAYERS,
    MAX_PAGE_ROWS,
    MAX_SERVED_MODELS,
)
from tessella_p2p.wire.envelope import Message
from tessella_p2p.wire.messages.types import (
    Addresses,
    Count,
    Digest,
    Health,
    Layers,
    Name,
    PageSize,
    Peer,
    Reason,
    TimeMs,
)

MemberStatus = Literal["PendingLoad", "Ready", "Healthy", "Draining", "Offline", "Left"]
LayerRanges = Annotated[tuple[Layers, ...], Field(max_length=64)]


class ListPeers(Message):
    """The routing contract: every worker of a model with its endpoints. A model that nobody serves has none."""

    kind: Literal["list_peers"] = "list_peers"
    model_id: Name
    after: Peer | None = None
    limit: PageSize = MAX_PAGE_ROWS


class PeerEntry(Message):
    """One worker, as those see it who dial it. ``reputation`` is in thousandths, see ``ledger.reputation``."""

    peer_id: Peer
    model_id: Name
    recipe: Name
    layer_ranges: LayerRanges
    status: MemberStatus
    p2p_addrs: Addresses
    http_addr: Annotated[str, Field(max_length=MAX_ADDRESS_CHARS)] | None = None
    http_api_url: Annotated[str, Field(max_length=MAX_ADDRESS_CHARS)] | None = None
    queue_depth: Count
    canary: bool
    failures: Count
    reputation: int
    replica_group_id: Count


class Peers(Message):
    """Answer to `ListPeers`; ``more`` where the page is not the last."""

    kind: Literal["peers"] = "peers"
    peers: Annotated[tuple[PeerEntry, ...], Field(max_length=MAX_PAGE_ROWS)]
    more: bool = False


class ListModels(Message):
    """What the mesh can render."""

    kind: Literal["list_models"] = "list_models"


class ModelEntry(Message):
    """A model and how many workers serve it."""

    model_id: Name
    active_workers: Count


class Models(Message):
    """Answer to `ListModels`."""

    kind: Literal["models"] = "models"
    models: Annotated[tuple[ModelEntry, ...], Field(max_length=MAX_SERVED_MODELS)]


class ListWorkers(Message):
    """The monitoring view: no addresses in it."""

    kind: Literal["list_workers"] = "list_workers"
    after: Peer | None = None
    limit: PageSize = MAX_PAGE_ROWS


class WorkerEntry(Message):
    """One worker, as an observer sees it."""

    peer_id: Peer
    model_id: Name
    status: MemberStatus
    vram_mb: Count
    queue_depth: Count


class Workers(Message):
    """Answer to `ListWorkers`."""

    kind: Literal["workers"] = "workers"
    workers: Annotated[tuple[WorkerEntry, ...], Field(max_length=MAX_PAGE_ROWS)]
    more: bool = False


class ReadModelHealth(Message):
    """Coverage of a model, and the memory terms that a repair is sized with. Without a recipe: the orchestrator's own."""

    kind: Literal["read_model_health"] = "read_model_health"
    model_id: Name
    device: Name
    recipe: Name | None = None


class ModelHealth(Message):
    """Answer to `ReadModelHealth` (manual, section 03). Memory in MB.

    ``rendered_layers`` is the prefix ``[0, n)`` that a ready chain renders, ``covered_layers`` how many layers somebody Healthy
    serves. The manual's formula gives the claim for the first hole exactly, or without a hole that for the whole model:
    ``global_tensor_mb`` is what that range loads beside its layers. For any other range it is ``overhead_mb``, and
    ``head_global_mb`` at layer 0, and ``tail_global_mb`` at the last layer.
    """

    kind: Literal["model_health"] = "model_health"
    model_id: Name
    recipe: Name
    device: Name
    health: Health
    total_layers: Count
    covered_layers: Count
    rendered_layers: Count
    holes: Annotated[tuple[Layers, ...], Field(max_length=MAX_MODEL_LAYERS)]
    mem_per_layer_mb: Count
    weights_per_layer_mb: Count
    kv_per_layer_mb: Count
    global_tensor_mb: Count
    head_global_mb: Count
    tail_global_mb: Count
    overhead_mb: Count
    usable_vram_pct: Count
    min_vram_mb: Count


class PreviewAssignment(Message):
    """Which range a claim would get now; nothing is changed."""

    kind: Literal["preview_assignment"] = "preview_assignment"
    model_id: Name
    vram_mb: Annotated[int, Field(ge=1, le=1 << 24)]
    device: Name
    recipe: Name | None = None


class AssignmentPreview(Message):
    """Answer to `PreviewAssignment`; ``claim_mb`` is the smallest claim that these layers fit into."""

    kind: Literal["assignment_preview"] = "assignment_preview"
    model_repo: Name
    layer_ranges: LayerRanges
    replica_group_id: Count
    claim_mb: Count


class ReadManifest(Message):
    """The manifest that a worker has to own to serve a model."""

    kind: Literal["read_manifest"] = "read_manifest"
    model_id: Name


class ManifestSummary(Message):
    """A model's manifest by its root: who has the root can check the manifest itself, from anybody."""

    kind: Literal["manifest"] = "manifest"
    model_id: Name
    manifest_root: Digest
    contract_hash: Digest
    total_layers: Annotated[int, Field(ge=1, le=MAX_MODEL_LAYERS)]


class ListManifests(Message):
    """The manifests that are served here."""

    kind: Literal["list_manifests"] = "list_manifests"


class Manifests(Message):
    """Answer to `ListManifests`."""

    kind: Literal["manifests"] = "manifests"
    manifests: Annotated[tuple[ManifestSummary, ...], Field(max_length=MAX_SERVED_MODELS)]


class ReadIdentity(Message):
    """Who is the orchestrator."""

    kind: Literal["read_identity"] = "read_identity"


class Identity(Message):
    """Answer to `ReadIdentity`: what a node pins."""

    kind: Literal["identity"] = "identity"
    peer_id: Peer
    addresses: Addresses


class ReadFederation(Message):
    """Where the federation stands."""

    kind: Literal["read_federation"] = "read_federation"


class FederatedPeer(Message):
    """One other orchestrator, as this one has pulled it. ``lag`` is how many entries are known to be missing."""

    peer_id: Peer
    state: Literal["new", "following", "unreachable", "refused"]
    chain: Count
    cursor: Count
    lag: Count
    pulled_at: TimeMs | None = None
    reason: Reason | None = None


class Federation(Message):
    """Answer to `ReadFederation`: the own chain's head, and each followed orchestrator."""

    kind: Literal["federation"] = "federation"
    peer_id: Peer
    chain: Count
    head: Count
    head_hash: Digest
    peers: Annotated[tuple[FederatedPeer, ...], Field(max_length=MAX_FEDERATION_PEERS)]


class ReadMetrics(Message):
    """Operational counters."""

    kind: Literal["read_metrics"] = "read_metrics"


class Metrics(Message):
    """Answer to `ReadMetrics`: name and value, in the order of the names."""

    kind: Literal["metrics"] = "metrics"
    counters: Annotated[tuple[tuple[Name, Count], ...], Field(max_length=MAX_COUNTERS)]


PublicRequest = (
    ListPeers
    | ListModels
    | ListWorkers
    | ReadModelHealth
    | PreviewAssignment
    | ReadManifest
    | ListManifests
    | ReadIdentity
    | ReadFederation
    | ReadMetrics
)
PublicAnswer = (
    Peers
    | Models
    | Workers
    | ModelHealth
    | AssignmentPreview
    | ManifestSummary
    | Manifests
    | Identity
    | Federation
    | Metrics
)
