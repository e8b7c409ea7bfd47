"""A program that settles proofs in a child, kills the child at random points, and checks the ledger after each kill.

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
from pathlib import Path
from typing import NoReturn

from tessella_p2p.ledger.store import LedgerStore
from tests.ledger.proving import NOW, ROUTE, TERMS, credits_for, proof_body, seal_proof
from tests.ledger.test_settlement import TEN_LAYERS

_REQUESTS = 50


def _settle_and_tell(path: Path, proofs: list[bytes], order: list[int], acknowledged: int) -> NoReturn:
    """The child: settle one proof after another; tell the index of each one that is durable."""
    store = LedgerStore(path)
    for index in order:
        store.settle([proofs[index]], TERMS, NOW)
        os.write(acknowledged, index.to_bytes(2, "big"))
    os._exit(0)


def _kill_one(path: Path, proofs: list[bytes], rng: random.Random) -> set[int]:
    """Start a child, kill it, and return what it had acknowledged."""
    order = rng.sample(range(len(proofs)), len(proofs))
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        os.close(readable)
        _settle_and_tell(path, proofs, order, writable)
    os.close(writable)
    os.read(readable, 2 * rng.randint(1, 3))
    # Anywhere within the next commits, not at their ends.
    select.select([], [], [], rng.random() * 0.004)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told = b""
    while part := os.read(readable, 4096):
        told += part
    os.close(readable)
    return {int.from_bytes(told[i : i + 2], "big") for i in range(0, len(told) - len(told) % 2, 2)}


def main() -> None:
    """Print one JSON object with what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--kills", type=int, required=True)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    proofs = [
        seal_proof(proof_body(stage, request_id=f"request-{i}"), ROUTE[stage].key)
        for i in range(_REQUESTS)
        for stage in range(3)
    ]
    acknowledged: set[int] = set()
    lost = doubled = early = 0
    for _ in range(options.kills):
        acknowledged |= _kill_one(options.path, proofs, rng)
        store = LedgerStore(options.path)
        settled = sum(store.account(stage.key.peer_id).settled_proofs for stage in ROUTE)
        paid = sum(store.account(stage.key.peer_id).micro_credits for stage in ROUTE)
        early += settled < len(proofs)
        doubled += paid != settled * credits_for(TEN_LAYERS, 300) or settled != len(store.journal())
        doubled += store.total() != 0 or store.content() != store.replay().content()
        if acknowledged:
            told = rng.choice(sorted(acknowledged))
            lost += store.settle([proofs[told]], TERMS, NOW)[0].settled.status != "duplicate"
        lost += settled < len(acknowledged)
        store.close()
    store = LedgerStore(options.path)
    store.settle(proofs, TERMS, NOW)
    for stage in ROUTE:
        doubled += store.account(stage.key.peer_id).micro_credits != _REQUESTS * credits_for(TEN_LAYERS, 300)
    store.close()
    report = {
        "kills": options.kills,
        "kills_before_everything_was_settled": early,
        "lost": lost,
        "doubled": doubled,
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
