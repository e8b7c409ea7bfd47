"""Group ``net``: what the encrypted, multiplexed data path costs beside raw TCP, and what a hop adds to a step.

Raw TCP (the same two processes, loopback) and this project's network take turns, so each ratio compares neighbours in time. The bar is
over raw TCP as the same event loop moves it, which is what the network is built on; what blocking sockets do stands beside it, and so
does the cipher: on one core it is slower than they are.

A hop is measured over real hosts, links, sessions, queues and engine threads; only the engine's arithmetic is replaced, by a
computation of a known length that holds no GIL. So the number is the network and the queues, whatever the model.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from statistics import median

import trio
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from benchmarks.net_peer import (
    MANIFEST_ROOT,
    MAX_POSITIONS,
    RECIPE,
    VOCABULARY,
    PeerPlan,
    cpu_s,
    serve_stage,
    stage_layers,
)
from benchmarks.net_wire import ECHO, SINK, key_named, quiet, receive_into
from benchmarks.results import Result, of_runs, ratio_of_runs
from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.base.limits import MIB
from tessella_p2p.dht.stage_records import VerifiedStage
from tessella_p2p.entry.chain import Chain
from tessella_p2p.entry.plan import EntryContext, SessionPlan, Token
from tessella_p2p.entry.report import hop_added_ms_p50
from tessella_p2p.entry.routes import Route
from tessella_p2p.entry.token_streams import TokenTable
from tessella_p2p.net.framing import receive_exactly
from tessella_p2p.net.libp2p_host import Libp2pNetwork
from tessella_p2p.stages.engine import Sampled
from tessella_p2p.stages.hop_links import HopLinks
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import ClockSequencer

ROUNDS = 5
BULK_BYTES = 64 * MIB
ROUND_TRIPS = 300
COMPUTE_MS = 5.0
DECODE_STEPS = 200
_PROMPT_TOKENS = 40


@dataclass
class Peer:
    """A process of `benchmarks.net_peer`."""

    process: subprocess.Popen[str]
    peer_id: PeerId
    addresses: tuple[str, ...]
    tcp_port: int
    trio_port: int

    def cpu_s(self) -> float:
        """Its CPU seconds so far."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline())["cpu_s"])


@contextmanager
def peer(plan: PeerPlan) -> Iterator[Peer]:
    """A running peer."""
    command = [sys.executable, "-m", "benchmarks.net_peer", json.dumps(asdict(plan))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            ready = json.loads(process.stdout.readline())
            yield Peer(
                process,
                PeerId(ready["peer_id"]),
                tuple(ready["addresses"]),
                ready["tcp_port"],
                ready["trio_port"],
            )
        finally:
            process.stdin.close()


# ---- a stream against a socket


@dataclass(frozen=True, slots=True)
class Bulk:
    """One transfer of `BULK_BYTES`: its speed, and the CPU that both ends spent on a GiB."""

    mib_per_s: float
    cpu_s_per_gib: float


def _tcp(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _tcp_round_trips(port: int, message_bytes: int) -> list[float]:
    """Microseconds of each."""
    message, answer, times = os.urandom(message_bytes), bytearray(message_bytes), []
    with _tcp(port) as connection:
        connection.sendall(struct.pack("!Q", message_bytes))
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            connection.sendall(message)
            receive_into(connection, answer)
            times.append((time.perf_counter() - start) * 1e6)
    return times


async def _round_trips(network: Libp2pNetwork, other: Peer, message_bytes: int) -> list[float]:
    """Microseconds of each."""
    message, times = os.urandom(message_bytes), []
    stream = await network.open_stream(other.peer_id, ECHO)
    await stream.send_all(struct.pack("!Q", message_bytes))
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        await stream.send_all(message)
        await receive_exactly(stream, message_bytes)
        times.append((time.perf_counter() - start) * 1e6)
    await stream.aclose()
    return times


def _tcp_bulk(other: Peer, data: bytes) -> Bulk:
    with _tcp(other.tcp_port) as connection:
        connection.sendall(struct.pack("!Q", 0))
        cpu, start = cpu_s() + other.cpu_s(), time.perf_counter()
        for _ in range(BULK_BYTES // len(data)):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        receive_into(connection, bytearray(8))
        return _bulk(time.perf_counter() - start, cpu_s() + other.cpu_s() - cpu)


async def _trio_bulk(other: Peer, data: bytes) -> Bulk:
    async with await trio.open_tcp_stream("127.0.0.1", other.trio_port) as connection:
        cpu, start = cpu_s() + other.cpu_s(), time.perf_counter()
        for _ in range(BULK_BYTES // len(data)):
            await connection.send_all(data)
        await connection.send_eof()
        while await connection.receive_some(8):
            pass
        return _bulk(time.perf_counter() - start, cpu_s() + other.cpu_s() - cpu)


async def _stream_bulk(network: Libp2pNetwork, other: Peer, data: bytes) -> Bulk:
    stream = await network.open_stream(other.peer_id, SINK)
    cpu, start = cpu_s() + other.cpu_s(), time.perf_counter()
    for _ in range(BULK_BYTES // len(data)):
        await stream.send_all(data)
    await stream.send_eof()
    await receive_exactly(stream, 8)
    took_s = time.perf_counter() - start
    await stream.aclose()
    return _bulk(took_s, cpu_s() + other.cpu_s() - cpu)


def _bulk(took_s: float, spent_s: float) -> Bulk:
    return Bulk(BULK_BYTES / MIB / took_s, spent_s * (1024 * MIB / BULK_BYTES))


def _cipher_mib_per_s() -> float:
    """How fast one core seals packets of the size that the session uses: the limit of an encrypted stream."""
    cipher, data, nonce, count = ChaCha20Poly1305(bytes(32)), bytes(65_519), bytes(12), 256
    start = time.perf_counter()
    for _ in range(count):
        cipher.encrypt(nonce, data, None)
    return count * len(data) / MIB / (time.perf_counter() - start)


async def _transfers() -> list[Result]:
    """Round trips and bulk."""
    trips: dict[tuple[str, int], list[list[float]]] = {}
    tcp_bulk: list[Bulk] = []
    trio_bulk: list[Bulk] = []
    stream_bulk: list[Bulk] = []
    cipher: list[float] = []
    data = os.urandom(MIB)
    async with Libp2pNetwork.open(key_named("net bench"), []) as network:
        with peer(PeerPlan("net peer")) as other:
            network.add_addresses(other.peer_id, other.addresses)
            for warm_up in (True, *(False,) * ROUNDS):
                cipher.append(_cipher_mib_per_s())
                tcp_bulk.append(_tcp_bulk(other, data))
                trio_bulk.append(await _trio_bulk(other, data))
                stream_bulk.append(await _stream_bulk(network, other, data))
                for size in (4096, 65_536):
                    trips.setdefault(("tcp", size), []).append(_tcp_round_trips(other.tcp_port, size))
                    trips.setdefault(("stream", size), []).append(await _round_trips(network, other, size))
                if warm_up:
                    cipher.clear()
                    tcp_bulk.clear()
                    trio_bulk.clear()
                    stream_bulk.clear()
                    trips.clear()
    tcp, blocking, ours = ([run.mib_per_s for run in runs] for runs in (trio_bulk, tcp_bulk, stream_bulk))
    note = f"{BULK_BYTES // MIB} MiB in sends of {len(data) // MIB} MiB, two processes, loopback"
    results = [
        of_runs("net.tcp_mib_s", "MiB/s", tcp, f"raw TCP in the same event loop (trio); {note}"),
        of_runs("net.blocking_tcp_mib_s", "MiB/s", blocking, f"raw TCP, blocking sockets, no event loop; {note}"),
        of_runs("net.stream_mib_s", "MiB/s", ours, f"Noise + Yamux; {note}"),
        of_runs("net.cipher_mib_s", "MiB/s", cipher, "ChaCha20-Poly1305 on one core: the limit of an encrypted stream"),
        ratio_of_runs("net.throughput_vs_tcp", ours, tcp, "Noise + Yamux over raw TCP in the same event loop"),
        ratio_of_runs("net.throughput_vs_blocking_tcp", ours, blocking, "the same over raw TCP without an event loop"),
        of_runs("net.tcp_cpu_s_per_gib", "s", [run.cpu_s_per_gib for run in trio_bulk], "both ends, trio"),
        of_runs("net.blocking_tcp_cpu_s_per_gib", "s", [run.cpu_s_per_gib for run in tcp_bulk], "both ends"),
        of_runs("net.stream_cpu_s_per_gib", "s", [run.cpu_s_per_gib for run in stream_bulk], "both ends"),
    ]
    for (kind, size), runs in trips.items():
        name = f"net.{kind}_rtt_{size // 1024}k_us"
        note = f"{'raw TCP' if kind == 'tcp' else 'Noise + Yamux'}, {ROUND_TRIPS} round trips of {size} bytes a run"
        results.append(of_runs(f"{name}_p50", "µs", [median(run) for run in runs], note))
        results.append(of_runs(f"{name}_p99", "µs", [_p99(run) for run in runs], note))
    return results


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


# ---- what a hop adds


@dataclass
class Entry:
    """An entry without a codec: it drives chains on a route that is known beforehand."""

    context: EntryContext
    table: TokenTable
    route: Route
    sessions: int = 0

    async def decode(self, steps: int) -> list[Token]:
        """One session: a prompt, then ``steps`` steps of one token."""
        self.sessions += 1
        plan = SessionPlan(
            session=SessionId(os.urandom(16)),
            request_id=f"bench-{self.sessions}",
            model_id="bench",
            manifest_root=MANIFEST_ROOT,
            vocabulary=VOCABULARY,
            num_prompt=_PROMPT_TOKENS,
            max_positions=MAX_POSITIONS,
            sampling=m.Sampling(),
            output="tokens",
            cache_scope=b"",
            digest_key=os.urandom(32),
            ticket=None,
        )
        chain = Chain(self.context, plan, 0, self.route)
        self.table.chains[chain.key] = chain
        try:
            await chain.open(range(_PROMPT_TOKENS))
            token, tokens = await chain.next_token(), []
            for _ in range(steps):
                assert isinstance(token.drawn, Sampled)
                await chain.step((token.drawn.token_id,), sample=True)
                token = await chain.next_token()
                tokens.append(token)
            return tokens
        finally:
            chain.end()
            del self.table.chains[chain.key]


def _stage(peer_id: PeerId, addresses: Sequence[str], stage: int, stages: int) -> VerifiedStage:
    return VerifiedStage(
        peer_id=peer_id,
        addresses=tuple(addresses),
        layers=stage_layers(stage),
        total_layers=stages,
        recipe=RECIPE,
        model_id="bench",
        manifest_root=MANIFEST_ROOT,
        queue_depth=0,
        state="ready",
        max_positions=MAX_POSITIONS,
        sequence=0,
        orchestrator=peer_id,
        lease_serial=0,
        lease_expires_at=0,
        issued_at=0,
        expires_at=0,
        raw=b"",
    )


@asynccontextmanager
async def chain_of_two(compute_ms: float, *, entry_is_head: bool) -> AsyncIterator[Entry]:
    """A chain of two stages: the tail in a process of its own, the head in another one, or in the entry's as a mesh's node has it."""
    own = PeerPlan("bench entry", 0, 2, compute_ms)
    with _processes(compute_ms, entry_is_head) as others:
        async with (
            Libp2pNetwork.open(key_named(own.name), ["/ip4/127.0.0.1/tcp/0"]) as network,
            trio.open_nursery() as nursery,
        ):
            links = HopLinks(network)
            await nursery.start(links.run)
            if entry_is_head:
                await serve_stage(network, own, links, nursery)
            stages = [(network.peer_id, network.addresses)] if entry_is_head else []
            stages += [(other.peer_id, other.addresses) for other in others]
            route = Route(tuple(_stage(*each, number, 2) for number, each in enumerate(stages)))
            context = EntryContext(network, key_named(own.name), SystemClock(), ClockSequencer(), links, os.urandom)
            table = TokenTable()
            network.serve(protocols.TOKENS, table.serve)
            yield Entry(context, table, route)
            nursery.cancel_scope.cancel()


@contextmanager
def _processes(compute_ms: float, entry_is_head: bool) -> Iterator[list[Peer]]:
    with peer(PeerPlan("bench tail", 1, 2, compute_ms)) as tail:
        if entry_is_head:
            yield [tail]
            return
        with peer(PeerPlan("bench head", 0, 2, compute_ms)) as head:
            yield [head, tail]


async def added_ms(compute_ms: float, *, entry_is_head: bool, rounds: int = ROUNDS) -> list[float]:
    """Milliseconds that a transfer adds, run by run."""
    runs: list[float] = []
    async with chain_of_two(compute_ms, entry_is_head=entry_is_head) as entry:
        for warm_up in (True, *(False,) * rounds):
            tokens = await entry.decode(DECODE_STEPS)
            added = hop_added_ms_p50(entry.route, tokens, entry.context.key.peer_id)
            if not warm_up and added is not None:
                runs.append(added)
    return runs


async def run() -> list[Result]:
    """Measure the data path."""
    quiet()
    print("net: round trips and bulk", file=sys.stderr)
    results = await _transfers()
    print("net: hops", file=sys.stderr)
    how = f"(step − sum of stage compute) / transfers, one session, {DECODE_STEPS} steps of {COMPUTE_MS:g} ms without the GIL"
    results.append(
        of_runs(
            "net.hop_added_ms_p50",
            "ms",
            await added_ms(COMPUTE_MS, entry_is_head=True),
            f"{how}; the entry's node holds the head, as in a mesh",
        )
    )
    results.append(
        of_runs(
            "net.hop_added_3_processes_ms_p50",
            "ms",
            await added_ms(COMPUTE_MS, entry_is_head=False),
            "the same with entry, head and tail in a process each",
        )
    )
    results.append(
        of_runs(
            "net.hop_added_idle_ms_p50",
            "ms",
            await added_ms(0.0, entry_is_head=False),
            "the same with an engine that takes no time",
        )
    )
    return results
