"""Which proofs are audited: shares, odd ones, owed ones, and how soon liars are caught."""

from __future__ import annotations

import hashlib
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulations.liars import Crowd, hunt, steps_until_caught, verdicts
from tessella_p2p.audits.sampling import AuditSampler, Cause, claim_of
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import (
    AUDIT_QUORUM,
    MAX_AUDIT_POSITIONS,
    MAX_AUDITORS,
    MAX_MEMBERS,
    MICRO_PER_LAYER_POSITION,
)
from tessella_p2p.ledger.evidence import Code, ProvenWork
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import DigestMark, Proof, Settled, Ticket

SETTLED = Settled(status="settled", micro_credits=5)
ODD = Settled(status="held", code=Code.NEIGHBOUR_MISMATCH.value)


def key_of(name: str) -> NodeKey:
    return NodeKey(hashlib.sha256(name.encode()).digest())


WORKER, UPSTREAM, DOWNSTREAM, REQUESTER = (key_of(name).peer_id for name in ("w", "u", "d", "r"))


def proven(*, marks: tuple[int, ...] = (), positions: int = 10, layers: tuple[int, int] = (4, 8)) -> ProvenWork:
    points = tuple(
        DigestMark(positions=at, input=at.to_bytes(32, "big"), output=(at + 1).to_bytes(32, "big"))
        for at in (*marks, positions)
        if at
    )
    proof = Proof(
        request_id="request",
        ticket=b"ticket",
        lease=b"lease",
        route=b"route",
        session=bytes(16),
        epoch=1,
        opened_at=0,
        manifest_root=bytes(32),
        recipe="f32",
        layers=layers,
        positions=positions,
        input_digest=bytes(32),
        output_digest=bytes(32),
        compute_us=0,
    )
    ticket = Ticket(
        request_id="request",
        requester=REQUESTER,
        manifest_root=bytes(32),
        recipe="f32",
        tier="Leech",
        max_positions=1 << 20,
        open_before=1,
        settle_before=2,
    )
    return ProvenWork(
        worker=WORKER,
        payload_digest=bytes(32),
        proof=proof,
        ticket=ticket,
        layers=LayerRange(*layers),
        route=bytes(32),
        upstream=UPSTREAM,
        downstream=DOWNSTREAM,
        points=points,
        receipted=positions,
        unmatched=False,
    )


def test_a_claim_is_what_the_proof_says_at_its_end() -> None:
    claim = claim_of(proven(marks=(256, 512), positions=600), total_layers=8)
    assert claim is not None
    assert (claim.worker, claim.requester, claim.upstream, claim.downstream) == (
        WORKER,
        REQUESTER,
        UPSTREAM,
        DOWNSTREAM,
    )
    assert (claim.positions, claim.input_digest) == (600, (600).to_bytes(32, "big"))
    assert claim.output_digest == (601).to_bytes(32, "big")
    assert claim.is_tail
    assert claim.micro_credits == 4 * 600 * MICRO_PER_LAYER_POSITION


def test_a_very_long_session_is_audited_up_to_its_last_mark_within_the_limit() -> None:
    claim = claim_of(proven(marks=(256, MAX_AUDIT_POSITIONS, 40_960), positions=50_000), total_layers=30)
    assert claim is not None
    assert claim.positions == MAX_AUDIT_POSITIONS
    assert not claim.is_tail
    assert claim.micro_credits == 4 * 50_000 * MICRO_PER_LAYER_POSITION


def test_a_proof_of_nothing_and_one_without_a_mark_within_the_limit_claim_nothing() -> None:
    assert claim_of(proven(positions=0), 8) is None
    assert claim_of(proven(positions=MAX_AUDIT_POSITIONS + 1), 8) is None


@given(st.floats(0.01, 0.99), st.integers(0, 2**32))
def test_the_share_of_settled_proofs_is_audited(share: float, seed: int) -> None:
    sampler = AuditSampler(random.Random(seed), share, 0.0)
    picked = sum(sampler.cause(WORKER, SETTLED) is Cause.SAMPLED for _ in range(400))
    assert abs(picked - 400 * share) <= 6 * math.sqrt(400 * share * (1 - share)) + 1


@pytest.mark.parametrize(
    "answer",
    [
        Settled(status="duplicate", micro_credits=5),
        Settled(status="refused", code="replayed"),
        Settled(status="held", code=Code.NO_RECEIPT.value),
        Settled(status="settled", micro_credits=0, code=Code.ALREADY_PAID.value),
    ],
)
def test_what_brings_in_nothing_new_is_not_audited(answer: Settled) -> None:
    assert AuditSampler(random.Random(1), 1.0, 0.0).cause(WORKER, answer) is None
    assert AuditSampler(random.Random(1), 1.0, 0.0).cause(None, SETTLED) is None


def test_an_odd_proof_is_always_audited() -> None:
    sampler = AuditSampler(random.Random(1), 0.0, 0.0)
    assert sampler.cause(WORKER, ODD) is Cause.ODD
    assert sampler.cause(WORKER, SETTLED) is None


def test_who_is_owed_an_audit_gets_it_with_the_next_proof_and_once() -> None:
    sampler = AuditSampler(random.Random(1), 0.0, 0.0)
    sampler.owe(WORKER)
    sampler.owe(WORKER)
    assert sampler.cause(UPSTREAM, SETTLED) is None
    assert sampler.cause(WORKER, SETTLED) is Cause.OWED
    assert sampler.cause(WORKER, SETTLED) is None


def test_owed_audits_are_bounded_and_the_oldest_is_forgotten() -> None:
    sampler = AuditSampler(random.Random(1), 0.0, 0.0)
    sampler.owe(WORKER)
    for index in range(MAX_MEMBERS):
        sampler.owe(PeerId(f"peer {index}"))
    assert sampler.cause(WORKER, SETTLED) is None
    assert sampler.cause(PeerId("peer 0"), SETTLED) is Cause.OWED


def test_the_bound_is_the_one_of_the_design() -> None:
    assert [steps_until_caught(p) for p in (1.0, 0.5, 0.1)] == [1, 17, 110]
    for p in (0.0, -0.1, 1.1):
        with pytest.raises(ValueError, match="probability"):
            steps_until_caught(p)


@given(st.floats(1e-6, 0.999))
def test_within_the_bound_a_liar_escapes_with_one_in_a_hundred_thousand(p: float) -> None:
    n = steps_until_caught(p)
    assert (1 - p) ** n <= 1.0001e-5
    assert n == 1 or (1 - p) ** (n - 1) > 0.999e-5


@pytest.mark.parametrize("lie_share", [1.0, 0.5, 0.1])
def test_liars_are_caught_within_the_bound_of_audited_steps(lie_share: float) -> None:
    rng = random.Random(f"liars {lie_share}")
    assert all(hunt(lie_share, rng).audited_steps <= steps_until_caught(lie_share) for _ in range(100))


def test_no_honest_node_is_slashed_in_a_million_audits() -> None:
    crowd = Crowd(lying=0.01, withheld=0.01, silent=0.01)
    counts = verdicts(1_000_000, crowd, random.Random("a million"))
    slashed = {name for name in counts if name.endswith((":failed", ":copied"))}
    assert slashed == {"liar:failed"}
    assert counts["worker:passed"] > 999_000


def test_auditors_that_conspire_frame_less_than_their_share_cubed_allows() -> None:
    """Where enough others can be asked, three conspirators among the first five are needed."""
    counts = verdicts(20_000, Crowd(colluding=0.1), random.Random("conspiracy"), MAX_AUDITORS)
    assert 0 < counts["worker:failed"] < 20_000 * math.comb(MAX_AUDITORS, AUDIT_QUORUM) * 0.1**AUDIT_QUORUM
    assert counts["conspirator:failed"] > counts["worker:failed"]
