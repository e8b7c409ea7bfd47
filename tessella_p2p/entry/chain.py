"""One (session, epoch) as its entry drives it (shell): open the chain, send steps, take tokens, sign receipts, close."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import (
    CapabilityRefused,
    HopTimeout,
    MalformedMessage,
    RemoteProtocolError,
    StreamReset,
    TessellaError,
    TransportError,
    error_from_code,
)
from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.base.limits import CHECKPOINT_S, HOP_TIMEOUT_S, PREFILL_CHUNK, REQUEST_TTL_MS
from tessella_p2p.entry.routes import Route
from tessella_p2p.net.network import Network, Stream
from tessella_p2p.stages.hop_links import FrameLink, HopLinks, Inbox
from tessella_p2p.stages.opening import open_hash, seal_capability, verify_capability
from tessella_p2p.stages.work import seal_receipt
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import Sequencer, decode_message, encode_message, seal
from tessella_p2p.wire.frames import DType, Flag, Frame, Kind, TraceEntry
from tessella_p2p.wire.keys import NodeKey

_DRAIN_S = 5.0
"""How long the entry waits for the tail to end a closed session's token stream."""


@dataclass(frozen=True, slots=True)
class EntryContext:
    """What every session of an entry shares."""

    network: Network
    key: NodeKey
    clock: WallClock
    sequencer: Sequencer
    links: HopLinks
    random_bytes: Callable[[int], bytes]
    hop_timeout_s: float = HOP_TIMEOUT_S
    checkpoint_s: float = CHECKPOINT_S


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What stays the same over all epochs of a session."""

    session: SessionId
    request_id: str
    model_id: str
    manifest_root: bytes
    vocabulary: int
    max_positions: int
    sampling: m.Sampling
    digest_key: bytes
    ticket: bytes | None


@dataclass(frozen=True, slots=True)
class Token:
    """One token from the tail: its id, the step's wall time at the entry, and each stage's times."""

    token_id: int
    wall_us: int
    trace: tuple[TraceEntry, ...]


@dataclass(slots=True)
class _Sent:
    position: int = 0
    step: int = 0
    at: float = 0.0
    chunks: int = 0


class Chain:
    """One epoch of one session on one route."""

    def __init__(self, context: EntryContext, plan: SessionPlan, epoch: int, route: Route) -> None:
        self._context = context
        self._plan = plan
        self._epoch = epoch
        self.route = route
        self._inbox = Inbox()
        self._head: FrameLink | None = None
        self._tokens: FrameLink | None = None
        self._opened = b""
        self._digest = hashlib.blake2b(key=plan.digest_key, digest_size=32)
        self._received = 0  # positions that the tail has answered for
        self._receipted = 0
        self._sent = _Sent()
        self._closed = trio.Event()

    @property
    def key(self) -> tuple[SessionId, int]:
        """(session, epoch)."""
        return (self._plan.session, self._epoch)

    @property
    def positions_sent(self) -> int:
        """Positions that went to the head in this epoch."""
        return self._sent.position

    @property
    def tail(self) -> PeerId:
        """Who may send the tokens."""
        return self.route.stages[-1].peer_id

    # ---- towards the head ----

    async def open(self, ids: Sequence[int]) -> None:
        """Open the chain and send ``ids`` (the prompt, and what was generated before this epoch) in chunks.

        Raises:
            TransportError: the head cannot be reached; the error names it.
        """
        context = self._context
        for stage in self.route.stages:
            context.network.add_addresses(stage.peer_id, stage.addresses)
        now_ms = context.clock.unix_ms()
        body = self._open_body()
        envelope = seal(
            context.key, m.CHAIN_OPEN, body, sequence=context.sequencer.next(m.CHAIN_OPEN, now_ms), now_ms=now_ms
        )
        self._opened = open_hash(envelope)
        capability = seal_capability(
            context.key,
            body,
            envelope,
            sequence=context.sequencer.next(m.CAPABILITY, now_ms),
            now_ms=now_ms,
            ttl_ms=REQUEST_TTL_MS,
        )
        head = self.route.stages[0].peer_id
        try:
            with trio.fail_after(context.hop_timeout_s):
                self._head = await context.links.attach(head, self.key, self._inbox)
        except trio.TooSlowError as error:
            raise HopTimeout(f"{head} could not be reached in time").blame(head) from error
        except TransportError as error:
            raise error.blame(head) from None
        await self._send(
            Frame(Kind.OPEN, *self.key, body=encode_message(m.OpenFrame(open=envelope, capability=capability)))
        )
        for start in range(0, len(ids), PREFILL_CHUNK):
            await self.step(ids[start : start + PREFILL_CHUNK], sample=start + PREFILL_CHUNK >= len(ids))

    def _open_body(self) -> m.ChainOpen:
        plan = self._plan
        return m.ChainOpen(
            session=plan.session,
            epoch=self._epoch,
            request_id=plan.request_id,
            model_id=plan.model_id,
            manifest_root=plan.manifest_root,
            recipe=self.route.recipe,
            route=tuple(
                m.RouteStage(peer_id=s.peer_id, layers=s.layers.as_tuple(), addresses=s.addresses)
                for s in self.route.stages
            ),
            entry_addresses=self._context.network.addresses,
            max_positions=plan.max_positions,
            sampling=plan.sampling,
            digest_key=plan.digest_key,
            ticket=plan.ticket,
        )

    async def step(self, ids: Sequence[int], *, sample: bool) -> None:
        """Send the next token ids; with ``sample`` the tail answers with the token that follows them."""
        body = b"".join(token.to_bytes(4, "little") for token in ids)
        sent = self._sent
        flags = Flag.SAMPLE if sample else Flag.NONE
        frame = Frame(Kind.STEP, *self.key, sent.step, sent.position, len(ids), DType.U32, flags, body=body)
        sent.at, sent.chunks = trio.current_time(), sent.chunks + 1
        sent.step, sent.position = sent.step + 1, sent.position + len(ids)
        await self._send(frame)

    async def _send(self, frame: Frame) -> None:
        assert self._head is not None
        try:
            await self._head.send(frame, self._context.hop_timeout_s)
        except TransportError as error:
            raise error.blame(self._head.peer) from None

    async def next_token(self) -> Token:
        """The token that answers the last sampling step.

        Raises:
            HopTimeout: none came within the hop timeout of every stage and chunk that is out.
            TessellaError: what a stage met, or the loss of the head or tail; ``peer`` names whose fault it is.
        """
        patience_s = self._context.hop_timeout_s * (len(self.route.stages) + self._sent.chunks)
        item: Frame | TessellaError
        try:
            with trio.fail_after(patience_s):
                item, arrived_at = await self._inbox.get()
        except trio.TooSlowError as error:
            raise HopTimeout(f"no token for {patience_s:.0f} s on the route of session epoch {self._epoch}") from error
        if isinstance(item, TessellaError):
            raise item.blame(self._head.peer if self._head is not None else self.tail)
        if item.kind is Kind.ERROR:
            body = decode_message(m.ErrorBody, bytes(item.body))
            raise error_from_code(body.code, body.reason).blame(PeerId(body.fault_of))
        return self._take(item, arrived_at)

    def _take(self, frame: Frame, arrived_at: float) -> Token:
        if frame.kind is not Kind.TOKEN or frame.dtype is not DType.U32 or len(frame.body) != 4:
            raise MalformedMessage(f"a {frame.kind.name} frame where a token is expected").blame(self.tail)
        token_id = int.from_bytes(frame.body, "little")
        if frame.position != self._sent.position or token_id >= self._plan.vocabulary:
            raise RemoteProtocolError(
                f"a token for position {frame.position} where {self._sent.position} is next"
            ).blame(self.tail)
        if len(frame.trace) != len(self.route.stages):
            raise MalformedMessage("a token whose trace does not fit the route").blame(self.tail)
        self._digest.update(bytes(frame.body))
        self._received = frame.position
        self._sent.chunks = 0
        return Token(token_id, int((arrived_at - self._sent.at) * 1e6), frame.trace)

    # ---- from the tail ----

    def accept_tokens(self, sender: PeerId, capability: bytes, link: FrameLink) -> None:
        """Take the tail's token stream, which opened with ``capability``. At most one stream per epoch.

        Raises:
            CapabilityRefused: a second stream, or a capability for something else.
            RemoteProtocolError: a forged or malformed one.
        """
        if self._tokens is not None:
            raise CapabilityRefused("this epoch has its token stream already")
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

    def deliver_token(self, frame: Frame) -> None:
        """Take a frame of the token stream.

        Raises:
            MalformedMessage: no token, or more of them than were asked for.
        """
        if frame.kind is Kind.CLOSE:  # the tail ends: it needs the last receipt
            self._send_receipt()
            return
        if (frame.session, frame.epoch) != self.key or not self._inbox.put(frame):
            raise MalformedMessage("a token stream that sends something else than this session's tokens")

    def token_stream_lost(self, reason: TessellaError) -> None:
        """The tail's stream ended; matters only while the session lives."""
        self._inbox.put(reason.blame(self.tail))
        self._closed.set()

    async def send_receipts(self) -> None:
        """Sign for what was received, every checkpoint interval, until cancelled."""
        while True:
            await trio.sleep(self._context.checkpoint_s)
            self._send_receipt()

    def _send_receipt(self) -> None:
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
        if self._tokens.send_nowait(Frame(Kind.RECEIPT, *self.key, body=raw)):
            self._receipted = self._received

    # ---- the end ----

    async def close(self) -> None:
        """Sign the last receipt and tell the chain; every stage frees its KV. Never raises; bounded in time."""
        self._send_receipt()
        if self._head is not None:
            sent = self._head.send_nowait(Frame(Kind.CLOSE, *self.key))
            self._context.links.detach(self._head.peer, self.key, self._inbox)
            if sent and self._tokens is not None:
                with trio.move_on_after(_DRAIN_S):
                    await self._closed.wait()
        self._inbox.close()


@dataclass(slots=True)
class TokenTable:
    """Which chains wait for token streams on this entry."""

    chains: dict[tuple[SessionId, int], Chain] = field(default_factory=dict)

    async def serve(self, stream: Stream) -> None:
        """Handle one inbound token stream: the first frame has to open it with its capability.

        Raises:
            RemoteProtocolError, CapabilityRefused: the stream is reset by the network's guard.
        """
        link = FrameLink(stream)
        chain: Chain | None = None
        accepted = trio.Event()

        def on_frame(frame: Frame) -> None:
            nonlocal chain
            if chain is not None:
                chain.deliver_token(frame)
                return
            known = self.chains.get((frame.session, frame.epoch))
            if frame.kind is not Kind.OPEN or known is None:
                raise CapabilityRefused(f"{stream.peer} opened a token stream for no session of this entry")
            known.accept_tokens(stream.peer, bytes(frame.body), link)
            chain = known
            accepted.set()

        async def receipts() -> None:
            await accepted.wait()
            assert chain is not None
            await chain.send_receipts()

        reason: TessellaError = StreamReset(f"{stream.peer} ended the token stream")
        failure: TessellaError | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receipts)
                try:
                    await link.run(on_frame)
                except TessellaError as error:
                    failure = reason = error
                nursery.cancel_scope.cancel()
        finally:
            if chain is not None:
                chain.token_stream_lost(reason)
        if failure is not None:
            raise failure
