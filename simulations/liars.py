"""Liars on paper: the cores of the audits against workers and auditors that lie, without a network and in seconds.

    python -m simulations.liars

What is simulated is who lies when; what is picked, asked and concluded are the audits' own cores. A digest stands for itself: whoever
computes truly has the true one, whoever lies alone has one that nobody else has, and those who conspire agree on one.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tessella_p2p.audits.judging import Conclusion, Statement, conclude
from tessella_p2p.audits.sampling import AuditSampler, Claim
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import AUDIT_RECHECK_SHARE, AUDIT_SHARE
from tessella_p2p.wire.messages import Settled

TRUTH = b"t" * 32
_WORKER = PeerId("worker")
_SETTLED = Settled(status="settled", micro_credits=1)
_MAX_STEPS = 64
"""Of one simulated session."""
_MAX_PROOFS = 10_000_000


@dataclass(frozen=True, slots=True)
class Hunt:
    """How a lying worker was caught: proofs that it sent, those that were audited, and their steps up to the first lie."""

    proofs: int
    audits: int
    audited_steps: int


@dataclass(frozen=True, slots=True)
class Crowd:
    """What auditors do, as shares of 1; who does nothing of it computes.

    Attributes:
        lying: names a digest that nobody else has.
        withheld: is shown no history.
        silent: does not report.
        colluding: names the one digest that its fellows name as well.
    """

    lying: float = 0.0
    withheld: float = 0.0
    silent: float = 0.0
    colluding: float = 0.0


def claim(output_digest: bytes, positions: int = 1) -> Claim:
    """A worker's claim to have computed ``output_digest``."""
    return Claim(
        worker=_WORKER,
        requester=PeerId("requester"),
        payer=PeerId("requester"),
        request_id="request",
        session=bytes(16),
        epoch=0,
        manifest_root=bytes(32),
        recipe="f32",
        layers=LayerRange(0, 1),
        is_tail=False,
        positions=positions,
        input_digest=bytes(32),
        output_digest=output_digest,
        upstream=PeerId("upstream"),
        downstream=PeerId("downstream"),
        micro_credits=positions * 1000,
    )


def hunt(lie_share: float, rng: random.Random, share: float = AUDIT_SHARE) -> Hunt:
    """Let a worker lie with probability ``lie_share`` a step until an audit catches it; its auditors are honest."""
    sampler = AuditSampler(rng, share, AUDIT_RECHECK_SHARE)
    audits = audited_steps = 0
    for proofs in range(1, _MAX_PROOFS):
        steps = rng.randint(1, _MAX_STEPS)
        first_lie = next((step for step in range(steps) if rng.random() < lie_share), None)
        if sampler.cause(_WORKER, _SETTLED) is None:
            continue
        audits += 1
        audited_steps += steps if first_lie is None else first_lie + 1
        claimed = TRUTH if first_lie is None else rng.randbytes(32)
        conclusion = audit(claim(claimed, steps), Crowd(), 4, rng, recheck=sampler.rechecks())
        if conclusion.worker.verdict == "failed":
            return Hunt(proofs, audits, audited_steps)
    raise AssertionError(f"{_MAX_PROOFS} proofs of a liar, and no audit found it")


def audit(claimed: Claim, crowd: Crowd, num_auditors: int, rng: random.Random, *, recheck: bool) -> Conclusion:
    """One audit by auditors drawn from ``crowd``."""
    statements: list[Statement] = []
    while True:
        statements.append(_statement(claimed, len(statements), crowd, rng))
        exhausted = len(statements) >= num_auditors
        conclusion = conclude(claimed, statements, recheck=recheck, exhausted=exhausted)
        if conclusion is not None:
            return conclusion


def _statement(claimed: Claim, index: int, crowd: Crowd, rng: random.Random) -> Statement:
    draw = rng.random()
    if draw < crowd.lying:
        return Statement(PeerId(f"liar {index}"), False, rng.randbytes(32))
    draw -= crowd.lying
    if draw < crowd.colluding:
        return Statement(PeerId(f"conspirator {index}"), False, b"c" * 32)
    draw -= crowd.colluding
    if draw < crowd.withheld:
        return Statement(PeerId(f"honest {index}"), None, withheld_by=claimed.upstream, code="history_withheld")
    draw -= crowd.withheld
    if draw < crowd.silent:
        return Statement(PeerId(f"silent {index}"), None, code="no_report")
    return _honest(index, claimed.output_digest == TRUTH)


@cache
def _honest(index: int, agrees: bool) -> Statement:
    return Statement(PeerId(f"honest {index}"), agrees, TRUTH)


def verdicts(num_audits: int, crowd: Crowd, rng: random.Random, num_auditors: int = 4) -> Counter[str]:
    """Audit an honest worker so often; how often each verdict was reached, as ``who:verdict``.

    ``who`` is ``worker``, or the first word of an auditor's name.
    """
    counts: Counter[str] = Counter()
    claimed = claim(TRUTH)
    for _ in range(num_audits):
        conclusion = audit(claimed, crowd, num_auditors, rng, recheck=rng.random() < AUDIT_RECHECK_SHARE)
        counts[f"worker:{conclusion.worker.verdict}"] += 1
        for other in conclusion.others:
            counts[f"{other.peer.partition(' ')[0]}:{other.verdict}"] += 1
    return counts


def steps_until_caught(lie_share: float, escape: float = 1e-5) -> int:
    """n(p): within so many audited steps a worker that lies with probability ``lie_share`` a step is caught, but for ``escape``.

    n = ln(escape) / ln(1 - p), rounded up; a step that is always a lie needs one.

    Raises:
        ValueError: no probability above 0.
    """
    if not 0.0 < lie_share <= 1.0:
        raise ValueError(f"{lie_share} is no probability of a lie")
    return 1 if lie_share == 1.0 else math.ceil(math.log(escape) / math.log1p(-lie_share))


def report(seed: int, lie_shares: Sequence[float], num_hunts: int, num_audits: int) -> str:
    """What the liars and the honest came to, in lines."""
    lines = []
    for lie_share in lie_shares:
        rng = random.Random(f"{seed} hunt {lie_share}")
        hunts = [hunt(lie_share, rng) for _ in range(num_hunts)]
        worst = max(each.audited_steps for each in hunts)
        proofs = sum(each.proofs for each in hunts) / num_hunts
        bound = steps_until_caught(lie_share)
        lines.append(
            f"p = {lie_share:<4} {num_hunts} liars: all caught, the last after {worst} audited steps (bound {bound}), "
            f"{proofs:.0f} proofs each on the average"
        )
    crowd = Crowd(lying=0.05, withheld=0.05, silent=0.05)
    lines.append(f"{num_audits} audits of honest workers, with {crowd}:")
    lines.append(f"  {dict(sorted(verdicts(num_audits, crowd, random.Random(f'{seed} honest')).items()))}")
    for colluding in (0.01, 0.1, 0.3):
        rng = random.Random(f"{seed} collusion {colluding}")
        framed = verdicts(num_audits // 10, Crowd(colluding=colluding), rng)["worker:failed"]
        lines.append(
            f"  {colluding:.0%} of all auditors conspire: {framed} of {num_audits // 10} honest proofs are framed"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(1, (1.0, 0.5, 0.1), 200, 1_000_000))  # noqa: T201 - it is what this module is run for
