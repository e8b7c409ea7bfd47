"""Proofs wait on disk, through full disks and restarts; what is held is sent again once a day."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from simulations.mesh import SimulatedClock
from tessella_p2p.base.errors import StorageError
from tessella_p2p.base.limits import HELD_RETRY_S, TICKET_OPEN_S, TICKET_SETTLE_S
from tessella_p2p.ledger.proof_log import ProofLog
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.work import WorkMeter, seal_receipt
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import ClockSequencer, open_envelope
from tessella_p2p.worker.proofs import ProofWriter
from tests.stages.openings import NOW, ORCHESTRATOR, STAGES, opened, ticket
from tests.worker.hostile_mesh import keyed, pass_time

T = TypeVar("T")
SESSION, OPENED = b"s" * 16, b"o" * 32


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@dataclass
class Disk:
    """Where the log is; ``full`` makes every call fail."""

    log: ProofLog
    full: bool = False
    calls: int = 0

    async def __call__(self, function: Callable[[], T], /) -> T:
        await trio.lowlevel.checkpoint()
        self.calls += 1
        if self.full:
            raise StorageError("the disk is full")
        return function()


@asynccontextmanager
async def disk(folder: Path, clock: VirtualClock) -> AsyncIterator[tuple[Disk, ProofWriter]]:
    with closing(ProofLog(folder / "proofs", 16 << 20, sync=False)) as log:
        blocking = Disk(log)
        yield blocking, ProofWriter(STAGES[0], SimulatedClock(clock), ClockSequencer(), log, None, blocking)


def confirmed_meter() -> WorkMeter:
    meter = WorkMeter(b"k" * 32, OPENED)
    meter.receive(3, bytes(12))
    meter.finish(bytes(96))
    receipt = m.ReceiptBody(
        request_id="request-1",
        session=SESSION,
        epoch=0,
        sender=STAGES[0].peer_id,
        positions=3,
        digest=keyed(bytes(96), OPENED),
    )
    meter.confirm(
        seal_receipt(receipt, STAGES[1], ClockSequencer(), NOW),
        receiver=STAGES[1].peer_id,
        sender=STAGES[0].peer_id,
        request_id="request-1",
        key=(SESSION, 0),
    )
    return meter


async def test_a_proof_says_what_was_confirmed_under_the_lease_of_the_open(tmp_path: Path, clock: VirtualClock) -> None:
    async with disk(tmp_path, clock) as (here, writer):
        meter = confirmed_meter()
        meter.receive(2, bytes(8))
        meter.finish(bytes(64))  # nobody signed for these two
        opening = opened(0, ticket=ticket())
        await writer.prove(opening, meter)
        (pending,) = here.log.pending(ORCHESTRATOR.peer_id, 10)
        envelope = open_envelope(pending.envelope, m.PROOF, now_ms=None, audience=ORCHESTRATOR.peer_id)
        proof = envelope.message(m.Proof)
        assert envelope.signer == STAGES[0].peer_id
        digests = (keyed(bytes(12), OPENED), keyed(bytes(96), OPENED))
        assert (proof.positions, proof.input_digest, proof.output_digest) == (3, *digests)
        assert (proof.lease, proof.layers, proof.route) == (b"the lease in force", (0, 2), opening.body.route_statement)


async def test_a_checkpoint_that_a_crash_left_becomes_a_proof(tmp_path: Path, clock: VirtualClock) -> None:
    async with disk(tmp_path, clock) as (here, writer):
        await writer.checkpoint(opened(0, ticket=ticket()), confirmed_meter())
        assert here.log.counts().open == 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            await pass_time(1.0)
            assert (here.log.counts().open, here.log.counts().pending) == (0, 1)
            nursery.cancel_scope.cancel()


async def test_held_proofs_are_sent_again_after_a_start_and_then_once_a_day(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with disk(tmp_path, clock) as (here, writer):
        num_held = 300  # more than one transaction moves

        def hold_all() -> None:
            for number in range(num_held):
                session = number.to_bytes(16, "big")
                here.log.put_proof(ORCHESTRATOR.peer_id, session, 0, b"proof")
                here.log.settle(ORCHESTRATOR.peer_id, session, 0, "held", 0, "no_receipt")

        hold_all()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            await pass_time(1.0)
            assert here.log.counts().pending == num_held
            hold_all()
            await pass_time(HELD_RETRY_S - 10.0)
            assert here.log.counts().held == num_held
            await pass_time(20.0)
            assert here.log.counts().pending == num_held
            nursery.cancel_scope.cancel()


async def test_a_proof_that_nobody_ever_settles_leaves_the_log_once_it_is_overdue(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with disk(tmp_path, clock) as (here, writer):
        await writer.prove(opened(0, ticket=ticket()), confirmed_meter())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            await pass_time(TICKET_OPEN_S + TICKET_SETTLE_S - 10.0)
            assert here.log.counts().pending == 1
            await pass_time(HELD_RETRY_S)
            assert (here.log.counts().pending, here.log.counts().refused) == (0, 1)
            nursery.cancel_scope.cancel()


async def test_a_disk_that_is_full_for_a_while_ends_nothing(tmp_path: Path, clock: VirtualClock) -> None:
    async with disk(tmp_path, clock) as (here, writer):
        await writer.checkpoint(opened(0, ticket=ticket()), confirmed_meter())
        here.full = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            await pass_time(300.0)
            assert here.calls < 30, "it does not hammer the disk"
            here.full = False
            await pass_time(60.0)
            assert (here.log.counts().open, here.log.counts().pending) == (0, 1)
            here.full = True
            with pytest.raises(StorageError):
                await writer.prove(opened(0, ticket=ticket()), confirmed_meter())
            nursery.cancel_scope.cancel()
