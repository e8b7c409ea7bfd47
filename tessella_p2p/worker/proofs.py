"""Proofs: signed and durable before they are uploaded (shell)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import structlog
import trio

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import RemoteProtocolError, StorageError, TessellaError, TransportError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import HELD_RETRY_S, MAX_PROOFS_PER_BATCH, TICKET_OPEN_S, TICKET_SETTLE_S
from tessella_p2p.ledger.blocking import RunBlocking
from tessella_p2p.ledger.client import OrchestratorClient, OrchestratorPort
from tessella_p2p.ledger.proof_log import PendingProof, ProofLog
from tessella_p2p.stages.opening import Opening
from tessella_p2p.stages.work import WorkMeter
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import Sequencer, seal
from tessella_p2p.wire.keys import NodeKey

log = structlog.get_logger(__name__)

_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 30.0


class ProofWriter:
    """Writes checkpoints and proofs into the log, and uploads each until the orchestrator that minted its ticket has settled it.

    Proofs of an orchestrator that cannot be reached wait, and hold up no other's; so do those of one that is not pinned any more.
    """

    def __init__(
        self,
        key: NodeKey,
        clock: WallClock,
        sequencer: Sequencer,
        proof_log: ProofLog,
        client: OrchestratorPort | None,
        run_blocking: RunBlocking,
    ) -> None:
        self._key = key
        self._clock = clock
        self._sequencer = sequencer
        self._log = proof_log
        self._client = client
        self._run_blocking = run_blocking
        self._written = trio.Event()
        self.changed = trio.Event()
        """Set, and replaced, whenever the log has changed."""

    def _wake(self) -> None:
        """Wake every upload."""
        self._written.set()
        self._written = trio.Event()

    def _note_change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def checkpoint(self, opening: Opening, meter: WorkMeter) -> None:
        """Journal the proof of what is confirmed so far; durable on return."""
        envelope = self._seal(opening, meter)
        session, epoch = opening.key
        await self._run_blocking(partial(self._log.put_checkpoint, _minter(opening), session, epoch, envelope))
        self._note_change()

    async def prove(self, opening: Opening, meter: WorkMeter) -> None:
        """Write the proof, durable on return, and wake the upload."""
        envelope = self._seal(opening, meter)
        session, epoch = opening.key
        await self._run_blocking(partial(self._log.put_proof, _minter(opening), session, epoch, envelope))
        self._wake()
        self._note_change()

    async def run(self) -> None:
        """Turn what a crash left open into proofs, then upload for ever. Cancelling it loses nothing: the log has it all."""
        await self._insist(self._prove_what_a_crash_left)
        clients = [] if self._client is None else [self._client.at(each) for each in self._client.orchestrators]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._insist, self._retry_held)
            for client in clients:
                if client is not None:
                    nursery.start_soon(self._insist, partial(self._upload, client))

    async def _insist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work``, again after a while when the disk fails: an operator makes room, and nothing is lost meanwhile."""
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                return await work()
            except StorageError as error:
                log.error("the proof log cannot be used", retry_s=retry_s, reason=str(error))
            await trio.sleep(retry_s)
            retry_s = min(retry_s * 2, _LAST_RETRY_S)

    async def _prove_what_a_crash_left(self) -> None:
        for left in await self._run_blocking(self._log.checkpoints):
            await self._run_blocking(partial(self._log.put_proof, left.minter, left.session, left.epoch, left.proof))
            log.info("a session that was open at a crash is proven up to its last checkpoint", epoch=left.epoch)
        pinned = () if self._client is None else self._client.orchestrators
        for minter in await self._run_blocking(self._log.minters):
            if minter not in pinned:
                log.warning("proofs wait for an orchestrator that is not pinned any more", orchestrator=minter)

    async def _retry_held(self) -> None:
        """Send held proofs again once a day, and once after a start: a bound of the day is over, or a neighbour has proven too.

        What is overdue by then is dropped: an orchestrator that is gone for good would never say so.
        """
        while True:
            num_dropped = await self._run_blocking(partial(self._log.drop_overdue, self._clock.unix_ms()))
            if num_dropped:
                log.warning("proofs that nobody settled in time are dropped", proofs=num_dropped)
                self._note_change()
            counts = await self._run_blocking(self._log.counts)
            held = counts.held  # not what is held again meanwhile
            while held > 0:
                moved = await self._run_blocking(self._log.requeue_held)
                held = held - moved if moved else 0
            if counts.held:
                log.info("held proofs are sent again", proofs=counts.held)
                self._wake()
                self._note_change()
            await trio.sleep(HELD_RETRY_S)

    async def _upload(self, client: OrchestratorClient) -> None:
        """Upload to one orchestrator what it minted the tickets of."""
        minter = client.orchestrator
        retry_s = _FIRST_RETRY_S
        while True:
            written = self._written
            pending = await self._run_blocking(partial(self._log.pending, minter, MAX_PROOFS_PER_BATCH))
            if not pending:
                await written.wait()
                continue
            try:
                proofs = m.WorkDone(proofs=tuple(item.envelope for item in pending))
                answer = await client.ask(proofs, m.WorkSettled)
                if len(answer.results) != len(pending):
                    raise RemoteProtocolError(f"{len(answer.results)} results for {len(pending)} proofs")
            except TessellaError as error:
                level = log.info if isinstance(error, TransportError) else log.warning
                level("proofs wait", orchestrator=minter, pending=len(pending), retry_s=retry_s, reason=str(error))
                await trio.sleep(retry_s)
                retry_s = min(retry_s * 2, _LAST_RETRY_S)
                continue
            retry_s = _FIRST_RETRY_S
            for item, result in zip(pending, answer.results, strict=True):
                await self._settle(item, result)
            self._note_change()

    async def _settle(self, item: PendingProof, result: m.Settled) -> None:
        log.info("proof settled", status=result.status, micro_credits=result.micro_credits, reason=result.reason)
        settle = partial(self._log.settle, item.minter, item.session, item.epoch)
        await self._run_blocking(partial(settle, result.status, result.micro_credits, result.code))

    def _seal(self, opening: Opening, meter: WorkMeter) -> bytes:
        confirmed, body = meter.confirmed, opening.body
        assert confirmed is not None
        assert body.ticket is not None
        assert body.route_statement is not None
        proof = m.Proof(
            request_id=body.request_id,
            ticket=body.ticket,
            lease=opening.lease,
            route=body.route_statement,
            session=body.session,
            epoch=body.epoch,
            opened_at=opening.opened_at,
            manifest_root=body.manifest_root,
            recipe=body.recipe,
            layers=body.route[opening.index].layers,
            positions=confirmed.boundary.positions,
            input_digest=confirmed.boundary.input_digest,
            output_digest=confirmed.boundary.output_digest,
            marks=meter.marks(),
            receipt=confirmed.receipt,
            compute_us=meter.compute_us,
        )
        now_ms = self._clock.unix_ms()
        return seal(
            self._key,
            m.PROOF,
            proof,
            sequence=self._sequencer.next(m.PROOF, now_ms),
            now_ms=now_ms,
            audience=_minter(opening),
            ttl_ms=int((TICKET_OPEN_S + TICKET_SETTLE_S) * 1000),
        )


def _minter(opening: Opening) -> PeerId:
    """Who minted the ticket of a paid session."""
    assert opening.orchestrator is not None
    return opening.orchestrator
