"""What only the operator may ask: each request travels in an `Operate`, beside the admin token."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tessella_p2p.base.limits import (
    MAX_ADMIN_TOKEN_CHARS,
    MAX_AUDITORS,
    MAX_MODEL_LAYERS,
    MAX_MOVES_TOLD,
    MAX_PAGE_ROWS,
    MAX_REASON_CHARS,
    MAX_TERMS,
)
from tessella_p2p.wire.envelope import Message
from tessella_p2p.wire.messages.federation import PullSnapshot, SnapshotPage
from tessella_p2p.wire.messages.reads import ManifestSummary
from tessella_p2p.wire.messages.types import (
    Count,
    Digest,
    Layers,
    MicroCredits,
    Name,
    PageSize,
    Peer,
    Reason,
    Sealed,
    Tier,
    TimeMs,
)


class ReadLedger(Message):
    """The newest entries of the journal, newest first; ``before`` is the last sequence of the page before."""

    kind: Literal["read_ledger"] = "read_ledger"
    limit: PageSize = 100
    before: Count | None = None


class LedgerLine(Message):
    """One entry of the journal, for people: what it moved, and why. ``text`` is one line.

    ``reports`` is how many auditors' sealed reports are kept that a verdict rests on; see `ReadEvidence`.
    """

    sequence: Count
    at: TimeMs
    kind: Name
    peer_id: Peer | None = None
    requester: Peer | None = None
    request_id: Name | None = None
    micro_credits: MicroCredits = 0
    text: Reason
    reports: Count = 0


class LedgerLines(Message):
    """Answer to `ReadLedger`."""

    kind: Literal["ledger_lines"] = "ledger_lines"
    head: Count
    entries: Annotated[tuple[LedgerLine, ...], Field(max_length=MAX_PAGE_ROWS)]


class ReadEvidence(Message):
    """What the verdict of entry ``sequence`` rests on."""

    kind: Literal["read_evidence"] = "read_evidence"
    sequence: Count


class Evidence(Message):
    """Answer to `ReadEvidence`: the proof as its worker sealed it, and the reports as their auditors did."""

    kind: Literal["evidence"] = "evidence"
    sequence: Count
    proof: Sealed
    reports: Annotated[tuple[Sealed, ...], Field(max_length=MAX_AUDITORS)]


class ReadAccounts(Message):
    """The balance of one identity, or a page of all of them in the order of their names."""

    kind: Literal["read_accounts"] = "read_accounts"
    peer_id: Peer | None = None
    after: Annotated[str, Field(max_length=64)] | None = None
    limit: PageSize = MAX_PAGE_ROWS


class AccountEntry(Message):
    """One account. ``name`` is a peer id, or the ledger's own account ``issuance``."""

    name: Annotated[str, Field(max_length=64)]
    micro_credits: MicroCredits
    foreign_micro_credits: MicroCredits = 0
    settled_proofs: Count
    tier: Tier


class AccountEntries(Message):
    """Answer to `ReadAccounts`."""

    kind: Literal["account_entries"] = "account_entries"
    accounts: Annotated[tuple[AccountEntry, ...], Field(max_length=MAX_PAGE_ROWS)]
    more: bool = False


class ReadReputation(Message):
    """The score of one identity, or a page of all of them."""

    kind: Literal["read_reputation"] = "read_reputation"
    peer_id: Peer | None = None
    after: Peer | None = None
    limit: PageSize = MAX_PAGE_ROWS


class ReputationEntry(Message):
    """How an identity did. ``score`` is in thousandths, 1,000 is a clean slate; the counters never decay."""

    peer_id: Peer
    score: int
    audits_passed: Count
    audits_failed: Count
    inconclusive: Count
    copies: Count
    slashes: Count
    blacklisted: bool


class ReputationEntries(Message):
    """Answer to `ReadReputation`."""

    kind: Literal["reputation_entries"] = "reputation_entries"
    entries: Annotated[tuple[ReputationEntry, ...], Field(max_length=MAX_PAGE_ROWS)]
    more: bool = False


class Slash(Message):
    """Take credits off an identity, which may leave it below 0; ``blacklist`` puts it on the blacklist, or takes it off."""

    kind: Literal["slash"] = "slash"
    peer_id: Peer
    micro_credits: Count = 0
    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON_CHARS)]
    blacklist: bool | None = None


class Slashed(Message):
    """Answer to `Slash`: the identity afterwards."""

    kind: Literal["slashed"] = "slashed"
    account: AccountEntry
    reputation: ReputationEntry


class Rebalance(Message):
    """Recompute the split of a model and move the mesh to it; with ``dry_run`` only say how. Without a model: of all."""

    kind: Literal["rebalance"] = "rebalance"
    model_id: Name | None = None
    dry_run: bool = False


class Move(Message):
    """One worker's range before and after."""

    peer_id: Peer
    before: Layers
    after: Layers


class RebalancePlan(Message):
    """Answer to `Rebalance`: the first moves in the order in which they are made, how many there are in all, and the dearest stage
    (relative cost) before and after."""

    kind: Literal["rebalance_plan"] = "rebalance_plan"
    moves: Annotated[tuple[Move, ...], Field(max_length=MAX_MOVES_TOLD)]
    num_moves: Count = 0
    dearest_before: Count
    dearest_after: Count
    begun: bool


class TermsEntry(Message):
    """`orchestrator.terms.ModelTerms` of a model under one recipe on one device; ``*`` is every device."""

    recipe: Name
    device: Annotated[str, Field(min_length=1, max_length=32)]
    layer_mb: Count
    kv_mb: Count
    embedding_mb: Count
    head_mb: Count
    overhead_mb: Count = 0
    usable_pct: Annotated[int, Field(ge=1, le=100)] = 90
    min_mb: Count = 1
    layer_cost: Annotated[int, Field(ge=1, lt=2**53)] = 1
    embedding_cost: Count = 0
    head_cost: Count = 0


class PublishManifest(Message):
    """The manifest that a model has to match from now on, and what it costs; workers of another root stay until they leave."""

    kind: Literal["publish_manifest"] = "publish_manifest"
    model_id: Name
    manifest_root: Digest
    contract_hash: Digest
    total_layers: Annotated[int, Field(ge=1, le=MAX_MODEL_LAYERS)]
    terms: Annotated[tuple[TermsEntry, ...], Field(min_length=1, max_length=MAX_TERMS)]


OperatorRequest = (
    ReadLedger | ReadEvidence | ReadAccounts | ReadReputation | Slash | Rebalance | PublishManifest | PullSnapshot
)
OperatorAnswer = (
    LedgerLines
    | Evidence
    | AccountEntries
    | ReputationEntries
    | Slashed
    | RebalancePlan
    | ManifestSummary
    | SnapshotPage
)
"""A `PublishManifest` is answered with what is served from now on."""


class Operate(Message):
    """An operator's request; the signer is whoever has the token. The token travels over an encrypted stream only."""

    kind: Literal["operate"] = "operate"
    admin_token: Annotated[str, Field(min_length=1, max_length=MAX_ADMIN_TOKEN_CHARS, repr=False)]
    request: Annotated[OperatorRequest, Field(discriminator="kind")]
