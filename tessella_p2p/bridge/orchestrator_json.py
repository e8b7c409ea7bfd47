"""An orchestrator's messages as JSON; pure.

Field for field the JSON is the message, under the manual's names where it has other ones. Digests and ids (bytes of up to 32) are
lower-case hex, sealed envelopes base64url without padding; an absent value is null, and every field is always there.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from tessella_p2p.base.limits import MICRO_PER_CREDIT
from tessella_p2p.ledger.accounts import ISSUANCE
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.messages.reads import LayerRanges
from tessella_p2p.wire.messages.types import Count, MicroCredits, Name, Sealed, Tier

_MAX_HEX_BYTES = 32


class _Answer(BaseModel):
    """An answer that is put together of messages."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Assignment(_Answer):
    """The range to serve. ``expert_range`` is null: layers are whole."""

    model_repo: Name
    layer_ranges: LayerRanges
    replica_group_id: Count
    expert_range: None = None


class Registration(_Answer):
    """The assignment, the peers to dial, and what certifies both: the lease, and the stage records as their peers signed them."""

    assignment: Assignment
    peers: tuple[m.PeerEntry, ...]
    lease: Sealed
    records: tuple[Sealed, ...]


class Acknowledgement(_Answer):
    """Done; nothing to tell."""

    acknowledged: bool = True


class AssignmentPreview(_Answer):
    """The range that a claim would get now; ``claim_mb`` is the smallest claim that it fits into."""

    model_repo: Name
    layer_ranges: LayerRanges
    replica_group_id: Count
    expert_range: None = None
    claim_mb: Count


class SettledBatch(_Answer):
    """What became of each proof, in their order."""

    results: tuple[m.Settled, ...]


class Account(_Answer):
    """A balance. ``peer_id`` is null for the ledger's own account ``issuance``; ``credits`` is for people, ``micro_credits`` exact."""

    name: str
    peer_id: str | None
    credits: float
    micro_credits: MicroCredits
    foreign_micro_credits: MicroCredits
    settled_proofs: Count
    tier: Tier


class Penalty(_Answer):
    """The identity after a slash."""

    account: Account
    reputation: m.ReputationEntry


class ApiError(_Answer):
    """What went wrong: ``code`` for programs, ``message`` for people, ``param`` the field at fault where there is one."""

    model_config = ConfigDict(frozen=True, extra="allow")

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(_Answer):
    """Any answer with a status of 400 and above."""

    error: ApiError


# ---- Messages into answers ----


def registration(answer: m.Assigned, peers: Sequence[m.PeerEntry], replica_group_id: int) -> Registration:
    """The answer to a register, and to an announce that renews a lease."""
    assignment = Assignment(
        model_repo=answer.model_id, layer_ranges=(answer.layers,), replica_group_id=replica_group_id
    )
    return Registration(assignment=assignment, peers=tuple(peers), lease=answer.lease, records=answer.records)


def preview(answer: m.AssignmentPreview) -> AssignmentPreview:
    """The answer of ``/api/v1/assignment``."""
    return AssignmentPreview(
        model_repo=answer.model_repo,
        layer_ranges=answer.layer_ranges,
        replica_group_id=answer.replica_group_id,
        claim_mb=answer.claim_mb,
    )


def account(entry: m.AccountEntry) -> Account:
    """A row of ``/credits``."""
    return Account(
        name=entry.name,
        peer_id=None if entry.name == ISSUANCE else entry.name,
        credits=entry.micro_credits / MICRO_PER_CREDIT,
        micro_credits=entry.micro_credits,
        foreign_micro_credits=entry.foreign_micro_credits,
        settled_proofs=entry.settled_proofs,
        tier=entry.tier,
    )


def penalty(answer: m.Slashed) -> Penalty:
    """The answer of ``/slash``."""
    return Penalty(account=account(answer.account), reputation=answer.reputation)


# ---- Answers into JSON ----


def json_of(answer: BaseModel) -> dict[str, Any]:
    """What stands in the body for an answer."""
    return {name: _plain(value) for name, value in answer.model_dump(exclude=_hidden(type(answer))).items()}


def _hidden(kind: type[BaseModel]) -> set[str]:
    """The word that tells messages apart: the route does that here."""
    field = kind.model_fields.get("kind")
    return set() if field is None or field.is_required() else {"kind"}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex() if len(value) <= _MAX_HEX_BYTES else base64url(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


def base64url(raw: bytes) -> str:
    """RFC 4648, section 5, without padding."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


# ---- Schemas ----

Schemas = dict[str, JsonSchemaValue]


def schema_of(kind: Any, schemas: Schemas) -> JsonSchemaValue:
    """The JSON schema of `json_of` of a ``kind`` (or a list of them); what it refers to is added to ``schemas``."""
    found = TypeAdapter(kind).json_schema(
        mode="serialization", ref_template="#/components/schemas/{model}", schema_generator=_Schemas
    )
    for name, schema in found.pop("$defs", {}).items():
        schemas[name] = schema
    if "title" in found and found.get("type") == "object":
        name = found["title"]
        schemas[name] = found
        return {"$ref": f"#/components/schemas/{name}"}
    return found


class _Schemas(GenerateJsonSchema):
    """Pydantic's schemas, with bytes as they stand in our JSON."""

    def bytes_schema(self, schema: core_schema.BytesSchema) -> JsonSchemaValue:
        least, most = schema.get("min_length", 0), schema.get("max_length", 0)
        if most > _MAX_HEX_BYTES:
            return {"type": "string", "pattern": "^[A-Za-z0-9_-]*$", "description": "a sealed envelope, base64url"}
        pattern = f"^([0-9a-f]{{2}}){{{least},{most}}}$"
        return {"type": "string", "pattern": pattern, "description": f"{most} bytes in hex"}

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        found = super().model_schema(schema)
        for name in _hidden(schema["cls"]):
            found.get("properties", {}).pop(name, None)
            if name in found.get("required", []):
                found["required"].remove(name)
        return found


PeerRows = list[m.PeerEntry]
ModelRows = list[m.ModelEntry]
WorkerRows = list[m.WorkerEntry]
ManifestRows = list[m.ManifestSummary]
AccountRows = list[Account]
ReputationRows = list[m.ReputationEntry]
Announcement = Registration | Acknowledgement
