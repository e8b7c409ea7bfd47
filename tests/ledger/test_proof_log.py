"""The worker's write-ahead log."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessella_p2p.base.errors import LocalProtocolError, StorageError
from tessella_p2p.ledger.proof_log import Checkpoint, PendingProof, ProofCounts, ProofLog

PROJECT = Path(__file__).parents[2]
ONE, TWO = b"1" * 16, b"2" * 16


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ProofLog]:
    opened = ProofLog(tmp_path / "proofs")
    yield opened
    opened.close()


def reopened(log: ProofLog, path: Path) -> ProofLog:
    log.close()
    return ProofLog(path / "proofs")


def test_a_checkpoint_replaces_the_one_before_and_outlives_a_restart(log: ProofLog, tmp_path: Path) -> None:
    log.put_checkpoint(ONE, 0, b"100 positions")
    log.put_checkpoint(ONE, 0, b"200 positions")
    log.put_checkpoint(ONE, 1, b"another epoch")
    again = reopened(log, tmp_path)
    assert again.checkpoints() == [Checkpoint(ONE, 0, b"200 positions"), Checkpoint(ONE, 1, b"another epoch")]
    again.close()


def test_a_proof_takes_its_checkpoints_place(log: ProofLog, tmp_path: Path) -> None:
    log.put_checkpoint(ONE, 0, b"checkpoint")
    log.put_checkpoint(TWO, 0, b"checkpoint")
    log.put_proof(ONE, 0, b"proof")
    again = reopened(log, tmp_path)
    assert again.checkpoints() == [Checkpoint(TWO, 0, b"checkpoint")]
    assert again.pending(10) == [PendingProof(ONE, 0, b"proof")]
    again.close()


def test_a_late_checkpoint_does_not_revive_a_proven_session(log: ProofLog) -> None:
    log.put_proof(ONE, 0, b"proof")
    log.put_checkpoint(ONE, 0, b"late")
    assert log.checkpoints() == []


@pytest.mark.parametrize("status", ["settled", "duplicate", "refused"])
def test_an_answered_proof_leaves_the_log_and_is_counted(log: ProofLog, status: str) -> None:
    log.put_proof(ONE, 0, b"proof")
    log.settle(ONE, 0, status, 7, None)
    log.settle(ONE, 0, status, 7, None)  # an answer that comes twice counts once
    assert log.pending(10) == []
    refused = int(status == "refused")
    assert log.counts() == ProofCounts(open=0, pending=0, settled=1 - refused, held=0, refused=refused, micro_credits=7)


def test_a_held_proof_waits_apart_until_it_is_queued_again(log: ProofLog, tmp_path: Path) -> None:
    log.put_proof(ONE, 0, b"proof\0with a zero byte")
    log.settle(ONE, 0, "held", 0, "no_receipt")
    assert log.pending(10) == []
    assert log.counts().held == 1
    again = reopened(log, tmp_path)
    assert again.requeue_held() == 1
    assert again.pending(10) == [PendingProof(ONE, 0, b"proof\0with a zero byte")]
    assert again.counts().held == 0
    again.close()


def test_pending_is_bounded_in_number_and_bytes(log: ProofLog) -> None:
    for i in range(5):
        log.put_proof(bytes([i]) * 16, i, bytes(1000))
    assert [item.epoch for item in log.pending(3)] == [0, 1, 2]
    assert [item.epoch for item in log.pending(10, max_bytes=2500)] == [0, 1]
    assert [item.epoch for item in log.pending(10, max_bytes=10)] == [0]


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
            small.put_proof(i.to_bytes(16, "big"), 0, bytes(4000))

    with pytest.raises(StorageError, match="let proofs settle"):
        fill()
    kept = len(small.pending(100, max_bytes=1 << 30))
    assert 0 < kept < 100
    assert small.counts().pending == kept
    small.close()


def test_two_nodes_do_not_share_a_log(log: ProofLog, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="in use"):
        ProofLog(tmp_path / "proofs")


def test_a_key_that_is_no_session_is_our_own_bug(log: ProofLog) -> None:
    with pytest.raises(LocalProtocolError):
        log.put_proof(b"short", 0, b"proof")


def test_what_was_durable_at_a_sigkill_is_there_afterwards(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from tessella_p2p.ledger.proof_log import ProofLog\n"
        "log = ProofLog(pathlib.Path(sys.argv[1]))\n"
        "log.put_checkpoint(b'1' * 16, 0, b'checkpoint')\n"
        "log.put_proof(b'2' * 16, 3, b'proof')\n"
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
    assert log.checkpoints() == [Checkpoint(b"1" * 16, 0, b"checkpoint")]
    assert log.pending(10) == [PendingProof(b"2" * 16, 3, b"proof")]
    log.close()
