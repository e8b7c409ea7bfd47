"""The journal: a hash chain that is appended to, read by cursor from both ends, and shown to others with its proofs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tessella_p2p.base.errors import LocalProtocolError, MalformedMessage, StorageError
from tessella_p2p.base.limits import (
    MAX_SERVED_MODELS,
    PROOF_GRACE_S,
    SNAPSHOT_PAGE_BYTES,
    SNAPSHOT_ROW_BYTES,
    TICKET_OPEN_S,
    TICKET_SETTLE_S,
)
from tessella_p2p.ledger.accounts import ISSUANCE
from tessella_p2p.ledger.chain import START, Head, entry_hash, unpack_row
from tessella_p2p.ledger.changes import JournalEntry, TicketsExpired, decode_entry, encode_entry, read_entry
from tessella_p2p.ledger.environment import Environment
from tessella_p2p.ledger.group_commit import GroupCommit
from tessella_p2p.ledger.journal import JOURNAL
from tessella_p2p.ledger.store import LedgerStore
from tests.ledger.proving import NOW, ROUTE, TERMS, credits_for, lease, proof_body, seal_proof, ticket
from tests.ledger.test_settlement import TEN_LAYERS

NUM_REQUESTS = 20
PROOFS = [
    seal_proof(proof_body(stage, request_id=f"request-{number}"), ROUTE[stage].key)
    for number in range(NUM_REQUESTS)
    for stage in range(3)
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerStore]:
    opened = LedgerStore(tmp_path / "ledger")
    yield opened
    opened.close()


# ---- The hash chain ----


def test_an_empty_journal_has_a_head_of_zeros(store: LedgerStore) -> None:
    assert store.head() == Head(0, 0, START)
    assert store.newest() == store.journal() == []
    assert store.snapshot(0) == []


def test_each_entry_names_the_hash_of_the_one_before_it(store: LedgerStore) -> None:
    store.settle(PROOFS, TERMS, NOW)
    previous, since = START, 0
    while page := store.snapshot(since, 7):
        for row in page:
            since += 1
            assert (row.sequence, row.previous, row.proof) == (since, previous, PROOFS[since - 1])
            previous = entry_hash(previous, 0, since, row.entry)
            assert [(since, decode_entry(row.entry))] == store.journal(since - 1, 1)
    assert store.head() == Head(0, len(PROOFS), previous)


def test_a_hash_depends_on_everything_that_it_covers() -> None:
    hashes = {
        entry_hash(START, 0, 1, b"entry"),
        entry_hash(bytes([1, *START[1:]]), 0, 1, b"entry"),
        entry_hash(START, 1, 1, b"entry"),
        entry_hash(START, 0, 2, b"entry"),
        entry_hash(START, 0, 1, b"other"),
    }
    assert len(hashes) == 5
    assert {len(found) for found in hashes} == {32}


def test_the_chain_goes_on_over_a_restart(tmp_path: Path) -> None:
    heads = []
    for part in (PROOFS[:4], PROOFS[4:9]):
        store = LedgerStore(tmp_path / "ledger")
        store.settle(part, TERMS, NOW)
        heads.append(store.head())
        store.close()
    store = LedgerStore(tmp_path / "ledger")
    assert store.head() == heads[1]
    rows = store.snapshot(0)
    assert entry_hash(rows[3].previous, 0, 4, rows[3].entry) == heads[0].hash == rows[4].previous
    store.close()


# ---- Pages ----


def test_the_newest_entries_come_first(store: LedgerStore) -> None:
    store.settle(PROOFS[:9], TERMS, NOW)
    assert [sequence for sequence, _ in store.newest(limit=4)] == [9, 8, 7, 6]
    assert [sequence for sequence, _ in store.newest(before=6, limit=4)] == [5, 4, 3, 2]
    assert [sequence for sequence, _ in store.newest(before=3)] == [2, 1]
    assert store.newest(before=1) == []
    assert [sequence for sequence, _ in store.newest(before=1000, limit=1)] == [9]
    assert dict(store.newest()) == dict(store.journal())


def test_a_page_for_others_is_bounded_in_bytes_and_never_empty_before_the_end(
    store: LedgerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.settle(PROOFS, TERMS, NOW)
    page = store.snapshot(0, 500)
    size_bytes = sum(len(row.entry) + len(row.proof or b"") + SNAPSHOT_ROW_BYTES for row in page)
    assert 0 < len(page) < len(PROOFS)
    assert size_bytes <= SNAPSHOT_PAGE_BYTES
    monkeypatch.setattr("tessella_p2p.ledger.journal.SNAPSHOT_PAGE_BYTES", 1)
    assert [row.sequence for row in store.snapshot(0, 500)] == [1]
    assert store.snapshot(0, 0) == []


# ---- Proofs are kept as long as somebody may ask for them ----


def test_a_proof_is_kept_until_its_ticket_and_the_grace_are_over(store: LedgerStore) -> None:
    kept_ms = round((TICKET_OPEN_S + TICKET_SETTLE_S + PROOF_GRACE_S) * 1000)
    store.settle(PROOFS[:3], TERMS, NOW)
    store.slash(ROUTE[0].key.peer_id, 1, "an entry without a proof", "operator", NOW)
    store.settle(PROOFS[3:6], TERMS, NOW + 1000)
    while store.expire(NOW + kept_ms - 1):
        pass
    assert [store.proof(sequence) for sequence in range(1, 8)] == [*PROOFS[:3], None, *PROOFS[3:6]]
    assert store.expire(NOW + kept_ms)
    assert [store.proof(sequence) for sequence in range(1, 8)] == [None] * 4 + PROOFS[3:6]
    assert not store.expire(NOW + kept_ms)
    assert store.expire(NOW + kept_ms + 1000)
    assert store.content() == store.replay().content()
    assert [row.proof for row in store.snapshot(0)] == [None] * store.head().sequence


# ---- Older ledgers ----


def test_a_ledger_of_schema_2_is_taken_over_from_its_journal(tmp_path: Path) -> None:
    """Its journal has no hashes, and its state other rows; nothing that was settled is lost or paid again."""
    model = LedgerStore(tmp_path / "model")
    model.settle(PROOFS[:30], TERMS, NOW)
    entries = [entry for _, entry in model.journal()]
    entries.append(JournalEntry(at=NOW, change=TicketsExpired(before=NOW - 1)))
    content = model.content()
    model.close()

    old = Environment(
        tmp_path / "old", (JOURNAL, "assignments", "accounts", "tickets"), map_size_bytes=1 << 26, schema=2
    )
    with old.write() as transaction:
        for sequence, entry in enumerate(entries, 1):
            transaction.append(JOURNAL, sequence.to_bytes(8, "big"), encode_entry(entry))
        transaction.put("tickets", bytes(32), b"a row of another form")
        transaction.put("accounts", b"nobody", b"a row of another form")
        transaction.set_number("sequence_floor", 77)
    old.close()

    for _ in range(2):
        store = LedgerStore(tmp_path / "old")
        assert store.content() == content == store.replay().content()
        assert store.head().sequence == len(entries)
        assert store.sequence_floor() == 77
        previous = START
        for row in store.snapshot(0):
            assert (row.previous, row.proof) == (previous, None)
            previous = entry_hash(previous, 0, row.sequence, row.entry)
        assert store.head().hash == previous
        assert {one.settled.status for one in store.settle(PROOFS[:30], TERMS, NOW)} == {"duplicate"}
        store.close()


def test_a_damaged_ledger_of_schema_2_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    old = Environment(tmp_path / "old", (JOURNAL,), map_size_bytes=1 << 26, schema=2)
    with old.write() as transaction:
        transaction.append(JOURNAL, (1).to_bytes(8, "big"), b"junk")
    old.close()
    for _ in range(2):
        with pytest.raises(StorageError, match="schema 2 is damaged"):
            LedgerStore(tmp_path / "old")


@pytest.mark.parametrize("junk", [b"", b"\xff", b"\xa1", b"\x01", b"\xa1\x61a\x01", bytes(40)])
def test_a_damaged_entry_is_a_typed_error(junk: bytes) -> None:
    with pytest.raises(MalformedMessage):
        read_entry(junk)
    with pytest.raises(LocalProtocolError):
        unpack_row(junk[:32])


# ---- Waiting requests share a transaction ----


def test_requests_that_come_at_the_same_time_are_settled_once_each(store: LedgerStore) -> None:
    """Every proof is sent by four threads at once: one of them settles it, three are told so."""
    answers: list[list[str]] = []

    def upload(proofs: Sequence[bytes]) -> None:
        answers.append([store.settle([proof], TERMS, NOW)[0].settled.status for proof in proofs])

    threads = [threading.Thread(target=upload, args=(PROOFS[::step],)) for step in (1, -1, 1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [status for answer in answers for status in answer]
    assert (told.count("settled"), told.count("duplicate")) == (len(PROOFS), 3 * len(PROOFS))
    assert store.head().sequence == len(PROOFS)
    assert store.account(ISSUANCE).micro_credits == -len(PROOFS) * credits_for(TEN_LAYERS, 300)
    assert store.content() == store.replay().content()


def test_who_comes_during_a_commit_shares_the_next_one() -> None:
    begun, go_on = threading.Event(), threading.Event()
    groups: list[list[int]] = []

    def commit(items: Sequence[int]) -> list[int]:
        groups.append(list(items))
        begun.set()
        go_on.wait()
        return [10 * item for item in items]

    group = GroupCommit[int, int](commit, max_items=2)
    results: dict[int, int] = {}

    def submit(item: int) -> None:
        results[item] = group.submit(item)

    first = threading.Thread(target=submit, args=(0,))
    first.start()
    begun.wait()
    others = [threading.Thread(target=submit, args=(item,)) for item in (1, 2, 3)]
    for number, thread in enumerate(others, 1):
        thread.start()
        while group.waiting < number:
            os.sched_yield()
    go_on.set()
    for thread in (first, *others):
        thread.join()
    assert results == {item: 10 * item for item in range(4)}
    assert groups == [[0], [1, 2], [3]]


def test_a_failed_commit_fails_for_each_caller_and_for_nobody_later() -> None:
    broken = [True]

    def commit(items: Sequence[int]) -> Sequence[int]:
        if broken[0]:
            raise StorageError("the disk is full")
        return items

    group = GroupCommit[int, int](commit, max_items=8)
    with pytest.raises(StorageError, match="the disk is full"):
        group.submit(1)
    broken[0] = False
    assert group.submit(2) == 2


# ---- Models ----


def test_published_models_are_kept_and_replaced(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger")
    store.keep_model(b"a" * 32, b"row")
    store.keep_model(b"b" * 32, b"row")
    store.keep_model(b"a" * 32, b"newer row")
    store.close()
    store = LedgerStore(tmp_path / "ledger")
    assert store.models() == {b"a" * 32: b"newer row", b"b" * 32: b"row"}
    for number in range(MAX_SERVED_MODELS - 2):
        store.keep_model(number.to_bytes(32, "big"), b"row")
    with pytest.raises(StorageError, match="are kept already"):
        store.keep_model(b"c" * 32, b"row")
    store.keep_model(b"b" * 32, b"newest row")
    assert len(store.models()) == MAX_SERVED_MODELS
    store.close()


def test_a_lease_or_ticket_that_is_too_long_to_be_remembered_is_verified_all_the_same(
    store: LedgerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessella_p2p.ledger.evidence.MAX_REMEMBERED_BYTES", 10)
    body = proof_body(sealed_ticket=ticket(), sealed_lease=lease(ROUTE[1].key, ROUTE[1].layers))
    assert store.settle([seal_proof(body, ROUTE[1].key)], TERMS, NOW)[0].settled.status == "settled"
