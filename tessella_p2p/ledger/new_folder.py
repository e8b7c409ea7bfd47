"""A folder that appears whole, or not at all (shell)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tessella_p2p.base.errors import StorageError


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``path`` once that is done; an exception removes it."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        if path.exists():
            raise StorageError(f"{path} exists: move it away, or name another folder")
        shutil.rmtree(unfinished, ignore_errors=True)  # of an attempt that was killed
        unfinished.mkdir(mode=0o700, parents=True)
        try:
            yield unfinished
            _sync(unfinished)
            unfinished.rename(path)
            _sync(path.parent)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}. Check the disk and the folder's owner"
        ) from error


def _sync(path: Path) -> None:
    """Make the folder's files and their names durable."""
    for name in (*path.glob("*.mdb"), path):
        descriptor = os.open(name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
