"""Events and effects of the Kademlia machine (`kademlia.Kademlia`)."""

from __future__ import annotations

from dataclasses import dataclass

from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import KAD_QUORUM
from tessella_p2p.dht.keyspace import Contact
from tessella_p2p.dht.requests import Reply, Request

# ---- Events ----


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """``sender`` is the peer that the stream authenticated."""

    sender: PeerId
    request: Request


@dataclass(frozen=True, slots=True)
class ReplyReceived:
    """``sender`` is the peer that the stream authenticated."""

    sender: PeerId
    reply: Reply


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request cannot be sent, or its stream broke."""

    request_id: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """`Kademlia.next_deadline` is reached."""


@dataclass(frozen=True, slots=True)
class Join:
    """Enter the mesh through ``seeds``: look this node up, then fill the farther buckets unless the table is about as it was."""

    query: int
    seeds: tuple[Contact, ...]


@dataclass(frozen=True, slots=True)
class Get:
    """Look the values of ``key`` up; ``quorum`` peers that have some end it early."""

    query: int
    key: bytes
    quorum: int = KAD_QUORUM


@dataclass(frozen=True, slots=True)
class Put:
    """Store ``value``, a record that this node signed, at the k peers closest to ``key``."""

    query: int
    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Refresh:
    """Look a random key up, so that a bucket in use is fresh."""

    query: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Give a query up; it finishes with what it has."""

    query: int


Event = RequestReceived | ReplyReceived | RequestFailed | TimerFired | Join | Get | Put | Refresh | Abandon


# ---- Effects ----


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send ``request`` to ``contact``; a `ReplyReceived` or `RequestFailed` may follow."""

    contact: Contact
    request: Request


@dataclass(frozen=True, slots=True)
class SendReply:
    """Answer the request that was just received."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class QueryFinished:
    """A query is over.

    Attributes:
        query: the number its event had.
        values: the newest valid value of each signer (`Get`).
        stored: peers that keep the value (`Put`).
        hops: referrals to the closest peer that answered, or to the last one with values.
        messages: requests that were sent for it.
    """

    query: int
    values: tuple[bytes, ...] = ()
    stored: int = 0
    hops: int = 0
    messages: int = 0


Effect = SendRequest | SendReply | QueryFinished
