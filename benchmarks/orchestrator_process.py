"""The orchestrator of the ``orchestrator`` group: ``python -m benchmarks.orchestrator_process`` serves until its standard input ends.

Its ledger is on disk, in a temporary folder, and durable: what it answers was synced.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import trio

from benchmarks.json_lines import answer
from benchmarks.net_wire import key_named, quiet
from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.limits import MIB
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.ledger.verifiers import VerifyProofs, verify_in_place
from tessella_p2p.net.libp2p_host import Libp2pNetwork
from tessella_p2p.net.network import Network
from tessella_p2p.orchestrator.service import Orchestrator
from tessella_p2p.orchestrator.terms import ANY_DEVICE, ModelTerms, ServedModel
from tessella_p2p.wire.envelope import ClockSequencer

KEY = key_named("orchestrator")
RECIPE = "f32"
_TERMS = ModelTerms(
    total_layers=30, layer_mb=14, kv_mb=24, embedding_mb=108, head_mb=108, overhead_mb=160, min_mb=256, head_cost=8
)
MODEL = ServedModel("bench", hashlib.sha256(b"bench").digest(), bytes(32), 30, {(RECIPE, ANY_DEVICE): _TERMS})
_MIN_STAGES = 4
_MAP_BYTES = 256 * MIB


@asynccontextmanager
async def orchestrator(network: Network, verify: VerifyProofs = verify_in_place) -> AsyncIterator[Orchestrator]:
    """A running orchestrator with a durable ledger."""
    with (
        tempfile.TemporaryDirectory(prefix="tessella-bench-") as folder,
        closing(LedgerStore(Path(folder) / "ledger", _MAP_BYTES, verify=verify)) as store,
    ):
        async with trio.open_nursery() as nursery:
            made = Orchestrator(
                network,
                KEY,
                SystemClock(),
                store,
                models=[MODEL],
                recipe=RECIPE,
                sequencer=ClockSequencer(),
                min_stages=_MIN_STAGES,
            )
            await nursery.start(made.run)
            yield made
            nursery.cancel_scope.cancel()


async def _serve() -> None:
    async with Libp2pNetwork.open(KEY, ["/ip4/127.0.0.1/tcp/0"]) as network, orchestrator(network):
        answer({"ready": True})
        answer({"addresses": network.addresses})
        while await trio.to_thread.run_sync(sys.stdin.readline):
            pass


if __name__ == "__main__":
    quiet()
    trio.run(_serve)
