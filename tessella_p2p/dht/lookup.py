"""The iterative lookup as a state machine: whom to ask next, and when it is over.

    state      means                                    leaves by
    NEW        heard of, not asked                      next_requests → ASKED
    ASKED      asked, takes one of the α slots          answered, slow, failed
    SLOW       over the soft deadline, its slot is free answered, failed
    ANSWERED   replied
    FAILED     over the hard deadline, or unreachable   other addresses turn up → NEW, once

The lookup looks at the k closest peers that did not fail. It is over when none of them is NEW or ASKED, and none SLOW either unless
k have answered already: a stalled peer costs a soft deadline, not a hard one, while a lookup that ends with fewer than k answers
would leave holes in the routing table. A lookup of values ends at a quorum of peers that had values, and once it has one it does not
wait for slow peers.

Source: Kademlia, section 2.3; the soft deadline is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from operator import attrgetter

from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import KAD_ALPHA, KAD_K, KAD_MAX_ADDRESSES, KAD_MAX_LOOKUP_PEERS
from tessella_p2p.dht.keyspace import Contact

_MAX_TRIES = 2
"""How often a lookup asks one peer, if other addresses of it turn up after a failure."""
_distance: Callable[[_Candidate], int] = attrgetter("distance")


class _State(Enum):
    NEW = 1
    ASKED = 2
    SLOW = 3
    ANSWERED = 4
    FAILED = 5


@dataclass(slots=True)
class _Candidate:
    contact: Contact
    distance: int
    state: _State
    hops: int
    tries: int = 0


class Lookup:
    """One lookup.

    Args:
        target: the key.
        own: this node, which is never asked.
        seeds: contacts to begin with.
        known: gives a contact as this node knows it itself, in the place of what another says; by default as it is said.
        settled: whether a peer that is named need not be asked: it counts as one that answered and named nobody.
        quorum: peers with values after which it ends early; 0 looks for peers only.
    """

    def __init__(
        self,
        target: int,
        own: PeerId,
        seeds: Iterable[Contact],
        *,
        known: Callable[[Contact], Contact] = lambda contact: contact,
        settled: Callable[[PeerId], bool] = lambda peer: False,
        quorum: int = 0,
        alpha: int = KAD_ALPHA,
        size: int = KAD_K,
    ) -> None:
        self.target = target
        self.quorum = quorum
        self.hits = 0
        self.messages = 0
        self.done = False
        self._own = own
        self._known = known
        self._settled = settled
        self._alpha = alpha
        self._size = size
        self._asked = 0
        self._candidates: dict[PeerId, _Candidate] = {}
        self._order: list[_Candidate] = []  # by distance
        self._learn(seeds, 1)

    @property
    def hops(self) -> int:
        """How many referrals away the closest peer that answered was."""
        return next((c.hops for c in self._order if c.state is _State.ANSWERED), 0)

    def next_requests(self) -> list[Contact]:
        """Whom to ask now; they count as asked. Sets ``done`` when there is nobody left to ask or to wait for."""
        requests: list[Contact] = []
        if self.done:
            return requests
        alive, waits, slow = 0, False, False
        for candidate in self._order:
            state = candidate.state
            if state is _State.FAILED:
                continue
            if state is _State.SLOW:
                slow = True
                continue
            if state is _State.NEW:
                waits = True
                if self._asked >= self._alpha:
                    break
                candidate.state = _State.ASKED
                candidate.tries += 1
                self._asked += 1
                self.messages += 1
                requests.append(candidate.contact)
            elif state is _State.ASKED:
                waits = True
            alive += 1
            if alive >= self._size:
                break
        self.done = not waits and not (slow and alive < self._size and not self.hits)
        return requests

    def answered(self, peer: PeerId, contacts: Iterable[Contact], *, has_values: bool = False) -> None:
        """A peer replied with contacts, at most k of which are looked at, and perhaps with valid values."""
        candidate = self._leave(peer, _State.ANSWERED)
        if candidate is None or self.done:
            return
        self._learn(contacts, candidate.hops + 1)
        if self.quorum and has_values:
            self.hits += 1
            self.done = self.hits >= self.quorum

    def slow(self, peer: PeerId) -> None:
        """A peer is over the soft deadline."""
        candidate = self._candidates.get(peer)
        if candidate is not None and candidate.state is _State.ASKED:
            candidate.state = _State.SLOW
            self._asked -= 1

    def failed(self, peer: PeerId) -> None:
        """A peer is over the hard deadline, or cannot be reached."""
        self._leave(peer, _State.FAILED)

    def closest(self) -> list[Contact]:
        """The k closest peers that answered, closest first."""
        return [c.contact for c in self._order if c.state is _State.ANSWERED][: self._size]

    def _leave(self, peer: PeerId, state: _State) -> _Candidate | None:
        candidate = self._candidates.get(peer)
        if candidate is None or candidate.state not in (_State.ASKED, _State.SLOW):
            return None
        if candidate.state is _State.ASKED:
            self._asked -= 1
        candidate.state = state
        return candidate

    def _learn(self, contacts: Iterable[Contact], hops: int) -> None:
        before = len(self._order)
        for contact in islice(contacts, self._size):
            candidate = self._candidates.get(contact.peer_id)
            if candidate is not None:
                if candidate.contact.addresses != contact.addresses:
                    self._merge(candidate, contact.addresses)
            elif contact.peer_id != self._own and contact.addresses:
                state = _State.ANSWERED if hops > 1 and self._settled(contact.peer_id) else _State.NEW
                candidate = _Candidate(self._known(contact), contact.key ^ self.target, state, hops)
                self._candidates[contact.peer_id] = candidate
                self._order.append(candidate)
        if len(self._order) == before:
            return
        self._order.sort(key=_distance)
        if len(self._order) > KAD_MAX_LOOKUP_PEERS:
            # Only the unasked are forgotten: a reply to the others is still under way.
            kept, far = self._order[:KAD_MAX_LOOKUP_PEERS], self._order[KAD_MAX_LOOKUP_PEERS:]
            for candidate in far:
                if candidate.state is _State.NEW:
                    del self._candidates[candidate.contact.peer_id]
                else:
                    kept.append(candidate)
            self._order = kept

    def _merge(self, candidate: _Candidate, addresses: tuple[str, ...]) -> None:
        """Take other addresses for a peer that was not asked, or failed: the first who named it may have lied about where it is."""
        if candidate.state not in (_State.NEW, _State.FAILED):
            return
        contact = candidate.contact
        if all(address in contact.addresses for address in addresses):
            return
        if candidate.state is _State.FAILED:
            if candidate.tries >= _MAX_TRIES:
                return
            candidate.state = _State.NEW
        merged = dict.fromkeys((*addresses, *contact.addresses))
        candidate.contact = Contact(contact.peer_id, tuple(merged)[:KAD_MAX_ADDRESSES])
