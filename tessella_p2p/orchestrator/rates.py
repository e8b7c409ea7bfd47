"""How often one peer may ask for what costs an orchestrator a signature or a durable write (pure).

    over P2P    the stream's peer ──requests──▶ verified ──membership, proofs──▶ answered
    over HTTP   all that come ──verifications──▶ verified ──its signer's requests, membership, proofs──▶ answered

A stream has its peer authenticated, so whoever asks too often costs no verification. Over HTTP nobody is known before that: all who
come share one bound, and only a flood reaches it. The bounds are far above what honest nodes ask for; a peer id costs nothing, so what
they bound is one identity, and the allow-list bounds identities.
"""

from __future__ import annotations

from typing import Final

from tessella_p2p.base.errors import Overloaded
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    HTTP_VERIFICATION_BURST,
    HTTP_VERIFICATIONS_PER_S,
    MAX_TRACKED_PEERS,
    PEER_MEMBERSHIP_BURST,
    PEER_MEMBERSHIP_PER_S,
    PEER_PROOF_BURST,
    PEER_PROOFS_PER_S,
    PEER_REQUEST_BURST,
    PEER_REQUESTS_PER_S,
)
from tessella_p2p.dht.rate_limit import RateLimit
from tessella_p2p.wire import messages as m

_MEMBERSHIP: Final = (m.Register, m.Ready, m.Announce, m.Deregister)


class RequestRates:
    """Token buckets of all peers. ``now`` is in monotonic seconds everywhere."""

    def __init__(self) -> None:
        self._unknown: RateLimit[None] = RateLimit(HTTP_VERIFICATIONS_PER_S, HTTP_VERIFICATION_BURST)
        self._requests = _of_peers(PEER_REQUESTS_PER_S, PEER_REQUEST_BURST)
        self._membership = _of_peers(PEER_MEMBERSHIP_PER_S, PEER_MEMBERSHIP_BURST)
        self._proofs = _of_peers(PEER_PROOFS_PER_S, PEER_PROOF_BURST)

    def check_unknown(self, now: float) -> None:
        """Count an envelope that is to be verified before anybody is known.

        Raises:
            Overloaded: too many of all together.
        """
        if not self._unknown.allows(None, now):
            raise Overloaded("more signed requests than are verified at a time: try again")

    def check_peer(self, peer: PeerId, now: float) -> None:
        """Count a request of an authenticated peer.

        Raises:
            Overloaded: it sends too many.
        """
        if not self._requests.allows(peer, now):
            raise Overloaded(f"you send more than {PEER_REQUESTS_PER_S:g} requests a second: wait")

    def check_content(self, peer: PeerId, request: m.OrchestratorRequest, now: float) -> None:
        """Count what a verified request of ``peer`` costs beside its own signature.

        Raises:
            Overloaded: too many requests about membership, or too many proofs; then none of it counts.
        """
        if isinstance(request, m.WorkDone):
            if not self._proofs.allows(peer, now, len(request.proofs)):
                raise Overloaded(f"you send more than {PEER_PROOFS_PER_S:g} proofs a second: keep them, and wait")
        elif isinstance(request, _MEMBERSHIP) and not self._membership.allows(peer, now):
            raise Overloaded(f"you send more than {PEER_MEMBERSHIP_PER_S:g} {request.kind} a second: wait")


def _of_peers(per_s: float, burst: float) -> RateLimit[PeerId]:
    return RateLimit(per_s, burst, MAX_TRACKED_PEERS)
