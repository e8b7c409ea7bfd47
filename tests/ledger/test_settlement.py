"""Every rule of settlement with its hostile twins, on the pure core."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import DIGEST_MARK_POSITIONS, MAX_PROOF_MARKS
from tessella_p2p.ledger import evidence
from tessella_p2p.ledger.accounts import ISSUANCE, Transfer
from tessella_p2p.ledger.changes import ProofSettled, Slashed
from tessella_p2p.ledger.evidence import Code, ProofRefused, SettlementTerms, verify_proof
from tessella_p2p.ledger.revocation import Revocation
from tessella_p2p.ledger.settlement import expire
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.marks import mark_stride
from tessella_p2p.wire.messages import DigestMark, Proof
from tests.ledger.proving import (
    HOUR,
    LAYERS,
    NOW,
    ORCHESTRATOR,
    REQUESTER,
    ROOT,
    ROUTE,
    TERMS,
    WEEK,
    WORKERS,
    PaperLedger,
    Stage,
    credits_for,
    digest_at,
    key_of,
    lease,
    proof_body,
    receipt,
    route_statement,
    seal_proof,
    ticket,
)

MIDDLE = ROUTE[1].key
TEN_LAYERS = LayerRange(10, 20)


def refused_code(raw: bytes, now_ms: int = NOW) -> str:
    """The code with which the pure core refuses a proof; nothing of it may stay behind."""
    ledger = PaperLedger()
    settled = ledger.settle(raw, now_ms)
    assert settled.status == "refused", settled
    assert settled.micro_credits == 0
    assert settled.code is not None
    assert settled.reason
    assert ledger.tables.content() == {}
    return settled.code


# ---- The valid case ----


def test_three_stages_of_one_session_are_paid_for_their_layers_and_positions() -> None:
    ledger = PaperLedger()
    for index, stage in enumerate(ROUTE):
        settled = ledger.settle(seal_proof(proof_body(index), stage.key))
        assert settled.status == "settled"
        assert settled.micro_credits == credits_for(TEN_LAYERS, 300)
        assert ledger.balance(stage.key) == credits_for(TEN_LAYERS, 300)
        assert ledger.state.accounts.get(stage.key.peer_id).settled_proofs == 1
    assert ledger.state.accounts.get(ISSUANCE).micro_credits == -3 * credits_for(TEN_LAYERS, 300)
    assert ledger.state.accounts.total() == 0


def test_the_same_proof_again_gets_the_same_answer_and_nothing_more() -> None:
    ledger = PaperLedger()
    first = ledger.settle(seal_proof(proof_body(), MIDDLE))
    for sequence in (1, 2):  # byte for byte, and sealed anew
        again = ledger.settle(seal_proof(proof_body(), MIDDLE, sequence=sequence))
        assert again.status == "duplicate"
        assert again.micro_credits == first.micro_credits
    assert ledger.balance(MIDDLE) == first.micro_credits
    assert len(ledger.changes) == 1


def test_a_proof_settles_after_its_lease_and_its_envelope_are_over() -> None:
    assert PaperLedger().settle(seal_proof(proof_body(), MIDDLE), NOW + WEEK - 1).status == "settled"


def test_a_ticket_from_before_an_outage_settles_with_the_lease_that_was_in_force_when_it_was_minted() -> None:
    old = lease(MIDDLE, (10, 20), at=NOW - 300_000, ttl_ms=600_000)
    body = proof_body(sealed_lease=old, opened_at=NOW + HOUR - 1)
    assert PaperLedger().settle(seal_proof(body, MIDDLE), NOW + 2 * HOUR).status == "settled"


# ---- What is paid ----


def test_only_what_the_receipt_covers_is_paid_and_a_later_receipt_pays_the_rest() -> None:
    ledger = PaperLedger()
    first = ledger.settle(seal_proof(proof_body(positions=300, receipted=200), MIDDLE))
    assert (first.status, first.micro_credits) == ("settled", credits_for(TEN_LAYERS, 200))
    full = ledger.settle(seal_proof(proof_body(positions=300, receipted=300), MIDDLE))
    assert (full.status, full.micro_credits) == ("settled", credits_for(TEN_LAYERS, 300))
    assert ledger.balance(MIDDLE) == credits_for(TEN_LAYERS, 300)
    assert ledger.state.accounts.get(MIDDLE.peer_id).settled_proofs == 1


def test_two_proofs_that_take_turns_do_not_grow_the_journal() -> None:
    ledger = PaperLedger()
    small, full = (seal_proof(proof_body(receipted=n), MIDDLE) for n in (200, 300))
    ledger.settle(small)
    ledger.settle(full)
    for raw in (small, full, small, full):
        assert ledger.settle(raw).status == "duplicate"
    assert len(ledger.changes) == 2
    assert ledger.balance(MIDDLE) == credits_for(TEN_LAYERS, 300)


def test_without_a_receipt_a_proof_is_held_and_settles_once_it_has_one() -> None:
    ledger = PaperLedger()
    held = ledger.settle(seal_proof(proof_body(receipted=None), MIDDLE))
    assert (held.status, held.code, held.micro_credits) == ("held", Code.NO_RECEIPT, 0)
    assert ledger.tables.content() == {}
    assert ledger.settle(seal_proof(proof_body(), MIDDLE)).status == "settled"


def test_a_receipt_for_a_position_without_a_digest_is_held() -> None:
    settled = PaperLedger().settle(seal_proof(proof_body(receipted=250), MIDDLE))
    assert (settled.status, settled.code) == ("held", Code.RECEIPT_UNMATCHED)


def test_a_session_without_work_settles_to_nothing() -> None:
    ledger = PaperLedger()
    settled = ledger.settle(seal_proof(proof_body(positions=0, receipted=None), MIDDLE))
    assert (settled.status, settled.micro_credits) == ("settled", 0)
    assert ledger.changes == []


@pytest.mark.parametrize("epochs", [(0, 1), (1, 0)])
def test_a_position_is_paid_once_over_epochs_and_workers(epochs: tuple[int, int]) -> None:
    other = (ROUTE[0], Stage(WORKERS[3], (10, 20)), ROUTE[2])
    ledger = PaperLedger()
    ledger.settle(seal_proof(proof_body(epoch=epochs[0], positions=200), MIDDLE))
    replayed = ledger.settle(seal_proof(proof_body(epoch=epochs[1], positions=300, route=other), WORKERS[3]))
    assert replayed.micro_credits == credits_for(TEN_LAYERS, 100)
    assert ledger.balance(MIDDLE) + ledger.balance(WORKERS[3]) == credits_for(TEN_LAYERS, 300)


def test_a_hundred_replicas_on_one_ticket_are_paid_for_one() -> None:
    ledger = PaperLedger()
    for i in range(100):
        replica = key_of(f"replica {i}")
        route = (ROUTE[0], Stage(replica, (10, 20)), ROUTE[2])
        settled = ledger.settle(seal_proof(proof_body(route=route, session=i.to_bytes(16, "big")), replica))
        assert settled.status == "settled"
        assert (settled.code == Code.ALREADY_PAID) == (i > 0)
    assert ledger.state.accounts.get(ISSUANCE).micro_credits == -credits_for(TEN_LAYERS, 300)


def test_two_tickets_for_one_request_are_paid_as_one() -> None:
    ledger = PaperLedger()
    for at in (NOW, NOW + 1000):
        body = proof_body(sealed_ticket=ticket(at=at), session=at.to_bytes(16, "big"), opened_at=at)
        ledger.settle(seal_proof(body, MIDDLE), NOW + 2000)
    assert ledger.balance(MIDDLE) == credits_for(TEN_LAYERS, 300)


def test_one_worker_cannot_fill_a_ticket_with_proofs() -> None:
    ledger = PaperLedger()
    answers = [ledger.settle(seal_proof(proof_body(epoch=epoch), MIDDLE)) for epoch in range(33)]
    assert {answer.status for answer in answers[:32]} == {"settled"}
    assert answers[32].code == Code.TOO_MANY_PROOFS


def test_a_proof_that_grows_by_a_position_each_time_does_not_fill_the_journal() -> None:
    ledger = PaperLedger()
    answers = [ledger.settle(seal_proof(proof_body(positions=positions), MIDDLE)) for positions in range(1, 41)]
    assert {answer.status for answer in answers[:32]} == {"settled"}
    assert {answer.code for answer in answers[32:]} == {Code.TOO_MANY_PROOFS}
    assert len(ledger.changes) == 32
    assert ledger.state.accounts.get(MIDDLE.peer_id).settled_proofs == 1


# ---- The bound on issuance ----


def test_the_tickets_of_one_requester_bring_in_a_bounded_number_of_credits_a_day() -> None:
    bound = credits_for(TEN_LAYERS, 250)
    ledger = PaperLedger(SettlementTerms(ORCHESTRATOR.peer_id, {ROOT: LAYERS}, bound))
    proof = seal_proof(proof_body(), MIDDLE)
    partly = ledger.settle(proof)
    assert (partly.status, partly.code, partly.micro_credits) == ("held", Code.ISSUANCE_BOUND, bound)
    assert ledger.settle(proof).micro_credits == bound  # the same day: the same answer
    assert ledger.settle(seal_proof(proof_body(2), ROUTE[2].key)).micro_credits == 0
    tomorrow = ledger.settle(proof, NOW + 24 * HOUR)
    assert (tomorrow.status, tomorrow.micro_credits) == ("settled", credits_for(TEN_LAYERS, 300))
    assert ledger.settle(proof, NOW + 24 * HOUR).status == "duplicate"
    assert ledger.balance(MIDDLE) == credits_for(TEN_LAYERS, 300)


def test_proofs_that_came_before_midnight_and_are_judged_after_it_are_within_the_bound_of_their_day() -> None:
    bound = credits_for(TEN_LAYERS, 300)
    ledger = PaperLedger(SettlementTerms(ORCHESTRATOR.peer_id, {ROOT: LAYERS}, bound))
    midnight = (NOW + WEEK) // (24 * HOUR) * 24 * HOUR
    overdue = proof_body(
        0, sealed_ticket=ticket(requester=WORKERS[5], settle_in_ms=midnight - NOW), requester=WORKERS[5]
    )
    ledger.settle(seal_proof(overdue, ROUTE[0].key), midnight - 2)
    assert ledger.settle(seal_proof(proof_body(), MIDDLE), midnight - 2).micro_credits == bound
    # Meanwhile the day is over, and what is overdue is forgotten.
    change = expire(ledger.state, midnight)
    assert change is not None
    ledger.state.apply(change, midnight)
    late = ledger.settle(seal_proof(proof_body(request_id="request-2"), MIDDLE), midnight - 1)
    assert (late.status, late.code) == ("held", Code.ISSUANCE_BOUND)
    assert ledger.balance(MIDDLE) == bound


def test_a_ring_that_owns_requester_and_every_stage_gains_at_most_the_bound() -> None:
    bound = credits_for(LayerRange(0, 30), 1000)
    ledger = PaperLedger(SettlementTerms(ORCHESTRATOR.peer_id, {ROOT: LAYERS}, bound))
    for i in range(5):
        for index, stage in enumerate(ROUTE):
            body = proof_body(index, positions=900, request_id=f"request-{i}")
            ledger.settle(seal_proof(body, stage.key))
    gained = sum(ledger.balance(stage.key) for stage in ROUTE)
    assert bound - credits_for(TEN_LAYERS, 1) < gained <= bound


# ---- Hostile twins: who signed what ----


def test_a_proof_that_is_signed_by_another_key_is_refused() -> None:
    assert refused_code(seal_proof(proof_body(), WORKERS[5])) == Code.FOREIGN_LEASE


def test_a_proof_with_a_changed_byte_is_refused() -> None:
    raw = bytearray(seal_proof(proof_body(), MIDDLE))
    raw[-1] ^= 1
    assert refused_code(bytes(raw)) == "invalid_signature"


def test_a_proof_for_another_orchestrator_is_refused() -> None:
    assert refused_code(seal_proof(proof_body(), MIDDLE, audience=WORKERS[5].peer_id)) == "invalid_signature"


def test_bytes_that_are_no_envelope_are_refused() -> None:
    assert refused_code(b"\x00") == "malformed_message"
    assert refused_code(b"\x80" * 70_000) == "malformed_message"


def test_another_orchestrators_ticket_is_refused() -> None:
    body = proof_body(sealed_ticket=ticket(minter=key_of("other orchestrator")))
    assert refused_code(seal_proof(body, MIDDLE)) == Code.FOREIGN_TICKET


@pytest.mark.parametrize(
    "wrong",
    [ticket("request-2"), ticket(root=bytes(32)), ticket(recipe="int4")],
    ids=["request", "model", "recipe"],
)
def test_a_ticket_for_something_else_is_refused(wrong: bytes) -> None:
    assert refused_code(seal_proof(proof_body(sealed_ticket=wrong), MIDDLE)) == Code.FOREIGN_TICKET


def test_a_lease_of_another_orchestrator_is_refused() -> None:
    body = proof_body(sealed_lease=lease(MIDDLE, (10, 20), signer=key_of("other orchestrator")))
    assert refused_code(seal_proof(body, MIDDLE)) == Code.FOREIGN_LEASE


@pytest.mark.parametrize(
    ("serial", "at", "code"),
    [
        (1, NOW - 1, Code.LEASE_REVOKED),
        (1, NOW, Code.LEASE_REVOKED),
        (9, NOW, Code.LEASE_REVOKED),
        (1, NOW + 1, None),
        (0, NOW - 1, None),
    ],
    ids=["before the session", "with it", "a later serial", "after it began", "an older lease"],
)
def test_work_is_paid_up_to_the_moment_in_which_its_lease_is_taken_away(
    serial: int, at: int, code: Code | None
) -> None:
    terms = replace(TERMS, revoked={MIDDLE.peer_id: Revocation(serial=serial, at=at)})
    assert PaperLedger(terms).settle(seal_proof(proof_body(), MIDDLE)).code == code


def test_a_worker_cannot_date_its_session_to_before_the_revocation() -> None:
    terms = replace(TERMS, revoked={MIDDLE.peer_id: Revocation(serial=1, at=NOW)})
    early = proof_body(opened_at=NOW - 1)  # within the skew of clocks; its ticket was minted later
    assert PaperLedger(terms).settle(seal_proof(early, MIDDLE)).code == Code.LEASE_REVOKED


def test_an_orchestrator_takes_away_its_own_leases_only() -> None:
    other = key_of("other orchestrator")
    terms = replace(
        TERMS, lease_issuers=frozenset({other.peer_id}), revoked={MIDDLE.peer_id: Revocation(serial=1, at=NOW - 1)}
    )
    body = proof_body(sealed_lease=lease(MIDDLE, (10, 20), signer=other))
    assert PaperLedger(terms).settle(seal_proof(body, MIDDLE)).status == "settled"


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lease(WORKERS[0], (10, 20)), Code.FOREIGN_LEASE),
        (lease(MIDDLE, (10, 20), recipe="int4"), Code.FOREIGN_LEASE),
        (lease(MIDDLE, (10, 20), root=bytes(32)), Code.FOREIGN_LEASE),
        (lease(MIDDLE, (10, 19)), Code.UNLEASED_LAYERS),
        (lease(MIDDLE, (11, 20)), Code.UNLEASED_LAYERS),
        (lease(MIDDLE, (10, 20), at=NOW - HOUR), Code.LEASE_NOT_IN_FORCE),
        (lease(MIDDLE, (10, 20), at=NOW + HOUR), Code.LEASE_NOT_IN_FORCE),
    ],
    ids=["foreign worker", "recipe", "model", "layer above", "layer below", "expired before", "issued after"],
)
def test_work_outside_a_lease_is_refused(wrong: bytes, code: Code) -> None:
    assert refused_code(seal_proof(proof_body(sealed_lease=wrong), MIDDLE), NOW + HOUR) == code


def test_work_under_a_lease_of_a_federated_orchestrator_is_paid() -> None:
    other = key_of("other orchestrator")
    terms = SettlementTerms(ORCHESTRATOR.peer_id, {ROOT: LAYERS}, lease_issuers=frozenset({other.peer_id}))
    assert terms.lease_issuers == frozenset({other.peer_id, ORCHESTRATOR.peer_id})
    foreign = proof_body(sealed_lease=lease(MIDDLE, (10, 20), signer=other))
    assert PaperLedger(terms).settle(seal_proof(foreign, MIDDLE)).status == "settled"
    stranger = proof_body(sealed_lease=lease(MIDDLE, (10, 20), signer=key_of("stranger")))
    assert PaperLedger(terms).settle(seal_proof(stranger, MIDDLE)).code == Code.FOREIGN_LEASE


def test_the_work_of_a_canary_is_refused() -> None:
    body = proof_body(sealed_lease=lease(MIDDLE, (10, 20), canary=True))
    assert refused_code(seal_proof(body, MIDDLE)) == Code.CANARY


# ---- The requester pays ----

PAYING = SettlementTerms(ORCHESTRATOR.peer_id, {ROOT: LAYERS}, requester_pays=True)


def paying_ledger(micro_credits: int) -> PaperLedger:
    """A ledger in which the requester has so much, and pays."""
    ledger = PaperLedger(PAYING)
    if micro_credits:
        ledger.state.accounts.apply(Transfer(ISSUANCE, REQUESTER.peer_id, micro_credits))
    return ledger


def test_a_requester_that_pays_is_charged_what_the_workers_get() -> None:
    each = credits_for(TEN_LAYERS, 300)
    ledger = paying_ledger(4 * each)
    for index, stage in enumerate(ROUTE):
        assert ledger.settle(seal_proof(proof_body(index), stage.key)).micro_credits == each
        assert ledger.balance(stage.key) == each
    assert ledger.balance(REQUESTER) == each
    assert ledger.state.accounts.get(ISSUANCE).micro_credits == -4 * each
    assert ledger.state.issued(REQUESTER.peer_id, NOW // (24 * HOUR)) == 0
    assert ledger.settle(seal_proof(proof_body(0), ROUTE[0].key)).status == "duplicate"
    assert ledger.balance(REQUESTER) == each


def test_a_requester_that_cannot_pay_never_goes_below_zero_and_the_rest_waits() -> None:
    each = credits_for(TEN_LAYERS, 300)
    ledger = paying_ledger(credits_for(TEN_LAYERS, 250) + 9_999)
    proof = seal_proof(proof_body(), MIDDLE)
    partly = ledger.settle(proof)
    assert (partly.status, partly.code) == ("held", Code.REQUESTER_CANNOT_PAY)
    assert partly.micro_credits == credits_for(TEN_LAYERS, 250)
    assert ledger.balance(REQUESTER) == 9_999
    nothing = ledger.settle(seal_proof(proof_body(2), ROUTE[2].key))
    assert (nothing.status, nothing.micro_credits) == ("held", 0)
    ledger.state.accounts.apply(Transfer(ISSUANCE, REQUESTER.peer_id, each))
    paid = ledger.settle(proof)
    assert (paid.status, paid.micro_credits) == ("settled", each)
    assert ledger.balance(MIDDLE) == each
    assert ledger.state.accounts.total() == 0


@pytest.mark.parametrize("slashed_to", [0, -1_000_000])
def test_a_requester_without_credits_pays_nothing(slashed_to: int) -> None:
    ledger = paying_ledger(0)
    if slashed_to:
        ledger.state.apply(Slashed(peer=REQUESTER.peer_id, micro_credits=-slashed_to, reason="", by="operator"), NOW)
    settled = ledger.settle(seal_proof(proof_body(), MIDDLE))
    assert (settled.status, settled.code, settled.micro_credits) == ("held", Code.REQUESTER_CANNOT_PAY, 0)
    assert ledger.balance(REQUESTER) == slashed_to


def test_a_requester_that_pays_itself_moves_nothing() -> None:
    ledger = paying_ledger(0)
    body = proof_body(0, route=(Stage(REQUESTER, (0, 30)),))
    assert ledger.settle(seal_proof(body, REQUESTER)).status == "settled"
    assert ledger.balance(REQUESTER) == 0
    assert ledger.state.accounts.get(REQUESTER.peer_id).settled_proofs == 1


def test_a_ring_cannot_gain_where_the_requester_pays() -> None:
    each = credits_for(TEN_LAYERS, 100)
    ledger = paying_ledger(each)
    for i in range(5):
        for index, stage in enumerate(ROUTE):
            body = proof_body(index, positions=900, request_id=f"request-{i}")
            ledger.settle(seal_proof(body, stage.key))
    ring = sum(ledger.balance(stage.key) for stage in ROUTE) + ledger.balance(REQUESTER)
    assert ring == each


# ---- Hostile twins: times and amounts ----


@pytest.mark.parametrize("opened_at", [NOW - HOUR, NOW + HOUR], ids=["before the ticket", "after open_before"])
def test_a_session_outside_its_tickets_time_is_refused(opened_at: int) -> None:
    assert refused_code(seal_proof(proof_body(opened_at=opened_at), MIDDLE), NOW + 2 * HOUR) == Code.TICKET_NOT_OPEN


def test_a_session_that_is_yet_to_be_opened_is_refused() -> None:
    assert refused_code(seal_proof(proof_body(opened_at=NOW + HOUR - 1), MIDDLE), NOW) == Code.TICKET_NOT_OPEN


def test_a_ticket_that_is_over_is_refused() -> None:
    assert refused_code(seal_proof(proof_body(), MIDDLE), NOW + WEEK) == Code.TICKET_EXPIRED


def test_more_positions_than_the_ticket_allows_are_refused() -> None:
    body = proof_body(sealed_ticket=ticket(max_positions=299))
    assert refused_code(seal_proof(body, MIDDLE)) == Code.TOO_MANY_POSITIONS


@pytest.mark.parametrize("order", [(100, 100), (200, 100), (0, 100), (100, 301), (100, 300)])
def test_marks_out_of_order_are_refused(order: tuple[int, int]) -> None:
    body = proof_body()
    marks = tuple(body.marks[0].model_copy(update={"positions": at}) for at in order)
    assert refused_code(seal_proof(body.model_copy(update={"marks": marks}), MIDDLE)) == Code.MALFORMED_MARKS


def without_marks(body: Proof, *left_out: int) -> bytes:
    """The same proof, without marks at some positions."""
    kept = tuple(mark for mark in body.marks if mark.positions not in left_out)
    return seal_proof(body.model_copy(update={"marks": kept}), MIDDLE)


@pytest.mark.parametrize("left_out", [256, 512, 768])
def test_a_proof_that_leaves_out_a_mark_is_refused(left_out: int) -> None:
    assert refused_code(without_marks(proof_body(positions=900), left_out)) == Code.MALFORMED_MARKS


def test_the_end_of_a_proof_is_a_mark_of_its_own() -> None:
    assert PaperLedger().settle(seal_proof(proof_body(positions=256), MIDDLE)).status == "settled"


@pytest.mark.parametrize(("left_out", "status"), [(256, "settled"), (512, "refused"), (131_072, "refused")])
def test_of_a_very_long_proof_every_second_mark_is_enough(left_out: int, status: str) -> None:
    """It has as many marks as a proof may have, and an audit of its beginning one to end at."""
    positions = 2 * DIGEST_MARK_POSITIONS * MAX_PROOF_MARKS
    body = proof_body(positions=positions, sealed_ticket=ticket(max_positions=positions))
    marks = tuple(
        DigestMark(positions=at, input=digest_at(10, at), output=digest_at(20, at))
        for at in range(512, positions + 1, 512)
        if at != left_out
    )
    assert len(marks) <= MAX_PROOF_MARKS
    answer = PaperLedger().settle(seal_proof(body.model_copy(update={"marks": marks}), MIDDLE))
    assert answer.status == status


def test_a_later_proof_may_not_leave_out_what_an_earlier_one_stated() -> None:
    ledger = PaperLedger()
    assert ledger.settle(seal_proof(proof_body(positions=240), MIDDLE)).status == "settled"  # at 100, 200, 240
    dropped = ledger.settle(without_marks(proof_body(positions=300), 100))
    assert (dropped.status, dropped.code) == ("refused", Code.MALFORMED_MARKS)
    assert ledger.settle(seal_proof(proof_body(positions=300), MIDDLE)).status == "settled"


def test_a_proof_that_grows_so_long_that_its_marks_are_thinned_is_no_conflict() -> None:
    """What an honest stage gives of one session, before and after."""
    ledger = PaperLedger()
    shorter, longer = 3 * DIGEST_MARK_POSITIONS * MAX_PROOF_MARKS // 4, 5 * DIGEST_MARK_POSITIONS * MAX_PROOF_MARKS // 4
    for positions in (shorter, longer):
        stride = mark_stride(positions)
        marks = tuple(
            DigestMark(positions=at, input=digest_at(10, at), output=digest_at(20, at))
            for at in range(stride, positions + 1, stride)
        )
        body = proof_body(positions=positions, sealed_ticket=ticket(max_positions=longer))
        assert ledger.settle(seal_proof(body.model_copy(update={"marks": marks}), MIDDLE)).status == "settled"


# ---- Hostile twins: digests and receipts ----


def test_an_edited_output_digest_is_refused() -> None:
    body = proof_body().model_copy(update={"output_digest": bytes(32)})
    assert refused_code(seal_proof(body, MIDDLE)) == Code.DIGEST_MISMATCH


def test_a_receipt_that_somebody_else_signed_is_refused() -> None:
    forged = receipt(MIDDLE, MIDDLE, 300, digest_at(20, 300))
    assert refused_code(seal_proof(proof_body(sealed_receipt=forged), MIDDLE)) == "invalid_signature"


@pytest.mark.parametrize(
    "foreign",
    [
        receipt(ROUTE[2].key, MIDDLE, 300, digest_at(20, 300), request_id="request-2"),
        receipt(ROUTE[2].key, MIDDLE, 300, digest_at(20, 300), session=b"t" * 16),
        receipt(ROUTE[2].key, MIDDLE, 300, digest_at(20, 300), epoch=1),
    ],
    ids=["request", "session", "epoch"],
)
def test_a_receipt_of_other_work_is_refused(foreign: bytes) -> None:
    assert refused_code(seal_proof(proof_body(sealed_receipt=foreign), MIDDLE)) == Code.FOREIGN_RECEIPT


def test_a_tail_whose_tokens_went_to_somebody_else_is_refused() -> None:
    """The receipts are of a throwaway identity, which claims to be the requester, or does not."""
    body = proof_body(2, requester=key_of("throwaway"), sealed_ticket=ticket())
    assert refused_code(seal_proof(body, ROUTE[2].key)) == Code.FOREIGN_ROUTE
    body = body.model_copy(update={"route": route_statement()})
    assert refused_code(seal_proof(body, ROUTE[2].key)) == "invalid_signature"


ACCOMPLICE = WORKERS[5]
WITH_ACCOMPLICE = (ROUTE[0], ROUTE[1], Stage(ACCOMPLICE, (20, 30)))


@pytest.mark.parametrize(
    ("route", "code"),
    [
        (route_statement(), "invalid_signature"),
        (route_statement(WITH_ACCOMPLICE, signer=MIDDLE), Code.FOREIGN_ROUTE),
        (route_statement(WITH_ACCOMPLICE, signer=ACCOMPLICE), Code.FOREIGN_ROUTE),
        (route_statement(WITH_ACCOMPLICE, request_id="another"), Code.FOREIGN_ROUTE),
        (route_statement(WITH_ACCOMPLICE, session=b"t" * 16), Code.FOREIGN_ROUTE),
        (route_statement(WITH_ACCOMPLICE, epoch=1), Code.FOREIGN_ROUTE),
    ],
    ids=[
        "the true route",
        "the worker's",
        "the accomplice's",
        "of another request",
        "of another session",
        "of an epoch",
    ],
)
def test_an_accomplice_that_signs_for_positions_that_never_were_brings_nothing(route: bytes, code: str) -> None:
    """A stage before the tail names whom it likes as its downstream; the neighbour that served is paid for what there was."""
    ledger = PaperLedger()
    boast = proof_body(1, route=WITH_ACCOMPLICE, positions=1000, sealed_route=route)
    refused = ledger.settle(seal_proof(boast, MIDDLE))
    assert (refused.status, refused.code) == ("refused", code)
    for index in (0, 2):
        honest = ledger.settle(seal_proof(proof_body(index), ROUTE[index].key))
        assert honest.micro_credits == credits_for(TEN_LAYERS, 300)
    assert ledger.balance(MIDDLE) == 0


@pytest.mark.parametrize(
    "route",
    [
        (ROUTE[0], Stage(MIDDLE, (10, 21)), Stage(ROUTE[2].key, (21, 30))),
        (ROUTE[0], Stage(WORKERS[4], (10, 20)), ROUTE[2]),
        (ROUTE[0], ROUTE[1]),
        (*ROUTE, Stage(ACCOMPLICE, (30, 31))),
    ],
    ids=["other layers", "without the worker", "too short", "too long"],
)
def test_a_route_without_this_worker_on_these_layers_is_refused(route: tuple[Stage, ...]) -> None:
    body = proof_body(sealed_route=route_statement(route))
    assert refused_code(seal_proof(body, MIDDLE)) == Code.FOREIGN_ROUTE


@pytest.mark.parametrize("raw", [ticket(), b"route"], ids=["of another domain", "no envelope"])
def test_a_route_that_is_no_statement_is_refused(raw: bytes) -> None:
    assert refused_code(seal_proof(proof_body(sealed_route=raw), MIDDLE)) in ("invalid_signature", "malformed_message")


def test_the_stages_of_a_chain_cost_one_verification_of_its_route() -> None:
    statement = route_statement(session=b"u" * 16)
    verified = evidence._open_route.cache_info().misses
    for index, stage in enumerate(ROUTE):
        body = proof_body(index, session=b"u" * 16, sealed_route=statement)
        verify_proof(seal_proof(body, stage.key), TERMS, NOW)
    assert evidence._open_route.cache_info().misses == verified + 1


def test_a_tail_that_proves_all_but_its_last_layer_is_no_less_a_tail() -> None:
    tail, friend = ROUTE[2].key, WORKERS[5]
    shorter = (ROUTE[0], ROUTE[1], Stage(tail, (20, 29)), Stage(friend, (29, 30)))
    body = proof_body(2, route=shorter, sealed_lease=lease(tail, (20, 30)))
    assert refused_code(seal_proof(body, tail)) == Code.UNLEASED_LAYERS


def test_a_later_proof_that_contradicts_an_earlier_one_is_refused() -> None:
    ledger = PaperLedger()
    ledger.settle(seal_proof(proof_body(), MIDDLE))
    settled = ledger.settle(seal_proof(proof_body(salt_in="edited"), MIDDLE))
    assert (settled.status, settled.code) == ("refused", Code.PROOF_CONFLICT)
    assert MIDDLE.peer_id in str(settled.reason)


@pytest.mark.parametrize("first", [0, 1])
def test_neighbours_that_do_not_fit_are_held_and_both_named(first: int) -> None:
    """G-RCPT-2: one stage's output is the next one's input, on every position that both state."""
    ledger = PaperLedger()
    proofs = [
        seal_proof(proof_body(0, positions=500), ROUTE[0].key),
        seal_proof(proof_body(1, positions=300, salt_in="edited"), MIDDLE),
    ]
    assert ledger.settle(proofs[first]).status == "settled"
    odd = ledger.settle(proofs[1 - first])
    assert (odd.status, odd.code, odd.micro_credits) == ("held", Code.NEIGHBOUR_MISMATCH, 0)
    assert ROUTE[0].key.peer_id in str(odd.reason)
    assert MIDDLE.peer_id in str(odd.reason)


def test_neighbours_that_stopped_at_different_positions_fit_on_their_common_prefix() -> None:
    ledger = PaperLedger()
    for index, positions in ((0, 350), (1, 270), (2, 230)):
        assert ledger.settle(seal_proof(proof_body(index, positions=positions), ROUTE[index].key)).status == "settled"


ELSEWHERE = (ROUTE[0], Stage(WORKERS[4], (10, 20)), Stage(WORKERS[5], (20, 30)))


def test_of_two_routes_of_one_epoch_the_first_settles_and_the_other_is_held() -> None:
    """Stages that share no neighbour: the requester alone contradicts itself."""
    ledger = PaperLedger()
    assert ledger.settle(seal_proof(proof_body(0), ROUTE[0].key)).status == "settled"
    for index in (1, 2):
        odd = ledger.settle(seal_proof(proof_body(index, route=ELSEWHERE), ELSEWHERE[index].key))
        assert (odd.status, odd.code, odd.micro_credits) == ("held", Code.NEIGHBOUR_MISMATCH, 0)
        assert REQUESTER.peer_id in str(odd.reason)
    for index in (1, 2):
        assert ledger.settle(seal_proof(proof_body(index), ROUTE[index].key)).status == "settled"


def test_another_epoch_or_session_may_have_another_route_and_the_same_one_may_be_sealed_again() -> None:
    ledger = PaperLedger()
    ledger.settle(seal_proof(proof_body(0), ROUTE[0].key))
    later = proof_body(1, route=ELSEWHERE, epoch=1)
    assert ledger.settle(seal_proof(later, WORKERS[4])).status == "settled"
    other = proof_body(2, route=ELSEWHERE, session=b"t" * 16)
    assert ledger.settle(seal_proof(other, WORKERS[5])).status == "settled"
    again = route_statement(at=NOW + 1)
    assert ledger.settle(seal_proof(proof_body(1, sealed_route=again), MIDDLE)).status == "settled"


def test_a_worker_that_proves_two_routes_of_one_epoch_is_refused() -> None:
    ledger = PaperLedger()
    ledger.settle(seal_proof(proof_body(0), ROUTE[0].key))
    settled = ledger.settle(seal_proof(proof_body(0, route=ELSEWHERE), ROUTE[0].key))
    assert (settled.status, settled.code) == ("refused", Code.PROOF_CONFLICT)


def test_a_proof_that_was_paid_in_part_before_routes_were_stated_is_paid_the_rest() -> None:
    before, ledger = PaperLedger(), PaperLedger()
    before.settle(seal_proof(proof_body(receipted=200), MIDDLE))
    (change,) = before.changes
    assert isinstance(change, ProofSettled)
    ledger.state.apply(change.model_copy(update={"route": None}), NOW)
    assert ledger.settle(seal_proof(proof_body(), MIDDLE)).micro_credits == credits_for(TEN_LAYERS, 300)
    odd = ledger.settle(
        seal_proof(proof_body(2, route=(ROUTE[0], Stage(WORKERS[4], (10, 20)), ROUTE[2])), ROUTE[2].key)
    )
    assert odd.code == Code.NEIGHBOUR_MISMATCH


# ---- Attribution and forgetting ----


def test_a_refusal_blames_the_signer_of_the_proof() -> None:
    body = proof_body(sealed_ticket=ticket(max_positions=1))
    with pytest.raises(ProofRefused) as caught:
        verify_proof(seal_proof(body, MIDDLE), TERMS, NOW)
    assert caught.value.peer == MIDDLE.peer_id


def test_a_proof_whose_own_signature_fails_blames_nobody() -> None:
    raw = bytearray(seal_proof(proof_body(), MIDDLE))
    raw[-1] ^= 1
    with pytest.raises(ProofRefused) as caught:
        verify_proof(bytes(raw), TERMS, NOW)
    assert caught.value.peer is None


def test_a_ticket_is_forgotten_after_its_time_and_never_paid_again() -> None:
    ledger = PaperLedger()
    proof = seal_proof(proof_body(), MIDDLE)
    ledger.settle(proof)
    assert expire(ledger.state, NOW + WEEK - 1) is None
    change = expire(ledger.state, NOW + WEEK)
    assert change is not None
    ledger.state.apply(change, NOW)
    assert expire(ledger.state, NOW + WEEK) is None
    assert set(ledger.tables.content()) == {"accounts", "state"}
    # Even by an orchestrator whose clock was set back.
    assert ledger.settle(proof, NOW).code == Code.TICKET_EXPIRED
    assert ledger.balance(MIDDLE) == credits_for(TEN_LAYERS, 300)


def test_a_requester_may_be_a_stage_of_its_own_route() -> None:
    route = (ROUTE[0], ROUTE[1], Stage(REQUESTER, (20, 30)))
    ledger = PaperLedger()
    for index, stage in enumerate(route):
        assert ledger.settle(seal_proof(proof_body(index, route=route), stage.key)).status == "settled"


def test_a_mesh_of_one_worker_that_asks_itself_is_paid() -> None:
    alone: NodeKey = REQUESTER
    ledger = PaperLedger()
    body = proof_body(0, route=(Stage(alone, (0, 30)),))
    assert ledger.settle(seal_proof(body, alone)).micro_credits == credits_for(LayerRange(0, 30), 300)
