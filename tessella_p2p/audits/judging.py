"""What comes of an audit: who was right, who lied, or that nobody can say (pure).

    claim ──order──▶ auditor ──report──▶ Statement ─┐
                                                    ├─ conclude ──▶ Conclusion, or: ask another one
    claim ──order──▶ another auditor ──report──▶ … ─┘

Auditors do not know what the worker claims, and each computes for itself. So the same digest from two of them is the truth, or two that
conspire; a digest that only one names is a lie or a broken machine.

    what was said                                   what follows
    the worker's own digest                         passed (now and then another auditor is asked all the same)
    another digest                                  other auditors adjudicate
    `AUDIT_QUORUM` auditors name the same one       it is the truth; whoever named another one, worker or auditor, failed
    nobody is left to be asked                      `AUDIT_QUORUM_LEAST` are enough, and for the worker its own word is one of
                                                    them, unless others were asked and kept from saying anything; else it is
                                                    inconclusive
    the history is not shown                        another auditor tries; then inconclusive, and counted against who withheld it
    it is another one, and the worker signed for    failed, on the worker's own two signatures: nobody has to be believed
      that at a position that its proof states
    it signed for that further on                   one auditor more against the worker: who says so has seen the rows

The worker ``copied`` where its digest is that of a ``scale`` canary's known-wrong answer. An ``echo`` canary proves no copy: whoever
passes on what it received, and computes nothing, answers the same.

By tolerance an auditor is believed in the same number, and is never punished: what it measured cannot be shown to anybody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tessella_p2p.audits.sampling import Claim
from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    AUDIT_QUORUM,
    AUDIT_QUORUM_LEAST,
    MAX_AUDITORS,
    MICRO_PER_CREDIT,
    MIN_PENALTY_CREDITS,
)
from tessella_p2p.ledger import reputation
from tessella_p2p.wire.envelope import open_envelope
from tessella_p2p.wire.messages import RECEIPT, AuditOrder, AuditReport, ReceiptBody

FALSE_INPUT = "false_input"
FALSE_REPORT = "false_report"
NOT_ADJUDICATED = "not_adjudicated"
WRONG_OUTPUT = "wrong_output"
COPIED_CANARY = "copied_canary"
HISTORY_WITHHELD = "history_withheld"
NO_AUDITOR = "no_auditor"
_FALSE_INPUT_REASON = "it signed a receipt for another input than its proof states"

_MAX_PENALTY_MICRO = 2**46
"""So that a balance stays within what a message may say, however many lies come together."""


@dataclass(frozen=True, slots=True)
class Statement:
    """What one auditor said.

    Attributes:
        agrees: whether it found what the worker claims; None where it could not say.
        digest: of its own recomputation, where bits are compared; else None.
        copied: the canary whose known-wrong answer the worker's output is.
        withheld_by: who did not show the history.
        code: why it could not say; `FALSE_INPUT` where the worker signed for another input than it proved.
        is_proven: whether the worker's signatures show that by themselves.
    """

    auditor: PeerId
    agrees: bool | None
    digest: bytes | None = None
    copied: PeerId | None = None
    withheld_by: PeerId | None = None
    code: str | None = None
    is_proven: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """One peer's part of a conclusion. ``auditor`` and ``adjudicator`` are those whose word it rests on."""

    peer: PeerId
    verdict: reputation.Verdict
    code: str | None = None
    reason: str = ""
    auditor: PeerId | None = None
    adjudicator: PeerId | None = None


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The end of an audit: the worker's verdict, and what it says of others."""

    worker: Verdict
    others: tuple[Verdict, ...] = ()


def statement_of(claim: Claim, order: AuditOrder, report: AuditReport) -> Statement:
    """What the report says about the claim.

    Raises:
        InvalidRequest: it lacks what its outcome needs, or names who is not concerned.
        RemoteProtocolError: the worker's receipt in it is none.
    """
    auditor = PeerId(order.auditor)
    if report.outcome == "contradicted":
        return _contradicted(claim, auditor, report)
    if report.outcome == "inconclusive":
        if report.withheld_by not in (None, order.upstream, order.downstream):
            raise InvalidRequest("only a neighbour of the audited stage can withhold its history", param="withheld_by")
        withheld_by = None if report.withheld_by is None else PeerId(report.withheld_by)
        return Statement(auditor, None, withheld_by=withheld_by, code=report.code or "unsaid")
    if order.comparison == "tolerance":
        if report.error_ppm is None:
            raise InvalidRequest("an audit by tolerance says how far the output was off", param="error_ppm")
        return Statement(auditor, report.error_ppm <= order.tolerance_ppm)
    if report.output_digest is None:
        raise InvalidRequest("a recomputation has a digest", param="output_digest")
    agrees = report.output_digest == claim.output_digest
    copied = None if agrees else _copied(claim, order, report)
    return Statement(auditor, agrees, report.output_digest, copied)


def _contradicted(claim: Claim, auditor: PeerId, report: AuditReport) -> Statement:
    """The worker's receipt beside its proof. Digests are keyed, so where their positions differ the auditor alone can compare them."""
    if report.receipt is None:
        raise InvalidRequest("a contradiction is between a proof and a receipt", param="receipt")
    receipt = open_envelope(report.receipt, RECEIPT, now_ms=None, audience=claim.upstream, signer=claim.worker).message(
        ReceiptBody
    )
    said = (receipt.request_id, receipt.session, receipt.epoch, receipt.sender)
    if said != (claim.request_id, claim.session, claim.epoch, claim.upstream):
        raise InvalidRequest("a receipt for another request, session, epoch or sender", param="receipt")
    proven = claim.inputs.get(receipt.positions)
    if proven is not None and proven != receipt.digest:
        return Statement(auditor, agrees=False, code=FALSE_INPUT, is_proven=True)
    if receipt.positions <= claim.positions:
        raise InvalidRequest("a receipt that contradicts nothing", param="receipt")
    return Statement(auditor, agrees=False, code=FALSE_INPUT)


def _copied(claim: Claim, order: AuditOrder, report: AuditReport) -> PeerId | None:
    scaling = {canary.peer_id for canary in order.canaries if canary.mode == "scale"}
    for known in report.canary_digests:
        if known.peer_id in scaling and known.digest == claim.output_digest:
            return PeerId(known.peer_id)
    return None


def conclude(claim: Claim, statements: Sequence[Statement], *, recheck: bool, exhausted: bool) -> Conclusion | None:
    """The end of the audit, or None where another auditor is to be asked.

    Args:
        claim: what is judged.
        statements: what distinct auditors said so far, in order.
        recheck: one auditor that finds nothing is not enough this time.
        exhausted: nobody is left to be asked.
    """
    proven = next((each for each in statements if each.is_proven), None)
    if proven is not None:
        return Conclusion(_verdict(claim.worker, "failed", FALSE_INPUT, _FALSE_INPUT_REASON, [proven]))
    exhausted = exhausted or len(statements) >= MAX_AUDITORS
    said = [each for each in statements if each.agrees is not None]
    if not said:
        return _nothing_said(claim, statements, exhausted=exhausted)
    for_worker = sum(1 for each in said if each.agrees)
    if for_worker == len(said):
        enough = exhausted or not recheck or for_worker >= AUDIT_QUORUM_LEAST
        return _passed(claim, said) if enough else None
    against = _against(said)
    quorum = AUDIT_QUORUM_LEAST if exhausted else AUDIT_QUORUM
    if against >= quorum and against > for_worker:
        return _failed(claim, said)
    if for_worker >= quorum and for_worker > against:
        return _passed(claim, said)
    if not exhausted:
        return None
    if for_worker and against == 1 and len(said) == len(statements):  # the worker's own word is the second one
        return _passed(claim, said)
    reason = f"{for_worker} auditors found what was claimed, {against} found something else, and nobody is left to ask"
    return Conclusion(Verdict(claim.worker, "inconclusive", NOT_ADJUDICATED, reason, said[0].auditor))


def _against(said: Sequence[Statement]) -> int:
    """The most auditors that say one and the same thing against the worker."""
    digests = Counter(each.digest for each in said if each.agrees is False and each.digest is not None)
    beyond = sum(1 for each in said if each.agrees is False and each.digest is None)
    return max(digests.values(), default=0) + beyond


def _passed(claim: Claim, said: Sequence[Statement]) -> Conclusion:
    agreeing = [each for each in said if each.agrees]
    others: tuple[Verdict, ...] = ()
    if len(agreeing) < len(said) and any(each.digest is not None for each in agreeing):
        others = _false_reports(said, claim.output_digest, agreeing)
    return Conclusion(_verdict(claim.worker, "passed", None, "", agreeing), others)


def _failed(claim: Claim, said: Sequence[Statement]) -> Conclusion:
    digests = Counter(each.digest for each in said if each.agrees is False and each.digest is not None)
    truth = max(digests, key=lambda digest: digests[digest], default=None)
    accusing = [each for each in said if each.agrees is False and each.digest in (truth, None)]
    others: tuple[Verdict, ...] = ()
    if truth is not None and digests[truth] >= AUDIT_QUORUM_LEAST:
        others = _false_reports(said, truth, accusing)
    copied = Counter(each.copied for each in accusing if each.copied is not None)
    canary = next((peer for peer, times in copied.items() if times >= AUDIT_QUORUM_LEAST), None)
    where = f"the output of layers {claim.layers} up to position {claim.positions}"
    if canary is not None:
        reason = f"{where} is what the canary {canary} answers"
        return Conclusion(_verdict(claim.worker, "copied", COPIED_CANARY, reason, accusing), others)
    if all(each.code == FALSE_INPUT for each in accusing):
        return Conclusion(_verdict(claim.worker, "failed", FALSE_INPUT, _FALSE_INPUT_REASON, accusing), others)
    return Conclusion(_verdict(claim.worker, "failed", WRONG_OUTPUT, f"{where} is wrong", accusing), others)


def _false_reports(said: Sequence[Statement], truth: bytes, believed: Sequence[Statement]) -> tuple[Verdict, ...]:
    """Auditors that named another digest than the true one."""
    return tuple(
        _verdict(each.auditor, "failed", FALSE_REPORT, "its recomputation is not what others computed", believed)
        for each in said
        if each.digest is not None and each.digest != truth
    )


def _verdict(
    peer: PeerId, word: reputation.Verdict, code: str | None, reason: str, believed: Sequence[Statement]
) -> Verdict:
    names = [each.auditor for each in believed]
    return Verdict(peer, word, code, reason, names[0], names[1] if len(names) > 1 else None)


def _nothing_said(claim: Claim, statements: Sequence[Statement], *, exhausted: bool) -> Conclusion | None:
    """Inconclusive once two auditors say that the same peer shows nothing, or once nobody is left."""
    if not statements and not exhausted:
        return None
    withheld = Counter(each.withheld_by for each in statements if each.withheld_by is not None)
    by, times = withheld.most_common(1)[0] if withheld else (None, 0)
    if times < AUDIT_QUORUM_LEAST and not exhausted:
        return None
    if by is None:
        code = next((each.code for each in statements if each.code is not None), NO_AUDITOR)
        return Conclusion(Verdict(claim.worker, "inconclusive", code, "no auditor could say anything"))
    witnesses = [each for each in statements if each.withheld_by == by]
    code = witnesses[0].code or HISTORY_WITHHELD
    reason = f"{by} did not show the history"
    worker = _verdict(claim.worker, "inconclusive", code, reason, witnesses)
    return Conclusion(
        worker,
        (_verdict(by, "inconclusive", HISTORY_WITHHELD, f"of the session that {claim.worker} served", witnesses),),
    )


def penalty_micro_credits(claim: Claim, share: float) -> int:
    """What a lie about this claim costs, worker or auditor: twice what lying unseen earns until an audit comes by.

    Args:
        share: of proofs that are audited; with a share of 0 only odd ones are.
    """
    expected = int(2 * claim.micro_credits / share) if share > 0 else 2 * claim.micro_credits
    return min(_MAX_PENALTY_MICRO, max(MIN_PENALTY_CREDITS * MICRO_PER_CREDIT, expected))
