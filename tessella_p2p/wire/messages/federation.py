"""Federation: signed ledger entries, pulled by cursor."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tessella_p2p.base.limits import KIB, MAX_FEDERATION_PEERS, MAX_LEDGER_ENTRY_BYTES, MAX_PAGE_ROWS
from tessella_p2p.wire.envelope import Message
from tessella_p2p.wire.messages.types import Count, Digest, PageSize, Sealed


class LedgerEntry(Message):
    """One entry of an orchestrator's journal. Domain `LEDGER_ENTRY`, audience anyone; the signer is the orchestrator.

    ``entry`` is the journal's bytes, ``previous`` the hash of the entry before it (see ``ledger.chain``), ``proof`` what it rests
    on, as long as that is kept. Two different entries of one (signer, chain, sequence) are evidence of equivocation. ``chain`` rises
    with each restore from a backup.
    """

    chain: Count
    sequence: Count
    previous: Digest
    entry: Annotated[bytes, Field(min_length=1, max_length=64 * KIB)]
    proof: Sealed | None = None


SealedEntry = Annotated[bytes, Field(min_length=1, max_length=MAX_LEDGER_ENTRY_BYTES)]
"""A sealed `LedgerEntry`: larger than `Sealed`, for there is a sealed proof in it."""


class LedgerHead(Message):
    """Where an orchestrator's journal ends: its newest sequence, and that entry's hash. Domain `LEDGER_HEAD`, audience anyone.

    It is small enough to be passed on, so followers that are told different stories find out from each other.
    """

    chain: Count
    sequence: Count
    hash: Digest


class PullSnapshot(Message):
    """A page of entries behind ``since``, of chain ``chain``; the signer is a federated orchestrator or, over HTTP, the operator."""

    kind: Literal["pull_snapshot"] = "pull_snapshot"
    chain: Count
    since: Count
    limit: PageSize = MAX_PAGE_ROWS


class SnapshotPage(Message):
    """Answer to `PullSnapshot`. Where ``chain`` is another one than was asked for, it holds no entry: begin again at 0.

    ``signed_head`` is a sealed `LedgerHead`; ``chain``, ``head`` and ``head_hash`` repeat it for people. ``seen`` are the newest sealed
    heads of other orchestrators that the answering one follows.
    """

    kind: Literal["snapshot_page"] = "snapshot_page"
    chain: Count
    head: Count
    head_hash: Digest
    entries: Annotated[tuple[SealedEntry, ...], Field(max_length=MAX_PAGE_ROWS)]
    signed_head: Sealed
    seen: Annotated[tuple[Sealed, ...], Field(max_length=MAX_FEDERATION_PEERS)] = ()
