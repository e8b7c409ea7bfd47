"""What a stage opened and is paid for it knows again after a restart, so that it never signs for two runs of one (session, epoch)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tessella_p2p.base.errors import StaleEpoch, StorageError
from tessella_p2p.base.ids import SessionId
from tessella_p2p.base.limits import TICKET_OPEN_S
from tessella_p2p.stages.opening import EpochFence
from tessella_p2p.worker import open_journal
from tessella_p2p.worker.open_journal import OpenJournal
from tests.stages.openings import NOW, opened, ticket

SESSIONS = [SessionId(bytes([number]) * 16) for number in range(5)]


def noted(folder: Path, opens: list[tuple[SessionId, int]], now_ms: int = NOW) -> None:
    journal = OpenJournal(folder)
    for session, epoch in opens:
        journal.note(session, epoch, now_ms)
    journal.close()


def remembered(folder: Path, now_ms: int = NOW) -> list[tuple[SessionId, int]]:
    journal = OpenJournal(folder)
    try:
        return list(journal.remembered(now_ms))
    finally:
        journal.close()


def test_a_restart_forgets_nothing_of_the_last_hour(tmp_path: Path) -> None:
    opens = [(SESSIONS[0], 0), (SESSIONS[1], 3), (SESSIONS[0], 1)]
    noted(tmp_path, opens)
    noted(tmp_path, [(SESSIONS[2], 0)], NOW + 1000)
    assert remembered(tmp_path, NOW + 1000) == [*opens, (SESSIONS[2], 0)]
    later = NOW + int(TICKET_OPEN_S * 1000)
    assert len(remembered(tmp_path, later)) == 4
    assert remembered(tmp_path, later + 200_000) == []


def test_a_record_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    noted(tmp_path, [(SESSIONS[0], 0), (SESSIONS[1], 0)])
    path = tmp_path / "opens"
    path.write_bytes(path.read_bytes()[:-5])
    noted(tmp_path, [(SESSIONS[2], 0)])
    assert remembered(tmp_path) == [(SESSIONS[0], 0), (SESSIONS[2], 0)]


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_journal, "MAX_REMEMBERED_OPENS", 2)
    noted(tmp_path, [(session, 0) for session in SESSIONS])
    assert remembered(tmp_path) == [(session, 0) for session in SESSIONS[2:]]
    noted(tmp_path, [(SESSIONS[0], 1)])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * 28


def test_a_turn_of_the_files_that_fails_halfway_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_journal, "MAX_REMEMBERED_OPENS", 2)
    journal = OpenJournal(tmp_path)
    for session in SESSIONS[:2]:
        journal.note(session, 0, NOW)

    def too_many_files(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", too_many_files)
        for _ in range(2):
            with pytest.raises(StorageError):
                journal.note(SESSIONS[2], 0, NOW)
    journal.note(SESSIONS[3], 0, NOW)
    journal.close()
    assert remembered(tmp_path) == [(SESSIONS[0], 0), (SESSIONS[1], 0), (SESSIONS[3], 0)]


def test_a_folder_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        OpenJournal(tmp_path / "missing")


def test_the_fence_of_a_restarted_stage_refuses_what_the_one_before_opened() -> None:
    before = opened(0, ticket=ticket())
    fence = EpochFence([(before.key[0], 2), (before.key[0], 1)])
    for epoch in range(3):
        with pytest.raises(StaleEpoch):
            fence.admit(opened(0, ticket=ticket(), epoch=epoch))
        with pytest.raises(StaleEpoch):
            fence.admit(opened(0, epoch=epoch))  # unpaid it would sign receipts as well
    fence.admit(opened(0, ticket=ticket(), epoch=3))


def test_no_number_of_unpaid_sessions_makes_the_fence_forget_a_paid_one() -> None:
    fence = EpochFence()
    fence.admit(opened(0, ticket=ticket()))
    for number in range(5000):
        fence.admit(opened(0, session=number.to_bytes(16, "big")))
    with pytest.raises(StaleEpoch):
        fence.admit(opened(0, ticket=ticket()))
