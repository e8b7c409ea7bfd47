"""The operator's log (shell): one JSON object a line, appended and synced, never changed.

    {"at": "2027-01-15T08:00:00.000Z", "action": 7, "where": "p2p 12D3…", "kind": "slash", "request": {…}, "outcome": "begun"}
    {"at": "2027-01-15T08:00:00.004Z", "action": 7, "where": "p2p 12D3…", "kind": "slash", "request": {…}, "outcome": "done"}

``outcome`` is ``begun``, ``done``, ``cut_off`` (the asker left meanwhile), or the code of the error that it ended with, then beside its
``reason``. A ``begun`` without a second line is an action during which the process died. The admin token is never in it.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from tessella_p2p.base.errors import StorageError

FILE_NAME = "operator.log"


class OperatorLog:
    """A file that only grows. Methods block; each may be called from any thread.

    Args:
        path: the file; it is made where it is missing, readable by its owner alone.

    Raises:
        StorageError: here and in every method, when it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mutex = threading.Lock()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def write(
        self,
        at_ms: int,
        where: str,
        kind: str,
        request: Mapping[str, object],
        outcome: str,
        *,
        reason: str = "",
        number: int = 0,
    ) -> int:
        """Append one line; it is durable on return.

        Args:
            at_ms: when (Unix milliseconds).
            where: who asked, and from where.
            kind: what was asked.
            request: its fields, as JSON.
            outcome: ``begun``, ``done`` or an error's code.
            reason: of a refusal.
            number: of the action that a line belongs to; 0 for a new one.

        Returns:
            the action's number.
        """
        with self._mutex:
            # The file only grows, so its size before an action's first line numbers the action.
            action = number or self._size() + 1
            line: dict[str, object] = {
                "at": datetime.fromtimestamp(at_ms / 1000, UTC)
                .isoformat(timespec="milliseconds")
                .replace("+00:00", "Z"),
                "action": action,
                "where": where,
                "kind": kind,
                "request": request,
                "outcome": outcome,
            }
            if reason:
                line["reason"] = reason
            self._append(json.dumps(line, ensure_ascii=True).encode() + b"\n")
            return action

    def _size(self) -> int:
        try:
            return os.fstat(self._file).st_size
        except OSError as error:
            raise self._unwritable(error) from error

    def _append(self, line: bytes) -> None:
        try:
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                line = b"\n" + line  # behind what a full disk, or a machine that died, left of a line
            written = os.write(self._file, line)
            if written != len(line):  # a full disk takes a part: what is there is no line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> StorageError:
        return StorageError(f"{self._path}: the operator's log cannot be written: {error.strerror}")
