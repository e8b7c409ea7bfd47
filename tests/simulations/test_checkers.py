"""Checkers: content with a real run, and not with any of its hostile twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from simulations.checkers import CHECKERS, check
from simulations.observations import Absence, CoverageSample, Observations, Separation
from simulations.scenario import Scenario
from tessella_p2p.base.errors import LocalProtocolError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import LEASE_TTL_S
from tessella_p2p.ledger.accounts import ISSUANCE
from tessella_p2p.ledger.changes import JournalEntry, ProofSettled
from tests.simulations.small_runs import small_scenario

SCENARIO: Scenario = small_scenario()
HEALTHY_S = SCENARIO.faults_end_s + SCENARIO.bounds.recovery_s
STRANGER = PeerId("12D3KooWKfXRUaXcTXfJ9CyewqE19kEGvhiMZkbdQAAWmuxQbdwn")


def violated(seen: Observations) -> dict[str, str]:
    """The first problem of each checker that is not content."""
    found: dict[str, str] = {}
    for violation in check(seen, SCENARIO):
        found.setdefault(violation.checker, violation.problem)
    return found


def test_a_real_run_contents_every_checker(honest_run: Observations) -> None:
    assert violated(honest_run) == {}
    assert len(honest_run.asked) > 10
    assert honest_run.journal
    assert len(honest_run.absences) == 2
    assert {asked.outcome for asked in honest_run.asked} >= {"answered", "abandoned"}
    assert any(asked.temperature for asked in honest_run.asked if asked.outcome == "answered")


# ---- Answers


def index_of(seen: Observations, outcome: str) -> int:
    return next(i for i, asked in enumerate(seen.asked) if asked.outcome == outcome and len(asked.tokens) > 1)


@pytest.mark.parametrize("outcome", ["answered", "abandoned"])
def test_a_wrong_token_is_caught_and_named(seen: Observations, outcome: str) -> None:
    index = index_of(seen, outcome)
    tokens = seen.asked[index].tokens
    seen.asked[index] = replace(seen.asked[index], tokens=(tokens[0], tokens[1] ^ 1, *tokens[2:]))
    assert "token 1 is wrong" in violated(seen)["tokens"]


def test_an_answer_that_ends_early_is_caught(seen: Observations) -> None:
    index = index_of(seen, "answered")
    seen.asked[index] = replace(seen.asked[index], tokens=seen.asked[index].tokens[:-1])
    assert set(violated(seen)) == {"tokens"}


def test_more_tokens_than_were_asked_for_are_caught(seen: Observations) -> None:
    index = index_of(seen, "answered")
    seen.asked[index] = replace(seen.asked[index], tokens=(*seen.asked[index].tokens, 7))
    assert set(violated(seen)) == {"tokens"}


def test_a_refusal_counts_only_once_the_mesh_had_its_time(seen: Observations) -> None:
    index = index_of(seen, "answered")
    refused = replace(seen.asked[index], outcome="refused", code="no_route", tokens=())
    seen.asked[index] = refused
    assert violated(seen) == {}
    seen.asked[index] = replace(refused, at_s=HEALTHY_S + 1)
    assert "no_route" in violated(seen)["answered"]


# ---- Stages and routes


def test_an_older_epoch_after_a_newer_one_is_caught_within_a_process(seen: Observations) -> None:
    first = seen.epochs[0]
    newer, older = replace(first, epoch=3), replace(first, epoch=2)
    seen.epochs += [newer, replace(older, start=first.start + 1), replace(older, peer=STRANGER)]
    assert violated(seen) == {}
    seen.epochs.append(older)
    assert "epoch 2" in violated(seen)["epochs"]


@pytest.mark.parametrize("twin", ["gap", "overlap", "short", "peer twice"])
def test_a_route_that_is_no_chain_is_caught(seen: Observations, twin: str) -> None:
    (a, la), (b, lb), *rest = seen.chains[0].stages
    stages = {
        "gap": ((a, la), (b, (lb[0] + 1, lb[1])), *rest),
        "overlap": ((a, la), (b, (lb[0] - 1, lb[1])), *rest),
        "short": ((a, la), (b, lb)),
        "peer twice": ((a, la), (a, lb), *rest),
    }[twin]
    seen.chains[0] = replace(seen.chains[0], stages=stages)
    assert "routes" in violated(seen)


def stage_of_a_chain(seen: Observations) -> tuple[int, PeerId, tuple[int, int]]:
    """A late chain, and the peer and layers of its first stage."""
    index = len(seen.chains) - 1
    peer, layers = seen.chains[index].stages[0]
    return index, peer, layers


def test_a_stage_without_any_lease_is_caught(seen: Observations) -> None:
    _, peer, _ = stage_of_a_chain(seen)
    seen.leases = [lease for lease in seen.leases if lease.peer != peer]
    found = violated(seen)
    assert "never had a lease" in found["leases"]
    assert "never had a lease" in found["hostile"]


def test_a_lease_that_came_later_is_none(seen: Observations) -> None:
    index, peer, _ = stage_of_a_chain(seen)
    at_s = seen.chains[index].at_s + 1
    seen.leases = [replace(lease, at_s=at_s) if lease.peer == peer else lease for lease in seen.leases]
    assert "never had a lease" in violated(seen)["leases"]


def test_a_lease_that_is_over_counts_only_while_the_orchestrator_is_away(seen: Observations) -> None:
    index, peer, _ = stage_of_a_chain(seen)
    seen.leases = [
        replace(lease, expires_ms=lease.expires_ms - int(LEASE_TTL_S * 1000)) if lease.peer == peer else lease
        for lease in seen.leases
    ]
    assert "lease is over" in violated(seen)["leases"]
    at_s = seen.chains[index].at_s
    seen.outages.append(Absence(seen.orchestrator, 0.0, at_s))
    assert "leases" not in violated(seen)


def test_a_range_that_was_given_up_is_caught(seen: Observations) -> None:
    index, peer, layers = stage_of_a_chain(seen)
    newest = [lease for lease in seen.leases if lease.peer == peer][-1]
    other = (layers[0] + 2, layers[1] + 2)
    moved = replace(newest, at_s=seen.chains[index].at_s - 1, serial=newest.serial + 100, layers=other)
    seen.leases.append(moved)
    assert violated(seen) == {}, "its old record may still be under way"
    seen.leases[-1] = replace(moved, at_s=0.1)
    seen.leases.sort(key=lambda lease: lease.serial)
    assert "although it has had layers" in violated(seen)["leases"]


def test_a_peer_that_is_long_gone_is_caught(seen: Observations) -> None:
    index, peer, _ = stage_of_a_chain(seen)
    at_s = seen.chains[index].at_s
    seen.absences.append(Absence(peer, at_s - SCENARIO.bounds.offline_s + 1, at_s + 5))
    assert violated(seen) == {}
    seen.absences[-1] = Absence(peer, -100.0, 0.0)
    assert violated(seen) == {}, "it was back"
    seen.absences[-1] = Absence(peer, at_s - SCENARIO.bounds.offline_s - 1)
    assert ", which has been gone for 2" in violated(seen)["stale records"]


def test_a_peer_behind_a_partition_is_gone_for_the_other_side_only(seen: Observations) -> None:
    chain = next(chain for chain in reversed(seen.chains) if chain.entry not in dict(chain.stages))
    peer, since_s = chain.stages[0][0], chain.at_s - SCENARIO.bounds.offline_s - 1
    everyone = {account.peer for account in seen.ends}
    seen.separations.append(Separation(frozenset(everyone), since_s))
    assert violated(seen) == {}
    seen.separations[-1] = Separation(frozenset({peer}), since_s)
    assert peer in violated(seen)["stale records"]


def test_a_stage_of_a_stranger_in_a_view_or_a_route_is_caught(seen: Observations) -> None:
    viewer = next(iter(seen.views))
    seen.views[viewer][STRANGER] = None
    assert STRANGER in violated(seen)["hostile"]
    del seen.views[viewer][STRANGER]
    seen.hostile.append(seen.chains[0].stages[0][0])
    assert "uses the hostile" in violated(seen)["hostile"]


# ---- Credits


def settled(entry: JournalEntry) -> ProofSettled:
    assert isinstance(entry.change, ProofSettled)
    return entry.change


def changed(entry: JournalEntry, **update: object) -> JournalEntry:
    return JournalEntry(at=entry.at, change=settled(entry).model_copy(update=update))


def pay_more(seen: Observations) -> None:
    amount = settled(seen.journal[0]).micro_credits
    seen.journal[0] = changed(seen.journal[0], micro_credits=amount + 1000)


def pay_less(seen: Observations) -> None:
    amount = settled(seen.journal[0]).micro_credits
    seen.journal[0] = changed(seen.journal[0], micro_credits=amount - 1000)


def pay_twice(seen: Observations) -> None:
    seen.journal.append(seen.journal[0])


def pay_another(seen: Observations) -> None:
    other = next(
        settled(entry).worker for entry in seen.journal if settled(entry).worker != settled(seen.journal[0]).worker
    )
    seen.journal[0] = changed(seen.journal[0], worker=other)


def pay_beyond_the_receipt(seen: Observations) -> None:
    change = settled(seen.journal[0])
    layers = change.layers[1] - change.layers[0]
    seen.journal[0] = changed(
        seen.journal[0],
        paid_positions=change.paid_positions + 1,
        micro_credits=change.micro_credits + 1000 * layers,
    )


def pay_without_a_proof(seen: Observations) -> None:
    seen.proofs = seen.proofs[1:]


def pay_a_damaged_proof(seen: Observations) -> None:
    raw = seen.proofs[0].proof
    seen.proofs[0] = replace(seen.proofs[0], proof=raw[:-1] + bytes([raw[-1] ^ 1]))


def pay_an_unleased_stage(seen: Observations) -> None:
    worker = settled(seen.journal[0]).worker
    seen.leases = [lease for lease in seen.leases if lease.peer != worker]


def mint(seen: Observations) -> None:
    index = next(i for i, account in enumerate(seen.accounts) if account.name != ISSUANCE)
    account = seen.accounts[index]
    seen.accounts[index] = replace(account, micro_credits=account.micro_credits + 1)


def shift(seen: Observations) -> None:
    """From one worker to another: the sum stays 0."""
    one, two = [i for i, account in enumerate(seen.accounts) if account.name != ISSUANCE][:2]
    for index, amount in ((one, 1000), (two, -1000)):
        account = seen.accounts[index]
        seen.accounts[index] = replace(account, micro_credits=account.micro_credits + amount)


TWINS: dict[Callable[[Observations], None], str] = {
    pay_more: "were due",
    pay_less: "were due",
    pay_twice: "0 were due",
    pay_another: "the proof is for something else",
    pay_beyond_the_receipt: "are confirmed",
    pay_without_a_proof: "no proof was uploaded",
    pay_a_damaged_proof: "no proof was uploaded",
    pay_an_unleased_stage: "was never granted",
    mint: "sum to 1 micro-credits",
    shift: "the journal gives",
}


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.__name__)
def test_what_the_ledger_may_never_do_is_caught(seen: Observations, twin: Callable[[Observations], None]) -> None:
    twin(seen)
    problems = [violation.problem for violation in check(seen, SCENARIO) if violation.checker == "credits"]
    assert any(TWINS[twin] in problem for problem in problems), problems


def test_a_proof_that_is_not_settled_at_the_end_is_caught(seen: Observations) -> None:
    end = seen.ends[0]
    assert end.proofs is not None
    seen.ends[0] = replace(end, proofs=replace(end.proofs, pending=1))
    assert "1 waiting" in violated(seen)["settled"]


def test_an_honest_proof_that_is_held_is_caught(seen: Observations) -> None:
    judged = seen.proofs[0]
    held = judged.settled.model_copy(update={"status": "held", "code": "no_receipt"})
    seen.proofs[0] = replace(judged, settled=held)
    assert "held: no_receipt" in violated(seen)["settled"]


# ---- Recovery and what is left


def test_a_hole_counts_only_once_the_mesh_had_its_time(seen: Observations) -> None:
    seen.coverage.append(CoverageSample(HEALTHY_S - 1, False, 6, (STRANGER,)))
    assert violated(seen) == {}
    seen.coverage.append(CoverageSample(HEALTHY_S + 1, True, 6, (STRANGER,)))
    assert STRANGER in violated(seen)["coverage"]
    seen.coverage[-1] = CoverageSample(HEALTHY_S + 1, None, 6, ())
    assert "orchestrator" in violated(seen)["coverage"]


def test_a_session_that_is_left_behind_is_caught(seen: Observations) -> None:
    end = seen.ends[0]
    seen.ends[0] = replace(end, kv_sessions=1)
    assert "KV of 1 sessions" in violated(seen)["leaks"]
    seen.ends[0] = replace(end, hop_sessions=2)
    assert "2 open ones" in violated(seen)["leaks"]
    seen.ends[0] = replace(end, up=False)
    assert "is not up" in violated(seen)["leaks"]


def test_what_a_role_did_not_expect_is_caught(seen: Observations) -> None:
    seen.failures.append(f"handler_failed exc_info={LocalProtocolError('a bug')!r}")
    assert "a bug" in violated(seen)["failures"]


def test_every_checker_says_what_it_holds_the_mesh_to() -> None:
    assert all((checker.__doc__ or "").strip().count("\n") == 0 for checker in CHECKERS.values())
