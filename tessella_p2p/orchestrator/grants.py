"""May a request start, and at which tier: the ticket, minted in the same round trip.

A tier is a priority when the mesh is busy, not a wallet: a balance decides it, and nothing is taken off the balance. Whose it is, the
requester says: its own, or that of an identity which let it ask in its name by a signed `Delegation`. That one is then named in the
ticket, and what is settled under it goes on its account.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tessella_p2p.base.errors import (
    DelegationRefused,
    InvalidRequest,
    Overloaded,
    RemoteProtocolError,
    UnknownModel,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    CLOCK_SKEW_MS,
    DELEGATION_TTL_S,
    GRANT_BURST,
    GRANT_RATE_PER_S,
    MAX_POSITIONS,
    MAX_REQUESTERS,
    MICRO_PER_CREDIT,
    TICKET_OPEN_S,
    TICKET_SETTLE_S,
    VIP_ABOVE_CREDITS,
)
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.wire.envelope import open_envelope, seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import DELEGATION, TICKET, Delegation, Granted, SessionGrant, Ticket, Tier, capped

_OPEN_MS = int(TICKET_OPEN_S * 1000)
_SETTLE_MS = int(TICKET_SETTLE_S * 1000)
_DELEGATION_MS = int(DELEGATION_TTL_S * 1000)


def tier_of(micro_credits: int) -> Tier:
    """The tier of a balance (manual, section 06)."""
    if micro_credits > VIP_ABOVE_CREDITS * MICRO_PER_CREDIT:
        return "VIP"
    return "Standard" if micro_credits > 0 else "Leech"


def identity_behind(request: SessionGrant, requester: PeerId, now_ms: int) -> PeerId | None:
    """In whose name ``requester`` asks; None where that is its own.

    Raises:
        DelegationRefused: its delegation is forged, over, for too long, or another entry's.
    """
    if request.delegation is None:
        return None
    try:
        envelope = open_envelope(request.delegation, DELEGATION, now_ms=now_ms)
        delegation = envelope.message(Delegation)
    except RemoteProtocolError as error:
        raise DelegationRefused(
            f"the delegation does not count: {error}; its identity makes another by `tessella-p2p keys delegate {requester}`"
        ) from error
    if delegation.entry != requester:
        raise DelegationRefused(f"{envelope.signer} lets {delegation.entry} ask in its name, not {requester}")
    if envelope.expires_at - envelope.issued_at > _DELEGATION_MS + CLOCK_SKEW_MS:
        raise DelegationRefused(f"a delegation may be valid for {DELEGATION_TTL_S / 86_400:.0f} days at most")
    return None if envelope.signer == requester else envelope.signer


@dataclass(frozen=True, slots=True)
class GrantTerms:
    """How many grants one requester gets, and how long one answer may become.

    Attributes:
        rate_per_s, burst: so many at once, then so many a second.
        max_positions: the most positions that a ticket authorises.
    """

    rate_per_s: int = GRANT_RATE_PER_S
    burst: int = GRANT_BURST
    max_positions: int = MAX_POSITIONS


class Grants:
    """Mints tickets, at a bounded rate per requester.

    Args:
        key: signs the tickets.
        catalogue: what may be served.
        terms: the bounds.
        max_requesters: how many requesters' rates are remembered.
    """

    def __init__(
        self,
        key: NodeKey,
        catalogue: Catalogue,
        terms: GrantTerms | None = None,
        max_requesters: int = MAX_REQUESTERS,
    ) -> None:
        self._key = key
        self._catalogue = catalogue
        self._terms = terms or GrantTerms()
        self._max_requesters = max_requesters
        # Per requester: when its bucket was looked at last, and what was in it, in thousandths of a grant.
        self._buckets: OrderedDict[PeerId, tuple[int, int]] = OrderedDict()

    def grant(
        self,
        requester: PeerId,
        request: SessionGrant,
        *,
        micro_credits: int,
        sequence: int,
        now_ms: int,
        identity: PeerId | None = None,
    ) -> Granted:
        """The answer to a verified request.

        Args:
            requester: who signed it; the ticket is good for chains that the same peer opens.
            request: what is to start.
            micro_credits: the balance of ``identity``, or the requester's own.
            sequence: of the ticket's envelope.
            now_ms: the time, Unix milliseconds.
            identity: in whose name it asks, see `identity_behind`; None for its own.

        Raises:
            UnknownModel: the model or the recipe is not served here.
            InvalidRequest: no positions, or more than a ticket may have.
            Overloaded: more grants than the rate allows.
        """
        model = self._catalogue.find(request.manifest_root)
        if model is None or model.model_id != request.model_id or not model.serves(request.recipe):
            raise UnknownModel(f"{request.model_id} with recipe {request.recipe} is not served here")
        if not 0 < request.max_positions <= self._terms.max_positions:
            raise InvalidRequest(f"a ticket is for 1 to {self._terms.max_positions} positions", param="max_positions")
        self._take((requester,) if identity is None else (requester, identity), now_ms)
        tier = capped(tier_of(micro_credits), request.tier)
        ticket = Ticket(
            request_id=request.request_id,
            requester=requester,
            manifest_root=request.manifest_root,
            recipe=request.recipe,
            tier=tier,
            max_positions=request.max_positions,
            open_before=now_ms + _OPEN_MS,
            settle_before=now_ms + _OPEN_MS + _SETTLE_MS,
            identity=identity,
        )
        sealed = seal(self._key, TICKET, ticket, sequence=sequence, now_ms=now_ms, ttl_ms=_OPEN_MS)
        return Granted(tier=tier, ticket=sealed)

    def _take(self, askers: tuple[PeerId, ...], now_ms: int) -> None:
        """Take one grant out of the bucket of each, or refuse, and then take none."""
        left_of = {peer: self._left(peer, now_ms) for peer in askers}
        self._make_room(askers, now_ms)
        for peer, left in left_of.items():
            self._buckets[peer] = (now_ms, left - 1000)
            self._buckets.move_to_end(peer)

    def _left(self, peer: PeerId, now_ms: int) -> int:
        """What is in a peer's bucket, enough for a grant."""
        full = self._terms.burst * 1000
        at, left = self._buckets.get(peer, (now_ms, full))
        left = min(full, left + max(0, now_ms - at) * self._terms.rate_per_s)
        if left < 1000:
            if now_ms < at:  # the clock was set back: it fills again from now on, not once the clock has come round
                self._buckets[peer] = (now_ms, left)
            raise Overloaded(f"{peer} asks for more than {self._terms.rate_per_s} grants a second: wait")
        return left

    def _make_room(self, askers: tuple[PeerId, ...], now_ms: int) -> None:
        """Have room for the buckets of all ``askers``, or refuse.

        Whoever was not seen for so long that its bucket is full again is forgotten: that changes nothing. After a clock was
        set back that is said of those who were seen by the clock before.
        """
        refill_ms = self._terms.burst * 1000 // self._terms.rate_per_s
        while self._buckets:
            oldest, (at, _) = next(iter(self._buckets.items()))
            if 0 <= now_ms - at < refill_ms:
                break
            del self._buckets[oldest]
        if len(self._buckets) + sum(peer not in self._buckets for peer in askers) > self._max_requesters:
            raise Overloaded("too many requesters at once: try again later")
