"""An LMDB environment with one writing process and typed errors. LMDB syncs to disk before a commit returns.

Shells only: this touches files. Reads and writes of LMDB block, for milliseconds where the disk is busy, so callers on an event
loop run them through `blocking`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import lmdb

from tessella_p2p.base.errors import StorageError

DATABASE_NAME = "data.mdb"
"""LMDB's file in a folder."""
_LOCK_NAME = "writer.lock"


def copy_database(path: Path, target: Path) -> None:
    """Copy the database in folder ``path``, as it is now, into the empty folder ``target``, without what it holds of free pages.

    Another process may be writing meanwhile, this one may not have it open.

    Raises:
        StorageError: it is no database, or ``target`` cannot be written.
    """
    with _typed_errors(path), lmdb.open(str(path), readonly=True, max_dbs=0) as environment:
        environment.copy(str(target), compact=True)


class Environment:
    """An open database folder, locked against every other process.

    Args:
        path: the folder; it is made where it is missing, readable by its owner alone.
        tables: the names of the tables.
        map_size_bytes: the size to which the file may grow.
        schema: version of what the tables hold; another one on disk is refused, never guessed at.
        since: the oldest version that this program reads as well; it becomes ``schema``. Tables that it lacks start empty.
        migrate: what else has to happen to an older one, in the transaction that makes it a ``schema``; it is told which it was.
        sync: False loses the latest commits when the machine (not the process) dies; for simulations.

    Raises:
        StorageError: another process has it open, it cannot be written, or its schema is another one.
    """

    def __init__(
        self,
        path: Path,
        tables: tuple[str, ...],
        *,
        map_size_bytes: int,
        schema: int,
        since: int | None = None,
        migrate: Callable[[Transaction, int], None] | None = None,
        sync: bool = True,
    ) -> None:
        self.path = path
        self._map_size_bytes = map_size_bytes
        self._mutex = threading.Lock()
        self._lock_file = -1
        with _typed_errors(self.path, self._map_size_bytes):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_file = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock()
            with _typed_errors(self.path, self._map_size_bytes):
                self._env = lmdb.open(
                    str(path), map_size=map_size_bytes, max_dbs=len(tables) + 1, subdir=True, mode=0o600, sync=sync
                )
        except StorageError:
            os.close(self._lock_file)
            raise
        try:
            with _typed_errors(self.path, self._map_size_bytes):
                self._meta = self._env.open_db(b"meta")
                self._tables = {name: self._env.open_db(name.encode()) for name in tables}
            self._check_schema(schema, schema if since is None else since, migrate)
        except StorageError:
            self.close()
            raise

    def close(self) -> None:
        """Close the database and let another process have it. A second call does nothing."""
        if self._lock_file >= 0:
            self._env.close()
            os.close(self._lock_file)
            self._lock_file = -1

    def copy(self, target: Path) -> None:
        """`copy_database` of this one, while it is written."""
        with _typed_errors(self.path, self._map_size_bytes):
            self._env.copy(str(target), compact=True)

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """The one write transaction: durable once the block has ended; an exception undoes it."""
        with self._mutex, _typed_errors(self.path, self._map_size_bytes), self._env.begin(write=True) as transaction:
            yield Transaction(transaction, self._tables, self._meta)

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A consistent view that no writer disturbs."""
        with _typed_errors(self.path, self._map_size_bytes), self._env.begin() as transaction:
            yield Transaction(transaction, self._tables, self._meta)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(
                f"{self.path} is in use by another process: stop that one, or name another folder"
            ) from error

    def _check_schema(self, schema: int, since: int, migrate: Callable[[Transaction, int], None] | None) -> None:
        with self.write() as transaction:
            found = transaction.number("schema")
            if found == schema:
                return
            if found is not None and not since <= found < schema:
                raise StorageError(
                    f"{self.path} has schema version {found}, this program reads version {schema}: "
                    f"use the program that wrote it, or name another folder"
                )
            if found is not None and migrate is not None:
                migrate(transaction, found)
            transaction.set_number("schema", schema)


@contextmanager
def _typed_errors(path: Path, map_size_bytes: int = 0) -> Iterator[None]:
    try:
        yield
    except lmdb.MapFullError as error:
        raise StorageError(
            f"{path} has reached its {map_size_bytes >> 20} MiB, and no setting makes that more. What is in it stays; "
            f"nothing is added before there is room: let proofs settle, or raise its ..._MAP_BYTES in base/limits.py"
        ) from error
    except (lmdb.DiskError, lmdb.ReadonlyError, lmdb.LockError) as error:
        raise StorageError(f"{path} cannot be written ({error}): check the disk and the folder's owner") from error
    except lmdb.Error as error:
        raise StorageError(f"{path} is no database that this program can use: {error}") from error
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else str(error.strerror)
        raise StorageError(f"{path} cannot be used: {what}. Check the disk and the folder's owner") from error


class Transaction:
    """`Tables` in one LMDB transaction, and the numbers beside them."""

    def __init__(
        self, transaction: lmdb.Transaction, tables: Mapping[str, lmdb._Database], meta: lmdb._Database
    ) -> None:
        self._transaction = transaction
        self._tables = tables
        self._meta = meta

    def get(self, table: str, key: bytes) -> bytes | None:
        """The value of ``key``, or None."""
        value = self._transaction.get(key, db=self._tables[table])
        return None if value is None else bytes(value)

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Set the value of ``key``."""
        self._transaction.put(key, value, db=self._tables[table])

    def append(self, table: str, key: bytes, value: bytes) -> None:
        """Set the value of a key that is larger than every key in the table."""
        self._transaction.put(key, value, db=self._tables[table], append=True)

    def delete(self, table: str, key: bytes) -> None:
        """Remove ``key`` where it is there."""
        self._transaction.delete(key, db=self._tables[table])

    def clear(self, table: str) -> None:
        """Remove every row of a table."""
        self._transaction.drop(self._tables[table], delete=False)

    def scan(self, table: str, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Up to ``limit`` pairs whose keys are at least ``start``, in order."""
        rows: list[tuple[bytes, bytes]] = []
        with self._transaction.cursor(db=self._tables[table]) as cursor:
            if limit < 1 or not (cursor.set_range(start) if start else cursor.first()):
                return rows
            for key, value in cursor:
                rows.append((bytes(key), bytes(value)))
                if len(rows) == limit:
                    break
        return rows

    def walk(self, table: str, start: bytes, limit: int) -> Iterator[tuple[bytes, bytes]]:
        """`scan`, read one by one as far as the caller goes."""
        with self._transaction.cursor(db=self._tables[table]) as cursor:
            found = limit > 0 and (cursor.set_range(start) if start else cursor.first())
            while found and limit:
                yield bytes(cursor.key()), bytes(cursor.value())
                limit -= 1
                found = cursor.next()

    def scan_back(self, table: str, before: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Up to ``limit`` pairs whose keys are below ``before`` (empty: from the last one on), the largest key first."""
        rows: list[tuple[bytes, bytes]] = []
        with self._transaction.cursor(db=self._tables[table]) as cursor:
            found = cursor.prev() if before and cursor.set_range(before) else cursor.last()
            while found and len(rows) < limit:
                rows.append((bytes(cursor.key()), bytes(cursor.value())))
                found = cursor.prev()
        return rows

    def last_key(self, table: str) -> bytes | None:
        """The largest key of a table."""
        with self._transaction.cursor(db=self._tables[table]) as cursor:
            return bytes(cursor.key()) if cursor.last() else None

    def count(self, table: str) -> int:
        """How many rows a table has."""
        return int(self._transaction.stat(self._tables[table])["entries"])

    def number(self, name: str) -> int | None:
        """A number that `set_number` kept."""
        value = self._transaction.get(name.encode(), db=self._meta)
        return None if value is None else int.from_bytes(value, "big")

    def set_number(self, name: str, value: int) -> None:
        """Keep a number of 0 to 2⁶⁴ − 1 under ``name``."""
        self._transaction.put(name.encode(), value.to_bytes(8, "big"), db=self._meta)
