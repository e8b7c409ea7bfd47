"""``python -m benchmarks.ledger_reader FOLDER SEED`` opens a ledger, reads pages of it, and prints one JSON object.

A process of its own, so that nothing is open or in memory before.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

from tessella_p2p.base.limits import MAX_PAGE_ROWS
from tessella_p2p.ledger.environment import DATABASE_NAME
from tessella_p2p.ledger.store import LedgerStore

PAGES = 200
"""Pages of `MAX_PAGE_ROWS` entries that are read, at random places."""


def _forget_cached(path: Path) -> None:
    """Ask the kernel to drop what it keeps of the file in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _timed(read: Callable[[], object]) -> float:
    start = time.perf_counter()
    read()
    return time.perf_counter() - start


def main() -> None:
    """Open, read, and say how long it took and how much memory it needed."""
    folder, rng = Path(sys.argv[1]), Random(int(sys.argv[2]))
    _forget_cached(folder / DATABASE_NAME)
    start = time.perf_counter()
    store = LedgerStore(folder)
    head = store.head()
    open_s = time.perf_counter() - start
    places = [rng.randrange(head.sequence) for _ in range(PAGES)]
    pages = [_timed(partial(store.journal, at, MAX_PAGE_ROWS)) for at in places]
    newest = [_timed(partial(store.newest, at, MAX_PAGE_ROWS)) for at in places]
    snapshots = [_timed(partial(store.snapshot, at, MAX_PAGE_ROWS)) for at in places]
    store.close()
    report = {
        "entries": head.sequence,
        "open_s": open_s,
        "page_ms": median(pages) * 1000,
        "slowest_page_ms": max(pages) * 1000,
        "newest_ms": median(newest) * 1000,
        "snapshot_ms": median(snapshots) * 1000,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
