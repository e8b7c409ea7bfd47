"""One (session, epoch) as its entry drives it (shell): open the chain, send steps, take tokens, sign receipts, close."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from tessella_p2p.base.errors import (
    CacheMiss,
    CapabilityRefused,
    HopTimeout,
    InvalidRequest,
    MalformedMessage,
    Overloaded,
    RemoteProtocolError,
    StaleEpoch,
    StreamReset,
    TessellaError,
    TransportError,
)
from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.base.limits import (
    MAX_ADDRESSES,
    MAX_OPEN_ADDRESS_BYTES,
    RECEIPT_PATIENCE_S,
    REQUEST_TTL_MS,
    SESSION_IDLE_S,
)
from tessella_p2p.entry.plan import EntryContext, SessionPlan, Token, prefill_chunk, tail_history
from tessella_p2p.entry.routes import Route
from tessella_p2p.stages.digest import RunningDigest
from tessella_p2p.stages.engine import Buffer, Sampled
from tessella_p2p.stages.faults import error_of
from tessella_p2p.stages.frame_link import FrameLink
from tessella_p2p.stages.history import Track, TrackKey
from tessella_p2p.stages.opening import open_hash, seal_capability, verify_capability
from tessella_p2p.stages.pooling import VECTOR_DTYPE, Pooled, parse_pooled
from tessella_p2p.stages.sent_work import SentWork
from tessella_p2p.stages.token_body import TOKEN_ID_BYTES, parse_sampled, token_body_bytes
from tessella_p2p.stages.work import seal_receipt
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import encode_message, seal
from tessella_p2p.wire.frames import DType, Flag, Frame, Header, Kind, TraceEntry

_EXPLAIN_S = 1.0
"""From the tail's good-bye to the error that explains it."""
REROUTABLE = (TransportError, RemoteProtocolError, StaleEpoch, CacheMiss, Overloaded)
"""What may end a chain. Another route may do better after any of them."""


class GrammarRefused(RemoteProtocolError):
    """A stage's word that the grammar, which this entry has compiled too, cannot be followed."""


@dataclass(slots=True)
class _Sent:
    """What went to the head: ``asked`` is the position of the token that is awaited, None when none is."""

    position: int = 0
    step: int = 0
    at: float = 0.0
    chunks: int = 0
    asked: int | None = None


class Chain:
    """One epoch of one session on one route; a `hop_links.Receiver` for the link to its head."""

    def __init__(self, context: EntryContext, plan: SessionPlan, epoch: int, route: Route) -> None:
        self._context = context
        self._plan = plan
        self._epoch = epoch
        self._token_body_bytes = token_body_bytes(plan.sampling, plan.output, plan.vocabulary, plan.hidden_size)
        self._token_dtype = VECTOR_DTYPE if plan.output == "embedding" else DType.U32
        self.route = route
        self._track: Track | None = None
        self._work: SentWork | None = None  # of a session that is paid: what the head has to sign for
        self._unsigned_since = 0.0
        self._false_receipt: RemoteProtocolError | None = None
        self._head: FrameLink | None = None
        self._tokens: FrameLink | None = None
        self._opened = b""
        self._digest: RunningDigest  # from the open on: it begins with the open's hash
        self._received = 0  # positions that the tail has answered for
        self._receipted = 0
        self._sent = _Sent()
        self._token: Token | None = None
        self._failure: TessellaError | None = None
        self._news = trio.Event()
        self._is_paid = False
        self._wait_s = 0.0  # for a place, at each stage
        self._explain_by = math.inf  # the tail closed its stream in order: until then a stage may say why
        self.suspects: tuple[PeerId, ...] = ()
        """Stages that may be to blame for the failure beside the one that is named: whoever could have made the story up."""
        self.ended = trio.Event()
        self.signed = trio.Event()
        """Set once the chain has ended and the head has given its last receipt, or never will."""

    @property
    def key(self) -> tuple[SessionId, int]:
        """(session, epoch)."""
        return (self._plan.session, self._epoch)

    @property
    def positions_sent(self) -> int:
        """Positions that went to the head in this epoch."""
        return self._sent.position

    @property
    def _head_id(self) -> PeerId:
        return self.route.stages[0].peer_id

    @property
    def tail(self) -> PeerId:
        """Who may send the tokens."""
        return self.route.stages[-1].peer_id

    # ---- towards the head ----

    async def open(self, ids: Sequence[int], wait_s: float = 0.0) -> None:
        """Open the chain and send ``ids`` (the prompt, and what was generated before this epoch) in chunks.

        Args:
            ids: what is known.
            wait_s: how long the open may wait for a place at each stage that is full.

        Raises:
            TessellaError: one of `REROUTABLE`: the head cannot be reached, or a stage refused already.
        """
        self._wait_s = wait_s
        envelope, capability = self._seal_open(ids)
        self._opened = open_hash(envelope)
        self._digest = RunningDigest(self._plan.digest_key, self._opened)
        self._begin_work(envelope)
        head = self._head_id
        self._context.network.add_addresses(head, self.route.stages[0].addresses)  # its own word, out of its record
        try:
            with trio.fail_after(self._context.hop_timeout_s):
                self._head = await self._context.links.attach(head, self.key, self)
        except trio.TooSlowError as error:
            raise HopTimeout(f"{head} could not be reached in time").blame(head) from error
        except (TransportError, RemoteProtocolError) as error:
            raise error.blame(head) from None
        await self._send(
            Frame(Kind.OPEN, *self.key, body=encode_message(m.OpenFrame(open=envelope, capability=capability)))
        )
        chunk = prefill_chunk(len(ids))
        for start in range(0, len(ids), chunk):
            await self.step(ids[start : start + chunk], sample=start + chunk >= len(ids))

    def _begin_work(self, envelope: bytes) -> None:
        """Where the head is paid, have it sign for what it gets, and keep what an auditor of it may ask for."""
        if not self._is_paid:
            return
        self._work = SentWork(self._plan.digest_key, self._opened)
        history = self._context.history
        if history is not None:
            self._track = history.begin(TrackKey(*self.key, "input", self._head_id), envelope)

    def _seal_open(self, ids: Sequence[int]) -> tuple[bytes, bytes]:
        context = self._context
        now_ms = context.clock.unix_ms()
        self._is_paid = self._plan.ticket is not None and now_ms < self._plan.ticket_open_before
        body = self._open_body(ids, self._seal_route(now_ms) if self._is_paid else None)
        envelope = seal(
            context.key, m.CHAIN_OPEN, body, sequence=context.sequencer.next(m.CHAIN_OPEN, now_ms), now_ms=now_ms
        )
        capability = seal_capability(
            context.key,
            body,
            envelope,
            sequence=context.sequencer.next(m.CAPABILITY, now_ms),
            now_ms=now_ms,
            ttl_ms=REQUEST_TTL_MS,
        )
        return envelope, capability

    def _seal_route(self, now_ms: int) -> bytes:
        """Who is to be paid for which layers, as the ledger will read it."""
        context = self._context
        statement = m.RouteStatement(
            request_id=self._plan.request_id,
            session=self._plan.session,
            epoch=self._epoch,
            stages=tuple((stage.peer_id, stage.layers.as_tuple()) for stage in self.route.stages),
        )
        return seal(context.key, m.ROUTE, statement, sequence=context.sequencer.next(m.ROUTE, now_ms), now_ms=now_ms)

    def _open_body(self, ids: Sequence[int], route_statement: bytes | None) -> m.ChainOpen:
        plan, stages = self._plan, self.route.stages
        history, history_answer = tail_history(plan.sampling, ids[: plan.num_prompt], ids[plan.num_prompt :])
        share_bytes = MAX_OPEN_ADDRESS_BYTES // (len(stages) + 1)
        return m.ChainOpen(
            session=plan.session,
            epoch=self._epoch,
            request_id=plan.request_id,
            model_id=plan.model_id,
            manifest_root=plan.manifest_root,
            recipe=self.route.recipe,
            route=tuple(
                m.RouteStage(
                    peer_id=s.peer_id, layers=s.layers.as_tuple(), addresses=first_addresses(s.addresses, share_bytes)
                )
                for s in stages
            ),
            entry_addresses=first_addresses(self._context.network.addresses, share_bytes),
            max_positions=plan.max_positions,
            output=plan.output,
            sampling=plan.sampling,
            history=history,
            history_answer=history_answer,
            cache_scope=plan.cache_scope,
            digest_key=plan.digest_key,
            ticket=plan.ticket if self._is_paid else None,
            route_statement=route_statement,
            wait_ms=round(self._wait_s * 1000),
        )

    async def step(self, ids: Sequence[int], *, sample: bool) -> None:
        """Send the next token ids; with ``sample`` the tail answers with the token that follows them.

        Raises:
            TessellaError: one of `REROUTABLE`.
        """
        body = b"".join(token.to_bytes(4, "little") for token in ids)
        sent = self._sent
        flags = Flag.SAMPLE if sample else Flag.NONE
        frame = Frame(Kind.STEP, *self.key, sent.step, sent.position, len(ids), DType.U32, flags, body=body)
        sent.at, sent.chunks = trio.current_time(), sent.chunks + 1
        sent.step, sent.position = sent.step + 1, sent.position + len(ids)
        if sample:
            sent.asked = sent.position
        if self._track is not None:
            self._track.note(frame)
        if self._work is not None:
            self._note_sent(len(ids), body, draws=sample)
        await self._send(frame)

    def _note_sent(self, rows: int, ids: bytes, *, draws: bool) -> None:
        assert self._work is not None
        if not self._work.unsigned_steps:
            self._unsigned_since = trio.current_time()
        try:
            self._work.send(rows, ids, draws=draws)
        except RemoteProtocolError as error:
            raise error.blame(self._head_id) from None

    async def _send(self, frame: Frame) -> None:
        assert self._head is not None
        if self._failure is not None:
            raise self._failure
        try:
            await self._head.send(frame, self._context.hop_timeout_s)
        except TransportError as error:
            raise error.blame(self._head.peer) from None

    async def next_token(self) -> Token:
        """The token that answers the last sampling step. Cancelled, it is not lost.

        Raises:
            HopTimeout: none came within the hop timeout of every stage and chunk that is out.
            TessellaError: one of `REROUTABLE`: what a stage met, or the loss of the head or tail; ``peer`` names whose fault it is.
        """
        hops_s = self._context.hop_timeout_s * (len(self.route.stages) + self._sent.chunks)
        patience_s = min(hops_s + self._wait_s * len(self.route.stages), SESSION_IDLE_S)
        deadline = trio.current_time() + patience_s
        while self._token is None and self._failure is None:
            with trio.move_on_at(min(deadline, self._explain_by)) as patience:
                await self._news.wait()
                self._news = trio.Event()
            if patience.cancelled_caught:
                break
        token, self._token = self._token, None
        if token is not None:
            return token
        if self._failure is None:
            self.suspects = tuple(stage.peer_id for stage in self.route.stages)
            has_left = self._explain_by < math.inf
            self._failure = (
                StreamReset(f"{self.tail} closed the token stream, and no stage says why").blame(self.tail)
                if has_left
                else HopTimeout(f"no token for {patience_s:.0f} s in epoch {self._epoch}")
            )
        raise self._failure

    # ---- from the head ----

    def returned(self, frame: Frame) -> None:
        """Take an error or a receipt; the head has nothing else to say."""
        if frame.kind is Kind.RECEIPT:
            self._take_receipt(bytes(frame.body))
        if frame.kind is not Kind.ERROR or self._head is None:
            return
        stages = [stage.peer_id for stage in self.route.stages]
        error = error_of(frame, self._head.peer, {*stages, self._context.key.peer_id})
        accused = stages.index(error.peer) if error.peer in stages else len(stages) - 1
        if self._failure is None:  # each stage up to the accused one passed the story on, and may have made it up
            self.suspects = tuple(stages[: accused + 1])
        self._fail(error)

    def _take_receipt(self, raw: bytes) -> None:
        if self._work is None or self.signed.is_set():
            return
        try:
            is_news = self._work.confirm(
                raw,
                receiver=self._head_id,
                sender=self._context.key.peer_id,
                request_id=self._plan.request_id,
                key=self.key,
            )
        except RemoteProtocolError as error:
            self._false_receipt = error.blame(self._head_id)
            self._fail(self._false_receipt)
            self.signed.set()
            return
        if is_news:
            self._unsigned_since = trio.current_time()
            if self._track is not None:
                self._track.note_receipt(raw, self._work.signed)
        if self.ended.is_set() and self._has_signed_enough:
            self.signed.set()

    @property
    def _has_signed_enough(self) -> bool:
        """The tail answered for what the head had received; what was on its way behind that may never have arrived."""
        return self._work is None or self._work.signed >= self._received

    def check_head(self) -> None:
        """Give up a head that takes steps and signs for none."""
        if self._work is None or not self._work.unsigned_steps:
            return
        if trio.current_time() - self._unsigned_since > RECEIPT_PATIENCE_S:
            self._fail(RemoteProtocolError(f"{self._head_id} gives no receipts").blame(self._head_id))

    def lost(self, reason: TessellaError) -> None:
        """The link to the head is gone."""
        self._fail(reason.blame(self._head_id))
        self.signed.set()

    def _fail(self, error: TessellaError) -> None:
        if not isinstance(error, REROUTABLE):
            # The request was checked before it began: what a stage has against it is the stage's problem, not the client's.
            peer = error.peer
            of_grammar = isinstance(error, InvalidRequest) and peer == self._context.key.peer_id
            cls = GrammarRefused if of_grammar and self._plan.sampling.grammar is not None else RemoteProtocolError
            error = cls(f"a stage refused the session with {error.code}: {error}")
            error.peer = peer
        self._failure = self._failure or error
        self._news.set()

    # ---- from the tail ----

    def accept_tokens(self, sender: PeerId, capability: bytes, link: FrameLink) -> None:
        """Take the tail's token stream, which opened with ``capability``. At most one stream per epoch.

        Raises:
            CapabilityRefused: a second stream, a closed session, or a capability for something else.
            RemoteProtocolError: a forged or malformed one.
        """
        if self._tokens is not None or self.ended.is_set():
            raise CapabilityRefused("this epoch has its token stream already, or is over")
        if sender != self.tail:
            raise CapabilityRefused(f"{sender} is not the tail of this session")
        verify_capability(
            capability,
            entry=self._context.key.peer_id,
            tail=self.tail,
            session=self._plan.session,
            epoch=self._epoch,
            opened=self._opened,
            now_ms=self._context.clock.unix_ms(),
        )
        self._tokens = link

    def check_token(self, header: Header) -> None:
        """Check the header of a TOKEN, before its payload is read.

        Raises:
            RemoteProtocolError: it is no token of this session, or not the one that was asked for.
        """
        if (header.session, header.epoch) != self.key:
            raise MalformedMessage("a token of another session").blame(self.tail)
        if header.dtype is not self._token_dtype or header.rows != 1 or header.body_bytes != self._token_body_bytes:
            raise MalformedMessage("a frame that holds no token").blame(self.tail)
        if header.trace_entries != len(self.route.stages):
            raise MalformedMessage("a token whose trace does not fit the route").blame(self.tail)
        if not self.ended.is_set() and header.position != self._sent.asked:
            raise RemoteProtocolError(
                f"a token for position {header.position} where {self._sent.asked} is asked for"
            ).blame(self.tail)

    def take_token(self, frame: Frame) -> None:
        """Take a token whose header was checked. It is signed for as it arrives, whenever the client reads it, and if it never does:
        the step after the last that was read is on its way when a client leaves.

        Raises:
            RemoteProtocolError: an id outside of the vocabulary, logprobs or a vector that are none.
        """
        if frame.position != self._sent.asked:
            return  # only after the end, when nobody asked for more
        try:
            drawn, signed = self._parse_token(frame.body)
        except RemoteProtocolError as error:
            raise error.blame(self.tail) from None
        wall_us = int((trio.current_time() - self._sent.at) * 1e6)
        self._digest.update_draw(frame.position, signed)
        self._received = frame.position
        self._sent.asked, self._sent.chunks = None, 0
        if self.ended.is_set():
            return
        self._token = Token(drawn, wall_us, tuple(_plausible(each, wall_us, frame.position) for each in frame.trace))
        self._news.set()

    def _parse_token(self, body: Buffer) -> tuple[Sampled | Pooled, Buffer]:
        """What a token's body says, and which of its bytes are signed for. Raises `RemoteProtocolError`."""
        if self._plan.output == "embedding":
            pooled = parse_pooled(body)
            return pooled, pooled.body
        return parse_sampled(body, self._plan.vocabulary), body[:TOKEN_ID_BYTES]

    def token_stream_closed(self) -> None:
        """The tail ended its stream in order: its side of the chain was closed or failed, and the reason comes by way of the head."""
        self._explain_by = min(self._explain_by, trio.current_time() + _EXPLAIN_S)
        self._news.set()

    def token_stream_lost(self, reason: TessellaError) -> None:
        """The tail's stream broke."""
        self._fail(reason.blame(self.tail))

    def send_receipt(self) -> None:
        """Sign for the tokens that arrived, unless that was done."""
        if self._tokens is None or self._received == self._receipted:
            return
        context, plan = self._context, self._plan
        body = m.ReceiptBody(
            request_id=plan.request_id,
            session=plan.session,
            epoch=self._epoch,
            sender=self.tail,
            positions=self._received,
            digest=self._digest.digest(),
        )
        raw = seal_receipt(body, context.key, context.sequencer, context.clock.unix_ms())
        if self._tokens.post(Frame(Kind.RECEIPT, *self.key, body=raw)):
            self._receipted = self._received

    # ---- the end ----

    def end(self) -> None:
        """Sign the last receipt and close the chain: every stage frees its KV within a step. Idempotent; does not wait.

        The head's last receipt is still to come: `release` the link once it is `signed`, or has taken too long over it.
        """
        if self.ended.is_set():
            return
        self.ended.set()
        self.send_receipt()
        if self._track is not None:
            self._track.end(trio.current_time())
        if self._head is not None:
            self._head.close_session(self.key)
        if self._head is None or self._work is None or not self._work.unsigned_steps:
            self.signed.set()

    def release(self) -> RemoteProtocolError | None:
        """Stop listening to the head of a chain that has ended. Idempotent.

        Returns:
            what it did wrong with its last receipt, where it was asked for one.
        """
        if self._head is not None:
            self._context.links.detach(self._head.peer, self.key, self)
        error, self._false_receipt = self._false_receipt, None
        if self._failure is not None and self._failure is not error:
            error = None  # it is known already what went wrong, and whose fault that was
        elif error is None and not self.signed.is_set() and not self._has_signed_enough:
            error = RemoteProtocolError(f"{self._head_id} gave no last receipt").blame(self._head_id)
        self.signed.set()
        return error


def first_addresses(addresses: Sequence[str], max_bytes: int) -> tuple[str, ...]:
    """As many of the first addresses as fit: a stage with long ones must not make the chain-open too long to send."""
    kept: list[str] = []
    for address in addresses[:MAX_ADDRESSES]:
        max_bytes -= len(address.encode()) + 2  # and its CBOR head
        if max_bytes < 0:
            break
        kept.append(address)
    return tuple(kept)


def _plausible(entry: TraceEntry, wall_us: int, positions: int) -> TraceEntry:
    """What a stage states is a report: no time is longer than the whole step was, nothing was cached beyond what was sent."""
    total_us = min(entry.total_us, wall_us)
    return TraceEntry(
        min(entry.queue_us, total_us),
        min(entry.compute_us, total_us),
        total_us,
        min(entry.cached_positions, positions),
    )
