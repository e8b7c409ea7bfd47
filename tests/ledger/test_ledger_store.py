"""The ledger on disk: durable, one writer, and the same after a crash at any point."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tessella_p2p.base.errors import StorageError
from tessella_p2p.ledger import store as store_module
from tessella_p2p.ledger.accounts import ISSUANCE
from tessella_p2p.ledger.assignments import Assignment, encode_assignment
from tessella_p2p.ledger.day_bytes import DAY_BYTES
from tessella_p2p.ledger.environment import Environment
from tessella_p2p.ledger.evidence import Code
from tessella_p2p.ledger.state import DAY_MS
from tessella_p2p.ledger.store import SCHEMA, LedgerStore
from tessella_p2p.wire import cbor
from tests.ledger.proving import HOUR, NOW, ROUTE, TERMS, WEEK, credits_for, proof_body, seal_proof
from tests.ledger.test_settlement import TEN_LAYERS

PROJECT = Path(__file__).parents[2]


def test_what_was_settled_is_there_after_a_restart(tmp_path: Path) -> None:
    proofs = [seal_proof(proof_body(index), stage.key) for index, stage in enumerate(ROUTE)]
    store = LedgerStore(tmp_path / "ledger")
    judged = store.settle(proofs, TERMS, NOW)
    assert [one.settled.status for one in judged] == ["settled"] * 3
    assert [one.worker for one in judged] == [stage.key.peer_id for stage in ROUTE]
    before = store.content()
    store.close()
    store = LedgerStore(tmp_path / "ledger")
    assert store.content() == before == store.replay().content()
    assert store.account(ROUTE[0].key.peer_id).micro_credits == credits_for(TEN_LAYERS, 300)
    assert store.account(ISSUANCE).micro_credits == -3 * credits_for(TEN_LAYERS, 300)
    assert store.total() == 0
    assert [one.settled.status for one in store.settle(proofs, TERMS, NOW)] == ["duplicate"] * 3
    store.close()


def test_answers_of_a_batch_keep_the_order_of_its_proofs(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger")
    good = seal_proof(proof_body(), ROUTE[1].key)
    judged = store.settle([b"junk", good, good, seal_proof(proof_body(0, receipted=None), ROUTE[0].key)], TERMS, NOW)
    assert [one.settled.status for one in judged] == ["refused", "settled", "duplicate", "held"]
    assert [seq for seq, _ in store.journal()] == [1]
    store.close()


def test_a_worker_makes_the_ledger_grow_by_a_bounded_number_of_bytes_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is beyond it is held, not lost, and costs others nothing; a restart does not forget it."""
    proofs = [seal_proof(proof_body(epoch=epoch), ROUTE[1].key) for epoch in range(10)]
    bound = 4 * len(proofs[0])
    monkeypatch.setattr(store_module, "SETTLED_BYTES_PER_WORKER_DAY", bound)
    store = LedgerStore(tmp_path / "ledger")
    statuses = [one.settled.status for one in store.settle(proofs, TERMS, NOW)]
    assert set(statuses) == {"settled", "held"}
    assert statuses == sorted(statuses, reverse=True)
    num_settled = statuses.count("settled")
    kept = sum(len(row.entry) + len(row.proof or b"") for row in store.snapshot(0))
    assert len(store.journal()) == num_settled
    assert bound <= kept < bound + 2 * len(proofs[0])
    store.close()
    store = LedgerStore(tmp_path / "ledger")
    (held,) = store.settle(proofs[-1:], TERMS, NOW + HOUR)
    assert (held.settled.code, held.settled.micro_credits) == (Code.BYTES_BOUND, 0)
    assert [one.settled.status for one in store.settle(proofs[:1], TERMS, NOW + HOUR)] == ["duplicate"]
    assert store.settle([seal_proof(proof_body(0), ROUTE[0].key)], TERMS, NOW + HOUR)[0].settled.status == "settled"
    assert store.settle(proofs[-1:], TERMS, NOW + DAY_MS)[0].settled.status == "settled"
    assert store.content() == store.replay().content()
    store.close()


def test_a_proof_that_is_held_for_its_bytes_says_what_it_brought_in_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "SETTLED_BYTES_PER_WORKER_DAY", 1)
    store = LedgerStore(tmp_path / "ledger")
    first, more = (seal_proof(proof_body(receipted=positions), ROUTE[1].key) for positions in (200, 300))
    paid = store.settle([first], TERMS, NOW)[0].settled
    held = store.settle([more], TERMS, NOW)[0].settled
    assert (held.status, held.code, held.micro_credits) == ("held", Code.BYTES_BOUND, paid.micro_credits)
    assert store.settle([more], TERMS, NOW + DAY_MS)[0].settled.micro_credits == credits_for(TEN_LAYERS, 300)
    store.close()


def test_days_before_yesterday_are_forgotten(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger")
    for day in range(3):
        store.settle([seal_proof(proof_body(epoch=day), ROUTE[1].key)], TERMS, NOW + day * DAY_MS)
    assert days_of(store) == 3
    assert store.expire(NOW + 2 * DAY_MS)
    assert days_of(store) == 2
    assert not store.expire(NOW + 2 * DAY_MS)
    store.close()


def days_of(store: LedgerStore) -> int:
    """Days of which it is known how much was added."""
    with store._environment.read() as transaction:
        return transaction.count(DAY_BYTES)


def test_the_journal_is_read_by_cursor(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger")
    for epoch in range(5):
        store.settle([seal_proof(proof_body(epoch=epoch), ROUTE[1].key)], TERMS, NOW + epoch)
    assert [seq for seq, _ in store.journal(since=2, limit=2)] == [3, 4]
    assert store.journal(since=5) == []
    assert [entry.at for _, entry in store.journal()] == [NOW + epoch for epoch in range(5)]
    assert [account.name for account in store.accounts(limit=1)] == [ROUTE[1].key.peer_id]
    assert [account.name for account in store.accounts(after=ROUTE[1].key.peer_id)] == [ISSUANCE]
    store.close()


def test_expired_tickets_are_forgotten_on_disk_too(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger")
    store.settle([seal_proof(proof_body(), ROUTE[1].key)], TERMS, NOW)
    assert not store.expire(NOW)
    assert store.expire(NOW + WEEK)
    assert not store.expire(NOW + WEEK)
    assert set(store.content()) == {"accounts", "state"}
    assert store.replay().content() == store.content()
    store.close()


def test_floors_rise_and_never_fall(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger")
    store.keep_assignments({}, 5)
    store.keep_assignments({}, 3)
    store.raise_sequence_floor(2**60)
    store.close()
    store = LedgerStore(tmp_path / "ledger")
    assert (store.serial_floor(), store.sequence_floor()) == (5, 2**60)
    store.close()


ROW = Assignment(lease=b"sealed", holds_range=True, mesh_complete=False)
PEERS = [stage.key.peer_id for stage in ROUTE]


def test_assignments_are_kept_replaced_and_forgotten_over_a_restart(tmp_path: Path) -> None:
    newer = Assignment(lease=b"newer", holds_range=False, mesh_complete=True)
    store = LedgerStore(tmp_path / "ledger")
    assert store.assignments() == {}
    store.keep_assignments(dict.fromkeys(PEERS, ROW), 7)
    store.keep_assignments({PEERS[0]: newer, PEERS[1]: None})
    store.close()
    store = LedgerStore(tmp_path / "ledger")
    assert store.assignments() == {PEERS[0]: newer, PEERS[2]: ROW}
    assert store.serial_floor() == 7
    assert store.content() == store.replay().content() == {}
    store.close()


@pytest.mark.parametrize(
    "row",
    [
        b"",
        b"junk",
        encode_assignment(ROW) + b"\0",
        encode_assignment(ROW)[:-1],
        cbor.encode({"lease": b"sealed", "holds_range": True}),
        cbor.encode({"lease": b"sealed", "holds_range": 1, "mesh_complete": False}),
        cbor.encode({"lease": b"", "holds_range": True, "mesh_complete": False}),
        cbor.encode({"lease": bytes(65 * 1024), "holds_range": True, "mesh_complete": False}),
        cbor.encode({"lease": b"sealed", "holds_range": True, "mesh_complete": False, "more": 1}),
    ],
)
def test_a_damaged_assignment_is_refused_by_name(tmp_path: Path, row: bytes) -> None:
    environment = Environment(tmp_path / "ledger", ("assignments",), map_size_bytes=1 << 20, schema=SCHEMA)
    with environment.write() as transaction:
        transaction.put("assignments", PEERS[0].encode(), row)
    environment.close()
    store = LedgerStore(tmp_path / "ledger")
    with pytest.raises(StorageError, match="damaged assignment"):
        store.assignments()
    store.close()


def test_no_more_assignments_are_read_than_there_may_be_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessella_p2p.ledger.store.MAX_MEMBERS", 2)
    store = LedgerStore(tmp_path / "ledger")
    store.keep_assignments(dict.fromkeys(PEERS, ROW))
    assert len(store.assignments()) == 2
    store.close()


def test_a_ledger_from_before_assignments_is_taken_over(tmp_path: Path) -> None:
    Environment(tmp_path / "ledger", ("journal",), map_size_bytes=1 << 20, schema=1).close()
    for _ in range(2):
        store = LedgerStore(tmp_path / "ledger")
        assert store.assignments() == {}
        store.close()
    with pytest.raises(StorageError, match=f"schema version {SCHEMA}.*version 1"):
        Environment(tmp_path / "ledger", ("journal",), map_size_bytes=1 << 20, schema=1)


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger")
    with pytest.raises(StorageError, match="in use by another process"):
        LedgerStore(tmp_path / "ledger")
    store.close()
    LedgerStore(tmp_path / "ledger").close()


def test_a_full_ledger_says_what_to_do_and_keeps_what_it_has(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger", map_size_bytes=256 * 1024)
    settled: list[str] = []

    def fill() -> None:
        for i in range(500):
            proof = seal_proof(proof_body(request_id=f"request-{i}"), ROUTE[1].key)
            settled.append(store.settle([proof], TERMS, NOW)[0].settled.status)

    with pytest.raises(StorageError, match="let proofs settle"):
        fill()
    assert settled
    assert set(settled) == {"settled"}
    assert store.account(ROUTE[1].key.peer_id).settled_proofs == len(settled)
    assert store.content() == store.replay().content()
    store.close()


def test_another_schema_is_refused_by_name(tmp_path: Path) -> None:
    Environment(tmp_path / "ledger", ("journal",), map_size_bytes=1 << 20, schema=SCHEMA + 1).close()
    with pytest.raises(StorageError, match=f"schema version {SCHEMA + 1}.*version {SCHEMA}"):
        LedgerStore(tmp_path / "ledger")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "data.mdb").write_bytes(b"no database" * 1000)
    with pytest.raises(StorageError, match="no database"):
        LedgerStore(tmp_path / "ledger")


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("a file")
    with pytest.raises(StorageError, match="cannot be used"):
        LedgerStore(tmp_path / "ledger")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_ledger_that_is_killed_at_random_points_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    """Proofs, slashes, verdicts, the blacklist, models and floors: 210 kills in all."""
    command = [sys.executable, "-m", "tests.ledger.killed_ledger", str(tmp_path / "ledger")]
    child = subprocess.run(
        [*command, "--seed", str(seed), "--kills", "70"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout)
    assert report["wrong"] == []
    assert report["kills"] == 70
    assert report["kills_before_everything_was_done"] > 50
