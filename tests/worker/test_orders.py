"""Orders: what a worker takes of whom, and what the orchestrator hears."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from simulations.mesh import SimulatedClock
from tessella_p2p.base.errors import (
    DialError,
    HopTimeout,
    InvalidSignature,
    Overloaded,
    StreamReset,
    TransportError,
    VersionMismatch,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import REQUEST_TTL_MS
from tessella_p2p.ledger.blocking import in_place
from tessella_p2p.ledger.proof_log import ProofLog
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork, constant_latency
from tessella_p2p.net.network import Stream
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.orchestrator.context import OrchestratorContext
from tessella_p2p.orchestrator.orders import Orders
from tessella_p2p.stages.hop_links import HopLinks
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import ClockSequencer, open_envelope, seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.worker.context import StageContext
from tessella_p2p.worker.orders import OrderServer
from tessella_p2p.worker.proofs import ProofWriter

ORCHESTRATOR, WORKER, STRANGER = (NodeKey(name.ljust(32, b".")) for name in (b"orchestrator", b"worker", b"stranger"))
ASSIGNMENT = m.UpdateAssignment(model_id="toy", layers=(0, 4), lease=b"lease", reason="a test")
AUDIT = m.AuditOrder(
    audit_id=bytes(16),
    auditor=WORKER.peer_id,
    audited=STRANGER.peer_id,
    manifest_root=bytes(32),
    session=bytes(16),
    epoch=0,
    layers=(0, 4),
    recipe="f32",
    positions=8,
    input_digest=bytes(32),
    upstream=STRANGER.peer_id,
    upstream_addresses=(),
    downstream=STRANGER.peer_id,
    downstream_addresses=(),
    comparison="bitwise",
    report_before=1,
)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@dataclass
class Commanded:
    """An orchestrator's `Orders`, a worker's `OrderServer`, and what arrived there."""

    orders: Orders
    orchestrator: MemoryNetwork
    worker: MemoryNetwork
    stranger: MemoryNetwork
    date: SimulatedClock
    server: OrderServer = field(init=False)
    assignments: list[tuple[m.UpdateAssignment, PeerId]] = field(default_factory=list)
    refusal: Exception | None = None

    async def take(self, order: m.UpdateAssignment, signer: PeerId) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.assignments.append((order, signer))

    def seal(
        self, key: NodeKey, *, sequence: int = 1, domain: str = m.ORDER, audience: PeerId = WORKER.peer_id
    ) -> bytes:
        body = m.OrderBody(body=ASSIGNMENT)
        return seal(key, domain, body, sequence=sequence, now_ms=self.date.unix_ms(), audience=audience)

    async def raw(self, network: MemoryNetwork, order: bytes) -> m.OrderAnswer:
        """Send the bytes of an order as they are."""
        network.add_addresses(WORKER.peer_id, self.worker.addresses)
        stream = await network.open_stream(WORKER.peer_id, protocols.ORDERS)
        await send_message(stream, order)
        answer = await receive_message(stream)
        if answer is None:
            raise StreamReset("no answer")
        audience = network.peer_id
        return open_envelope(answer, m.ORDER_ANSWER, now_ms=None, audience=audience, signer=WORKER.peer_id).message(
            m.OrderAnswer
        )


@asynccontextmanager
async def commanded(folder: Path, clock: VirtualClock) -> AsyncIterator[Commanded]:
    fabric = MemoryFabric(random.Random(1), clock, constant_latency(0.01))
    date = SimulatedClock(clock)
    with (
        closing(LedgerStore(folder / "ledger", 16 << 20, sync=False)) as store,
        closing(ProofLog(folder / "proofs", 16 << 20, sync=False)) as log,
    ):
        async with (
            MemoryNetwork.open(fabric, ORCHESTRATOR.peer_id) as orchestrator,
            MemoryNetwork.open(fabric, WORKER.peer_id) as worker,
            MemoryNetwork.open(fabric, STRANGER.peer_id) as stranger,
        ):
            sequencer = ClockSequencer()
            context = OrchestratorContext(orchestrator, ORCHESTRATOR, date, store, sequencer, "f32", in_place)
            proofs = ProofWriter(WORKER, date, sequencer, log, None, in_place)
            stage_context = StageContext(worker, WORKER, date, sequencer, HopLinks(worker, 10.0), proofs)
            pins = frozenset({ORCHESTRATOR.peer_id})
            found = Commanded(Orders(context), orchestrator, worker, stranger, date)
            found.server = OrderServer(stage_context, pins, found.take)
            found.server.serve()
            yield found


async def test_an_order_is_taken_and_the_orchestrator_hears_so(tmp_path: Path, clock: VirtualClock) -> None:
    async with commanded(tmp_path, clock) as both:
        answer = await both.orders.send(WORKER.peer_id, both.worker.addresses, ASSIGNMENT)
        assert answer == m.OrderTaken()
        assert both.assignments == [(ASSIGNMENT, ORCHESTRATOR.peer_id)]


async def test_an_audit_order_comes_with_its_envelope_which_others_can_check(
    tmp_path: Path, clock: VirtualClock
) -> None:
    taken: list[bytes] = []

    async def audit(order: m.AuditOrder, raw: bytes) -> None:
        assert order == AUDIT
        taken.append(raw)

    async with commanded(tmp_path, clock) as both:
        answer = await both.orders.send(WORKER.peer_id, both.worker.addresses, AUDIT)
        assert isinstance(answer, m.OrderRefused)
        assert answer.code == "invalid_request"
        both.server.on_audit = audit
        assert isinstance(await both.orders.send(WORKER.peer_id, (), AUDIT), m.OrderTaken)
        shown = open_envelope(
            taken[0], m.ORDER, now_ms=None, audience=WORKER.peer_id, signer=ORCHESTRATOR.peer_id
        ).message(m.OrderBody)
        assert shown.body == AUDIT


async def test_a_refusal_says_why(tmp_path: Path, clock: VirtualClock) -> None:
    async with commanded(tmp_path, clock) as both:
        both.refusal = Overloaded("this stage is busy")
        answer = await both.orders.send(WORKER.peer_id, both.worker.addresses, ASSIGNMENT)
        assert answer == m.OrderRefused(code="overloaded", reason="this stage is busy")


async def test_a_peer_that_is_not_pinned_is_not_even_heard(tmp_path: Path, clock: VirtualClock) -> None:
    async with commanded(tmp_path, clock) as both:
        for order in (both.seal(STRANGER), both.seal(ORCHESTRATOR)):
            with pytest.raises(StreamReset):
                await both.raw(both.stranger, order)
        assert not both.assignments


@pytest.mark.parametrize(
    ("order", "code"),
    [
        (lambda both: both.seal(STRANGER), "invalid_signature"),
        (lambda both: both.seal(ORCHESTRATOR, domain=m.REQUEST), "invalid_signature"),
        (lambda both: both.seal(ORCHESTRATOR, audience=STRANGER.peer_id), "invalid_signature"),
        (lambda both: both.seal(ORCHESTRATOR)[:-1] + b"\0", "invalid_signature"),
    ],
)
async def test_hostile_orders_are_refused_with_their_reason(
    tmp_path: Path, clock: VirtualClock, order: Callable[[Commanded], bytes], code: str
) -> None:
    async with commanded(tmp_path, clock) as both:
        answer = (await both.raw(both.orchestrator, order(both))).body
        assert isinstance(answer, m.OrderRefused)
        assert answer.code == code
        assert not both.assignments


async def test_an_order_counts_once_and_for_a_minute(tmp_path: Path, clock: VirtualClock) -> None:
    async with commanded(tmp_path, clock) as both:
        order, late = both.seal(ORCHESTRATOR), both.seal(ORCHESTRATOR, sequence=2)
        assert isinstance((await both.raw(both.orchestrator, order)).body, m.OrderTaken)
        again = (await both.raw(both.orchestrator, order)).body
        assert isinstance(again, m.OrderRefused)
        assert again.code == "replayed"
        with trio.move_on_after(REQUEST_TTL_MS / 1000):
            await trio.Event().wait()
        expired = (await both.raw(both.orchestrator, late)).body
        assert isinstance(expired, m.OrderRefused)
        assert expired.code == "expired"
        assert len(both.assignments) == 1


async def test_bytes_that_are_no_envelope_get_no_answer(tmp_path: Path, clock: VirtualClock) -> None:
    async with commanded(tmp_path, clock) as both:
        with pytest.raises(TransportError):
            await both.raw(both.orchestrator, b"\xff" * 100)


async def test_a_worker_that_is_gone_silent_or_too_old_is_an_error_of_the_tree(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with commanded(tmp_path, clock) as both:
        with pytest.raises(DialError):
            await both.orders.send(NodeKey(b"nobody".ljust(32, b".")).peer_id, (), ASSIGNMENT)
        with pytest.raises(VersionMismatch):
            await both.orders.send(STRANGER.peer_id, both.stranger.addresses, ASSIGNMENT)

        async def silent(_: Stream) -> None:
            await trio.sleep_forever()

        both.stranger.serve(protocols.ORDERS, silent)
        with pytest.raises(HopTimeout):
            await both.orders.send(STRANGER.peer_id, both.stranger.addresses, ASSIGNMENT)


async def test_an_answer_to_another_order_does_not_count(tmp_path: Path, clock: VirtualClock) -> None:
    async with commanded(tmp_path, clock) as both:

        async def misleading(stream: Stream) -> None:
            await receive_message(stream)
            body = m.OrderAnswer(to=1, body=m.OrderTaken())
            now_ms = both.date.unix_ms()
            await send_message(
                stream,
                seal(STRANGER, m.ORDER_ANSWER, body, sequence=1, now_ms=now_ms, audience=ORCHESTRATOR.peer_id),
            )

        both.stranger.serve(protocols.ORDERS, misleading)
        with pytest.raises(InvalidSignature, match="not to"):
            await both.orders.send(STRANGER.peer_id, both.stranger.addresses, ASSIGNMENT)
