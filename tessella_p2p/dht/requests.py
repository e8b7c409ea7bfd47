"""Requests and replies of ``/tessella/kad/1`` as the machine sees them, and their bytes.

The wire form is in `messages`; what comes in is validated there. What goes out was built here, so it is encoded as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tessella_p2p.base.ids import PeerId
from tessella_p2p.dht import messages
from tessella_p2p.dht.keyspace import Contact
from tessella_p2p.wire import cbor
from tessella_p2p.wire.envelope import decode_message
from tessella_p2p.wire.messages import Refused


@dataclass(frozen=True, slots=True)
class Find:
    """Asks for the contacts closest to a key and, with ``values``, for what is stored under it."""

    key: bytes
    values: bool


@dataclass(frozen=True, slots=True)
class Store:
    """Asks to keep a record of the sender's own."""

    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One request; ``addresses`` are the sender's own."""

    id: int
    addresses: tuple[str, ...]
    body: Find | Store


@dataclass(frozen=True, slots=True)
class Found:
    """Contacts, closest first, and values; both as somebody says."""

    contacts: tuple[Contact, ...]
    values: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """The value is kept."""


@dataclass(frozen=True, slots=True)
class Declined:
    """The request is refused, by a code of ``base.errors``."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to request ``to`` of the same stream."""

    to: int
    body: Found | Stored | Declined


def encode_request(request: Request) -> bytes:
    """The bytes of a `messages.KadRequest`."""
    body: dict[str, object]
    match request.body:
        case Find(key, values):
            body = {"kind": "find", "key": key, "values": values}
        case Store(key, value):
            body = {"kind": "store", "key": key, "value": value}
    return cbor.encode({"id": request.id, "addresses": request.addresses, "body": body})


def decode_request(data: bytes) -> Request:
    """The request in ``data``.

    Raises:
        MalformedMessage: it is none.
    """
    message = decode_message(messages.KadRequest, data)
    match message.body:
        case messages.Find():
            return Request(message.id, message.addresses, Find(message.body.key, message.body.values))
        case messages.Store():
            return Request(message.id, message.addresses, Store(message.body.key, message.body.value))


def encode_reply(reply: Reply) -> bytes:
    """The bytes of a `messages.KadReply`."""
    body: dict[str, object]
    match reply.body:
        case Found(contacts, values):
            body = {"kind": "found", "contacts": [_contact_bytes(contact) for contact in contacts], "values": values}
        case Stored():
            body = {"kind": "stored"}
        case Declined(code, reason):
            body = {"kind": "refused", "code": code, "reason": reason}
    return cbor.encode({"to": reply.to, "body": body})


def decode_reply(data: bytes) -> Reply:
    """The reply in ``data``.

    Raises:
        MalformedMessage: it is none.
    """
    message = decode_message(messages.KadReply, data)
    match message.body:
        case messages.Found():
            contacts = tuple(_contact(data) for data in message.body.contacts)
            return Reply(message.to, Found(contacts, message.body.values))
        case messages.Stored():
            return Reply(message.to, Stored())
        case Refused():
            return Reply(message.to, Declined(message.body.code, message.body.reason))


@lru_cache(maxsize=8192)
def _contact_bytes(contact: Contact) -> bytes:
    return cbor.encode({"peer_id": contact.peer_id, "addresses": contact.addresses})


@lru_cache(maxsize=8192)
def _contact(data: bytes) -> Contact:
    message = decode_message(messages.KadContact, data)
    return Contact(PeerId(message.peer_id), message.addresses)
