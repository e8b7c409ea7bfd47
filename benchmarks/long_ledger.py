"""A ledger of ten million entries, and how it is made.

Making it is not what is measured: real entries, as an orchestrator writes them, are copied with another request, session and digest
each, and chained. Only the journal and the accounts are filled; the tables of tickets that could still settle have no part in
opening or paging.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.net_wire import key_named
from benchmarks.paper_proofs import POSITIONS, STAGES, WORKERS
from benchmarks.results import BenchmarkError
from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.limits import (
    DIGEST_MARK_POSITIONS,
    LEDGER_MAP_BYTES,
    MIB,
    MICRO_PER_LAYER_POSITION,
    TICKET_SETTLE_S,
)
from tessella_p2p.ledger.accounts import ISSUANCE, Transfer
from tessella_p2p.ledger.chain import START, entry_hash, pack_row
from tessella_p2p.ledger.changes import JournalEntry, ProofSettled, decode_entry, encode_entry
from tessella_p2p.ledger.environment import DATABASE_NAME, Environment
from tessella_p2p.ledger.journal import JOURNAL, JOURNAL_TABLES
from tessella_p2p.ledger.state import DAY_MS, TABLE_NAMES, LedgerState
from tessella_p2p.ledger.store import SCHEMA
from tessella_p2p.wire.messages import DigestMark

ENTRIES = 10_000_000
_IN_ONE_COMMIT = 100_000
_FREE_BYTES = 24 * 1024 * MIB
"""What the disk must have free; the ledger takes less than half of it."""
_REQUEST = b"request-00000000"
_SESSION = bytes(range(16))
_DIGEST = bytes(range(100, 132))


def make(folder: Path, entries: int, report: Callable[[str], None]) -> int:
    """Write a ledger of so many entries; its size on disk, in bytes.

    Raises:
        BenchmarkError: the disk has not enough room.
    """
    if shutil.disk_usage(folder.parent).free < _FREE_BYTES * entries // ENTRIES:
        raise BenchmarkError(f"the ledger of {entries} entries needs {_FREE_BYTES * entries // ENTRIES >> 20} MiB free")
    environment = Environment(
        folder, (*JOURNAL_TABLES, *TABLE_NAMES), map_size_bytes=LEDGER_MAP_BYTES, schema=SCHEMA, sync=False
    )
    templates = [_template(index) for index in range(len(STAGES))]
    previous, sequence = START, 0
    while sequence < entries:
        with environment.write() as transaction:
            for _ in range(min(_IN_ONE_COMMIT, entries - sequence)):
                sequence += 1
                entry = templates[sequence % len(STAGES)](sequence)
                transaction.append(JOURNAL, sequence.to_bytes(8, "big"), pack_row(previous, entry))
                previous = entry_hash(previous, 0, sequence, entry)
            _pay(LedgerState(transaction), _IN_ONE_COMMIT // len(STAGES))
        if sequence % (10 * _IN_ONE_COMMIT) == 0:
            report(f"ledger: {sequence // 1_000_000} of {entries // 1_000_000} million entries written")
    environment.close()
    return (folder / DATABASE_NAME).stat().st_size


def _pay(state: LedgerState, proofs: int) -> None:
    """What so many entries of each worker brought it."""
    for worker, (start, end) in zip(WORKERS, STAGES, strict=True):
        amount = proofs * (end - start) * POSITIONS * MICRO_PER_LAYER_POSITION
        state.accounts.apply(Transfer(ISSUANCE, worker.peer_id, amount), proofs=proofs)


def _template(index: int) -> Callable[[int], bytes]:
    """An entry about stage ``index``, as bytes, but for what its sequence decides."""
    now_ms = SystemClock().unix_ms()
    start, end = STAGES[index]
    requester = key_named("requester 0").peer_id
    change = ProofSettled(
        requester=requester,
        request_id=_REQUEST.decode(),
        settle_before=now_ms + round(TICKET_SETTLE_S * 1000),
        worker=WORKERS[index].peer_id,
        session=_SESSION,
        epoch=0,
        layers=(start, end),
        paid_positions=POSITIONS,
        micro_credits=(end - start) * POSITIONS * MICRO_PER_LAYER_POSITION,
        complete=True,
        day=now_ms // DAY_MS,
        payload_digest=_DIGEST,
        upstream=WORKERS[index - 1].peer_id if index else requester,
        downstream=WORKERS[index + 1].peer_id if index + 1 < len(STAGES) else requester,
        route=os.urandom(32),
        points=tuple(
            DigestMark(positions=at, input=os.urandom(32), output=os.urandom(32))
            for at in (DIGEST_MARK_POSITIONS, POSITIONS)
        ),
    )
    entry = encode_entry(JournalEntry(at=now_ms, change=change))
    places = [(entry.index(part), len(part)) for part in (_REQUEST, _SESSION, _DIGEST)]

    def numbered(sequence: int) -> bytes:
        made = bytearray(entry)
        request = sequence // len(STAGES)
        values = (b"request-%08d" % request, request.to_bytes(16, "big"), sequence.to_bytes(32, "big"))
        for (at, length), value in zip(places, values, strict=True):
            made[at : at + length] = value
        return bytes(made)

    assert decode_entry(numbered(1)).change.kind == "proof_settled"
    return numbered
