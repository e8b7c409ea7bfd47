"""The auditor (shell): takes an order, repeats what another worker proved, and reports what came out.

Of the layers that it serves anyway it repeats the work as one more session of its stage: in the lowest tier, a few rows at a time, and
only while that leaves a place for somebody who pays. Other layers are loaded for it, beside the stage, and let go again; see
`guest_stage`. Either way it rests as long as it has computed where others are at work here. What it is shown is believed as far as
its digest is the order's.

    order ──take──▶ queue ──▶ input of the upstream peer ─┐
                                                          ├─ the stage, or a guest ──▶ digests ──▶ report
                     (by tolerance) output downstream ────┘
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import structlog
import trio

from tessella_p2p.base.errors import (
    CacheMiss,
    Expired,
    InvalidRequest,
    InvalidStep,
    LocalProtocolError,
    Overloaded,
    PromptTooLong,
    RefusalError,
    RemoteProtocolError,
    TessellaError,
    TransportError,
)
from tessella_p2p.base.ids import LayerRange, PeerId, SessionId
from tessella_p2p.base.limits import AUDIT_ROWS, MAX_REASON_CHARS, MAX_WAITING_AUDITS
from tessella_p2p.ledger.client import OrchestratorPort
from tessella_p2p.model.recipe import RECIPES, base_name
from tessella_p2p.stages.engine import SessionKey, StepInput, StepOutput, TokenSampler
from tessella_p2p.stages.opening import StageIdentity
from tessella_p2p.stages.pending import StepResult
from tessella_p2p.stages.pooling import Pool
from tessella_p2p.stages.recomputation import Recomputation
from tessella_p2p.stages.rows import cast
from tessella_p2p.stages.sampler import sampler_of
from tessella_p2p.stages.service import StageService
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import peek_signer
from tessella_p2p.wire.frames import DType
from tessella_p2p.worker.context import StageContext
from tessella_p2p.worker.contradictions import Contradiction, find_contradiction
from tessella_p2p.worker.guest_stage import GuestStage
from tessella_p2p.worker.history_reader import FetchedHistory, HistoryReader, Piece, open_history

log = structlog.get_logger(__name__)

_RETRY_S = 2.0
_REPORT_S = 5.0
"""Before an order's deadline: a report that is late is none."""
_FETCHES = 3
"""How often a neighbour is asked: it may be busy, or away for a moment."""

Serving = tuple[StageService, StageIdentity]
_Fetched = dict[tuple[m.HistorySide, DType], FetchedHistory]


@dataclass(frozen=True, slots=True)
class _Taken:
    order: m.AuditOrder
    raw: bytes
    orchestrator: PeerId


class _Withheld(Exception):
    """A neighbour does not show what it has to."""

    def __init__(self, peer: str, error: TessellaError) -> None:
        super().__init__(str(error))
        self.peer = peer
        self.code = error.code


class Auditor:
    """Carries out the audit orders of one worker, one after the other.

    Args:
        client: where reports go: to the orchestrator that ordered the audit.
        serving: the stage that this node serves now, and as what; None while it serves none.
        random_bytes: for session ids that nobody guesses.
        guests: where other layers than this node's are loaded; None audits none of those.
    """

    def __init__(
        self,
        context: StageContext,
        client: OrchestratorPort,
        serving: Callable[[], Serving | None],
        random_bytes: Callable[[int], bytes],
        guests: GuestStage | None = None,
    ) -> None:
        self._guests = guests
        self._context = context
        self._client = client
        self._serving = serving
        self._random_bytes = random_bytes
        self._send, self._receive = trio.open_memory_channel[_Taken](MAX_WAITING_AUDITS)
        self.audits = 0
        """Orders that were carried out, whatever came of them."""

    async def take(self, order: m.AuditOrder, raw: bytes) -> None:
        """Take an order whose envelope ``raw`` was verified; an `orders.AuditHandler`.

        Raises:
            InvalidRequest: it is not for this node, or for a stage that it neither serves nor may load.
            Expired: there is no time left for it.
            Overloaded: this node serves no stage now, or as many orders as it takes wait already.
        """
        await trio.lowlevel.checkpoint()
        serving = self._serving()
        if serving is None:
            raise Overloaded("this node serves no stage right now")
        self._check(order, *serving)
        try:
            self._send.send_nowait(_Taken(order, raw, peek_signer(raw)))
        except trio.WouldBlock:
            raise Overloaded(f"{MAX_WAITING_AUDITS} audits wait here already") from None

    def _check(self, order: m.AuditOrder, stage: StageService, identity: StageIdentity) -> None:
        if order.auditor != identity.peer_id or order.audited == identity.peer_id:
            raise InvalidRequest("an order for another auditor, or for an audit of oneself", param="auditor")
        if order.manifest_root != identity.manifest_root:
            raise InvalidRequest("this stage serves another artifact", param="manifest_root")
        is_own = order.layers == identity.layers.as_tuple()
        if not is_own and (self._guests is None or order.comparison != "bitwise"):
            raise InvalidRequest(f"this stage serves layers {identity.layers}", param="layers")
        if LayerRange(*order.layers).end > identity.total_layers:
            raise InvalidRequest(f"the model has {identity.total_layers} layers", param="layers")
        if order.comparison == "bitwise" and order.recipe != identity.recipe:
            raise InvalidRequest(f"this stage computes {identity.recipe}, not {order.recipe}", param="recipe")
        if order.comparison == "tolerance" and (stage.engine.is_tail or order.output_digest is None):
            raise InvalidRequest("by tolerance rows are compared, with those of a digest", param="comparison")
        if order.comparison == "tolerance" and base_name(order.recipe) not in RECIPES:
            raise InvalidRequest("nobody knows what the rows of this recipe are", param="recipe")
        if not 1 <= order.positions <= stage.engine.max_positions:
            raise InvalidRequest(f"this stage holds {stage.engine.max_positions} positions", param="positions")
        if self._left_s(order) <= 0:
            raise Expired("the audit's time is over")

    def _left_s(self, order: m.AuditOrder) -> float:
        return (order.report_before - self._context.clock.unix_ms()) / 1000 - _REPORT_S

    async def run(self) -> None:
        """Carry out what was taken, until cancelled."""
        async for taken in self._receive:
            report = _inconclusive(taken.order, "too_late", "there was no time to compute it")
            with trio.move_on_after(max(0.0, self._left_s(taken.order))):
                try:
                    report = await self._carried_out(taken)
                except Exception as error:  # whatever a neighbour's rows set off ends this audit, not the node
                    log.error("an audit failed", audited=taken.order.audited, exc_info=error)
                    report = _inconclusive(taken.order, "internal_error", "the auditor failed over it")
            log.info(
                "audited",
                audited=taken.order.audited,
                outcome=report.outcome,
                code=report.code,
                reason=report.reason,
                withheld_by=report.withheld_by,
            )
            self.audits += 1
            await self._report(taken, report)

    async def _carried_out(self, taken: _Taken) -> m.AuditReport:
        """Try until something can be said of it.

        What a neighbour has shown is kept over troubles of this node's own: a history is shown a few times only, and whoever is asked
        for it too often because of them would look like one who withholds it.
        """
        order = taken.order
        fetches = 0
        fetched: _Fetched = {}
        while True:
            try:
                return await self._attempt(taken, fetched)
            except _Withheld as withheld:
                fetched.clear()
                fetches += 1
                if fetches == _FETCHES:
                    return _inconclusive(order, withheld.code, str(withheld), withheld.peer)
                log.info("history was not shown", by=withheld.peer, code=withheld.code, reason=str(withheld))
            except InvalidRequest as error:  # the stage is another one by now
                return _inconclusive(order, error.code, str(error))
            except (Overloaded, CacheMiss, PromptTooLong) as error:  # of this node's own stage
                log.info("an audit waits", audited=order.audited, code=error.code, reason=str(error))
            await trio.sleep(_RETRY_S)

    async def _attempt(self, taken: _Taken, fetched: _Fetched) -> m.AuditReport:
        """One recomputation, from the first row to the last.

        Args:
            fetched: what neighbours showed at earlier tries; what they show now is added.

        Raises:
            _Withheld: a neighbour showed nothing, too little, or something else.
            InvalidRequest: this node serves another stage by now.
            Overloaded, CacheMiss, PromptTooLong: there is no room now, or the stage failed.
        """
        order = taken.order
        serving = self._serving()
        if serving is None:
            raise Overloaded("this node serves no stage right now")
        home, identity = serving
        self._check(order, home, identity)
        rows = _rows_dtype(order, home)

        async def shown(side: m.HistorySide, dtype: DType) -> HistoryReader:
            if (side, dtype) not in fetched:
                async with open_history(self._context, order, taken.raw, side, dtype) as history:
                    fetched[side, dtype] = await history.fetched(order.positions)
            return fetched[side, dtype].reader()

        async with AsyncExitStack() as stack:
            stage = await stack.enter_async_context(self._stage_for(order, home, identity))
            with _blaming(order.upstream):
                wanted = DType.U32 if stage.engine.is_head else rows
                inputs = await shown("input", wanted)
            outputs: HistoryReader | None = None
            if order.comparison == "tolerance":
                with _blaming(order.downstream):
                    outputs = await shown("output", rows)
            found = await self._recomputed(order, stage, home, inputs, outputs)
            if found.input_digest != order.input_digest:
                with _blaming(order.upstream):
                    contradiction = await find_contradiction(
                        self._context, order, taken.raw, inputs, found.input_digest, wanted
                    )
                return _contradicted(order, contradiction)
        return _conclusion(order, found)

    @asynccontextmanager
    async def _stage_for(
        self, order: m.AuditOrder, home: StageService, identity: StageIdentity
    ) -> AsyncIterator[StageService]:
        """The stage that recomputes: this node's own where it serves those layers, else a guest."""
        layers = LayerRange(*order.layers)
        if layers == identity.layers:
            if home.num_sessions and home.num_sessions >= home.engine.max_sessions - 1:
                raise Overloaded(f"{home.num_sessions} sessions are open; the last place is for somebody who pays")
            yield home
        elif self._guests is None:
            raise InvalidRequest(f"this stage serves layers {identity.layers}", param="layers")
        else:
            async with self._guests.borrowed(layers) as guest:
                yield guest

    async def _recomputed(
        self,
        order: m.AuditOrder,
        stage: StageService,
        home: StageService,
        inputs: HistoryReader,
        outputs: HistoryReader | None,
    ) -> Recomputation:
        engine = stage.engine
        found = Recomputation(
            inputs.body.digest_key,
            inputs.opened,
            scaling=[PeerId(canary.peer_id) for canary in order.canaries if canary.mode == "scale"],
            vocabulary=engine.vocabulary,
        )
        sampler: TokenSampler | None = None
        pool: Pool | None = None
        if engine.is_tail and inputs.body.output == "embedding":
            pool = Pool(engine.hidden_size)
        elif engine.is_tail:
            # Not the upstream's fault where it fails: what compiles in time on one machine may not on another.
            constraint = await self._context.grammars.constraint_of(inputs.body)
            with _blaming(order.upstream):
                sampler = sampler_of(inputs.body, engine.vocabulary, constraint)
        key = SessionKey(SessionId(self._random_bytes(16)), 0)
        await stage.open(key, order.positions, len(inputs.body.route))
        try:
            while found.positions < order.positions:
                with _blaming(order.upstream):
                    piece = await inputs.next(AUDIT_ROWS)
                result = await _answered(stage, key, found.positions, piece, sampler, normed=pool is not None)
                answer = result.output if pool is None else pool.fold(result.output, draws=piece.draws)
                if isinstance(answer, InvalidStep):  # no stage can have computed this
                    raise _Withheld(order.upstream, answer)
                if isinstance(answer, TessellaError):
                    raise answer
                claimed: StepOutput | None = None
                if outputs is not None:
                    with _blaming(order.downstream):
                        claimed = await _claimed(outputs, piece.rows, engine.hidden_size)
                found.step(piece.body, piece.rows, answer, draws=piece.draws, claimed=claimed)
                others = home.queue_depth if stage is home else home.num_sessions
                if others:
                    await trio.sleep(result.compute_us / 1e6)
        finally:
            with trio.CancelScope(shield=True):
                await stage.close(key)
        return found

    async def _report(self, taken: _Taken, report: m.AuditReport) -> None:
        client = self._client.at(taken.orchestrator)
        if client is None:
            log.warning("an audit of an orchestrator that is not asked any more", orchestrator=taken.orchestrator)
            return
        while True:
            try:
                await client.call(report)
            except TransportError as error:
                log.info("an audit's report waits", code=error.code, reason=str(error))
            except TessellaError as error:
                log.warning("an audit's report was not taken", code=error.code, reason=str(error))
                return
            else:
                return
            if self._left_s(taken.order) + _REPORT_S <= _RETRY_S:
                return
            await trio.sleep(_RETRY_S)


def _rows_dtype(order: m.AuditOrder, home: StageService) -> DType:
    """What the hidden states of the audited recipe are: a digest covers their bytes, and says nothing of it."""
    return home.engine.wire_dtype if order.comparison == "bitwise" else RECIPES[base_name(order.recipe)].wire_dtype


async def _answered(
    stage: StageService,
    key: SessionKey,
    position: int,
    piece: Piece,
    sampler: TokenSampler | None,
    *,
    normed: bool,
) -> StepResult:
    """What the engine makes of a piece."""
    engine = stage.engine
    body, dtype = piece.body, piece.dtype
    if not engine.is_head and dtype is not engine.wire_dtype:  # by tolerance alone
        body, dtype = cast(body, dtype, engine.wire_dtype), engine.wire_dtype
    sample = sampler if piece.draws else None
    return await stage.step(StepInput(key, position, piece.rows, dtype, body, sample, normed))


async def _claimed(outputs: HistoryReader, rows: int, width: int) -> StepOutput:
    """Rows that the downstream peer shows. Raises `RemoteProtocolError` for such as are no rows of this stage's."""
    body, dtype = await outputs.exactly(rows)
    if len(body) != rows * width * dtype.size:
        raise InvalidStep(f"{len(body)} bytes of {dtype.name} are no {rows} rows of {width}")
    return StepOutput(body, dtype)


@contextmanager
def _blaming(peer: str) -> Iterator[None]:
    """What goes wrong here is the neighbour's doing."""
    try:
        yield
    except LocalProtocolError:
        raise
    except (TransportError, RemoteProtocolError, RefusalError) as error:
        raise _Withheld(peer, error) from error


def _conclusion(order: m.AuditOrder, found: Recomputation) -> m.AuditReport:
    """What can be said once the inputs are what they have to be.

    Outputs that are not are their receiver's fault: it signed for them.
    """
    if order.comparison == "tolerance":
        if found.claimed_digest != order.output_digest:
            reason = "what the downstream peer shows is not what the audited worker proved to have sent"
            return _inconclusive(order, "history_mismatch", reason, order.downstream)
        return m.AuditReport(
            audit_id=order.audit_id,
            outcome="computed",
            output_digest=found.output_digest,
            error_ppm=found.error_ppm,
        )
    return m.AuditReport(
        audit_id=order.audit_id,
        outcome="computed",
        output_digest=found.output_digest,
        canary_digests=tuple(
            m.CanaryDigest(peer_id=peer, digest=digest) for peer, digest in found.canary_digests().items()
        ),
    )


def _contradicted(order: m.AuditOrder, found: Contradiction) -> m.AuditReport:
    """What can be said where the inputs are others than the worker proved to have received."""
    if found.receipt is None:
        return _inconclusive(order, "history_mismatch", found.reason, found.blamed)
    return m.AuditReport(
        audit_id=order.audit_id, outcome="contradicted", receipt=found.receipt, code="false_input", reason=found.reason
    )


def _inconclusive(order: m.AuditOrder, code: str, reason: str, withheld_by: str | None = None) -> m.AuditReport:
    return m.AuditReport(
        audit_id=order.audit_id,
        outcome="inconclusive",
        code=code,
        reason=reason[:MAX_REASON_CHARS],
        withheld_by=withheld_by,
    )
