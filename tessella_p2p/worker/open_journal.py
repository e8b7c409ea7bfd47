"""Which (session, epoch) this node has opened and is paid for, remembered over its restarts (shell).

A stage signs receipts and a proof for what it received. Were an entry able to open the same (session, epoch) again on a stage that has
forgotten it, and send other rows, the stage's signatures of the two runs would contradict each other, and an audit would take it for a
liar. So what the fence remembers has to outlive the process, for as long as a ticket opens sessions.

A record is appended before the session begins and is not synced: a process that dies loses nothing of it, and a machine that dies is
not back within the hour with its clock and its leases. Two files take turns, so what is kept is bounded.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from tessella_p2p.base.errors import StorageError
from tessella_p2p.base.ids import SessionId
from tessella_p2p.base.limits import CLOCK_SKEW_MS, MAX_REMEMBERED_OPENS, TICKET_OPEN_S

_RECORD = struct.Struct(">16sIQ")
_KEPT_MS = int(TICKET_OPEN_S * 1000) + 2 * CLOCK_SKEW_MS


class OpenJournal:
    """The two files ``opens`` and ``opens.old`` in a node's folder.

    Args:
        folder: it exists.

    Raises:
        StorageError: here and in `note`, when it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "opens"
        self._old = folder / "opens.old"
        self._file = -1
        self._num_records = 0
        try:
            self._open()
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror}") from error

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        whole = os.fstat(self._file).st_size // _RECORD.size
        os.ftruncate(self._file, whole * _RECORD.size)  # a record that was cut off belongs to no session that began
        self._num_records = whole

    def close(self) -> None:
        """Close the files. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def remembered(self, now_ms: int) -> Iterator[tuple[SessionId, int]]:
        """What may still be opened again, oldest first: (session, epoch)."""
        for path in (self._old, self._path):
            data = path.read_bytes() if path.exists() else b""
            for session, epoch, at in _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size]):
                if at + _KEPT_MS > now_ms:
                    yield SessionId(session), epoch

    def note(self, session: SessionId, epoch: int, now_ms: int) -> None:
        """Remember an open; constant time, and nothing is waited for."""
        try:
            if self._num_records >= MAX_REMEMBERED_OPENS:
                self.close()
                os.replace(self._path, self._old)
                self._num_records = 0
            if self._file < 0:  # also where it could not be opened the last time
                self._open()
            written = os.write(self._file, _RECORD.pack(session, epoch, now_ms))
            if written != _RECORD.size:
                os.ftruncate(self._file, self._num_records * _RECORD.size)
                raise StorageError(f"{self._path} cannot be written: no space is left")
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror}") from error
        self._num_records += 1
