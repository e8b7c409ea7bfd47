"""A backup is the ledger of one moment; put back, it goes on as a chain of its own and doubles nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessella_p2p.base.errors import StorageError
from tessella_p2p.base.limits import RESTORED_SERIALS
from tessella_p2p.ledger.backup import backup_ledger, restore_ledger
from tessella_p2p.ledger.chain import START, entry_hash
from tessella_p2p.ledger.changes import ChainBegun
from tessella_p2p.ledger.environment import DATABASE_NAME, Environment
from tessella_p2p.ledger.journal import JOURNAL
from tessella_p2p.ledger.store import SCHEMA, LedgerStore
from tests.ledger.proving import NOW, ROUTE, TERMS, proof_body, seal_proof

PROJECT = Path(__file__).parents[2]
PROOFS = [seal_proof(proof_body(index), stage.key) for index, stage in enumerate(ROUTE)]
LATER = NOW + 60_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerStore]:
    opened = LedgerStore(tmp_path / "ledger")
    yield opened
    opened.close()


def chain_is_true(store: LedgerStore) -> bool:
    """Whether each entry names the hash of the one before it."""
    head, previous = store.head(), START
    rows = store.snapshot(0)
    for sequence, row in enumerate(rows, 1):
        if (row.sequence, row.previous) != (sequence, previous):
            return False
        previous = entry_hash(previous, head.chain, sequence, row.entry)
    return (head.sequence, head.hash) == (len(rows), previous)


def test_a_backup_is_put_back_as_the_next_chain_and_what_it_has_is_not_paid_again(
    tmp_path: Path, store: LedgerStore
) -> None:
    store.keep_assignments({}, 7)
    store.raise_sequence_floor(NOW * 1000 + 5)
    store.settle(PROOFS[:2], TERMS, NOW)
    before = store.head()
    store.backup(tmp_path / "backup")
    store.settle(PROOFS[2:], TERMS, NOW)
    head = restore_ledger(tmp_path / "backup", tmp_path / "restored", LATER)
    restored = LedgerStore(tmp_path / "restored")
    assert (head.chain, head.sequence) == (LATER, before.sequence + 1)
    assert restored.head() == head
    assert chain_is_true(restored)
    assert chain_is_true(store)
    begun = restored.journal(since=2)[0][1]
    assert begun.change == ChainBegun(chain=LATER, after=2, after_hash=before.hash)
    assert begun.at == LATER
    assert restored.content() == restored.replay().content()
    statuses = [one.settled.status for one in restored.settle(PROOFS, TERMS, LATER)]
    assert statuses == ["duplicate", "duplicate", "settled"]
    assert restored.total() == 0
    assert restored.serial_floor() == 7 + RESTORED_SERIALS
    assert restored.sequence_floor() > LATER * 1000
    assert restored.proof(1) == PROOFS[0]
    restored.close()
    # A second restore is a chain further on: of the restored one, and of the same backup.
    backup_ledger(tmp_path / "restored", tmp_path / "second backup")
    assert restore_ledger(tmp_path / "second backup", tmp_path / "again", LATER).chain == LATER + 1
    assert restore_ledger(tmp_path / "backup", tmp_path / "once more", LATER + 5).chain == LATER + 5


def test_a_ledger_is_backed_up_while_another_process_writes_it(tmp_path: Path, store: LedgerStore) -> None:
    store.settle(PROOFS, TERMS, NOW)
    script = (
        "import sys; from pathlib import Path; from tessella_p2p.ledger.backup import backup_ledger; "
        "backup_ledger(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "ledger"), str(tmp_path / "backup")],
        cwd=PROJECT,
        check=True,
        timeout=60,
    )
    copy = LedgerStore(tmp_path / "backup")
    assert copy.head() == store.head()
    assert copy.content() == store.content()
    copy.close()


def test_an_empty_ledger_is_put_back_too(tmp_path: Path, store: LedgerStore) -> None:
    store.backup(tmp_path / "backup")
    head = restore_ledger(tmp_path / "backup", tmp_path / "restored", NOW)
    assert (head.chain, head.sequence) == (NOW, 1)


def test_nothing_that_exists_is_overwritten(tmp_path: Path, store: LedgerStore) -> None:
    with pytest.raises(StorageError, match="exists"):
        store.backup(tmp_path / "ledger")
    store.backup(tmp_path / "backup")
    with pytest.raises(StorageError, match="exists"):
        restore_ledger(tmp_path / "backup", tmp_path / "ledger", NOW)
    with pytest.raises(StorageError, match="holds no backup"):
        restore_ledger(tmp_path / "nowhere", tmp_path / "restored", NOW)
    with pytest.raises(StorageError, match="holds no ledger"):
        backup_ledger(tmp_path / "nowhere", tmp_path / "other")
    assert {path.name for path in tmp_path.iterdir()} == {"ledger", "backup"}


def test_what_a_killed_attempt_left_is_in_nobodys_way(tmp_path: Path, store: LedgerStore) -> None:
    (tmp_path / "backup.unfinished").mkdir()
    (tmp_path / "backup.unfinished" / DATABASE_NAME).write_bytes(b"half")
    store.backup(tmp_path / "backup")
    assert {path.name for path in tmp_path.iterdir()} == {"ledger", "backup"}


def test_a_damaged_backup_is_refused_and_leaves_nothing(tmp_path: Path, store: LedgerStore) -> None:
    store.settle(PROOFS, TERMS, NOW)
    store.backup(tmp_path / "backup")
    environment = Environment(tmp_path / "backup", (JOURNAL,), map_size_bytes=1 << 30, schema=SCHEMA)
    with environment.write() as transaction:
        row = transaction.get(JOURNAL, (2).to_bytes(8, "big"))
        assert row is not None
        transaction.put(JOURNAL, (2).to_bytes(8, "big"), row[:-1] + bytes([row[-1] ^ 1]))
    environment.close()
    with pytest.raises(StorageError, match="entry 3 of the journal is damaged"):
        restore_ledger(tmp_path / "backup", tmp_path / "restored", NOW)
    (tmp_path / "backup" / DATABASE_NAME).write_bytes(b"no database" * 1000)
    with pytest.raises(StorageError, match="no database"):
        restore_ledger(tmp_path / "backup", tmp_path / "restored", NOW)
    assert {path.name for path in tmp_path.iterdir()} == {"ledger", "backup"}
