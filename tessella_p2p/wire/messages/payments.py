"""Grants, tickets, receipts, proofs, balances."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tessella_p2p.base.limits import MAX_DIGEST_MARKS, MAX_PROOFS_PER_BATCH
from tessella_p2p.wire.envelope import Message
from tessella_p2p.wire.messages.types import (
    Count,
    Digest,
    Epoch,
    Layers,
    MicroCredits,
    Name,
    Peer,
    Positions,
    Reason,
    RequestName,
    Sealed,
    SealedDelegation,
    SealedRoute,
    Session,
    Tier,
    TimeMs,
)


class Delegation(Message):
    """An identity's leave for an entry to ask in its name. Domain `DELEGATION`, audience anyone (orchestrators read it).

    The signer is the identity: its balance decides the tier of what ``entry`` asks for, and is charged where requesters pay. It counts
    as long as its envelope is valid, at most `base.limits.DELEGATION_TTL_S`.
    """

    entry: Peer


class SessionGrant(Message):
    """An entry asks to start a request; the signer is the requester.

    ``delegation`` is a sealed `Delegation`: in whose name it asks; None for its own. ``tier`` is the most that it wants.
    """

    kind: Literal["session_grant"] = "session_grant"
    request_id: RequestName
    model_id: Name
    manifest_root: Digest
    recipe: Name
    max_positions: Positions
    delegation: SealedDelegation | None = None
    tier: Tier | None = None


class Granted(Message):
    """Answer to `SessionGrant`: the tier and the ticket, in one round trip."""

    kind: Literal["granted"] = "granted"
    tier: Tier
    ticket: Sealed


class Ticket(Message):
    """The orchestrator's authority to be paid for one request. Domain `TICKET`, audience anyone (stages read it).

    ``requester`` is who opens the chain. ``identity`` is in whose name, where that is somebody else: the account that is charged, or
    whose issuance is counted.
    """

    request_id: RequestName
    requester: Peer
    manifest_root: Digest
    recipe: Name
    tier: Tier
    max_positions: Positions
    open_before: TimeMs
    settle_before: TimeMs
    identity: Peer | None = None

    @property
    def payer(self) -> str:
        """On whose account the request goes."""
        return self.identity or self.requester


class ReceiptBody(Message):
    """What a receiver got from a stage. Domain `RECEIPT`, audience the sender; the signer is the receiver.

    ``digest`` runs over the chain-open and the rows of positions ``[0, positions)``, or a tail's draws; see `stages.digest`.
    """

    request_id: RequestName
    session: Session
    epoch: Epoch
    sender: Peer
    positions: Positions
    digest: Digest


class DigestMark(Message):
    """Running digests of a stage's input and output after ``positions`` positions."""

    positions: Positions
    input: Digest
    output: Digest


class Proof(Message):
    """A stage's statement of its work for one (session, epoch). Domain `PROOF`, audience the orchestrator that minted the ticket.

    Its neighbours, and so whose ``receipt`` counts, are those that the requester's `RouteStatement` in ``route`` names.
    """

    request_id: RequestName
    ticket: Sealed
    lease: Sealed
    route: SealedRoute
    session: Session
    epoch: Epoch
    opened_at: TimeMs
    manifest_root: Digest
    recipe: Name
    layers: Layers
    positions: Positions
    input_digest: Digest
    output_digest: Digest
    marks: Annotated[tuple[DigestMark, ...], Field(max_length=MAX_DIGEST_MARKS)] = ()
    receipt: Sealed | None = None
    compute_us: Count


class WorkDone(Message):
    """Proofs to settle; each is an envelope of domain `PROOF`."""

    kind: Literal["work_done"] = "work_done"
    proofs: Annotated[tuple[Sealed, ...], Field(min_length=1, max_length=MAX_PROOFS_PER_BATCH)]


class Settled(Message):
    """What became of one proof. ``status``: settled, duplicate (the same proof again: the same answer), held, refused."""

    status: Literal["settled", "duplicate", "held", "refused"]
    micro_credits: Count = 0
    code: Name | None = None
    reason: Reason | None = None


class WorkSettled(Message):
    """Answer to `WorkDone`, in the order of its proofs."""

    kind: Literal["work_settled"] = "work_settled"
    results: Annotated[tuple[Settled, ...], Field(max_length=MAX_PROOFS_PER_BATCH)]


class ReadCredits(Message):
    """The signer's own balance."""

    kind: Literal["read_credits"] = "read_credits"


class Credits(Message):
    """Answer to `ReadCredits`."""

    kind: Literal["credits"] = "credits"
    micro_credits: MicroCredits
    tier: Tier
    settled_proofs: Count
