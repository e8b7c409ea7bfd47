"""Files that belong to one user: written whole or not at all, and readable by nobody else."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

_FILE_MODE = 0o600


def write_private(path: Path, data: bytes) -> None:
    """Write or replace a file; it is the old one or the new one, never a part.

    Raises:
        OSError: as the system says; the old one is as it was.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()
