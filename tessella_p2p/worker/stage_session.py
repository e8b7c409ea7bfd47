"""One session on one stage (shell): open, steps, receipts, close, proof. A linear task per (session, epoch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import structlog
import trio

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import (
    HopTimeout,
    InvalidStep,
    MalformedMessage,
    RemoteProtocolError,
    StreamReset,
    TessellaError,
    TransportError,
    error_from_code,
)
from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.base.limits import CHECKPOINT_S, HOP_TIMEOUT_S
from tessella_p2p.net.network import Network
from tessella_p2p.stages.engine import Buffer, SampleAt, Sampled, SessionKey, StepInput, StepOutput
from tessella_p2p.stages.hop_links import FrameLink, HopLinks, Inbox
from tessella_p2p.stages.opening import Opening
from tessella_p2p.stages.service import StageService
from tessella_p2p.stages.work import WorkMeter, seal_receipt
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import Sequencer, decode_message, encode_message
from tessella_p2p.wire.frames import DType, Flag, Frame, Kind, TraceEntry
from tessella_p2p.wire.keys import NodeKey

log = structlog.get_logger(__name__)

FINAL_RECEIPT_S = 2.0
"""How long a closing stage waits for its receiver's last signature."""
UNRECEIPTED_CHECKPOINTS = 3
"""A receiver that gives no receipt for so many checkpoints is dropped."""
_CLEAN_UP_S = 10.0
_TOKEN_STREAM_END_S = 1.0


class ProofSink(Protocol):
    """Where work is made durable. Each call returns once it is on disk."""

    async def checkpoint(self, opening: Opening, meter: WorkMeter) -> None:
        """Journal what is confirmed so far; a crash is paid up to here."""
        ...

    async def prove(self, opening: Opening, meter: WorkMeter) -> None:
        """Write the proof, and let the upload begin."""
        ...


@dataclass(frozen=True, slots=True)
class StageContext:
    """What every session of a node shares."""

    network: Network
    key: NodeKey
    clock: WallClock
    sequencer: Sequencer
    links: HopLinks
    proofs: ProofSink
    hop_timeout_s: float = HOP_TIMEOUT_S
    checkpoint_s: float = CHECKPOINT_S


class StageSession:
    """One (session, epoch) on this stage.

    Args:
        upstream: the link its frames come from; receipts and errors go back on it.
    """

    def __init__(self, context: StageContext, stage: StageService, opening: Opening, upstream: FrameLink) -> None:
        self._context = context
        self._stage = stage
        self._opening = opening
        self._upstream = upstream
        self._key = SessionKey(*opening.key)
        self._meter = WorkMeter(opening.body.digest_key)
        self._down: FrameLink | None = None
        self._inbox = Inbox()
        self._scope = trio.CancelScope()
        self._receipted_at = 0  # positions that the newest receipt upstream covers
        self._silent_checkpoints = 0

    @property
    def upstream(self) -> FrameLink:
        """The link this session belongs to."""
        return self._upstream

    @property
    def opening(self) -> Opening:
        """The verified chain-open."""
        return self._opening

    def deliver(self, frame: Frame) -> None:
        """Take a frame from upstream.

        Raises:
            InvalidStep: more steps than may wait.
        """
        if frame.kind is Kind.CLOSE:
            self._scope.cancel()
        elif not self._inbox.put(frame):
            raise InvalidStep("more steps than may wait at a stage")

    def cancel(self) -> None:
        """End the session: its upstream is gone, or the node stops."""
        self._scope.cancel()

    async def run(self) -> None:
        """Serve until closed, cancelled or failed; then free the KV, tell the neighbours and write the proof.

        Never raises a `TessellaError`: what went wrong goes upstream as a typed ERROR frame.
        """
        async with trio.open_nursery() as links:  # the last receipt outlives the steps
            failure: TessellaError | None = None
            try:
                with self._scope:
                    await self._stage.open(self._key, self._opening.body.max_positions)
                    await self._connect(links)
                    await self._serve()
            except TessellaError as error:
                failure = error
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLEAN_UP_S):
                    await self._stage.close(self._key)
                    await self._finish(failure)
                links.cancel_scope.deadline = trio.current_time() + _TOKEN_STREAM_END_S

    # ---- opening ----

    async def _connect(self, nursery: trio.Nursery) -> None:
        opening, context = self._opening, self._context
        session, epoch = opening.key
        try:
            with trio.fail_after(context.hop_timeout_s):
                if opening.is_tail:
                    context.network.add_addresses(opening.entry, opening.body.entry_addresses)
                    self._down = FrameLink(await context.network.open_stream(opening.entry, protocols.TOKENS))
                    nursery.start_soon(self._run_token_link, self._down)
                    body: bytes = opening.capability
                else:
                    following = opening.body.route[opening.index + 1]
                    context.network.add_addresses(opening.downstream, following.addresses)
                    self._down = await context.links.attach(opening.downstream, opening.key, self._inbox)
                    body = encode_message(m.OpenFrame(open=opening.envelope.raw, capability=opening.capability))
        except trio.TooSlowError as error:
            raise HopTimeout(f"{opening.downstream} could not be reached in time").blame(opening.downstream) from error
        except TransportError as error:
            raise error.blame(opening.downstream) from None
        await self._send_down(Frame(Kind.OPEN, session, epoch, body=body))

    async def _send_down(self, frame: Frame) -> None:
        assert self._down is not None
        try:
            await self._down.send(frame, self._context.hop_timeout_s)
        except TransportError as error:
            raise error.blame(self._opening.downstream) from None

    async def _run_token_link(self, link: FrameLink) -> None:
        def deliver(frame: Frame) -> None:
            if (frame.session, frame.epoch) != self._opening.key:
                raise MalformedMessage("a frame of another session on a token stream")
            if not self._inbox.put(frame):
                raise MalformedMessage("more receipts than a session can take")

        reason: TessellaError = StreamReset(f"{link.peer} ended the token stream")
        try:
            await link.run(deliver)
        except TessellaError as error:
            reason = error
        self._inbox.put(reason.blame(link.peer))

    # ---- steps ----

    async def _serve(self) -> None:
        next_checkpoint = trio.current_time() + self._context.checkpoint_s
        while True:
            item, arrived_at = None, 0.0
            with trio.move_on_at(next_checkpoint):
                item, arrived_at = await self._inbox.get()
            if trio.current_time() >= next_checkpoint:
                next_checkpoint = trio.current_time() + self._context.checkpoint_s
                await self._checkpoint()
            if isinstance(item, TessellaError):
                raise item.blame(self._opening.downstream)
            if item is not None:
                await self._take(item, arrived_at)

    async def _take(self, frame: Frame, arrived_at: float) -> None:
        if frame.kind is Kind.STEP:
            await self._step(frame, arrived_at)
        elif frame.kind is Kind.RECEIPT:
            self._confirm(frame)
        elif frame.kind is Kind.ERROR:
            body = decode_message(m.ErrorBody, bytes(frame.body))
            raise error_from_code(body.code, body.reason).blame(PeerId(body.fault_of))
        else:
            raise MalformedMessage(f"a {frame.kind.name} frame inside a session").blame(self._opening.upstream)

    async def _step(self, frame: Frame, arrived_at: float) -> None:
        if frame.position + frame.rows <= self._meter.positions:
            return  # a step is idempotent: this one was done
        try:
            self._meter.expect(frame.position)
        except InvalidStep as error:
            raise error.blame(self._opening.upstream) from None
        opening, sampling = self._opening, self._opening.body.sampling
        wants_token = opening.is_tail and bool(frame.flags & Flag.SAMPLE)
        last = frame.position + frame.rows
        result = await self._stage.step(
            StepInput(
                session=self._key,
                position=frame.position,
                rows=frame.rows,
                dtype=frame.dtype,
                body=frame.body,
                sample=SampleAt(sampling.temperature, sampling.seed) if wants_token else None,
            )
        )
        output = result.output
        if isinstance(output, InvalidStep):
            raise output.blame(opening.upstream)
        if isinstance(output, TessellaError):
            raise output
        out: Buffer = b""
        kind, dtype, rows, position = Kind.STEP, frame.dtype, frame.rows, frame.position
        if isinstance(output, Sampled):
            out, kind, dtype, rows, position = output.token_id.to_bytes(4, "little"), Kind.TOKEN, DType.U32, 1, last
        elif isinstance(output, StepOutput):
            out, dtype = output.body, output.dtype
        self._meter.add(frame.rows, frame.body, out, result.compute_us)
        if not out:
            return
        total_us = int((trio.current_time() - arrived_at) * 1e6)
        trace = (*frame.trace, TraceEntry(result.queue_us, result.compute_us, total_us))
        await self._send_down(Frame(kind, *opening.key, frame.step, position, rows, dtype, frame.flags, trace, out))

    # ---- receipts and checkpoints ----

    def _confirm(self, frame: Frame) -> None:
        before = self._meter.confirmed
        try:
            self._meter.confirm(
                bytes(frame.body),
                receiver=self._opening.downstream,
                sender=self._context.key.peer_id,
                request_id=self._opening.body.request_id,
                key=self._opening.key,
            )
        except RemoteProtocolError as error:
            raise error.blame(self._opening.downstream) from None
        if self._meter.confirmed is not before:
            self._silent_checkpoints = 0

    def _send_receipt(self) -> None:
        positions, digest = self._meter.input_receipt()
        if self._opening.index == 0 or positions == self._receipted_at:
            return  # the entry proves nothing, so it needs no receipt of the head
        body = m.ReceiptBody(
            request_id=self._opening.body.request_id,
            session=self._opening.body.session,
            epoch=self._opening.body.epoch,
            sender=self._opening.upstream,
            positions=positions,
            digest=digest,
        )
        raw = seal_receipt(body, self._context.key, self._context.sequencer, self._context.clock.unix_ms())
        if self._upstream.send_nowait(Frame(Kind.RECEIPT, *self._opening.key, body=raw)):
            self._receipted_at = positions

    async def _checkpoint(self) -> None:
        self._send_receipt()
        if self._meter.unconfirmed_steps:
            self._silent_checkpoints += 1
            if self._silent_checkpoints > UNRECEIPTED_CHECKPOINTS:
                receiver = self._opening.downstream
                raise RemoteProtocolError(f"{receiver} gives no receipts").blame(receiver)
        if self._opening.ticket is not None and self._meter.confirmed is not None:
            await self._context.proofs.checkpoint(self._opening, self._meter)

    # ---- the end ----

    async def _finish(self, failure: TessellaError | None) -> None:
        session, epoch = self._opening.key
        if failure is not None:
            log.info("session failed", request_id=self._opening.body.request_id, epoch=epoch, reason=str(failure))
            self._upstream.send_nowait(error_frame(failure, self._context.key.peer_id, session, epoch))
        self._send_receipt()
        if self._down is not None:
            self._down.send_nowait(Frame(Kind.CLOSE, session, epoch))
            if self._meter.unconfirmed_steps:
                await self._await_final_receipt()
            if self._opening.is_tail:
                self._down.end()
            self._context.links.detach(self._opening.downstream, self._opening.key, self._inbox)
        self._inbox.close()
        if self._opening.ticket is not None and self._meter.confirmed is not None:
            try:
                await self._context.proofs.prove(self._opening, self._meter)
            except TessellaError as error:
                log.error("a proof could not be written", request_id=self._opening.body.request_id, reason=str(error))

    async def _await_final_receipt(self) -> None:
        with trio.move_on_after(FINAL_RECEIPT_S):
            while self._meter.unconfirmed_steps:
                item, _ = await self._inbox.get()
                if isinstance(item, TessellaError):
                    return
                if item.kind is Kind.RECEIPT:
                    try:
                        self._confirm(item)
                    except TessellaError as error:
                        log.warning("a bad last receipt", peer=self._opening.downstream, reason=str(error))
                        return


def error_frame(error: TessellaError, met_by: PeerId, session: SessionId, epoch: int) -> Frame:
    """The ERROR frame that tells a session's upstream what ended it, and whose fault it was."""
    body = m.ErrorBody(code=error.code, reason=str(error)[:1024], met_by=met_by, fault_of=error.peer or met_by)
    return Frame(Kind.ERROR, session, epoch, body=encode_message(body))
