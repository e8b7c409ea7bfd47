"""Backups of a ledger, and how one is put back (shell).

A backup is a copy of the database in one moment, compacted, made while the orchestrator runs. What was settled after it is not in it,
so a restored ledger is another one: it begins the next chain, which federated orchestrators follow from its beginning, and it numbers
leases and envelopes far beyond what may have been signed meanwhile, so that none is signed twice with one number.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

from tessella_p2p.base.errors import StorageError
from tessella_p2p.ledger.chain import Head
from tessella_p2p.ledger.environment import DATABASE_NAME, copy_database
from tessella_p2p.ledger.new_folder import new_folder
from tessella_p2p.ledger.store import LedgerStore


def backup_ledger(path: Path, target: Path) -> None:
    """Copy the ledger in folder ``path`` to the new folder ``target``, whether another process has it open or none has.

    Raises:
        StorageError: there is no ledger, ``target`` exists, or it cannot be written; then nothing is left of it.
    """
    if not (path / DATABASE_NAME).is_file():
        raise StorageError(f"{path} holds no ledger")
    with new_folder(target) as unfinished:
        copy_database(path, unfinished)


def restore_ledger(backup: Path, path: Path, now_ms: int) -> Head:
    """Make the ledger in the new folder ``path`` out of a backup.

    It reads the whole journal and checks its chain: some minutes for ten million entries.

    Args:
        backup: the folder that `backup_ledger` wrote; it stays as it is.
        path: the folder of the ledger; move away what is there.
        now_ms: the time, Unix milliseconds.

    Returns:
        Where the restored ledger stands, in its new chain.

    Raises:
        StorageError: there is no backup, it is damaged or of a newer version, or ``path`` exists; then nothing is left of it.
    """
    if not (backup / DATABASE_NAME).is_file():
        raise StorageError(f"{backup} holds no backup of a ledger")
    with new_folder(path) as unfinished:
        shutil.copyfile(backup / DATABASE_NAME, unfinished / DATABASE_NAME)
        with closing(LedgerStore(unfinished)) as store:
            return store.begin_chain(now_ms)
