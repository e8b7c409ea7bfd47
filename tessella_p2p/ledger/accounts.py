"""Double entry: every transfer takes from one account what it gives to another, so the sum over all accounts is always 0.

Amounts are integer micro-credits. Proven work is paid from `ISSUANCE`, the one account that goes below 0; its balance is minus
what all workers were ever paid.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tessella_p2p.base.errors import LocalProtocolError
from tessella_p2p.ledger.tables import Tables

ISSUANCE = "issuance"
"""The account that new credits come from. No peer id looks like it."""

TABLE = "accounts"
_PAGE = 1024
_ROW = struct.Struct(">qQ")
"""Micro-credits and settled proofs."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Move ``micro_credits`` (over 0) from account ``debit`` to account ``credit``."""

    debit: str
    credit: str
    micro_credits: int


@dataclass(frozen=True, slots=True)
class Account:
    """One account: its balance in micro-credits and how many of its proofs were settled."""

    name: str
    micro_credits: int = 0
    settled_proofs: int = 0


class Accounts:
    """The accounts in a set of tables."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def get(self, name: str) -> Account:
        """The account ``name``; one that was never touched is empty."""
        row = self._tables.get(TABLE, name.encode())
        return Account(name) if row is None else _account(name, row)

    def apply(self, transfer: Transfer, *, proofs: int = 0) -> None:
        """Post both sides of a transfer.

        Args:
            transfer: what is moved.
            proofs: by how many settled proofs the credited account's count rises.

        Raises:
            LocalProtocolError: an amount below 1, or both sides the same account.
        """
        if transfer.micro_credits < 1 or transfer.debit == transfer.credit:
            raise LocalProtocolError(f"no transfer: {transfer}")
        self._add(transfer.debit, -transfer.micro_credits, 0)
        self._add(transfer.credit, transfer.micro_credits, proofs)

    def count_proof(self, name: str) -> None:
        """One more settled proof of ``name``, which brought nothing."""
        self._add(name, 0, 1)

    def page(self, after: str = "", limit: int = _PAGE) -> list[Account]:
        """Up to ``limit`` accounts whose names follow ``after``, in the order of their names."""
        rows = self._tables.scan(TABLE, after.encode() + (b"\0" if after else b""), limit)
        return [_account(key.decode(), row) for key, row in rows]

    def total(self) -> int:
        """The sum over all accounts: 0."""
        total, after = 0, ""
        while page := self.page(after):
            total += sum(account.micro_credits for account in page)
            after = page[-1].name
        return total

    def _add(self, name: str, micro_credits: int, proofs: int) -> None:
        key = name.encode()
        row = self._tables.get(TABLE, key)
        before, settled = (0, 0) if row is None else _content(name, row)
        try:
            after = _ROW.pack(before + micro_credits, settled + proofs)
        except struct.error as error:
            raise LocalProtocolError(f"account {name} would pass 2⁶³ micro-credits") from error
        self._tables.put(TABLE, key, after)


def _account(name: str, row: bytes) -> Account:
    return Account(name, *_content(name, row))


def _content(name: str, row: bytes) -> tuple[int, int]:
    """Micro-credits and settled proofs."""
    if len(row) != _ROW.size:
        raise LocalProtocolError(f"the row of account {name} is damaged")
    micro_credits, settled_proofs = _ROW.unpack(row)
    return micro_credits, settled_proofs
