"""The other end of the ``net`` group: ``python -m benchmarks.net_peer '{"name": ...}'`` serves until its standard input ends.

It answers raw TCP connections, streams of this project's network, and chains, with a stage whose engine computes nothing that anybody
needs: it hands rows on, and can keep a core busy for a given time first, in one call that holds no GIL, as a real engine does.
"""

from __future__ import annotations

import hashlib
import json
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import trio

from benchmarks.net_wire import ECHO, SINK, answer_echo, answer_sink, key_named, receive_into
from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.errors import LocalProtocolError
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.net.libp2p_host import Libp2pNetwork
from tessella_p2p.stages.engine import Buffer, KvUse, Sampled, SessionKey, StepAnswer, StepInput, StepOutput
from tessella_p2p.stages.hop_links import HopLinks
from tessella_p2p.stages.opening import Opening, StageIdentity
from tessella_p2p.stages.service import StageService
from tessella_p2p.stages.work import WorkMeter
from tessella_p2p.wire.envelope import ClockSequencer
from tessella_p2p.wire.frames import DType
from tessella_p2p.worker.context import StageContext
from tessella_p2p.worker.hop_server import HopServer

RECIPE = "busy"
MANIFEST_ROOT = bytes(32)
MAX_POSITIONS = 1024
VOCABULARY = 1 << 16
HIDDEN_SIZE = 576
"""Of SmolLM2-135M: 2,304 bytes a row."""


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """What a peer serves.

    Attributes:
        name: its key follows from it.
        stage: its place in a chain of ``stages``; None for no stage.
        stages: of the chain.
        compute_ms: what a turn of its engine takes.
    """

    name: str
    stage: int | None = None
    stages: int = 1
    compute_ms: float = 0.0


class BusyEngine:
    """Keeps a core busy for ``compute_ms`` a turn, without the GIL; implements `stages.engine.StageEngine`."""

    def __init__(self, layers: LayerRange, total: int, compute_ms: float) -> None:
        self.layers = layers
        self.is_head = layers.start == 0
        self.is_tail = layers.end == total
        self.hidden_size = HIDDEN_SIZE
        self.vocabulary = VOCABULARY
        self.wire_dtype = DType.F32
        self.max_sessions = 64
        self.max_positions = MAX_POSITIONS
        self.memory_bytes = 0
        self.kv = KvUse(64, 0, 0)
        self._work = bytes(_bytes_hashed_in(compute_ms))
        self._row = bytes(HIDDEN_SIZE * DType.F32.size)

    def open_session(self, key: SessionKey, max_positions: int, scope: bytes = b"") -> None:
        """See `stages.engine.StageEngine.open_session`."""

    def keep(self, waiting: Collection[SessionKey]) -> None:
        """See `stages.engine.StageEngine.keep`."""

    def cached_positions(self, key: SessionKey) -> int:
        """See `stages.engine.StageEngine.cached_positions`."""
        return 0

    def close_session(self, key: SessionKey) -> None:
        """See `stages.engine.StageEngine.close_session`."""

    def close(self) -> None:
        """See `stages.engine.StageEngine.close`."""

    def forward(self, batch: Sequence[StepInput]) -> list[StepAnswer]:
        """See `stages.engine.StageEngine.forward`."""
        if self._work:
            hashlib.sha256(self._work)  # over 2 KiB it lets go of the GIL
        return [self._answer(step) for step in batch]

    def _answer(self, step: StepInput) -> StepAnswer:
        if self.is_tail:
            return Sampled(step.position % 100) if step.sample is not None else None
        body: Buffer = self._row * step.rows if self.is_head else step.body
        return StepOutput(body, self.wire_dtype)


def _bytes_hashed_in(milliseconds: float) -> int:
    """How much SHA-256 takes so long here, by the fastest of a few trials."""
    if not milliseconds:
        return 0
    trial = bytes(1 << 20)
    fastest_s = min(_timed(trial) for _ in range(8))
    return int(len(trial) * milliseconds / 1000 / fastest_s)


def _timed(data: bytes) -> float:
    start = time.perf_counter()
    hashlib.sha256(data)
    return time.perf_counter() - start


class NoProofs:
    """Sessions here are unpaid, so nothing is to be proved; a `worker.context.ProofSink`."""

    async def checkpoint(self, opening: Opening, meter: WorkMeter) -> None:
        """Never called without a ticket."""
        raise LocalProtocolError("a checkpoint of an unpaid session")

    async def prove(self, opening: Opening, meter: WorkMeter) -> None:
        """Never called without a ticket."""
        raise LocalProtocolError("a proof of an unpaid session")


def stage_layers(stage: int) -> LayerRange:
    """One layer a stage."""
    return LayerRange(stage, stage + 1)


async def serve_stage(network: Libp2pNetwork, plan: PeerPlan, links: HopLinks, nursery: trio.Nursery) -> None:
    """Serve the plan's stage in ``nursery``; ``links`` run already."""
    assert plan.stage is not None
    key = key_named(plan.name)
    stage = StageService(BusyEngine(stage_layers(plan.stage), plan.stages, plan.compute_ms))
    hops = HopServer(StageContext(network, key, SystemClock(), ClockSequencer(), links, NoProofs()))
    await nursery.start(stage.run)
    await nursery.start(hops.run)
    hops.attach(
        stage,
        StageIdentity(
            peer_id=key.peer_id,
            manifest_root=MANIFEST_ROOT,
            recipe=RECIPE,
            layers=stage_layers(plan.stage),
            total_layers=plan.stages,
            max_positions=MAX_POSITIONS,
            pins=frozenset(),
            lease=b"",
        ),
    )


def _serve_tcp() -> int:
    """Raw TCP on a thread per connection; returns the port. The first 8 bytes say how long a message is, 0 for a sink."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_answer_tcp, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def _answer_tcp(connection: socket.socket) -> None:
    with connection:
        size = bytearray(8)
        receive_into(connection, size)
        (message_bytes,) = struct.unpack("!Q", size)
        if message_bytes:
            message = bytearray(message_bytes)
            while receive_into(connection, message):
                connection.sendall(message)
        else:
            room, received = bytearray(1 << 20), 0
            while count := connection.recv_into(room):
                received += count
            connection.sendall(struct.pack("!Q", received))


async def _sink_trio(connection: trio.SocketStream) -> None:
    received = 0
    while part := await connection.receive_some(1 << 20):
        received += len(part)
    await connection.send_all(struct.pack("!Q", received))
    await connection.send_eof()


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def _serve(plan: PeerPlan) -> None:
    async with Libp2pNetwork.open(key_named(plan.name), ["/ip4/127.0.0.1/tcp/0"]) as network:
        network.serve(ECHO, answer_echo)
        network.serve(SINK, answer_sink)
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        links = HopLinks(network)
        async with trio.open_nursery() as nursery:
            await nursery.start(links.run)
            nursery.start_soon(trio.serve_listeners, _sink_trio, listeners)
            if plan.stage is not None:
                await serve_stage(network, plan, links, nursery)
            ready = {
                "peer_id": network.peer_id,
                "addresses": network.addresses,
                "tcp_port": _serve_tcp(),
                "trio_port": listeners[0].socket.getsockname()[1],
            }
            print(json.dumps(ready), flush=True)
            while await trio.to_thread.run_sync(sys.stdin.readline):
                print(json.dumps({"cpu_s": cpu_s()}), flush=True)
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    from benchmarks.net_wire import quiet

    quiet()
    trio.run(_serve, PeerPlan(**json.loads(sys.argv[1])))
