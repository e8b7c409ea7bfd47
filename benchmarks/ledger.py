"""Group ``ledger``: settlements a second, and a ledger of ten million entries.

Settlements go the whole way: sealed proofs in a sealed request, judged by a real orchestrator whose ledger is synced to the disk before
the answer. Only the transport is left out. Single: one proof in a request, many requests in flight; batched: as many proofs as a
request may have.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import trio

from benchmarks import long_ledger
from benchmarks.ledger_reader import PAGES
from benchmarks.net_wire import quiet
from benchmarks.orchestrator_process import KEY, orchestrator
from benchmarks.paper_proofs import WORKERS, proofs
from benchmarks.results import BenchmarkError, Result, of_runs
from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.limits import MAX_PAGE_ROWS, MAX_PROOFS_PER_BATCH, SETTLE_PROCESSES
from tessella_p2p.ledger.verifiers import ProofVerifiers, VerifyProofs
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import open_envelope, seal

BATCHED_REQUESTS = 1_344
SINGLE_REQUESTS = 448
_BATCHES_IN_FLIGHT = 8
_SINGLES_IN_FLIGHT = 32
_READ_S = 600.0


async def run(rounds: int, report: Callable[[str], None]) -> list[Result]:
    """Measure settlements in ``rounds`` rounds, each with ledgers of its own; then the long ledger once."""
    quiet()
    batched_runs, single_runs = [], []
    with closing(ProofVerifiers(SETTLE_PROCESSES)) as verify:
        await _settlements(
            SINGLE_REQUESTS, MAX_PROOFS_PER_BATCH, _BATCHES_IN_FLIGHT, verify
        )  # the processes run from here on
        for number in range(rounds):
            batched = await _settlements(BATCHED_REQUESTS, MAX_PROOFS_PER_BATCH, _BATCHES_IN_FLIGHT, verify)
            single = await _settlements(SINGLE_REQUESTS, 1, _SINGLES_IN_FLIGHT, verify)
            batched_runs.append(batched)
            single_runs.append(single)
            report(f"ledger: settlements {number + 1}/{rounds}: {batched:.0f} batched, {single:.0f} single")
    results = [
        of_runs(
            "ledger.settlements_per_s",
            "1/s",
            single_runs,
            f"one proof in a request, {_SINGLES_IN_FLIGHT} in flight, durable",
        ),
        of_runs(
            "ledger.settlements_batched_per_s",
            "1/s",
            batched_runs,
            f"{MAX_PROOFS_PER_BATCH} proofs in a request, {_BATCHES_IN_FLIGHT} in flight, durable; "
            f"{SETTLE_PROCESSES} processes verify",
        ),
    ]
    return results + await trio.to_thread.run_sync(_long_ledger, report)


async def _settlements(num_requests: int, batch: int, in_flight: int, verify: VerifyProofs) -> float:
    """Proofs a second that are settled and durable."""
    now_ms = SystemClock().unix_ms()
    # Each worker uploads its own.
    by_worker = list(zip(*proofs(0, num_requests, now_ms), strict=True))
    uploads = []
    for worker, own in zip(WORKERS, by_worker, strict=True):
        for number, part in enumerate(_parts(own, batch)):
            body = m.RequestBody(body=m.WorkDone(proofs=part))
            raw = seal(worker, m.REQUEST, body, sequence=number + 1, now_ms=now_ms, audience=KEY.peer_id)
            uploads.append((worker.peer_id, raw))
    waiting = iter(sorted(uploads, key=lambda upload: len(upload[1])))
    answers = []
    fabric = MemoryFabric(Random(0), VirtualClock())
    async with (
        MemoryNetwork.open(fabric, KEY.peer_id) as network,
        orchestrator(network, verify=verify) as made,
    ):

        async def upload() -> None:
            for peer, raw in waiting:
                answers.append((peer, await made.answer(peer, raw)))

        start = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(in_flight):
                nursery.start_soon(upload)
        taken_s = time.perf_counter() - start
    settled = 0
    for peer, raw in answers:
        answer = open_envelope(raw, m.ANSWER, now_ms=None, audience=peer, signer=KEY.peer_id).message(m.AnswerBody).body
        if not isinstance(answer, m.WorkSettled):
            raise BenchmarkError(f"the orchestrator answered {answer!r}")
        settled += sum(one.status == "settled" and one.micro_credits > 0 for one in answer.results)
    if settled != num_requests * len(WORKERS):
        raise BenchmarkError(f"{settled} of {num_requests * len(WORKERS)} proofs were settled and paid")
    return settled / taken_s


def _parts(sealed: Sequence[bytes], size: int) -> list[tuple[bytes, ...]]:
    return [tuple(sealed[at : at + size]) for at in range(0, len(sealed), size)]


def _long_ledger(report: Callable[[str], None]) -> list[Result]:
    """Make the long ledger, read it in a process of its own, and remove it."""
    with tempfile.TemporaryDirectory(prefix="tessella-bench-") as folder:
        path = Path(folder) / "ledger"
        size_bytes = long_ledger.make(path, long_ledger.ENTRIES, report)
        report(f"ledger: {size_bytes / 2**30:.1f} GiB on disk")
        found = _read(path)
    if found["entries"] != long_ledger.ENTRIES:
        raise BenchmarkError(f"the ledger has {found['entries']} entries")
    what = f"{long_ledger.ENTRIES:,} entries, {size_bytes / 2**30:.1f} GiB, not in memory before"
    page = f"{PAGES} pages of {MAX_PAGE_ROWS} at random places, the slowest {found['slowest_page_ms']:.0f} ms"
    return [
        of_runs("ledger.open_10m_s", "s", [found["open_s"]], what),
        of_runs("ledger.page_10m_ms", "ms", [found["page_ms"]], page),
        of_runs("ledger.newest_10m_ms", "ms", [found["newest_ms"]], "the same, backwards, as an operator reads"),
        of_runs("ledger.snapshot_10m_ms", "ms", [found["snapshot_ms"]], "the same, as one page of federation"),
        of_runs("ledger.rss_10m_mib", "MiB", [found["rss_mib"]], "resident, with what the kernel maps of the file"),
    ]


def _read(path: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.ledger_reader", str(path), "1"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=_READ_S, check=False)
    if child.returncode:
        raise BenchmarkError(f"reading the long ledger failed: {child.stderr.strip()[-500:]}")
    found: dict[str, float] = json.loads(child.stdout)
    return found
