"""The worker's write-ahead log."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessella_p2p.base.errors import LocalProtocolError, StorageError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import PROOF_LOG_MAP_BYTES
from tessella_p2p.ledger.environment import Environment
from tessella_p2p.ledger.proof_log import Checkpoint, PendingProof, ProofCounts, ProofLog
from tests.ledger.proving import NOW, ORCHESTRATOR, WEEK, WORKERS, key_of, proof_body, seal_proof

PROJECT = Path(__file__).parents[2]
ONE, TWO = b"1" * 16, b"2" * 16
MINTER = PeerId("minter")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ProofLog]:
    opened = ProofLog(tmp_path / "proofs")
    yield opened
    opened.close()


def reopened(log: ProofLog, path: Path) -> ProofLog:
    log.close()
    return ProofLog(path / "proofs")


def test_a_checkpoint_replaces_the_one_before_and_outlives_a_restart(log: ProofLog, tmp_path: Path) -> None:
    log.put_checkpoint(MINTER, ONE, 0, b"100 positions")
    log.put_checkpoint(MINTER, ONE, 0, b"200 positions")
    log.put_checkpoint(MINTER, ONE, 1, b"another epoch")
    again = reopened(log, tmp_path)
    assert again.checkpoints() == [
        Checkpoint(MINTER, ONE, 0, b"200 positions"),
        Checkpoint(MINTER, ONE, 1, b"another epoch"),
    ]
    again.close()


def test_a_proof_takes_its_checkpoints_place(log: ProofLog, tmp_path: Path) -> None:
    log.put_checkpoint(MINTER, ONE, 0, b"checkpoint")
    log.put_checkpoint(MINTER, TWO, 0, b"checkpoint")
    log.put_proof(MINTER, ONE, 0, b"proof")
    again = reopened(log, tmp_path)
    assert again.checkpoints() == [Checkpoint(MINTER, TWO, 0, b"checkpoint")]
    assert again.pending(MINTER, 10) == [PendingProof(MINTER, ONE, 0, b"proof")]
    again.close()


def test_a_late_checkpoint_does_not_revive_a_proven_session(log: ProofLog) -> None:
    log.put_proof(MINTER, ONE, 0, b"proof")
    log.put_checkpoint(MINTER, ONE, 0, b"late")
    assert log.checkpoints() == []


@pytest.mark.parametrize("status", ["settled", "duplicate", "refused"])
def test_an_answered_proof_leaves_the_log_and_is_counted(log: ProofLog, status: str) -> None:
    log.put_proof(MINTER, ONE, 0, b"proof")
    log.settle(MINTER, ONE, 0, status, 7, None)
    log.settle(MINTER, ONE, 0, status, 7, None)  # an answer that comes twice counts once
    assert log.pending(MINTER, 10) == []
    refused = int(status == "refused")
    assert log.counts() == ProofCounts(open=0, pending=0, settled=1 - refused, held=0, refused=refused, micro_credits=7)


def test_proofs_that_can_settle_no_more_leave_the_log_though_nobody_answers(log: ProofLog) -> None:
    minter = ORCHESTRATOR.peer_id
    proof = seal_proof(proof_body(), WORKERS[1])
    for epoch in range(2):
        log.put_proof(minter, ONE, epoch, proof)
    log.settle(minter, ONE, 1, "held", 0, "no_receipt")
    log.put_proof(minter, TWO, 0, b"no proof")
    assert log.drop_overdue(NOW + WEEK - 1) == 0
    assert log.drop_overdue(NOW + WEEK) == 2
    assert [pending.session for pending in log.pending(minter, 10)] == [TWO]
    assert (log.counts().held, log.counts().refused) == (0, 2)


def test_an_orchestrator_that_boasts_breaks_no_counter(log: ProofLog) -> None:
    for epoch in range(3):
        log.put_proof(MINTER, ONE, epoch, b"proof")
        log.settle(MINTER, ONE, epoch, "settled", 2**63, None)
    assert log.counts().micro_credits == 2**64 - 1


def test_a_held_proof_waits_apart_until_it_is_queued_again(log: ProofLog, tmp_path: Path) -> None:
    log.put_proof(MINTER, ONE, 0, b"proof\0with a zero byte")
    log.settle(MINTER, ONE, 0, "held", 0, "no_receipt")
    assert log.pending(MINTER, 10) == []
    assert log.counts().held == 1
    again = reopened(log, tmp_path)
    assert again.requeue_held() == 1
    assert again.pending(MINTER, 10) == [PendingProof(MINTER, ONE, 0, b"proof\0with a zero byte")]
    assert again.counts().held == 0
    again.close()


def test_pending_is_bounded_in_number_and_bytes(log: ProofLog) -> None:
    for i in range(5):
        log.put_proof(MINTER, bytes([i]) * 16, i, bytes(1000))
    assert [item.epoch for item in log.pending(MINTER, 3)] == [0, 1, 2]
    assert [item.epoch for item in log.pending(MINTER, 10, max_bytes=2500)] == [0, 1]
    assert [item.epoch for item in log.pending(MINTER, 10, max_bytes=10)] == [0]


def test_the_sequence_floor_never_falls(log: ProofLog, tmp_path: Path) -> None:
    log.raise_sequence_floor(9)
    log.raise_sequence_floor(8)
    again = reopened(log, tmp_path)
    assert again.sequence_floor() == 9
    again.close()


def test_a_full_log_says_what_to_do_and_keeps_what_it_has(tmp_path: Path) -> None:
    small = ProofLog(tmp_path / "small", map_size_bytes=128 * 1024)

    def fill() -> None:
        for i in range(100):
            small.put_proof(MINTER, i.to_bytes(16, "big"), 0, bytes(4000))

    with pytest.raises(StorageError, match="let proofs settle"):
        fill()
    kept = len(small.pending(MINTER, 100, max_bytes=1 << 30))
    assert 0 < kept < 100
    assert small.counts().pending == kept
    small.close()


def test_two_nodes_do_not_share_a_log(log: ProofLog, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="in use"):
        ProofLog(tmp_path / "proofs")


def test_a_key_that_is_no_session_is_our_own_bug(log: ProofLog) -> None:
    with pytest.raises(LocalProtocolError):
        log.put_proof(MINTER, b"short", 0, b"proof")


def test_what_was_durable_at_a_sigkill_is_there_afterwards(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from tessella_p2p.ledger.proof_log import ProofLog\n"
        "log = ProofLog(pathlib.Path(sys.argv[1]))\n"
        "log.put_checkpoint('minter', b'1' * 16, 0, b'checkpoint')\n"
        "log.put_proof('minter', b'2' * 16, 3, b'proof')\n"
        "print('durable', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "proofs")],
        cwd=PROJECT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "durable\n"
        child.send_signal(signal.SIGKILL)
    log = ProofLog(tmp_path / "proofs")
    assert log.checkpoints() == [Checkpoint(MINTER, b"1" * 16, 0, b"checkpoint")]
    assert log.pending(MINTER, 10) == [PendingProof(MINTER, b"2" * 16, 3, b"proof")]
    log.close()


def test_proofs_of_each_minter_are_apart(log: ProofLog) -> None:
    other = PeerId("another minter")
    for epoch in range(3):
        log.put_proof(MINTER, ONE, epoch, b"proof")
        log.put_proof(other, ONE, epoch, b"its proof")
    assert sorted(log.minters()) == sorted([MINTER, other])
    assert [item.envelope for item in log.pending(other, 10)] == [b"its proof"] * 3
    for epoch in range(3):
        log.settle(other, ONE, epoch, "settled", 1, None)
    assert log.minters() == [MINTER]
    assert log.pending(other, 10) == []
    assert len(log.pending(MINTER, 10)) == 3


def test_a_log_of_version_1_is_read_and_its_proofs_go_where_they_are_addressed(tmp_path: Path) -> None:
    second = key_of("second orchestrator").peer_id
    proofs = [seal_proof(proof_body(), WORKERS[1]), seal_proof(proof_body(), WORKERS[1], audience=second)]
    old = Environment(
        tmp_path / "proofs", ("checkpoints", "pending", "held"), map_size_bytes=PROOF_LOG_MAP_BYTES, schema=1
    )
    with old.write() as transaction:
        transaction.put("checkpoints", ONE + bytes(4), proofs[0])
        transaction.put("pending", ONE + bytes([0, 0, 0, 1]), proofs[0])
        transaction.put("held", TWO + bytes([0, 0, 0, 2]), b"no_receipt\0" + proofs[1])
    old.close()
    for _ in range(2):
        log = ProofLog(tmp_path / "proofs")
        assert log.checkpoints() == [Checkpoint(ORCHESTRATOR.peer_id, ONE, 0, proofs[0])]
        assert log.pending(ORCHESTRATOR.peer_id, 10) == [PendingProof(ORCHESTRATOR.peer_id, ONE, 1, proofs[0])]
        log.requeue_held()
        assert log.pending(second, 10) == [PendingProof(second, TWO, 2, proofs[1])]
        log.close()


def test_a_damaged_log_of_version_1_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    old = Environment(
        tmp_path / "proofs", ("checkpoints", "pending", "held"), map_size_bytes=PROOF_LOG_MAP_BYTES, schema=1
    )
    with old.write() as transaction:
        transaction.put("pending", ONE + bytes(4), b"no envelope")
    old.close()
    for _ in range(2):
        with pytest.raises(StorageError, match="damaged proof"):
            ProofLog(tmp_path / "proofs")
