"""Ordered tables of bytes: what the ledger's state is kept in.

The state reads and writes through `Tables` alone, so one piece of code serves the database (`store`), the replay of a journal and
the tests, and two states are equal when their bytes are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

import cbor2

from tessella_p2p.base.errors import LocalProtocolError
from tessella_p2p.wire import cbor


def encode_row(value: object) -> bytes:
    """The bytes of a row's value: numbers, strings and lists of them, no map, so that one value has one encoding."""
    return cbor.encode_plain(value)


def decode_row(row: bytes) -> object:
    """The value of a row that this program wrote; without the checks that a peer's bytes get.

    Raises:
        LocalProtocolError: the row is damaged.
    """
    try:
        value: object = cbor2.loads(row)
    except (cbor2.CBORError, ValueError) as error:
        raise LocalProtocolError(f"a row of the ledger is damaged: {type(error).__name__}") from error
    return value


class Tables(Protocol):
    """Tables of byte keys in order. Keys have at most 511 bytes (LMDB's limit)."""

    def get(self, table: str, key: bytes) -> bytes | None:
        """The value of ``key``, or None."""
        ...

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Set the value of ``key``."""
        ...

    def delete(self, table: str, key: bytes) -> None:
        """Remove ``key`` where it is there."""
        ...

    def scan(self, table: str, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Up to ``limit`` pairs whose keys are at least ``start``, in order."""
        ...


class DictTables:
    """`Tables` in memory."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[bytes, bytes]] = {}
        self._keys: dict[str, list[bytes]] = {}

    def get(self, table: str, key: bytes) -> bytes | None:
        """The value of ``key``, or None."""
        return self._rows.get(table, {}).get(key)

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Set the value of ``key``."""
        rows = self._rows.setdefault(table, {})
        if key not in rows:
            insort(self._keys.setdefault(table, []), key)
        rows[key] = value

    def delete(self, table: str, key: bytes) -> None:
        """Remove ``key`` where it is there."""
        if self._rows.get(table, {}).pop(key, None) is not None:
            keys = self._keys[table]
            del keys[bisect_left(keys, key)]

    def scan(self, table: str, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Up to ``limit`` pairs whose keys are at least ``start``, in order."""
        keys = self._keys.get(table, [])
        first = bisect_left(keys, start)
        rows = self._rows.get(table, {})
        return [(key, rows[key]) for key in keys[first : first + limit]]

    def content(self) -> dict[str, list[tuple[bytes, bytes]]]:
        """Every pair of every table that is not empty, in order."""
        return {table: [(key, self._rows[table][key]) for key in keys] for table, keys in self._keys.items() if keys}
