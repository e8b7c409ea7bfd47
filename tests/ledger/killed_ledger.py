"""A program that changes a ledger in a child, kills the child at random points, and checks the ledger after each kill.

Run by `test_ledger_store`. It is a process of its own because it forks, which only a process of one thread may.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from tessella_p2p.ledger.chain import START, entry_hash
from tessella_p2p.ledger.changes import VerdictReached
from tessella_p2p.ledger.store import LedgerStore
from tests.ledger.proving import NOW, ROUTE, TERMS, credits_for, key_of, proof_body, seal_proof
from tests.ledger.test_settlement import TEN_LAYERS

_REQUESTS = 60
_AUDITS = 80
_PEERS = 40
_MODELS = 8
_SLASH = 1_000
_WORKERS = tuple(stage.key.peer_id for stage in ROUTE)


@dataclass(frozen=True)
class Operation:
    """One change: how it is made; it returns whether it was new."""

    kind: str
    make: Callable[[LedgerStore], bool]


def _settle(proof: bytes, store: LedgerStore) -> bool:
    return store.settle([proof], TERMS, NOW)[0].settled.status == "settled"


def _slash(audit: int, store: LedgerStore) -> bool:
    return store.slash(_WORKERS[audit % 3], _SLASH, "it lied", "audit", NOW, audit.to_bytes(16, "big"))


def _verdict(audit: int, store: LedgerStore) -> bool:
    reached = VerdictReached(audit_id=audit.to_bytes(16, "big"), peer=_WORKERS[audit % 3], verdict="failed")
    return store.record_verdict(reached, NOW) is not None


def _blacklist(peer: int, store: LedgerStore) -> bool:
    return store.set_blacklisted(key_of(f"peer {peer}").peer_id, True, "it lied", NOW)


def _keep_model(number: int, store: LedgerStore) -> bool:
    root = number.to_bytes(32, "big")
    was_there = root in store.models()
    store.keep_model(root, b"row")
    return not was_there


def _raise_floor(number: int, store: LedgerStore) -> bool:
    was_there = store.sequence_floor() >= number
    store.raise_sequence_floor(number)
    return not was_there


def _operations() -> list[Operation]:
    proofs = [
        seal_proof(proof_body(stage, request_id=f"request-{number}"), ROUTE[stage].key)
        for number in range(_REQUESTS)
        for stage in range(3)
    ]
    return [
        *(Operation("settle", partial(_settle, proof)) for proof in proofs),
        *(Operation("slash", partial(_slash, audit)) for audit in range(_AUDITS)),
        *(Operation("verdict", partial(_verdict, audit)) for audit in range(_AUDITS)),
        *(Operation("blacklist", partial(_blacklist, peer)) for peer in range(_PEERS)),
        *(Operation("model", partial(_keep_model, number)) for number in range(_MODELS)),
        *(Operation("floor", partial(_raise_floor, number)) for number in range(1, 4)),
    ]


def _make_and_tell(path: Path, operations: list[Operation], order: list[int], acknowledged: int) -> NoReturn:
    """The child: make one change after another; tell the index of each one that is durable."""
    store = LedgerStore(path)
    for index in order:
        operations[index].make(store)
        os.write(acknowledged, index.to_bytes(2, "big"))
    os._exit(0)


def _kill_one(path: Path, operations: list[Operation], order: list[int], rng: random.Random) -> set[int]:
    """Start a child, kill it, and return what it had acknowledged."""
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        os.close(readable)
        _make_and_tell(path, operations, order, writable)
    os.close(writable)
    os.read(readable, 2 * rng.randint(1, 2))
    # Anywhere within the next commits, not at their ends.
    select.select([], [], [], rng.random() * 0.004)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told = b""
    while part := os.read(readable, 4096):
        told += part
    os.close(readable)
    return {int.from_bytes(told[i : i + 2], "big") for i in range(0, len(told) - len(told) % 2, 2)}


def _check(store: LedgerStore, operations: list[Operation], acknowledged: set[int], rng: random.Random) -> list[str]:
    """What is wrong with the ledger after a kill."""
    wrong = []
    kinds = Counter[str](entry.change.kind for _, entry in store.journal(limit=4096))
    told = Counter(operations[index].kind for index in acknowledged)
    written = {"settle": "proof_settled", "slash": "slashed", "verdict": "verdict_reached"}
    for kind, change in {**written, "blacklist": "blacklist_changed"}.items():
        if kinds[change] < told[kind]:
            wrong.append(f"lost: {told[kind]} of {kind} were acknowledged, {kinds[change]} are there")
    if not _adds_up(store, kinds):
        wrong.append("doubled: the accounts are not what the journal's entries bring and take")
    if store.total() != 0 or store.content() != store.replay().content():
        wrong.append("doubled: the state is not what the journal says")
    previous, rows = START, 0
    while page := store.snapshot(rows, 500):
        for row in page:
            rows += 1
            wrong += ["broken chain"] * (row.previous != previous or row.sequence != rows)
            previous = entry_hash(previous, 0, row.sequence, row.entry)
    if store.head().hash != previous:
        wrong.append("broken chain: its head")
    for index in rng.sample(sorted(acknowledged), min(8, len(acknowledged))):
        if operations[index].make(store):
            wrong.append(f"lost: a {operations[index].kind} that was acknowledged")
    return wrong


def _adds_up(store: LedgerStore, kinds: Mapping[str, int]) -> bool:
    accounts = [store.account(worker) for worker in _WORKERS]
    settled = sum(account.settled_proofs for account in accounts)
    balance = sum(account.micro_credits for account in accounts)
    expected = settled * credits_for(TEN_LAYERS, 300) - kinds["slashed"] * _SLASH
    reputations = store.reputations("", 10, NOW)
    failed = sum(reputation.audits_failed for _, reputation in reputations)
    slashes = sum(reputation.slashes for _, reputation in reputations)
    counted = (settled, failed, slashes, len(store.blacklist()))
    entries = tuple(kinds[kind] for kind in ("proof_settled", "verdict_reached", "slashed", "blacklist_changed"))
    return balance == expected and counted == entries


def main() -> None:
    """Print one JSON object with what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--kills", type=int, required=True)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    operations = _operations()
    acknowledged: set[int] = set()
    wrong: list[str] = []
    early = 0
    for _ in range(options.kills):
        left = [index for index in range(len(operations)) if index not in acknowledged]
        acknowledged |= _kill_one(options.path, operations, rng.sample(left, len(left)), rng)
        store = LedgerStore(options.path)
        early += len(acknowledged) < len(operations)
        wrong += _check(store, operations, acknowledged, rng)
        store.close()
    store = LedgerStore(options.path)
    for operation in operations:
        operation.make(store)
    wrong += _check(store, operations, set(range(len(operations))), rng)
    store.close()
    report = {"kills": options.kills, "kills_before_everything_was_done": early, "wrong": wrong}
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
