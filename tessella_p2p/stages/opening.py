"""What a stage checks before it serves a session (pure): nothing in a chain-open is believed until it is verified."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from tessella_p2p.base.errors import (
    CapabilityRefused,
    Expired,
    InvalidRequest,
    MalformedMessage,
    NotAuthorized,
    StaleEpoch,
)
from tessella_p2p.base.ids import LayerRange, PeerId, SessionId
from tessella_p2p.base.limits import MAX_REMEMBERED_OPENS, REQUEST_TTL_MS
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import Envelope, open_envelope, seal
from tessella_p2p.wire.keys import NodeKey

_REMEMBERED_SESSIONS = 4096


@dataclass(frozen=True, slots=True)
class StageIdentity:
    """What this node serves: an open has to name exactly this."""

    peer_id: PeerId
    manifest_root: bytes
    recipe: str
    layers: LayerRange
    total_layers: int
    max_positions: int
    pins: frozenset[PeerId]
    """Orchestrators whose tickets count."""
    lease: bytes
    """The envelope of the lease in force."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A verified chain-open, as this stage sees it. ``ticket`` is None for an unpaid session; ``lease`` is the one in force."""

    envelope: Envelope
    capability: bytes
    body: m.ChainOpen
    index: int
    entry: PeerId
    upstream: PeerId
    downstream: PeerId
    ticket: m.Ticket | None
    orchestrator: PeerId | None
    lease: bytes
    opened_at: int

    @property
    def key(self) -> tuple[SessionId, int]:
        """(session, epoch)."""
        return (SessionId(self.body.session), self.body.epoch)

    @property
    def opened(self) -> bytes:
        """The hash of the chain-open."""
        return open_hash(self.envelope.raw)

    @property
    def cache_scope(self) -> bytes:
        """Whose cached prefixes the session may use here: the entry's own scopes, each apart; empty for none."""
        if not self.body.cache_scope:
            return b""
        return hashlib.sha256(b"/".join((self.entry.encode(), self.body.cache_scope))).digest()

    @property
    def is_tail(self) -> bool:
        """Whether this stage samples."""
        return self.index == len(self.body.route) - 1

    @property
    def tier(self) -> m.Tier:
        """The ticket's tier; without a ticket the lowest."""
        return self.ticket.tier if self.ticket is not None else "Leech"


def open_hash(envelope: bytes) -> bytes:
    """What a capability is bound to."""
    return hashlib.sha256(envelope).digest()


def seal_capability(
    key: NodeKey, body: m.ChainOpen, envelope: bytes, *, sequence: int, now_ms: int, ttl_ms: int
) -> bytes:
    """The entry's capability for the tail of ``body``, whose chain-open is ``envelope``."""
    tail = body.route[-1].peer_id
    grant = m.CapabilityGrant(session=body.session, epoch=body.epoch, open_hash=open_hash(envelope), tail=tail)
    return seal(key, m.CAPABILITY, grant, sequence=sequence, now_ms=now_ms, audience=tail, ttl_ms=ttl_ms)


def verify_capability(
    raw: bytes, *, entry: PeerId, tail: PeerId, session: bytes, epoch: int, opened: bytes, now_ms: int
) -> None:
    """Check that ``raw`` lets ``tail`` send the tokens of (session, epoch).

    Raises:
        CapabilityRefused: bound to something else.
        RemoteProtocolError: malformed, forged or expired.
    """
    grant = open_envelope(raw, m.CAPABILITY, now_ms=now_ms, audience=tail, signer=entry).message(m.CapabilityGrant)
    if (grant.session, grant.epoch, grant.open_hash, grant.tail) != (session, epoch, opened, tail):
        raise CapabilityRefused("a capability that is bound to another session, epoch, chain or tail")


def verify_open(frame: m.OpenFrame, identity: StageIdentity, *, upstream: PeerId, now_ms: int) -> Opening:
    """Check a chain-open that ``upstream`` (as its stream authenticated it) passed on.

    Raises:
        RemoteProtocolError: malformed, forged or expired, the ticket's time to open included.
        InvalidRequest: a route that is no chain, or that names another stage than this node serves.
        NotAuthorized: from a peer that is not the previous stage of the route; a ticket that is foreign or for something else; a
            route statement that says something else.
        CapabilityRefused: at the tail, a capability that is bound to something else.
    """
    envelope = open_envelope(frame.open, m.CHAIN_OPEN, now_ms=now_ms)
    if envelope.expires_at - envelope.issued_at > REQUEST_TTL_MS:  # else it could outlive the fence's memory of it
        raise MalformedMessage(f"a chain-open may be valid for {REQUEST_TTL_MS // 1000} s at most")
    body = envelope.message(m.ChainOpen)
    index = _own_index(body, identity)
    expected_upstream = PeerId(body.route[index - 1].peer_id) if index else envelope.signer
    if upstream != expected_upstream:
        raise NotAuthorized(f"the route names {expected_upstream} as the previous stage, not {upstream}")
    if body.max_positions > identity.max_positions:
        raise InvalidRequest(f"this stage holds {identity.max_positions} positions, {body.max_positions} are asked for")
    last = index == len(body.route) - 1
    if last:
        verify_capability(
            frame.capability,
            entry=envelope.signer,
            tail=identity.peer_id,
            session=body.session,
            epoch=body.epoch,
            opened=open_hash(frame.open),
            now_ms=now_ms,
        )
    ticket, orchestrator = _ticket(body, envelope.signer, identity, now_ms)
    _check_route_statement(body, envelope.signer)
    return Opening(
        envelope=envelope,
        capability=frame.capability,
        body=body,
        index=index,
        entry=envelope.signer,
        upstream=upstream,
        downstream=envelope.signer if last else PeerId(body.route[index + 1].peer_id),
        ticket=ticket,
        orchestrator=orchestrator,
        lease=identity.lease,
        opened_at=now_ms,
    )


def _own_index(body: m.ChainOpen, identity: StageIdentity) -> int:
    places = [i for i, stage in enumerate(body.route) if stage.peer_id == identity.peer_id]
    if len(places) != 1:
        raise InvalidRequest(f"the route names this node {len(places)} times")
    end = 0
    for stage in body.route:
        if stage.layers[0] != end:
            raise InvalidRequest(f"the route has a gap or an overlap at layer {end}")
        end = stage.layers[1]
    if end != identity.total_layers:
        raise InvalidRequest(f"the route ends at layer {end} of {identity.total_layers}")
    index = places[0]
    if body.manifest_root != identity.manifest_root or body.recipe != identity.recipe:
        raise InvalidRequest(f"this stage serves another artifact or recipe ({identity.recipe}) than {body.recipe}")
    if body.route[index].layers != identity.layers.as_tuple():
        raise InvalidRequest(f"this stage serves layers {identity.layers}, not {body.route[index].layers}")
    return index


def _ticket(
    body: m.ChainOpen, entry: PeerId, identity: StageIdentity, now_ms: int
) -> tuple[m.Ticket | None, PeerId | None]:
    if body.ticket is None:
        return None, None
    envelope = open_envelope(body.ticket, m.TICKET, now_ms=None)
    ticket = envelope.message(m.Ticket)
    if envelope.signer not in identity.pins:
        raise NotAuthorized(f"a ticket of {envelope.signer}, which this node does not pin")
    if ticket.open_before <= now_ms:
        raise Expired(f"a ticket that could be opened until {(now_ms - ticket.open_before) / 1000:.0f} s ago")
    bound = (ticket.requester, ticket.request_id, ticket.manifest_root, ticket.recipe)
    if bound != (entry, body.request_id, body.manifest_root, body.recipe):
        raise NotAuthorized("a ticket for another requester, request, artifact or recipe")
    if body.max_positions > ticket.max_positions:
        raise NotAuthorized(f"a ticket for {ticket.max_positions} positions, {body.max_positions} are asked for")
    return ticket, envelope.signer


def _check_route_statement(body: m.ChainOpen, entry: PeerId) -> None:
    """With another statement than of this route the stage would work unpaid."""
    if body.route_statement is None:
        return
    said = open_envelope(body.route_statement, m.ROUTE, now_ms=None, signer=entry).message(m.RouteStatement)
    stages = tuple((stage.peer_id, stage.layers) for stage in body.route)
    if (said.request_id, said.session, said.epoch, said.stages) != (
        body.request_id,
        body.session,
        body.epoch,
        stages,
    ):
        raise NotAuthorized("a route statement of another request, session, epoch or route")


class EpochFence:
    """What this stage let in: the highest epoch of each session, so that what was rerouted stays so, and each ticket's one session.

    Bounded, oldest first; a chain-open that is forgotten here has expired before, unless thousands of sessions came within a minute.
    Paid sessions are kept apart, and longer: a stage must not sign for two runs of one (session, epoch), which their entry could ask
    for anew as long as the ticket opens.

    Args:
        paid: (session, epoch) that a process before this one opened and is paid for.
    """

    def __init__(self, paid: Iterable[tuple[SessionId, int]] = ()) -> None:
        self._epochs: OrderedDict[SessionId, tuple[int, PeerId]] = OrderedDict()
        self._paid: OrderedDict[SessionId, tuple[int, PeerId | None]] = (
            OrderedDict()
        )  # of a process before: nobody knows whose
        for session, epoch in paid:
            highest, _ = self._paid.get(session, (-1, None))
            self._paid[session] = (max(highest, epoch), None)
            _remember(self._paid, session, MAX_REMEMBERED_OPENS)
        self._tickets: OrderedDict[tuple[PeerId, str], SessionId] = OrderedDict()

    def admit(self, opening: Opening) -> None:
        """Enter an epoch.

        Raises:
            StaleEpoch: this epoch, or a later one, was seen before.
            NotAuthorized: the session belongs to another entry, or the ticket pays for another session.
        """
        session, epoch = opening.key
        highest, owner = self._paid.get(session) or self._epochs.get(session, (-1, opening.entry))
        if owner not in (None, opening.entry):
            raise NotAuthorized("this session belongs to another entry")
        if epoch <= highest:
            raise StaleEpoch(f"epoch {epoch} of this session is over; epoch {highest} was opened here")
        if opening.ticket is not None:
            paid = (opening.entry, opening.ticket.request_id)
            if self._tickets.setdefault(paid, session) != session:
                raise NotAuthorized(f"the ticket of request {opening.ticket.request_id} pays for another session")
            _remember(self._tickets, paid, MAX_REMEMBERED_OPENS)
        if opening.ticket is not None or session in self._paid:
            self._paid[session] = (epoch, opening.entry)
            _remember(self._paid, session, MAX_REMEMBERED_OPENS)
        else:
            self._epochs[session] = (epoch, opening.entry)
            _remember(self._epochs, session, _REMEMBERED_SESSIONS)


K = TypeVar("K")
V = TypeVar("V")


def _remember(memory: OrderedDict[K, V], key: K, most: int) -> None:
    """Keep ``key`` as the newest; forget the oldest at the bound."""
    memory.move_to_end(key)
    if len(memory) > most:
        memory.popitem(last=False)
