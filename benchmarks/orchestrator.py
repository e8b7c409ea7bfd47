"""Group ``orchestrator``: registrations and grants a second, with a durable ledger.

Each is measured twice. In process: sealed requests, made beforehand, are judged and answered, so the figure is the orchestrator's own
work with signatures, allocation and disk. Over libp2p: hosts in another process ask over loopback as nodes do, so the figure has the
network in it, and their own signatures where the two processes share cores.

A registration changes the member table for good, so the cost may grow with the members: `PEERS` identities register, and the time of
the last hundred is reported beside the whole.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import trio

from benchmarks.json_lines import process
from benchmarks.net_wire import key_named, quiet
from benchmarks.orchestrator_process import KEY, MODEL, RECIPE, orchestrator
from benchmarks.results import BenchmarkError, Result, of_runs
from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.ids import PeerId
from tessella_p2p.ledger.client import OrchestratorClient
from tessella_p2p.net.libp2p_host import Libp2pNetwork
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.orchestrator.service import Orchestrator
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import ClockSequencer, open_envelope, seal

PEERS = 1000
"""Identities that register."""
REQUESTERS = 50
GRANTS_EACH = 40
CLIENTS = 16
"""Hosts that ask over libp2p at the same time."""
ASKED_EACH = 60
_AT_A_TIME = 32
"""Requests in flight in process."""

Request = tuple[PeerId, bytes]
Body = m.Register | m.SessionGrant


def _register(number: int) -> m.Register:
    return m.Register(
        addresses=(f"/ip4/203.0.113.{number % 250}/tcp/9080",),
        claim_mb=1024 + number % 7 * 256,
        device="cpu",
        model_id=MODEL.model_id,
        total_layers=MODEL.total_layers,
        manifest_root=MODEL.manifest_root,
        contract_hash=MODEL.contract_hash,
        recipe=RECIPE,
    )


def _grant(number: int) -> m.SessionGrant:
    return m.SessionGrant(
        request_id=f"request-{number}",
        model_id=MODEL.model_id,
        manifest_root=MODEL.manifest_root,
        recipe=RECIPE,
        max_positions=2048,
    )


def _sealed(name: str, body: Body, sequence: int) -> Request:
    key = key_named(name)
    now_ms = SystemClock().unix_ms()
    request = m.RequestBody(body=body)
    return key.peer_id, seal(key, m.REQUEST, request, sequence=sequence, now_ms=now_ms, audience=KEY.peer_id)


def _checked(peer: PeerId, answer: bytes, kind: type[m.Assigned] | type[m.Granted]) -> None:
    body = open_envelope(answer, m.ANSWER, now_ms=None, audience=peer, signer=KEY.peer_id).message(m.AnswerBody).body
    if not isinstance(body, kind):
        raise BenchmarkError(f"the orchestrator answered {body!r}")


async def _answer_all(
    made: Orchestrator, requests: Sequence[Request], kind: type[m.Assigned] | type[m.Granted]
) -> float:
    """Seconds that the orchestrator takes for all ``requests``, `_AT_A_TIME` of them in flight."""
    answers: list[tuple[PeerId, bytes]] = []
    waiting = iter(requests)

    async def ask() -> None:
        for peer, raw in waiting:
            answers.append((peer, await made.answer(peer, raw)))

    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(_AT_A_TIME):
            nursery.start_soon(ask)
    taken_s = time.perf_counter() - start
    for peer, answer in answers:
        _checked(peer, answer, kind)
    return taken_s


@asynccontextmanager
async def _in_process() -> AsyncIterator[Orchestrator]:
    """An orchestrator on a network that nobody uses."""
    fabric = MemoryFabric(Random(0), VirtualClock())
    async with MemoryNetwork.open(fabric, KEY.peer_id) as network, orchestrator(network) as made:
        yield made


async def _own_work() -> tuple[float, float, float]:
    """Registrations a second: all, and the last hundred; grants a second."""
    registrations = [_sealed(f"worker {number}", _register(number), 1) for number in range(PEERS)]
    grants = [
        _sealed(f"requester {number % REQUESTERS}", _grant(number), 1 + number // REQUESTERS)
        for number in range(REQUESTERS * GRANTS_EACH)
    ]
    async with _in_process() as made:
        first_s = await _answer_all(made, registrations[:-100], m.Assigned)
        last_s = await _answer_all(made, registrations[-100:], m.Assigned)
        grants_s = await _answer_all(made, grants, m.Granted)
    return PEERS / (first_s + last_s), 100 / last_s, len(grants) / grants_s


async def _over_libp2p() -> tuple[float, float]:
    """Registrations and grants a second that `CLIENTS` hosts get from an orchestrator in another process."""
    async with process("benchmarks.orchestrator_process") as served, AsyncExitStack() as hosts:
        address = f"{(await served.line())['addresses'][0]}/p2p/{KEY.peer_id}"
        clients = []
        for number in range(CLIENTS):
            key = key_named(f"client {number}")
            network = await hosts.enter_async_context(Libp2pNetwork.open(key, ["/ip4/127.0.0.1/tcp/0"]))
            client = OrchestratorClient(network, key, SystemClock(), ClockSequencer(), KEY.peer_id, address)
            await client.call(m.ReadCredits())  # connected from here on
            clients.append(client)
        return await _rate(clients, _register, m.Assigned), await _rate(clients, _grant, m.Granted)


async def _rate(
    clients: Sequence[OrchestratorClient], body: Callable[[int], Body], kind: type[m.Assigned] | type[m.Granted]
) -> float:
    async def ask(first: int, client: OrchestratorClient) -> None:
        for number in range(ASKED_EACH):
            await client.ask(body(first + number), kind)

    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for index, client in enumerate(clients):
            nursery.start_soon(ask, index * ASKED_EACH, client)
    return len(clients) * ASKED_EACH / (time.perf_counter() - start)


async def run(rounds: int) -> list[Result]:
    """Measure in ``rounds`` rounds, each with ledgers of its own."""
    quiet()
    own = [await _own_work() for _ in range(rounds)]
    asked = [await _over_libp2p() for _ in range(rounds)]
    registrations, last, grants = zip(*own, strict=True)
    registrations_asked, grants_asked = zip(*asked, strict=True)
    own_note = f"in process, durable, {_AT_A_TIME} at a time"
    asked_note = f"{CLIENTS} hosts over libp2p on loopback, durable"
    peers_note = f"{own_note}; {PEERS} identities"
    return [
        of_runs("orchestrator.registrations_per_s", "1/s", registrations, peers_note),
        of_runs("orchestrator.registrations_at_1000_per_s", "1/s", last, f"the last hundred of {PEERS} identities"),
        of_runs(
            "orchestrator.registrations_libp2p_per_s", "1/s", registrations_asked, f"{asked_note}; each again and again"
        ),
        of_runs("orchestrator.grants_per_s", "1/s", grants_asked, asked_note),
        of_runs("orchestrator.grants_in_process_per_s", "1/s", grants, own_note),
    ]
