"""What a proven piece of work is worth, now: the decision, not its execution.

    proof ──verify_proof──▶ ProvenWork ──settle──▶ (changes, Settled)
                 │                          │
                 └── ProofRefused           └── the changes are journaled and applied before the answer leaves

    answer      what it means                                                    journaled
    settled     accepted; ``micro_credits`` is what the proof brought in all     yes
    duplicate   the same proof again: the same answer, nothing paid twice        no
    held        nothing (more) is paid now; send it again later, or with the     no, or what was paid in part
                receipt that it lacks
    refused     never paid                                                       no

Rules, beyond those of ``evidence``: only what a receipt covers is paid; each (layer, position) of a ticket is paid once, whatever the
epoch, the session or the worker; of a (session, epoch) the route counts that the requester stated first, as settled proofs show it;
where a neighbour's proof is known, one's output is the other's input at every position that both state; the tickets on one account
(the requester's, or that of the identity in whose name it asked) bring a bounded number of credits into being a day. Refused and held
proofs leave no trace in the state, so nobody can fill it with them.
"""

from __future__ import annotations

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import (
    DIGEST_MARK_POSITIONS,
    MAX_PROOFS_PER_TICKET_AND_WORKER,
    MAX_REASON_CHARS,
    MICRO_PER_LAYER_POSITION,
)
from tessella_p2p.ledger.changes import Change, ProofSettled, TicketsExpired
from tessella_p2p.ledger.evidence import Code, ProofRefused, ProvenWork, SettlementTerms
from tessella_p2p.ledger.state import DAY_MS, LedgerState
from tessella_p2p.ledger.tickets import Point, ProofFacts, TicketFacts, TicketKey
from tessella_p2p.wire.marks import mark_stride
from tessella_p2p.wire.messages import Settled

_ENDLESS = 2**53


def settle(
    state: LedgerState, work: ProvenWork, terms: SettlementTerms, now_ms: int
) -> tuple[tuple[Change, ...], Settled]:
    """Decide on one proof. The state is read, not changed.

    Args:
        state: every change of the ledger so far.
        work: a proof that `verify_proof` let through.
        terms: what it is judged by.
        now_ms: the time, Unix milliseconds; it decides which day's bound applies.

    Returns:
        The changes to journal and apply, and the answer for the worker.

    Raises:
        ProofRefused: the proof is never paid.
    """
    proof = work.proof
    key = TicketKey(PeerId(work.ticket.requester), proof.request_id)
    if work.ticket.settle_before <= state.horizon:
        raise ProofRefused(Code.TICKET_EXPIRED, "its ticket expired and is forgotten").blame(work.worker)
    ticket = state.ticket(key)
    earlier = state.proof(key, proof.session, proof.epoch, work.worker)
    before = 0 if earlier is None else earlier.micro_credits
    if earlier is not None:
        if earlier.payload_digest == work.payload_digest and earlier.complete:
            return (), Settled(status="duplicate", micro_credits=before)
        _check_own(earlier, work)
    _check_marks(work)
    if not proof.positions:
        return (), Settled(status="settled")
    if not work.receipted:
        return (), _no_receipt(work, before)
    mismatch = _mismatch(state, key, ticket, work)
    if mismatch is not None and not state.is_cleared(key, proof.session, proof.epoch, work.worker):
        return (), _held(Code.NEIGHBOUR_MISMATCH, mismatch, before)
    return _pay(state, key, ticket, work, earlier, terms, now_ms)


def expire(state: LedgerState, now_ms: int) -> TicketsExpired | None:
    """The change that forgets tickets that can no longer settle, where there are any; apply it and ask again."""
    earliest = state.next_expiry()
    return None if earliest is None or earliest > now_ms else TicketsExpired(before=now_ms)


def refusal(error: ProofRefused) -> Settled:
    """The answer for a proof that was refused; it names the signer where that is known."""
    return Settled(status="refused", code=error.reason_code, reason=str(error)[:MAX_REASON_CHARS])


def too_many_bytes(worker: PeerId, changes: tuple[Change, ...], settled: Settled) -> Settled:
    """The answer for a proof whose ``changes`` are not written, because the worker's proofs made the ledger grow enough today."""
    paid = sum(change.micro_credits for change in changes if isinstance(change, ProofSettled))
    reason = f"the proofs of {worker} have made the ledger grow as much as they may today; the rest waits"
    return _held(Code.BYTES_BOUND, reason, settled.micro_credits - paid)


def _pay(
    state: LedgerState,
    key: TicketKey,
    ticket: TicketFacts,
    work: ProvenWork,
    earlier: ProofFacts | None,
    terms: SettlementTerms,
    now_ms: int,
) -> tuple[tuple[Change, ...], Settled]:
    before = 0 if earlier is None else earlier.micro_credits
    day, payer = now_ms // DAY_MS, PeerId(work.ticket.payer)
    if not terms.requester_pays:
        left = terms.issuance_per_day - state.issued(payer, day)
        held = f"the tickets of {payer} have brought in what they may today; the rest waits"
        held_code = Code.ISSUANCE_BOUND
    else:
        left = _purse(state, payer, work.worker)
        held = f"{payer} cannot pay more than it has; the rest waits"
        held_code = Code.REQUESTER_CANNOT_PAY
    paid_positions = _affordable(ticket, work.layers, work.receipted, max(0, left) // MICRO_PER_LAYER_POSITION)
    amount = ticket.due(work.layers, paid_positions) * MICRO_PER_LAYER_POSITION
    complete = paid_positions == work.receipted
    if not amount and complete and earlier is not None:
        # Two proofs of one session that take turns must not grow the journal.
        return (), Settled(status="duplicate", micro_credits=before)
    if not amount and not complete:
        return (), _held(held_code, held, before)
    if ticket.entries.get(work.worker, 0) >= MAX_PROOFS_PER_TICKET_AND_WORKER:
        raise ProofRefused(
            Code.TOO_MANY_PROOFS, f"{work.worker} has proven this ticket too often: in all its sessions and epochs"
        ).blame(work.worker)
    change = ProofSettled(
        requester=key.requester,
        request_id=key.request_id,
        settle_before=work.ticket.settle_before,
        worker=work.worker,
        session=work.proof.session,
        epoch=work.proof.epoch,
        layers=work.layers.as_tuple(),
        paid_positions=paid_positions,
        micro_credits=amount,
        complete=complete,
        day=day,
        payload_digest=work.payload_digest,
        upstream=work.upstream,
        downstream=work.downstream,
        route=work.route,
        points=work.points,
        requester_pays=terms.requester_pays,
        identity=work.ticket.identity,
    )
    if not complete:
        return (change,), _held(held_code, held, before + amount)
    if not before + amount:
        reason = "every layer and position of it was paid before"
        return (change,), Settled(status="settled", code=Code.ALREADY_PAID.value, reason=reason)
    return (change,), Settled(status="settled", micro_credits=before + amount)


def _purse(state: LedgerState, payer: PeerId, worker: PeerId) -> int:
    """What ``payer`` can pay ``worker``, in micro-credits. Paying itself moves nothing, so that has no end."""
    return _ENDLESS if payer == worker else state.accounts.get(payer).micro_credits


def _affordable(ticket: TicketFacts, layers: LayerRange, positions: int, budget: int) -> int:
    """The most positions, up to ``positions``, whose unpaid layer·positions fit into ``budget``."""
    if ticket.due(layers, positions) <= budget:
        return positions
    low, high = 0, positions
    while low < high:
        middle = (low + high + 1) // 2
        if ticket.due(layers, middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _check_own(earlier: ProofFacts, work: ProvenWork) -> None:
    """A later proof of the same work may say more than an earlier one, never something else."""
    if earlier.route not in (b"", work.route) or earlier.layers != work.proof.layers:
        raise ProofRefused(
            Code.PROOF_CONFLICT, f"{work.worker} proved another route for this session and epoch before"
        ).blame(work.worker)
    said = {positions: (received, sent) for positions, received, sent in earlier.points}
    for positions, received, sent in _points(work):
        if said.get(positions, (received, sent)) != (received, sent):
            raise ProofRefused(
                Code.PROOF_CONFLICT, f"{work.worker} proved other digests at position {positions} before"
            ).blame(work.worker)
    stated, end = {point.positions for point in work.points}, work.proof.positions
    for positions, _, _ in earlier.points[:-1]:  # the last one is that proof's end, which need be no mark
        is_thinned = positions % DIGEST_MARK_POSITIONS == 0 and positions % mark_stride(end) != 0
        if positions <= end and positions not in stated and not is_thinned:
            raise ProofRefused(
                Code.MALFORMED_MARKS,
                f"{work.worker} stated digests at position {positions} before, and leaves them out",
            ).blame(work.worker)


def _check_marks(work: ProvenWork) -> None:
    """Whether the marks are there that an honest stage gives: else neighbours have nothing to compare, and auditors no beginning.

    It is asked here and not where a proof is verified by itself: whoever mirrors a ledger takes what an older version has settled.
    """
    positions = work.proof.positions
    stated = {point.positions for point in work.points}
    stride = mark_stride(positions)
    missing = next((at for at in range(stride, positions + 1, stride) if at not in stated), None)
    if missing is not None:
        raise ProofRefused(
            Code.MALFORMED_MARKS, f"{work.worker} proves {positions} positions and states no digests at {missing}"
        ).blame(work.worker)


def _mismatch(state: LedgerState, key: TicketKey, ticket: TicketFacts, work: ProvenWork) -> str | None:
    """What does not fit between the proof and those of its chain that are known (G-RCPT-2); None where all fits."""
    proof = work.proof
    if ticket.routes.get((proof.session, proof.epoch), work.route) != work.route:
        return f"{key.requester} signed another route too for this session and epoch, and that one's stages were paid"
    upstream = state.proof(key, proof.session, proof.epoch, work.upstream)
    if upstream is not None and upstream.layers[1] == work.layers.start:  # the requester may be a stage elsewhere
        at = _first_difference(upstream.points, _points(work))
        if at is not None:
            return _differs(upstream.worker, work.worker, at)
    downstream = state.proof(key, proof.session, proof.epoch, work.downstream)
    if downstream is not None and downstream.layers[0] == work.layers.end:
        at = _first_difference(_points(work), downstream.points)
        if at is not None:
            return _differs(work.worker, downstream.worker, at)
    return None


def _differs(sender: str, receiver: str, positions: int) -> str:
    return f"what {sender} sent is not what {receiver} received, within the first {positions} positions"


def _points(work: ProvenWork) -> tuple[Point, ...]:
    return tuple((point.positions, point.input, point.output) for point in work.points)


def _first_difference(sender: tuple[Point, ...], receiver: tuple[Point, ...]) -> int | None:
    sent = {positions: output for positions, _, output in sender}
    for positions, received, _ in receiver:
        if sent.get(positions, received) != received:
            return positions
    return None


def _no_receipt(work: ProvenWork, before: int) -> Settled:
    if work.unmatched:
        reason = f"the receipt of {work.downstream} is for a position at which the proof states no digest"
        return _held(Code.RECEIPT_UNMATCHED, reason, before)
    return _held(Code.NO_RECEIPT, f"no receipt of {work.downstream} is attached", before)


def _held(code: Code, reason: str, micro_credits: int) -> Settled:
    return Settled(status="held", micro_credits=micro_credits, code=code.value, reason=reason[:MAX_REASON_CHARS])
