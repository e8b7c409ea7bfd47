"""The signed envelope that every control message and every record travels in.

An envelope is the canonical CBOR of a list of nine: version, domain, signer, audience, sequence, issued-at, expires-at
(Unix milliseconds), payload bytes and an Ed25519 signature over the canonical CBOR of a context string and the first eight.
The domain keeps a signature from being used for another purpose, the audience from being used towards another peer, the
sequence and the times from being used again.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tessella_p2p.base.errors import (
    Expired,
    InvalidSignature,
    MalformedMessage,
    Overloaded,
    RemoteProtocolError,
    Replayed,
    VersionMismatch,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    CLOCK_SKEW_MS,
    MAX_ENVELOPE_BYTES,
    MAX_OPEN_REQUESTS,
    MAX_OPEN_REQUESTS_PER_SIGNER,
    REQUEST_TTL_MS,
)
from tessella_p2p.wire import cbor, keys

VERSION = 1
ANYONE = "*"
"""Audience of a record: whoever reads it."""

# An envelope and what its signature covers are lists of nine that share eight fields, byte for byte.
_LIST_OF_NINE = b"\x89"
_CONTEXT = cbor.encode("tessella-envelope")
_SIGNATURE = b"\x58\x40"
"""The head of a string of 64 bytes."""
_FIELD_TYPES = (int, str, str, str, int, int, int, bytes, bytes)
_MAX_DOMAIN_CHARS = 32
_MAX_NUMBER = 2**53
"""Sequences and times are below it, like every count and time in a message: an answer repeats its request's sequence."""


class Message(BaseModel):
    """Base of every payload: frozen, unknown fields refused, no coercion between types. In JSON (logs), bytes are hex."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_bytes="hex")


MessageT = TypeVar("MessageT", bound=Message)


class Sequencer(Protocol):
    """Gives sequence numbers that rise for ever, over restarts too."""

    def next(self, domain: str, now_ms: int) -> int:
        """A number larger than any it gave for ``domain`` before."""
        ...


class ClockSequencer:
    """Sequence numbers that follow the clock in microseconds and never fall back while the process lives.

    Over a restart they rise as long as the clock does; a node persists ``floor`` (see `floor`) to be safe from a clock that was
    set back.
    """

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self._lock = threading.Lock()

    def next(self, domain: str, now_ms: int) -> int:
        """A number larger than any given before; all domains share one counter."""
        with self._lock:
            self.floor = max(self.floor + 1, now_ms * 1000)
            return self.floor


@dataclass(frozen=True, slots=True)
class Envelope:
    """An envelope whose signature was verified. ``raw`` is what was signed and sent, byte for byte."""

    domain: str
    signer: PeerId
    audience: str
    sequence: int
    issued_at: int
    expires_at: int
    payload: bytes
    raw: bytes

    def message(self, kind: type[MessageT]) -> MessageT:
        """The payload as a ``kind``.

        Raises:
            MalformedMessage: when it is none.
        """
        return decode_message(kind, self.payload)


def encode_message(message: Message) -> bytes:
    """Canonical CBOR of a message's fields; fields that are None are left out."""
    try:
        return cbor.encode_plain(_plain(message))
    except _NotPlain:
        return cbor.encode(message.model_dump(exclude_none=True))


class _NotPlain(Exception):
    """A value whose canonical form has to be found, as a float's."""


_PLAIN_TYPES = frozenset({int, str, bytes, bool})
"""What has one encoding only."""


@cache
def _canonical_order(kind: type) -> tuple[str, ...]:
    """The names of a message's fields, in the order of their encodings: the shorter first."""
    if not issubclass(kind, Message):
        raise _NotPlain
    return tuple(sorted(kind.model_fields, key=lambda name: (len(name), name)))


def _plain(value: object) -> object:
    """Messages as maps in canonical order and tuples as lists: what an encoder that sorts nothing, at a third of the time, gets right.

    Raises:
        _NotPlain: there is something else in it.
    """
    kind: type = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if kind is tuple:
        return [_plain(item) for item in value]  # type: ignore[attr-defined] # it is a tuple
    names, fields = _canonical_order(kind), value.__dict__
    return {name: _plain(fields[name]) for name in names if fields[name] is not None}


def decode_message(kind: type[MessageT], data: bytes) -> MessageT:
    """The ``kind`` whose fields ``data`` holds.

    Raises:
        MalformedMessage: no canonical CBOR, an unknown or missing field, a value out of bounds.
    """
    value = cbor.decode(data, MAX_ENVELOPE_BYTES, lists=tuple)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = _quoted(".".join(str(part) for part in first["loc"]))
        raise MalformedMessage(
            f"{kind.__name__}: {where or kind.__name__}: {_quoted(first['msg'])}", param=where or None
        ) from error


def _quoted(text: str) -> str:
    """What may repeat a peer's words, short and on one line."""
    return text.encode("unicode_escape").decode("ascii")[:200]


def seal(
    key: keys.NodeKey,
    domain: str,
    message: Message,
    *,
    sequence: int,
    now_ms: int,
    audience: str = ANYONE,
    ttl_ms: int = REQUEST_TTL_MS,
) -> bytes:
    """A signed envelope around ``message``, valid from ``now_ms`` for ``ttl_ms``."""
    fields = cbor.encode(
        [
            VERSION,
            domain,
            str(key.peer_id),
            str(audience),
            sequence,
            now_ms,
            now_ms + ttl_ms,
            encode_message(message),
        ]
    )[1:]
    return _LIST_OF_NINE + fields + _SIGNATURE + key.sign(_LIST_OF_NINE + _CONTEXT + fields)


_Fields = tuple[int, str, str, str, int, int, int, bytes, bytes]


def peek_signer(raw: bytes) -> PeerId:
    """Who claims to have signed ``raw``, unverified: for an admission that is decided before a signature is.

    Raises:
        MalformedMessage, VersionMismatch: when it is no envelope.
    """
    return PeerId(_fields(raw)[2])


def peek_sequence(raw: bytes) -> int:
    """The sequence that ``raw`` states, unverified: for the answer to a request that is refused before its signature is verified.

    Raises:
        MalformedMessage, VersionMismatch: when it is no envelope.
    """
    return _fields(raw)[4]


def peek_audience(raw: bytes) -> str:
    """Whom ``raw`` says it is for, unverified: for an envelope of one's own.

    Raises:
        MalformedMessage, VersionMismatch: when it is no envelope.
    """
    return _fields(raw)[3]


def _fields(raw: bytes) -> _Fields:
    fields = cbor.decode(raw, MAX_ENVELOPE_BYTES, lists=tuple)
    if not isinstance(fields, tuple) or not fields or not isinstance(fields[0], int):
        raise MalformedMessage("no envelope")
    if fields[0] != VERSION:
        raise VersionMismatch(f"envelope version {fields[0]}; this node speaks version {VERSION}")
    if len(fields) != 9:
        raise MalformedMessage("no envelope: nine fields are expected")
    if tuple(map(type, fields)) != _FIELD_TYPES:
        raise MalformedMessage("no envelope: a field has the wrong type")
    _, domain, signer, audience, sequence, issued_at, expires_at, _, _ = fields
    numbers = (sequence, issued_at, expires_at)
    if len(domain) > _MAX_DOMAIN_CHARS or min(numbers) < 0 or max(numbers) >= _MAX_NUMBER:
        raise MalformedMessage("no envelope: a field is out of bounds")
    names = domain + signer + audience
    # They are repeated in errors and logs.
    if max(len(signer), len(audience)) > keys.MAX_PEER_ID_CHARS or not names.isascii() or not names.isprintable():
        raise MalformedMessage("no envelope: a domain, signer or audience is no name")
    return fields


def open_envelope(
    raw: bytes,
    domain: str,
    *,
    now_ms: int | None,
    audience: str = ANYONE,
    signer: PeerId | None = None,
) -> Envelope:
    """Verify an envelope.

    Args:
        raw: the received bytes.
        domain: the only domain accepted.
        now_ms: the time to judge by; None skips the expiry, for evidence that is judged by other times (a receipt, an old lease).
        audience: the only audience accepted: this node's peer id, or `ANYONE` for a record.
        signer: the only signer accepted, where it is known (the peer at the other end of the stream, a pinned orchestrator).

    Raises:
        MalformedMessage, VersionMismatch, InvalidSignature, Expired: each says what was wrong; nothing was changed.
    """
    _, got_domain, got_signer, got_audience, sequence, issued_at, expires_at, payload, signature = _fields(raw)
    if got_domain != domain:
        raise InvalidSignature(f"an envelope of domain {got_domain!r} where {domain!r} is expected")
    if got_audience != audience:
        raise InvalidSignature(f"a {domain} envelope that is addressed to {got_audience}, not to {audience}")
    if signer is not None and got_signer != signer:
        raise InvalidSignature(f"a {domain} envelope signed by {got_signer}, not by {signer}")
    if expires_at < issued_at:
        raise MalformedMessage(f"a {domain} envelope that expires before it was issued")
    if len(signature) != keys.SIGNATURE_BYTES:
        raise InvalidSignature(f"a {domain} envelope with a signature of {len(signature)} bytes")
    signed = _LIST_OF_NINE + _CONTEXT + bytes(raw)[1 : -len(_SIGNATURE) - len(signature)]
    keys.verify(PeerId(got_signer), signed, signature)
    if now_ms is not None:
        check_window(domain, issued_at, expires_at, now_ms)
    return Envelope(domain, PeerId(got_signer), audience, sequence, issued_at, expires_at, payload, bytes(raw))


def check_window(what: str, issued_at: int, expires_at: int, now_ms: int) -> None:
    """Refuse what is not yet or no longer valid; a clock may be off by the skew limit.

    Raises:
        Expired: says by how many seconds.
    """
    if issued_at > now_ms + CLOCK_SKEW_MS:
        ahead = (issued_at - now_ms) / 1000
        raise Expired(
            f"a {what} issued {ahead:.0f} s in the future: the signer's clock is ahead (limit {CLOCK_SKEW_MS // 1000} s)"
        )
    if expires_at <= now_ms:
        raise Expired(f"a {what} that expired {(now_ms - expires_at) / 1000:.0f} s ago")


_Request = tuple[str, str, int]
"""Signer, domain, sequence."""


class ReplayGuard:
    """Remembers the sequence numbers of requests until they expire, so that none is accepted twice.

    Requests of one signer may arrive out of order (each has a stream of its own), so a set is kept, not a high-water mark. Records
    are different: there the highest sequence wins, see ``dht.records``.

    Args:
        max_entries: bound over all signers; at the bound new requests are refused, never old entries forgotten.
        max_per_signer: bound for one of them while there is room; it falls in step with the room that is left, so that a few
            signers cannot take the room of all.
    """

    def __init__(
        self, max_entries: int = MAX_OPEN_REQUESTS, max_per_signer: int = MAX_OPEN_REQUESTS_PER_SIGNER
    ) -> None:
        self._max_entries = max_entries
        self._max_per_signer = max_per_signer
        self._num_of: Counter[str] = Counter()
        self._seen: set[_Request] = set()
        self._ends: list[
            tuple[int, _Request]
        ] = []  # a heap: those of a clock that was set back do not stand in the way

    def check(self, envelope: Envelope, now_ms: int) -> None:
        """Accept an envelope once.

        Raises:
            Replayed: when this signer used this sequence in this domain before.
            RemoteProtocolError: when it is valid for longer than it can be remembered.
            Overloaded: when too many unexpired requests are remembered already.
        """
        if envelope.expires_at - envelope.issued_at > REQUEST_TTL_MS:
            raise RemoteProtocolError(f"a request may be valid for {REQUEST_TTL_MS // 1000} s at most")
        while self._ends and self._ends[0][0] <= now_ms:
            _, oldest = heapq.heappop(self._ends)
            self._seen.discard(oldest)
            self._forget_one_of(oldest[0])
        entry = (envelope.signer, envelope.domain, envelope.sequence)
        if entry in self._seen:
            raise Replayed(f"{envelope.signer} used sequence {envelope.sequence} for {envelope.domain} before")
        room = self._max_entries - len(self._seen)
        # In whole numbers, and rounded up: as long as there is room at all, each signer may use one place.
        if self._num_of[envelope.signer] >= -(-self._max_per_signer * room // self._max_entries):
            raise Overloaded("too many requests in the last two minutes; try again later")
        # It is accepted at most CLOCK_SKEW_MS before its issue, and until its expiry.
        self._seen.add(entry)
        heapq.heappush(self._ends, (now_ms + REQUEST_TTL_MS + CLOCK_SKEW_MS, entry))
        self._num_of[envelope.signer] += 1

    def _forget_one_of(self, signer: str) -> None:
        self._num_of[signer] -= 1
        if not self._num_of[signer]:
            del self._num_of[signer]
