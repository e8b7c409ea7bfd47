"""What fields of messages are made of, with their bounds; and the domains of signatures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, get_args

from pydantic import AfterValidator, Field

from tessella_p2p.base.errors import MalformedMessage
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import (
    KIB,
    MAX_ADDRESS_CHARS,
    MAX_ADDRESSES,
    MAX_DELEGATION_BYTES,
    MAX_EPOCHS,
    MAX_MODEL_LAYERS,
    MAX_PAGE_ROWS,
    MAX_POSITIONS,
    MAX_REASON_CHARS,
    MAX_ROUTE_BYTES,
)
from tessella_p2p.wire.keys import public_key_of

# Domains: what a signature is for.
LEASE = "lease"
STAGE_RECORD = "stage-record"
REQUEST = "orchestrator-request"
ANSWER = "orchestrator-answer"
TICKET = "ticket"
DELEGATION = "delegation"
CHAIN_OPEN = "chain-open"
CAPABILITY = "capability"
ROUTE = "route"
RECEIPT = "receipt"
PROOF = "proof"
ORDER = "order"
ORDER_ANSWER = "order-answer"
HISTORY_REQUEST = "history-request"
HISTORY = "history"
LEDGER_ENTRY = "ledger-entry"
LEDGER_HEAD = "ledger-head"


def _is_peer_id(value: str) -> str:
    try:
        public_key_of(PeerId(value))
    except MalformedMessage as error:
        raise ValueError(str(error)) from error
    return value


def _is_range(value: tuple[int, int]) -> tuple[int, int]:
    if LayerRange(*value).end > MAX_MODEL_LAYERS:
        raise ValueError(f"a range beyond layer {MAX_MODEL_LAYERS}")
    return value


Peer = Annotated[str, AfterValidator(_is_peer_id), Field(json_schema_extra={"format": "peer-id"})]
Layers = Annotated[tuple[int, int], AfterValidator(_is_range)]
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
Session = Annotated[bytes, Field(min_length=16, max_length=16)]
Sealed = Annotated[bytes, Field(min_length=1, max_length=64 * KIB)]
"""An envelope inside a message."""
SealedDelegation = Annotated[bytes, Field(min_length=1, max_length=MAX_DELEGATION_BYTES)]
"""The envelope of a `Delegation`."""
SealedRoute = Annotated[bytes, Field(min_length=1, max_length=MAX_ROUTE_BYTES)]
"""The envelope of a `RouteStatement`."""
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[0-9A-Za-z_.:/@+-]+$")]
"""Of a model, a recipe, a device, a code: ASCII, so that no two of them look the same."""
RequestName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9A-Za-z_.-]+$")]
Addresses = Annotated[tuple[Annotated[str, Field(max_length=MAX_ADDRESS_CHARS)], ...], Field(max_length=MAX_ADDRESSES)]
TimeMs = Annotated[int, Field(ge=0, lt=2**53)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Positions = Annotated[int, Field(ge=0, le=MAX_POSITIONS)]
Epoch = Annotated[int, Field(ge=0, lt=MAX_EPOCHS)]
Tier = Literal["VIP", "Standard", "Leech"]
"""The best first."""
PageSize = Annotated[int, Field(ge=1, le=MAX_PAGE_ROWS)]
Reason = Annotated[str, Field(max_length=MAX_REASON_CHARS)]
MicroCredits = Annotated[int, Field(ge=-(2**53), lt=2**53)]
CanaryMode = Literal["off", "echo", "scale"]
"""How a canary answers instead of truly: with its input; with its true output, scaled."""
Health = Literal["healthy", "degraded", "incomplete"]

_RANK: Final[Mapping[Tier, int]] = {tier: rank for rank, tier in enumerate(get_args(Tier))}


def capped(tier: Tier, most: Tier | None) -> Tier:
    """``tier``, or ``most`` where it is a better one than that; None is no bound."""
    return tier if most is None or _RANK[tier] >= _RANK[most] else most
