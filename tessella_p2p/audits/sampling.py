"""Which proofs are recomputed, and what of each (pure).

The choice falls after a proof is settled, so when a worker computes it cannot know which of its steps will be looked at. A proof's
digests run over everything since position 0: an audit at ``positions`` looks at every step up to there, and whoever lies with
probability p a step gets through n audited steps with (1 - p)^n.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import MAX_AUDIT_POSITIONS, MAX_MEMBERS, MICRO_PER_LAYER_POSITION
from tessella_p2p.ledger.evidence import Code
from tessella_p2p.wire.envelope import decode_message, open_envelope
from tessella_p2p.wire.messages import PROOF, TICKET, DigestMark, Proof, Settled, Ticket


class Cause(StrEnum):
    """Why a proof is audited."""

    SAMPLED = "sampled"
    ODD = "odd"
    """Its neighbour's proof says otherwise: nothing is paid until an audit has passed it."""
    OWED = "owed"
    """An audit of the same worker came to nothing before."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a worker claims in one proof, as far as it can be recomputed.

    Attributes:
        positions: how far: the proof's end, or its last mark within `MAX_AUDIT_POSITIONS`.
        input_digest, output_digest: keyed, of all rows up to there; the output of a tail are token ids.
        open_digest: the chain-open that it served; None in a proof that does not say it.
        micro_credits: what the proof brought in; of one that is held, what it would.
    """

    worker: PeerId
    requester: PeerId
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
    open_digest: bytes | None
    upstream: PeerId
    downstream: PeerId
    micro_credits: int = 0


def claim_of(
    sealed: bytes, *, orchestrator: PeerId, total_layers: Mapping[bytes, int], micro_credits: int = 0
) -> Claim | None:
    """What the sealed proof claims; None where it claims nothing that could be recomputed.

    Args:
        sealed: a proof that the ledger settled or holds.
        orchestrator: its audience.
        total_layers: layers of each model, by manifest root.
        micro_credits: what it brought in.

    Raises:
        RemoteProtocolError: no proof, or forged.
    """
    envelope = open_envelope(sealed, PROOF, now_ms=None, audience=orchestrator)
    proof = envelope.message(Proof)
    ticket = decode_message(Ticket, open_envelope(proof.ticket, TICKET, now_ms=None).payload)
    end = DigestMark(positions=proof.positions, input=proof.input_digest, output=proof.output_digest)
    at = max(
        (point for point in (*proof.marks, end) if 0 < point.positions <= MAX_AUDIT_POSITIONS),
        key=lambda point: point.positions,
        default=None,
    )
    if at is None or proof.manifest_root not in total_layers:
        return None
    layers = LayerRange(*proof.layers)
    return Claim(
        worker=envelope.signer,
        requester=PeerId(ticket.requester),
        request_id=proof.request_id,
        session=proof.session,
        epoch=proof.epoch,
        manifest_root=proof.manifest_root,
        recipe=proof.recipe,
        layers=layers,
        is_tail=layers.end == total_layers[proof.manifest_root],
        positions=at.positions,
        input_digest=at.input,
        output_digest=at.output,
        open_digest=proof.open_digest,
        upstream=PeerId(proof.upstream),
        downstream=PeerId(proof.downstream),
        micro_credits=micro_credits or len(layers) * at.positions * MICRO_PER_LAYER_POSITION,
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
        """An audit came to nothing, so the worker's next proof is audited: nobody gets out of audits by making them fail."""
        self._owed[worker] = None
        self._owed.move_to_end(worker)
        if len(self._owed) > MAX_MEMBERS:
            self._owed.popitem(last=False)


def steps_until_caught(lie_share: float, escape: float = 1e-5) -> int:
    """n(p): within so many audited steps a worker that lies with probability ``lie_share`` a step is caught, but for ``escape``.

    n = ln(escape) / ln(1 - p), rounded up; a step that is always a lie needs one.

    Raises:
        ValueError: no probability above 0.
    """
    if not 0.0 < lie_share <= 1.0:
        raise ValueError(f"{lie_share} is no probability of a lie")
    return 1 if lie_share == 1.0 else math.ceil(math.log(escape) / math.log1p(-lie_share))
