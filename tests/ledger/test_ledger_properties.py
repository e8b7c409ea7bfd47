"""Credits are conserved and each layer·position is paid at most once, whatever arrives in whatever order."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import LocalProtocolError, MalformedMessage
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.ledger.accounts import ISSUANCE, Accounts, Transfer
from tessella_p2p.ledger.changes import JournalEntry, decode_entry, encode_entry
from tessella_p2p.ledger.evidence import ProofRefused, verify_proof
from tessella_p2p.ledger.settlement import expire
from tessella_p2p.ledger.state import LedgerState
from tessella_p2p.ledger.tables import DictTables
from tests.ledger.proving import NOW, ROUTE, TERMS, WEEK, WORKERS, PaperLedger, Stage, proof_body, seal_proof


@dataclass(frozen=True)
class Work:
    """One proof that some worker may send."""

    request: int
    epoch: int
    stage: int
    replica: bool
    positions: int
    receipted: int | None
    honest: bool


work = st.builds(
    Work,
    request=st.integers(0, 1),
    epoch=st.integers(0, 1),
    stage=st.integers(0, 2),
    replica=st.booleans(),
    positions=st.sampled_from((0, 100, 150, 300)),
    receipted=st.sampled_from((None, 100, 250, -1)),
    honest=st.sampled_from((True, True, True, False)),
)


@lru_cache(maxsize=4096)
def sealed(one: Work) -> bytes:
    key = WORKERS[3 + one.stage] if one.replica else ROUTE[one.stage].key
    route = [*ROUTE]
    route[one.stage] = Stage(key, ROUTE[one.stage].layers)
    body = proof_body(
        one.stage,
        route=route,
        epoch=one.epoch,
        positions=one.positions,
        receipted=one.receipted,
        request_id=f"request-{one.request}",
        salt_in="" if one.honest else "edited",
    )
    return seal_proof(body, key)


@settings(max_examples=60, deadline=None)
@given(st.lists(work, max_size=14))
def test_credits_are_conserved_and_each_layer_position_is_paid_once(works: list[Work]) -> None:
    ledger = PaperLedger()
    brought: defaultdict[bytes, int] = defaultdict(int)
    receipted: dict[tuple[int, int], int] = {}
    for one in works:
        raw = sealed(one)
        before = -ledger.state.accounts.get(ISSUANCE).micro_credits
        settled = ledger.settle(raw)
        issued = -ledger.state.accounts.get(ISSUANCE).micro_credits
        assert issued >= before
        assert ledger.state.accounts.total() == 0
        if settled.status in ("refused", "duplicate"):
            assert issued == before
        covered = one.positions if one.receipted == -1 else one.receipted or 0
        for layer in range(*ROUTE[one.stage].layers):
            at = (one.request, layer)
            receipted[at] = max(receipted.get(at, 0), min(covered, one.positions))
        brought[raw] = max(brought[raw], settled.micro_credits)
    # No more than what receipts cover, each layer and position of a request once.
    assert -ledger.state.accounts.get(ISSUANCE).micro_credits <= sum(receipted.values()) * 1000
    paid = sum(account.micro_credits for account in ledger.state.accounts.page() if account.name != ISSUANCE)
    assert paid == -ledger.state.accounts.get(ISSUANCE).micro_credits


routes = st.lists(
    work.filter(lambda one: one.honest and not one.replica),
    max_size=12,
    unique_by=lambda one: (one.request, one.epoch, one.stage),
)


@settings(max_examples=30, deadline=None)
@given(routes.flatmap(lambda works: st.tuples(st.just(works), st.permutations(works))))
def test_the_order_of_honest_proofs_changes_who_is_paid_never_how_much(orders: tuple[list[Work], list[Work]]) -> None:
    totals = set()
    for order in orders:
        ledger = PaperLedger()
        for one in order:
            ledger.settle(sealed(one))
        totals.add(ledger.state.accounts.get(ISSUANCE).micro_credits)
    assert len(totals) == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(work, max_size=14), st.booleans())
def test_replaying_the_journal_gives_the_same_bytes(works: list[Work], forget: bool) -> None:
    ledger = PaperLedger()
    for one in works:
        ledger.settle(sealed(one))
    expired = expire(ledger.state, NOW + WEEK) if forget else None
    if expired is not None:
        ledger.state.apply(expired, NOW)
        ledger.changes.append(expired)
    replayed = DictTables()
    state = LedgerState(replayed)
    for change in ledger.changes:
        state.apply(decode_entry(encode_entry(JournalEntry(at=NOW, change=change))).change, NOW)
    assert replayed.content() == ledger.tables.content()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2000), st.integers(0, 255))
def test_any_bytes_give_a_refusal_or_a_value(junk: bytes, at: int, value: int) -> None:
    edited = bytearray(sealed(Work(0, 0, 1, False, 300, -1, True)))
    edited[at % len(edited)] = value
    for raw in (junk, bytes(edited), bytes(edited[: at % len(edited)])):
        with contextlib.suppress(ProofRefused):
            verify_proof(raw, TERMS, NOW)
        with contextlib.suppress(MalformedMessage):
            decode_entry(raw)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(-2, 5)), max_size=20))
def test_transfers_keep_the_sum_at_zero(moves: list[tuple[int, int, int]]) -> None:
    accounts = Accounts(DictTables())
    for debit, credit, amount in moves:
        if debit == credit or amount < 1:
            with pytest.raises(LocalProtocolError):
                accounts.apply(Transfer(str(debit), str(credit), amount))
        else:
            accounts.apply(Transfer(str(debit), str(credit), amount))
        assert accounts.total() == 0


def test_a_change_that_does_not_fit_the_state_is_our_own_bug() -> None:
    ledger = PaperLedger()
    ledger.settle(sealed(Work(0, 0, 1, False, 300, -1, True)))
    with pytest.raises(LocalProtocolError):
        ledger.state.apply(ledger.changes[0], NOW)
    assert len(LayerRange(10, 20)) * 300 * 1000 == ledger.balance(ROUTE[1].key)
