"""Which proofs are recomputed, and what of each (pure).

The choice falls after a proof is settled, so when a worker computes it cannot know which of its steps will be looked at. A proof's
digests run over everything since position 0: an audit at ``positions`` looks at every step up to there, and whoever lies with
probability p a step gets through n audited steps with (1 - p)^n.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import MAX_AUDIT_POSITIONS, MAX_MEMBERS, MICRO_PER_LAYER_POSITION
from tessella_p2p.ledger.evidence import Code, ProvenWork
from tessella_p2p.wire.messages import Settled


class Cause(StrEnum):
    """Why a proof is audited."""

    SAMPLED = "sampled"
    ODD = "odd"
    """Its neighbour's proof says otherwise: nothing is paid until an audit has passed it."""
    OWED = "owed"
    """An audit of the same worker came to nothing before, or a neighbour's odd proof was audited."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a worker claims in one proof, as far as it can be recomputed.

    Attributes:
        positions: how far: the proof's end, or its last mark within `MAX_AUDIT_POSITIONS`.
        payer: on whose account the ticket is: the requester's own, or that of the identity in whose name it asked.
        input_digest, output_digest: keyed, of the chain-open and all rows up to there; the output of a tail are its draws.
        micro_credits: what the whole proof is worth.
        inputs: what it states to have received at each of its positions, by position: keyed digests.
    """

    worker: PeerId
    requester: PeerId
    payer: PeerId
    request_id: str
    session: bytes
    epoch: int
    manifest_root: bytes
    recipe: str
    layers: LayerRange
    is_tail: bool
    positions: int
    input_digest: bytes
    output_digest: bytes
    upstream: PeerId
    downstream: PeerId
    micro_credits: int
    inputs: Mapping[int, bytes] = field(default_factory=dict)


def claim_of(work: ProvenWork, total_layers: int) -> Claim | None:
    """What a proof claims; None where it claims nothing that could be recomputed.

    Args:
        work: a proof that the ledger settled or holds.
        total_layers: of the model.
    """
    at = next((point for point in reversed(work.points) if point.positions <= MAX_AUDIT_POSITIONS), None)
    if at is None:
        return None
    proof = work.proof
    return Claim(
        worker=work.worker,
        requester=PeerId(work.ticket.requester),
        payer=PeerId(work.ticket.payer),
        request_id=proof.request_id,
        session=proof.session,
        epoch=proof.epoch,
        manifest_root=proof.manifest_root,
        recipe=proof.recipe,
        layers=work.layers,
        is_tail=work.layers.end == total_layers,
        positions=at.positions,
        input_digest=at.input,
        output_digest=at.output,
        upstream=work.upstream,
        downstream=work.downstream,
        micro_credits=len(work.layers) * proof.positions * MICRO_PER_LAYER_POSITION,
        inputs={point.positions: point.input for point in work.points},
    )


class AuditSampler:
    """Decides what is audited.

    Args:
        rng: secret, for whoever can foresee its choices lies where nobody looks.
        share: of the settled proofs that are audited.
        recheck_share: of the audits in which a second auditor is asked although the first found nothing.
    """

    def __init__(self, rng: random.Random, share: float, recheck_share: float) -> None:
        self._rng = rng
        self._share = share
        self._recheck_share = recheck_share
        self._owed: OrderedDict[PeerId, None] = OrderedDict()

    def cause(self, worker: PeerId | None, settled: Settled) -> Cause | None:
        """Why the proof that was answered with ``settled`` is audited; None if it is not."""
        if worker is None:
            return None
        if settled.status == "held" and settled.code == Code.NEIGHBOUR_MISMATCH:
            return Cause.ODD
        if settled.status != "settled" or not settled.micro_credits:
            return None
        if worker in self._owed:
            del self._owed[worker]
            return Cause.OWED
        return Cause.SAMPLED if self._rng.random() < self._share else None

    def rechecks(self) -> bool:
        """Whether an audit that finds nothing is repeated by a second auditor."""
        return self._rng.random() < self._recheck_share

    def owe(self, worker: PeerId) -> None:
        """The worker's next proof is audited: so nobody gets out of audits by making them fail."""
        self._owed[worker] = None
        self._owed.move_to_end(worker)
        if len(self._owed) > MAX_MEMBERS:
            self._owed.popitem(last=False)
