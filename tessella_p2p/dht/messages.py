"""What travels on ``/tessella/kad/1`` and ``/tessella/gossip/1``.

Both run inside an authenticated stream, so the sender is the stream's peer and no message carries an envelope of its own. The
values are envelopes: stage records, signed by the peer whose stage they state.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tessella_p2p.base.limits import (
    GOSSIP_MAX_BATCH,
    KAD_K,
    KAD_MAX_ADDRESSES,
    KAD_MAX_CONTACT_BYTES,
    KAD_MAX_VALUE_BYTES,
    KAD_MAX_VALUES,
    MAX_ADDRESS_CHARS,
)
from tessella_p2p.wire import cbor
from tessella_p2p.wire.envelope import Message
from tessella_p2p.wire.messages import Count, Digest, Peer, Refused

RecordBytes = Annotated[bytes, Field(min_length=1, max_length=KAD_MAX_VALUE_BYTES)]
"""The envelope of one stage record."""
ContactAddresses = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=MAX_ADDRESS_CHARS)], ...], Field(max_length=KAD_MAX_ADDRESSES)
]
ContactBytes = Annotated[bytes, Field(min_length=1, max_length=KAD_MAX_CONTACT_BYTES)]
"""The canonical CBOR of a `KadContact`. The same contact travels in many replies, so its bytes are recognised and not parsed again."""


class KadContact(Message):
    """Where a peer may be dialled, as somebody says; the dial itself proves or refutes it."""

    peer_id: Peer
    addresses: ContactAddresses


class Find(Message):
    """Asks for the contacts closest to ``key`` and, with ``values``, for what is stored under it."""

    kind: Literal["find"] = "find"
    key: Digest
    values: bool


class Store(Message):
    """Asks to keep ``value``, a record of the sender's own, under ``key`` until it expires."""

    kind: Literal["store"] = "store"
    key: Digest
    value: RecordBytes


class KadRequest(Message):
    """One request. ``addresses`` are the sender's own; without any it stays out of routing tables."""

    id: Count
    addresses: ContactAddresses
    body: Annotated[Find | Store, Field(discriminator="kind")]


class Found(Message):
    """Answer to `Find`: contacts, closest first, and the values of the key."""

    kind: Literal["found"] = "found"
    contacts: Annotated[tuple[ContactBytes, ...], Field(max_length=KAD_K)]
    values: Annotated[tuple[RecordBytes, ...], Field(max_length=KAD_MAX_VALUES)] = ()


class Stored(Message):
    """Answer to `Store`: the value is kept."""

    kind: Literal["stored"] = "stored"


class KadReply(Message):
    """Answer to the request ``to`` of the same stream."""

    to: Count
    body: Annotated[Found | Stored | Refused, Field(discriminator="kind")]


class HeartbeatBatch(Message):
    """Stage records as their peers signed them; the only message of gossip, and it has no answer."""

    records: Annotated[tuple[RecordBytes, ...], Field(min_length=1, max_length=GOSSIP_MAX_BATCH)]


def encode_batch(records: tuple[bytes, ...]) -> bytes:
    """The bytes of a `HeartbeatBatch`; what was checked already is encoded as it is."""
    return cbor.encode({"records": records})
