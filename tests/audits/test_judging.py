"""What follows from what auditors say: who failed, who lied, and when nobody can say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulations.liars import TRUTH, claim
from tessella_p2p.audits.judging import (
    COPIED_CANARY,
    FALSE_INPUT,
    FALSE_REPORT,
    HISTORY_WITHHELD,
    NO_AUDITOR,
    NOT_ADJUDICATED,
    WRONG_OUTPUT,
    Conclusion,
    Statement,
    conclude,
    penalty_micro_credits,
    statement_of,
)
from tessella_p2p.audits.sampling import Claim
from tessella_p2p.base.errors import InvalidRequest, RemoteProtocolError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_AUDITORS, MICRO_PER_CREDIT, MIN_PENALTY_CREDITS
from tessella_p2p.wire.envelope import seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import RECEIPT, AuditOrder, AuditReport, CanaryDigest, CanaryNamed, ReceiptBody

AUDITOR, WORKER, UPSTREAM, DOWNSTREAM, CANARY, STRANGER = (
    NodeKey(bytes([index]) * 32).peer_id for index in range(1, 7)
)
LIE, OTHER_LIE = b"l" * 32, b"o" * 32
HONEST = replace(claim(TRUTH), worker=WORKER, upstream=UPSTREAM, downstream=DOWNSTREAM)
LYING = replace(HONEST, output_digest=LIE)
ORDER = AuditOrder(
    audit_id=bytes(16),
    auditor=AUDITOR,
    audited=WORKER,
    session=bytes(16),
    epoch=0,
    manifest_root=bytes(32),
    recipe="f32",
    layers=(0, 1),
    positions=1,
    input_digest=bytes(32),
    upstream=UPSTREAM,
    upstream_addresses=(),
    downstream=DOWNSTREAM,
    downstream_addresses=(),
    comparison="bitwise",
    canaries=(CanaryNamed(peer_id=CANARY, mode="scale"),),
    report_before=1,
)
BY_TOLERANCE = ORDER.model_copy(update={"comparison": "tolerance", "tolerance_ppm": 40, "output_digest": TRUTH})


def names(digest: bytes, auditor: str, *, truth_is: bytes = TRUTH, copied: PeerId | None = None) -> Statement:
    """An auditor that names ``digest``, about a worker that claims ``truth_is``."""
    return Statement(PeerId(auditor), digest == truth_is, digest, copied)


def withheld(auditor: str, by: PeerId = UPSTREAM) -> Statement:
    return Statement(PeerId(auditor), None, withheld_by=by, code="history_withheld")


def silent(auditor: str) -> Statement:
    return Statement(PeerId(auditor), None, code="no_report")


def ended(conclusion: Conclusion | None) -> Conclusion:
    assert conclusion is not None
    return conclusion


def failed(conclusion: Conclusion) -> set[str]:
    return {each.peer for each in (conclusion.worker, *conclusion.others) if each.verdict in ("failed", "copied")}


def report(**fields: object) -> AuditReport:
    return AuditReport.model_validate({"audit_id": bytes(16), "outcome": "computed", **fields})


# ---- Reports ----


def test_the_workers_own_digest_agrees_and_any_other_does_not() -> None:
    assert statement_of(HONEST, ORDER, report(output_digest=TRUTH)) == Statement(AUDITOR, True, TRUTH)
    assert statement_of(LYING, ORDER, report(output_digest=TRUTH)) == Statement(AUDITOR, False, TRUTH)


def test_by_tolerance_the_deviation_decides() -> None:
    assert statement_of(HONEST, BY_TOLERANCE, report(error_ppm=40)) == Statement(AUDITOR, True)
    assert statement_of(HONEST, BY_TOLERANCE, report(error_ppm=41)) == Statement(AUDITOR, False)


def test_a_known_wrong_answer_names_its_scale_canary() -> None:
    known = (CanaryDigest(peer_id=CANARY, digest=LIE),)
    assert statement_of(LYING, ORDER, report(output_digest=TRUTH, canary_digests=known)).copied == CANARY
    other = (CanaryDigest(peer_id=CANARY, digest=OTHER_LIE),)
    assert statement_of(LYING, ORDER, report(output_digest=TRUTH, canary_digests=other)).copied is None


def test_nothing_is_copied_from_a_stranger_from_an_echo_or_by_an_honest_worker() -> None:
    stranger = (CanaryDigest(peer_id=STRANGER, digest=LIE),)
    assert statement_of(LYING, ORDER, report(output_digest=TRUTH, canary_digests=stranger)).copied is None
    echo = ORDER.model_copy(update={"canaries": (CanaryNamed(peer_id=CANARY, mode="echo"),)})
    known = (CanaryDigest(peer_id=CANARY, digest=LIE),)
    assert statement_of(LYING, echo, report(output_digest=TRUTH, canary_digests=known)).copied is None
    true = (CanaryDigest(peer_id=CANARY, digest=TRUTH),)
    assert statement_of(HONEST, ORDER, report(output_digest=TRUTH, canary_digests=true)).copied is None


@pytest.mark.parametrize(
    ("order", "fields", "param"),
    [
        (ORDER, {}, "output_digest"),
        (ORDER, {"error_ppm": 0}, "output_digest"),
        (BY_TOLERANCE, {"output_digest": TRUTH}, "error_ppm"),
        (ORDER, {"outcome": "inconclusive", "withheld_by": STRANGER}, "withheld_by"),
        (ORDER, {"outcome": "inconclusive", "withheld_by": WORKER}, "withheld_by"),
    ],
)
def test_a_report_without_what_its_outcome_needs_is_refused(
    order: AuditOrder, fields: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        statement_of(HONEST, order, report(**fields))
    assert refused.value.param == param


# ---- Conclusions ----


def test_one_auditor_that_finds_the_claim_is_enough() -> None:
    conclusion = ended(conclude(HONEST, [names(TRUTH, "a")], recheck=False, exhausted=False))
    assert conclusion.worker.verdict == "passed"
    assert conclusion.worker.auditor == "a"
    assert not conclusion.others


def test_a_recheck_hears_a_second_auditor_if_there_is_one() -> None:
    assert conclude(HONEST, [names(TRUTH, "a")], recheck=True, exhausted=False) is None
    assert ended(conclude(HONEST, [names(TRUTH, "a")], recheck=True, exhausted=True)).worker.verdict == "passed"
    twice = [names(TRUTH, "a"), names(TRUTH, "b")]
    assert ended(conclude(HONEST, twice, recheck=True, exhausted=False)).worker.verdict == "passed"


def lie_seen_by(*auditors: str) -> list[Statement]:
    return [names(TRUTH, auditor, truth_is=LIE) for auditor in auditors]


def test_one_accusation_is_adjudicated_and_condemns_nobody() -> None:
    assert conclude(LYING, lie_seen_by("a"), recheck=False, exhausted=False) is None
    conclusion = ended(conclude(LYING, lie_seen_by("a"), recheck=False, exhausted=True))
    assert (conclusion.worker.verdict, conclusion.worker.code) == ("inconclusive", NOT_ADJUDICATED)
    assert not failed(conclusion)


def test_two_auditors_condemn_a_liar_where_there_are_no_more_and_three_where_there_are() -> None:
    assert conclude(LYING, lie_seen_by("a", "b"), recheck=False, exhausted=False) is None
    for auditors, exhausted in ((("a", "b"), True), (("a", "b", "c"), False)):
        conclusion = ended(conclude(LYING, lie_seen_by(*auditors), recheck=False, exhausted=exhausted))
        assert (conclusion.worker.verdict, conclusion.worker.code) == ("failed", WRONG_OUTPUT)
        assert (conclusion.worker.auditor, conclusion.worker.adjudicator) == ("a", "b")
        assert failed(conclusion) == {WORKER}


def test_a_lying_auditor_is_the_one_who_fails() -> None:
    said = [names(LIE, "liar"), names(TRUTH, "b")]
    assert conclude(HONEST, said, recheck=False, exhausted=False) is None
    conclusion = ended(conclude(HONEST, said, recheck=False, exhausted=True))  # beside the worker's own word
    assert conclusion.worker.verdict == "passed"
    assert [(each.peer, each.code) for each in conclusion.others] == [("liar", FALSE_REPORT)]
    said += [names(TRUTH, "c"), names(TRUTH, "d")]
    assert failed(ended(conclude(HONEST, said, recheck=False, exhausted=False))) == {"liar"}


def test_an_auditor_that_covers_a_liar_fails_with_it() -> None:
    said = [names(LIE, "accomplice", truth_is=LIE), *lie_seen_by("a", "b", "c")]
    conclusion = ended(conclude(LYING, said, recheck=True, exhausted=False))
    assert failed(conclusion) == {WORKER, "accomplice"}


@pytest.mark.parametrize("others", [[withheld("c"), withheld("d")], [silent("c")]], ids=["withheld", "silent"])
def test_nobody_is_a_liar_by_the_workers_own_word_where_others_were_kept_from_saying_anything(
    others: list[Statement],
) -> None:
    """Else a liar, its upstream peer and one accomplice make a liar of whoever tells the truth, however many replicas there are."""
    said = [*lie_seen_by("honest"), names(LIE, "accomplice", truth_is=LIE), *others]
    conclusion = ended(conclude(LYING, said, recheck=False, exhausted=True))
    assert conclusion.worker.verdict == "inconclusive"
    assert failed(conclusion) == set()


def test_different_accusations_do_not_add_up() -> None:
    said = [names(LIE, "a"), names(OTHER_LIE, "b")]
    conclusion = ended(conclude(HONEST, said, recheck=False, exhausted=True))
    assert conclusion.worker.code == NOT_ADJUDICATED
    assert not failed(conclusion)


def test_as_many_for_as_against_is_inconclusive() -> None:
    said = [*lie_seen_by("a", "b"), names(LIE, "c", truth_is=LIE), names(LIE, "d", truth_is=LIE)]
    conclusion = ended(conclude(LYING, said, recheck=False, exhausted=True))
    assert conclusion.worker.verdict == "inconclusive"
    assert not failed(conclusion)


def test_a_copier_copied_only_if_the_others_see_it_too() -> None:
    both = [names(TRUTH, auditor, truth_is=LIE, copied=CANARY) for auditor in ("a", "b")]
    conclusion = ended(conclude(LYING, both, recheck=False, exhausted=True))
    assert (conclusion.worker.verdict, conclusion.worker.code) == ("copied", COPIED_CANARY)
    one = [names(TRUTH, "a", truth_is=LIE, copied=CANARY), names(TRUTH, "b", truth_is=LIE)]
    assert ended(conclude(LYING, one, recheck=False, exhausted=True)).worker.verdict == "failed"


def test_a_history_that_two_auditors_are_not_shown_is_counted_against_who_withheld_it() -> None:
    assert conclude(HONEST, [withheld("a")], recheck=False, exhausted=False) is None
    conclusion = ended(conclude(HONEST, [withheld("a"), withheld("b")], recheck=False, exhausted=False))
    assert conclusion.worker.verdict == "inconclusive"
    assert [(each.peer, each.verdict, each.code) for each in conclusion.others] == [
        (UPSTREAM, "inconclusive", HISTORY_WITHHELD)
    ]
    assert not failed(conclusion)


def test_one_auditor_that_is_shown_the_history_is_enough() -> None:
    conclusion = ended(conclude(HONEST, [withheld("a"), names(TRUTH, "b")], recheck=False, exhausted=False))
    assert conclusion.worker.verdict == "passed"


def test_silence_is_inconclusive_once_nobody_is_left() -> None:
    assert conclude(HONEST, [silent("a"), silent("b")], recheck=False, exhausted=False) is None
    conclusion = ended(conclude(HONEST, [silent("a")], recheck=False, exhausted=True))
    assert (conclusion.worker.verdict, conclusion.worker.code) == ("inconclusive", "no_report")
    assert ended(conclude(HONEST, [], recheck=False, exhausted=True)).worker.code == NO_AUDITOR


def test_by_tolerance_auditors_condemn_and_are_never_punished() -> None:
    beyond = [Statement(PeerId("a"), False), Statement(PeerId("b"), False)]
    assert failed(ended(conclude(LYING, beyond, recheck=False, exhausted=True))) == {WORKER}
    mixed = [Statement(PeerId("a"), False), Statement(PeerId("b"), True), Statement(PeerId("c"), True)]
    conclusion = ended(conclude(HONEST, mixed, recheck=False, exhausted=True))
    assert conclusion.worker.verdict == "passed"
    assert not failed(conclusion)


@st.composite
def statements(draw: st.DrawFn, *, most_lies: int) -> Sequence[Statement]:
    """About an honest worker: honest auditors, some that could not say, and at most so many that each name a lie of their own."""
    kinds = draw(st.lists(st.sampled_from(["honest", "withheld", "silent", "lie"]), max_size=MAX_AUDITORS))
    said: list[Statement] = []
    for index, kind in enumerate(kinds):
        if kind == "lie" and sum(each.agrees is False for each in said) < most_lies:
            said.append(names(bytes([index]) * 32, f"liar {index}"))
        elif kind == "withheld":
            said.append(withheld(f"honest {index}"))
        elif kind == "silent":
            said.append(silent(f"honest {index}"))
        else:
            said.append(names(TRUTH, f"honest {index}"))
    return said


@given(statements(most_lies=MAX_AUDITORS), st.booleans(), st.booleans())
def test_liars_that_do_not_conspire_condemn_nobody(said: Sequence[Statement], recheck: bool, exhausted: bool) -> None:
    conclusion = conclude(HONEST, said, recheck=recheck, exhausted=exhausted)
    if conclusion is not None:
        assert all(peer.startswith("liar") for peer in failed(conclusion))


@given(statements(most_lies=MAX_AUDITORS), st.booleans())
def test_an_audit_ends(said: Sequence[Statement], recheck: bool) -> None:
    assert conclude(HONEST, said, recheck=recheck, exhausted=True) is not None
    full = [*said, *(silent(f"silent {index}") for index in range(MAX_AUDITORS - len(said)))]
    assert conclude(HONEST, full, recheck=recheck, exhausted=False) is not None


# ---- Penalties ----


@given(st.floats(0.001, 1.0), st.integers(0, 2**40))
def test_lying_does_not_pay(share: float, micro_credits: int) -> None:
    """A lie in every proof earns 1/share proofs until the first audit; the penalty is more than that."""
    penalty = penalty_micro_credits(replace(LYING, micro_credits=micro_credits), share)
    assert penalty >= min(2**46, int(micro_credits / share))
    assert MIN_PENALTY_CREDITS * MICRO_PER_CREDIT <= penalty <= 2**46


def test_without_a_share_a_lie_costs_twice_its_worth() -> None:
    assert penalty_micro_credits(replace(LYING, micro_credits=10**9), 0.0) == 2 * 10**9


# ---- A false input ----

WORKER_KEY, STRANGER_KEY = NodeKey(bytes([2]) * 32), NodeKey(bytes([6]) * 32)
AT, FURTHER = 4, 7


def receipt(positions: int, digest: bytes, *, signer: NodeKey = WORKER_KEY, **changes: object) -> bytes:
    fields: dict[str, object] = {
        "request_id": HONEST.request_id,
        "session": HONEST.session,
        "epoch": HONEST.epoch,
        "sender": UPSTREAM,
        "positions": positions,
        "digest": digest,
    }
    body = ReceiptBody.model_validate(fields | changes)
    return seal(signer, RECEIPT, body, sequence=1, now_ms=1, audience=body.sender)


def proves_input(digest: bytes) -> Claim:
    return replace(HONEST, positions=AT, input_digest=digest, inputs={1: TRUTH, AT: digest, FURTHER: digest})


def contradicted(sealed: bytes | None) -> AuditReport:
    return report(outcome="contradicted", receipt=sealed, code=FALSE_INPUT)


@pytest.mark.parametrize("positions", [AT, FURTHER])
def test_two_signatures_of_the_worker_that_contradict_each_other_fail_it_whatever_others_say(positions: int) -> None:
    lying = proves_input(LIE)
    proven = statement_of(lying, ORDER, contradicted(receipt(positions, TRUTH)))
    assert (proven.agrees, proven.is_proven) == (False, True)
    others = [names(TRUTH, f"auditor {number}") for number in range(MAX_AUDITORS - 1)]
    for recheck in (False, True):
        conclusion = ended(conclude(lying, [*others, proven], recheck=recheck, exhausted=False))
        assert (conclusion.worker.verdict, conclusion.worker.code) == ("failed", FALSE_INPUT)
        assert conclusion.worker.auditor == AUDITOR
        assert conclusion.others == (), "who was shown another history said the truth about that"


def test_a_receipt_for_more_than_the_proof_states_is_one_auditors_word() -> None:
    lying = proves_input(LIE)
    said = statement_of(lying, ORDER, contradicted(receipt(FURTHER + 1, TRUTH)))
    assert (said.agrees, said.is_proven, said.digest) == (False, False, None)
    again = [replace(said, auditor=PeerId(f"auditor {number}")) for number in range(3)]
    assert conclude(lying, again[:1], recheck=False, exhausted=False) is None
    conclusion = ended(conclude(lying, again, recheck=False, exhausted=False))
    assert (conclusion.worker.verdict, conclusion.worker.code) == ("failed", FALSE_INPUT)
    agreeing = [names(TRUTH, f"other {number}") for number in range(3)]
    outvoted = ended(conclude(lying, [again[0], *agreeing], recheck=False, exhausted=True))
    assert outvoted.worker.verdict == "passed"
    assert outvoted.others == (), "its upstream peer may have shown it something else"


@pytest.mark.parametrize(
    "sealed",
    [
        None,
        b"no receipt",
        receipt(AT, LIE, signer=STRANGER_KEY),
        receipt(AT, LIE, session=b"x" * 16),
        receipt(AT, LIE, epoch=HONEST.epoch + 1),
        receipt(AT, LIE, request_id="another"),
        receipt(AT, LIE, sender=STRANGER),
        receipt(AT, TRUTH),
        receipt(1, TRUTH),
        receipt(2, LIE),
    ],
    ids=[
        "none",
        "garbage",
        "forged",
        "session",
        "epoch",
        "request",
        "sender",
        "the proof's own",
        "a mark's",
        "of less",
    ],
)
def test_what_contradicts_nothing_is_no_report(sealed: bytes | None) -> None:
    with pytest.raises((InvalidRequest, RemoteProtocolError)):
        statement_of(proves_input(TRUTH), ORDER, contradicted(sealed))
