"""Verifying in child processes gives what verifying in place gives, also when they die; and they die with their parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest

from tessella_p2p.ledger.evidence import ProofRefused, SettlementTerms
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.ledger.verifiers import ProofVerifiers, Verified, verify_in_place
from tests.ledger.proving import LAYERS, NOW, ORCHESTRATOR, ROOT, ROUTE, TERMS, proof_body, seal_proof, ticket

PROJECT = Path(__file__).parents[2]
GOOD = [
    seal_proof(proof_body(stage, request_id=f"request-{number}"), ROUTE[stage].key)
    for number in range(4)
    for stage in range(3)
]
BAD = [
    b"junk",
    seal_proof(proof_body(), ROUTE[0].key),
    seal_proof(proof_body(sealed_ticket=ticket(max_positions=1)), ROUTE[1].key),
    seal_proof(proof_body(receipted=None), ROUTE[1].key),
]
MIXED = [*GOOD[:6], *BAD, *GOOD[6:]]


def plain(verified: list[Verified]) -> list[object]:
    """What can be compared: two errors are equal when they say the same."""
    return [(e.reason_code, str(e), e.peer) if isinstance(e, ProofRefused) else e for e in verified]


@pytest.fixture
def two() -> Iterator[ProofVerifiers]:
    made = ProofVerifiers(2)
    yield made
    made.close()


def test_children_find_what_is_found_in_place(two: ProofVerifiers) -> None:
    for _ in range(2):
        assert plain(two(MIXED, TERMS, NOW)) == plain(verify_in_place(MIXED, TERMS, NOW))
    assert len(two.children()) == 1


def test_live_views_are_shown_as_they_are_at_the_moment(two: ProofVerifiers) -> None:
    layers = {ROOT: LAYERS}
    terms = SettlementTerms(ORCHESTRATOR.peer_id, MappingProxyType(layers))
    assert plain(two(GOOD, terms, NOW)) == plain(verify_in_place(GOOD, terms, NOW))
    layers[ROOT] = 20  # the routes of these proofs go on after that
    later = two(GOOD, terms, NOW)
    assert plain(later) == plain(verify_in_place(GOOD, terms, NOW))
    assert sum(isinstance(one, ProofRefused) for one in later) == len(GOOD)


def test_few_proofs_and_no_processes_are_verified_in_place() -> None:
    one = ProofVerifiers(1)
    assert plain(one(MIXED[:3], TERMS, NOW)) == plain(verify_in_place(MIXED[:3], TERMS, NOW))
    assert not one.children()
    none = ProofVerifiers(0)
    assert plain(none(MIXED, TERMS, NOW)) == plain(verify_in_place(MIXED, TERMS, NOW))


def test_a_child_that_dies_costs_nothing_and_another_takes_its_place(two: ProofVerifiers) -> None:
    two(MIXED, TERMS, NOW)
    [child] = two.children()
    os.kill(child, signal.SIGKILL)
    assert plain(two(MIXED, TERMS, NOW)) == plain(verify_in_place(MIXED, TERMS, NOW))
    assert not two.children()
    assert plain(two(MIXED, TERMS, NOW)) == plain(verify_in_place(MIXED, TERMS, NOW))
    assert two.children() != [child]


def test_where_no_child_can_be_started_it_is_done_in_place(
    two: ProofVerifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert plain(two(MIXED, TERMS, NOW)) == plain(verify_in_place(MIXED, TERMS, NOW))
    assert not two.children()


def test_a_ledger_settles_what_its_children_verified(tmp_path: Path, two: ProofVerifiers) -> None:
    store = LedgerStore(tmp_path / "ledger", verify=two)
    statuses = [one.settled.status for one in store.settle(MIXED, TERMS, NOW)]
    assert statuses == ["settled"] * 6 + ["refused"] * 3 + ["held"] + ["settled"] * 6
    assert store.content() == store.replay().content()
    store.close()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux tells so of the end of a process")
def test_closing_ends_the_children_and_a_parent_that_is_killed_takes_them_along(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from tests.ledger.test_verifiers import GOOD, NOW, TERMS, ProofVerifiers\n"
        "verifiers = ProofVerifiers(1)\n"
        "verifiers(GOOD, TERMS, NOW)\n"
        "print(*verifiers.children(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    # A process's descriptor is readable once it has ended.
    assert select.select([child], [], [], 30.0)[0] == [child]
    os.close(child)
    parent.stdin.close()
    parent.stdout.close()

    one = ProofVerifiers(1)
    one(GOOD, TERMS, NOW)
    own = os.pidfd_open(one.children()[0])
    one.close()
    assert select.select([own], [], [], 0.0)[0] == [own]
    os.close(own)
    assert plain(one(GOOD, TERMS, NOW)) == plain(verify_in_place(GOOD, TERMS, NOW))
    assert not one.children()
