"""Federation: signed ledger entries, pulled by cursor."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tessella_p2p.base.limits import KIB, MAX_PAGE_ROWS
from tessella_p2p.wire.envelope import Message
from tessella_p2p.wire.messages.types import Count, Digest, PageSize, Sealed


class LedgerEntry(Message):
    """One entry of an orchestrator's journal. Domain `LEDGER_ENTRY`, audience anyone; the signer is the orchestrator.

    ``entry`` is the journal's bytes, ``previous`` the hash of the entry before it (see ``ledger.chain``), ``proof`` what it rests
    on. Two different entries of one (signer, chain, sequence) are evidence of equivocation. ``chain`` counts the restores from a
    backup.
    """

    chain: Count
    sequence: Count
    previous: Digest
    entry: Annotated[bytes, Field(min_length=1, max_length=64 * KIB)]
    proof: Sealed | None = None


class PullSnapshot(Message):
    """A page of entries behind ``since``, of chain ``chain``; the signer is a federated orchestrator or, over HTTP, the operator."""

    kind: Literal["pull_snapshot"] = "pull_snapshot"
    chain: Count
    since: Count
    limit: PageSize = MAX_PAGE_ROWS


class SnapshotPage(Message):
    """Answer to `PullSnapshot`. Where ``chain`` is another one than was asked for, it holds no entry: begin again at 0."""

    kind: Literal["snapshot_page"] = "snapshot_page"
    chain: Count
    head: Count
    head_hash: Digest
    entries: Annotated[tuple[Sealed, ...], Field(max_length=MAX_PAGE_ROWS)]
