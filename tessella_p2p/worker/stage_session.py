"""One session on one stage (shell): open, steps, receipts, close, proof. A linear task per (session, epoch).

What neighbours send reaches the session through plain calls that never block: steps are queued, and everything else takes effect at
once. So an error or a close frees the KV after the turn that runs, however many steps wait.

Steps run through plain calls too, from the frame that brings the rows to the one that takes them on, with no task in between: at one
token a step each task that has to be woken is felt. The task opens and connects, waits where there is something to wait for (room
downstream), and ends the session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import trio

from tessella_p2p.base.errors import (
    HopTimeout,
    InvalidRequest,
    InvalidStep,
    LocalProtocolError,
    MalformedMessage,
    Overloaded,
    RemoteProtocolError,
    StreamReset,
    TessellaError,
    TooManyHopBodies,
    TransportError,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    CHECKPOINT_S,
    FINAL_RECEIPT_S,
    MAX_WAITING_BODY_BYTES,
    RECEIPT_PATIENCE_S,
    SESSION_IDLE_S,
)
from tessella_p2p.stages.engine import Buffer, Sampled, SessionKey, StepAnswer, StepInput, StepOutput, TokenSampler
from tessella_p2p.stages.faults import error_frame, error_of
from tessella_p2p.stages.frame_link import FrameLink, Unread
from tessella_p2p.stages.history import StageTracks
from tessella_p2p.stages.intake import StepIntake
from tessella_p2p.stages.opening import Opening
from tessella_p2p.stages.pending import StepResult
from tessella_p2p.stages.pooling import VECTOR_DTYPE, Pool, Pooled
from tessella_p2p.stages.sampler import sampler_for
from tessella_p2p.stages.service import StageService
from tessella_p2p.stages.token_body import TOKEN_ID_BYTES, encode_sampled
from tessella_p2p.stages.work import Confirmed, WorkMeter, seal_receipt
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import encode_message
from tessella_p2p.wire.frames import DType, Flag, Frame, Header, Kind, TraceEntry, encode_frame
from tessella_p2p.worker.context import StageContext

log = structlog.get_logger(__name__)

_CLEAN_UP_S = 10.0
_TOKEN_STREAM_END_S = 1.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A step that waits, and when it arrived (trio's clock)."""

    frame: Frame
    arrived_at: float


class StageSession:
    """One (session, epoch) on this stage; a `hop_links.Receiver` for its downstream link.

    Args:
        upstream: the link its frames come from; receipts and errors go back on it.
        predecessors: sessions of earlier epochs, which are ending; this one opens when their KV is free.
    """

    def __init__(
        self,
        context: StageContext,
        stage: StageService,
        opening: Opening,
        upstream: FrameLink,
        predecessors: Sequence[StageSession] = (),
    ) -> None:
        self._context = context
        self._stage = stage
        self._opening = opening
        self._upstream = upstream
        self._predecessors = tuple(predecessors)
        self._key = SessionKey(*opening.key)
        self._intake = StepIntake.for_engine(stage.engine, opening.body.max_positions, opening.index)
        self._meter = WorkMeter(opening.body.digest_key, opening.opened)
        self._tracks = StageTracks.begin(context.history, opening)
        self._sampler: TokenSampler | None = None
        self._pool: Pool | None = None  # of a tail that was opened for an embedding
        self._awaits_grammar = False
        self._steps: deque[_Waiting] = deque()
        self._in_turn: _Waiting | None = None  # with the stage, or its output waits for room
        self._unsent: Frame | None = None
        self._news = trio.Event()
        self._idle_since = 0.0
        self._is_serving = False
        self._down: FrameLink | None = None
        self._down_is_lost = False
        self._receipt_arrived = trio.Event()
        self._scope = trio.CancelScope()
        self._failure: TessellaError | None = None
        self._is_closed = False  # by its upstream
        self._is_over = False
        self._receipted = 0  # positions that the newest receipt upstream covers
        self._unsigned_since = 0.0
        self._journaled: Confirmed | None = None
        self.freed = trio.Event()
        """Set once its KV is free."""

    @property
    def upstream(self) -> FrameLink:
        """The link this session belongs to."""
        return self._upstream

    @property
    def stage(self) -> StageService:
        """The stage that it holds KV on."""
        return self._stage

    @property
    def opening(self) -> Opening:
        """The verified chain-open."""
        return self._opening

    # ---- what the upstream link calls ----

    def wants(self, header: Header) -> bool:
        """Whether a STEP is new, and of the right form."""
        if self._is_over or self._scope.cancel_called:
            return False
        try:
            is_new = self._intake.judge(header) == "new"
        except InvalidStep as error:
            self._fail(error.blame(self._opening.upstream))
            return False
        if is_new and not self._is_serving and self._waits_with_too_much(header):
            self._fail(TooManyHopBodies("this stage is full, and keeps no more rows of a session that waits"))
            return False
        return is_new

    def _waits_with_too_much(self, header: Header) -> bool:
        too_much = self._intake.positions * self._intake.row_bytes + header.body_bytes > MAX_WAITING_BODY_BYTES
        return too_much and (self._awaits_grammar or self._stage.waits(self._key))

    def deliver(self, frame: Frame) -> None:
        """Take a STEP that was wanted."""
        if self._is_over or self._scope.cancel_called:
            return
        self._intake.take(frame)
        self._steps.append(_Waiting(frame, trio.current_time()))
        self._begin_step()
        if self._tracks.received is not None:
            self._tracks.received.note(frame)
        self._meter.receive(frame.rows, frame.body, draws=frame.flags is Flag.SAMPLE)  # while the engine is at work

    def damaged(self, unread: Unread) -> None:
        """Take note of a STEP whose checksum was wrong."""
        error = InvalidStep(f"the rows of the step at position {unread.header.position} were damaged")
        self._fail(error.blame(self._opening.upstream))

    def close(self) -> None:
        """The upstream closes the session, or is gone."""
        self._is_closed = True
        self._scope.cancel()

    def stop(self, reason: TessellaError) -> None:
        """This node ends the session; the upstream is told why."""
        self._fail(reason)

    # ---- what the downstream link calls ----

    def returned(self, frame: Frame) -> None:
        """Take a receipt or an error."""
        opening = self._opening
        if frame.kind is Kind.ERROR:
            below = [PeerId(stage.peer_id) for stage in opening.body.route[opening.index + 1 :]]
            self._fail(error_of(frame, opening.downstream, {*below, self._context.key.peer_id, opening.entry}))
            return
        before = self._meter.confirmed
        try:
            self._meter.confirm(
                bytes(frame.body),
                receiver=opening.downstream,
                sender=self._context.key.peer_id,
                request_id=opening.body.request_id,
                key=opening.key,
            )
        except RemoteProtocolError as error:
            self._down_is_lost = True  # nothing that it signs from now on counts
            self._fail(error.blame(opening.downstream))
        confirmed = self._meter.confirmed
        if confirmed is not None and confirmed is not before:
            self._unsigned_since = trio.current_time()
            if self._tracks.sent is not None:
                self._tracks.sent.note_receipt(confirmed.receipt, confirmed.boundary.positions)
        self._receipt_arrived.set()

    def lost(self, reason: TessellaError) -> None:
        """The way downstream is gone."""
        self._down_is_lost = True
        self._receipt_arrived.set()
        self._fail(reason.blame(self._opening.downstream))

    def _fail(self, error: TessellaError) -> None:
        if not self._is_over and not self._is_closed:
            self._failure = self._failure or error
            self._scope.cancel()

    # ---- the session ----

    async def run(self) -> None:
        """Serve until closed, stopped, cancelled or failed; then tell the neighbours, free the KV and write the proof.

        Never raises a `TessellaError`: what went wrong goes upstream as a typed ERROR frame.
        """
        async with trio.open_nursery() as outliving:  # the last receipt outlives the steps
            try:
                with self._scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._keep_receipts)
                        await self._serve(outliving)
            finally:
                self._is_over = True
                with trio.CancelScope(shield=True):
                    await self._finish()
                outliving.cancel_scope.deadline = trio.current_time() + _TOKEN_STREAM_END_S

    async def _serve(self, outliving: trio.Nursery) -> None:
        try:
            for older in self._predecessors:
                await older.freed.wait()
            body = self._opening.body
            if self._opening.is_tail and body.output == "embedding":
                self._pool = Pool(self._stage.engine.hidden_size)
            elif self._opening.is_tail:
                self._sampler = await self._make_sampler()
            await self._stage.open(
                self._key,
                body.max_positions,
                len(body.route),
                self._opening.tier,
                self._opening.cache_scope,
                wait_s=body.wait_ms / 1000,
            )
            await self._connect(outliving)
            self._is_serving, self._idle_since = True, trio.current_time()
            self._begin_step()
            await self._attend()
        except TessellaError as error:
            self._fail(error)

    async def _make_sampler(self) -> TokenSampler:
        """What this tail draws with. Raises `InvalidRequest`, the entry's fault, and `Overloaded`."""
        self._awaits_grammar = True
        try:
            constraint = await self._context.grammars.constraint_of(self._opening.body)
        except InvalidRequest as error:
            raise error.blame(self._opening.entry) from None
        finally:
            self._awaits_grammar = False
        return sampler_for(self._opening, self._stage.engine.vocabulary, constraint)

    async def _connect(self, outliving: trio.Nursery) -> None:
        opening, context = self._opening, self._context
        try:
            with trio.fail_after(context.hop_timeout_s):
                if opening.is_tail:
                    context.network.add_addresses(opening.entry, opening.body.entry_addresses)
                    stream = await context.network.open_stream(opening.entry, protocols.TOKENS)
                    self._down = FrameLink(stream, context.hop_timeout_s)
                    outliving.start_soon(self._run_token_link, self._down)
                    body = opening.capability
                else:
                    if not context.is_known(opening.downstream):
                        following = opening.body.route[opening.index + 1]
                        context.network.add_addresses(opening.downstream, following.addresses)
                    self._down = await context.links.attach(opening.downstream, opening.key, self)
                    body = encode_message(m.OpenFrame(open=opening.envelope.raw, capability=opening.capability))
        except trio.TooSlowError as error:
            raise HopTimeout(f"{opening.downstream} could not be reached in time").blame(opening.downstream) from error
        except (TransportError, RemoteProtocolError) as error:
            raise error.blame(opening.downstream) from None
        await self._send_down(Frame(Kind.OPEN, *opening.key, body=body))

    async def _send_down(self, frame: Frame) -> None:
        assert self._down is not None
        try:
            await self._down.send(frame, self._context.hop_timeout_s)
        except TransportError as error:
            raise error.blame(self._opening.downstream) from None

    async def _run_token_link(self, link: FrameLink) -> None:
        reason: TessellaError = StreamReset(f"{link.peer} ended the token stream")
        try:
            await link.run(_TokenLinkHandler(self))
        except TessellaError as error:
            reason = error
        self.lost(reason)

    # ---- steps ----

    def _begin_step(self) -> None:
        """Give the stage the oldest step that waits, unless it has one, or an output of the one before waits for room."""
        if self._in_turn is not None or not self._steps or not self._is_serving or self._scope.cancel_called:
            return
        self._in_turn = waiting = self._steps.popleft()
        frame = waiting.frame
        self._stage.submit(
            StepInput(
                session=self._key,
                position=frame.position,
                rows=frame.rows,
                dtype=frame.dtype,
                body=frame.body,
                sample=self._sampler if frame.flags is Flag.SAMPLE else None,
                normed=self._pool is not None,
            ),
            self._stepped,
        )

    def _stepped(self, result: StepResult) -> None:
        """Send on what became of a step, and account for it; then the next one."""
        waiting = self._in_turn
        if waiting is None or self._is_over or self._scope.cancel_called:
            return
        try:
            self._send_on(waiting, result)
        except TessellaError as error:
            self._fail(error)
        except Exception as error:  # our own bug ends this session, not the stage with all the others
            log.error("a session failed", request_id=self._opening.body.request_id, exc_info=error)
            self._fail(LocalProtocolError("this stage failed over a step's result"))
        self._idle_since = trio.current_time()
        if self._unsent is None:
            self._in_turn = None
            self._begin_step()

    def _send_on(self, waiting: _Waiting, result: StepResult) -> None:
        """Send a step's output first, then account for it: the next stage need not wait for digests."""
        frame, output = waiting.frame, self._folded(waiting.frame, result.output)
        if isinstance(output, InvalidStep):
            raise output.blame(self._opening.upstream)
        if isinstance(output, InvalidRequest):  # what the draw was asked to follow
            raise output.blame(self._opening.entry)
        if isinstance(output, TessellaError):
            raise output
        out: Buffer = b""
        kind, dtype, rows, position = Kind.STEP, frame.dtype, frame.rows, frame.position
        if isinstance(output, Sampled | Pooled):
            kind, rows, position = Kind.TOKEN, 1, frame.position + frame.rows
        if isinstance(output, Sampled):
            out, dtype = encode_sampled(output), DType.U32
        elif isinstance(output, Pooled):
            out, dtype = output.body, VECTOR_DTYPE
        elif isinstance(output, StepOutput):
            out, dtype = output.body, output.dtype
        if out:
            assert self._down is not None
            total_us = int((trio.current_time() - waiting.arrived_at) * 1e6)
            trace = (*frame.trace, TraceEntry(result.queue_us, result.compute_us, total_us, result.cached_positions))
            step = Frame(kind, *self._opening.key, frame.step, position, rows, dtype, frame.flags, trace, out)
            data = encode_frame(step)
            if not self._down.send_nowait(step, data):
                self._unsent = step
                self._news.set()
            if self._tracks.sent is not None:
                self._tracks.sent.note(step, data)
        signed = out[:TOKEN_ID_BYTES] if isinstance(output, Sampled) else out
        self._account(signed, is_token=kind is Kind.TOKEN, compute_us=result.compute_us)

    def _folded(self, frame: Frame, output: StepAnswer) -> StepAnswer | Pooled:
        """For an embedding a tail keeps the sum of its rows, and sends the vector when it is asked for."""
        if self._pool is None:
            return output
        return self._pool.fold(output, draws=frame.flags is Flag.SAMPLE)

    async def _attend(self) -> None:
        """What a step cannot do by itself: wait for room downstream; and end a session that is idle.

        Raises:
            HopTimeout: the downstream took nothing in time, or the upstream sent nothing for `SESSION_IDLE_S`.
            StreamReset: the downstream is lost.
        """
        while True:
            busy = self._in_turn is not None or bool(self._steps)
            idle_at = (trio.current_time() if busy else self._idle_since) + SESSION_IDLE_S
            with trio.move_on_at(idle_at) as patience:
                await self._news.wait()
                self._news = trio.Event()
            if self._unsent is not None:
                await self._send_down(self._unsent)
                self._unsent = self._in_turn = None
                self._begin_step()
            elif patience.cancelled_caught and self._is_idle():
                raise HopTimeout(f"no step for {SESSION_IDLE_S:.0f} s").blame(self._opening.upstream)

    def _is_idle(self) -> bool:
        at_work = self._in_turn is not None or bool(self._steps)
        return not at_work and trio.current_time() >= self._idle_since + SESSION_IDLE_S

    def _account(self, out: Buffer, *, is_token: bool, compute_us: int) -> None:
        self._intake.finish()
        if not self._meter.unconfirmed_steps:
            self._unsigned_since = trio.current_time()
        try:
            self._meter.finish(out, is_token=is_token, compute_us=compute_us)
        except RemoteProtocolError as error:
            raise error.blame(self._opening.downstream) from None

    # ---- receipts and checkpoints ----

    async def _keep_receipts(self) -> None:
        """Sign for what arrives, insist on signatures for what is sent, and journal what is signed."""
        period_s = min(
            self._context.checkpoint_s, CHECKPOINT_S
        )  # neighbours count on the default, whatever is set here
        next_checkpoint = trio.current_time() + self._context.checkpoint_s
        while True:
            await trio.sleep(period_s)
            self._send_receipt()
            now = trio.current_time()
            if self._meter.unconfirmed_steps and now - self._unsigned_since > RECEIPT_PATIENCE_S:
                receiver = self._opening.downstream
                self._fail(RemoteProtocolError(f"{receiver} gives no receipts").blame(receiver))
            if now >= next_checkpoint:
                next_checkpoint = now + self._context.checkpoint_s
                await self._checkpoint()

    def _send_receipt(self) -> None:
        positions, digest = self._meter.input_receipt()
        if positions == self._receipted or (self._opening.index == 0 and self._opening.ticket is None):
            return  # an entry needs the receipt for audits alone, and nobody audits what nobody is paid for
        body = m.ReceiptBody(
            request_id=self._opening.body.request_id,
            session=self._opening.body.session,
            epoch=self._opening.body.epoch,
            sender=self._opening.upstream,
            positions=positions,
            digest=digest,
        )
        raw = seal_receipt(body, self._context.key, self._context.sequencer, self._context.clock.unix_ms())
        if self._upstream.post(Frame(Kind.RECEIPT, *self._opening.key, body=raw)):
            self._receipted = positions

    async def _checkpoint(self) -> None:
        confirmed = self._meter.confirmed
        if self._opening.ticket is None or confirmed is None or confirmed is self._journaled:
            return
        try:
            await self._context.proofs.checkpoint(self._opening, self._meter)
        except TessellaError as error:  # the session goes on: the answer is worth more to its client than the journal
            log.error("a checkpoint could not be written", request_id=self._opening.body.request_id, reason=str(error))
        else:
            self._journaled = confirmed

    # ---- the end ----

    async def _finish(self) -> None:
        """Tell both neighbours at once, so that KV is freed on every stage at the same time; then free it here, then prove."""
        opening = self._opening
        if self._failure is None and not self._is_closed:
            self._failure = Overloaded("this stage is leaving")
        if self._failure is not None:
            log.info(
                "session failed",
                request_id=opening.body.request_id,
                epoch=opening.body.epoch,
                code=self._failure.code,
                fault_of=self._failure.peer,
                reason=str(self._failure),
            )
            self._report(self._failure)
        self._steps.clear()
        self._tracks.end(trio.current_time())
        self._send_receipt()
        if self._failure is not None:
            self._upstream.post(error_frame(self._failure, self._context.key.peer_id, *opening.key))
        if self._down is not None:
            self._down.close_session(opening.key)
        with trio.move_on_after(_CLEAN_UP_S):
            await self._stage.close(self._key)
        self.freed.set()
        if self._down is not None:
            await self._await_final_receipt()
            if opening.is_tail:
                self._down.end()
            self._context.links.detach(opening.downstream, opening.key, self)
        if opening.ticket is not None and self._meter.confirmed is not None:
            try:
                await self._context.proofs.prove(opening, self._meter)
            except TessellaError as error:
                log.error("a proof could not be written", request_id=opening.body.request_id, reason=str(error))

    def _report(self, failure: TessellaError) -> None:
        """Tell of a next stage that failed this one, or says itself that it is at fault; an entry is nobody's stage."""
        reports, downstream = self._context.reports, self._opening.downstream
        if reports is not None and failure.peer == downstream and not self._opening.is_tail:
            reports.note(downstream, failure)

    async def _await_final_receipt(self) -> None:
        with trio.move_on_after(FINAL_RECEIPT_S):
            while self._meter.unconfirmed_steps and not self._down_is_lost:
                await self._receipt_arrived.wait()
                self._receipt_arrived = trio.Event()


@dataclass(frozen=True, slots=True)
class _TokenLinkHandler:
    """What the entry sends back on a token stream: receipts of its one session, and nothing else."""

    session: StageSession

    def wants(self, header: Header) -> bool:
        if header.kind is not Kind.RECEIPT or (header.session, header.epoch) != self.session.opening.key:
            raise MalformedMessage(f"a {header.kind.name} frame where this session's receipts are expected")
        return True

    def take(self, frame: Frame) -> None:
        self.session.returned(frame)

    def skipped(self, unread: Unread) -> None:
        raise InvalidStep("a damaged receipt")
