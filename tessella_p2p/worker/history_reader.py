"""The asking half of ``/tessella/history/1`` (shell): rows of an audited stage's neighbour, a few at a time.

Where nobody else can audit, the upstream peer does it; then it reads what it kept itself, and asks nobody.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from tessella_p2p.base.errors import (
    CacheMiss,
    HopTimeout,
    InvalidSignature,
    InvalidStep,
    MalformedMessage,
    RemoteProtocolError,
    StreamReset,
    error_from_code,
)
from tessella_p2p.base.ids import LayerRange, PeerId, SessionId
from tessella_p2p.base.limits import HISTORY_REQUEST_S, HISTORY_TRACK_BYTES, MAX_ENVELOPE_BYTES
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.network import Stream
from tessella_p2p.stages.engine import Buffer
from tessella_p2p.stages.frame_link import FrameReader
from tessella_p2p.stages.history import TrackKey
from tessella_p2p.stages.opening import open_hash
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import open_envelope, seal
from tessella_p2p.wire.frames import DType, Flag, Frame, Header, Kind
from tessella_p2p.worker.context import StageContext


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows; with ``draws`` the tail drew a token after the last of them."""

    body: Buffer
    rows: int
    dtype: DType
    draws: bool


class HistoryReader:
    """What one neighbour shows. `open_history` makes it.

    Args:
        receive: its next frame; see `next`.
        receipt: the newest of the audited stage that it shows, unverified.

    Attributes:
        opened: the hash of the chain-open that it shows.
        body: the chain-open.
    """

    def __init__(
        self,
        order: m.AuditOrder,
        raw_open: bytes,
        receive: Callable[[], Awaitable[Frame]],
        receipt: bytes | None,
    ) -> None:
        self.receipt = receipt
        self.opened = open_hash(raw_open)
        self.body = _open_of(raw_open, order)
        self._order = order
        self._raw_open = raw_open
        self._receive = receive
        self._frame: Frame | None = None
        self._rows_taken = 0

    async def next(self, max_rows: int) -> Piece:
        """The next rows, at most ``max_rows``, of one step.

        Raises:
            TransportError, RemoteProtocolError: it shows no more, or something else.
        """
        frame = self._frame
        if frame is None:
            self._frame = frame = await self._receive()
            self._rows_taken = 0
        rows = min(max_rows, frame.rows - self._rows_taken)
        row_bytes = len(frame.body) // frame.rows
        begin = self._rows_taken * row_bytes
        self._rows_taken += rows
        is_end = self._rows_taken == frame.rows
        if is_end:
            self._frame = None
        body = memoryview(frame.body)[begin : begin + rows * row_bytes]
        return Piece(body, rows, frame.dtype, is_end and frame.flags is Flag.SAMPLE)

    async def exactly(self, rows: int) -> tuple[Buffer, DType]:
        """The next ``rows`` rows, and their dtype.

        Raises:
            as `next`.
        """
        pieces = [await self.next(rows)]
        while (left := rows - sum(piece.rows for piece in pieces)) > 0:
            pieces.append(await self.next(left))
        return b"".join(piece.body for piece in pieces), pieces[0].dtype

    async def fetched(self, positions: int) -> FetchedHistory:
        """All of it up to ``positions``, to be read again and again. Nothing may have been read of it before.

        Raises:
            as `next`; also where it shows more bytes than a node keeps.
        """
        frames: list[Frame] = []
        num_rows = num_bytes = 0
        while num_rows < positions:
            frame = await self._receive()
            num_rows += frame.rows
            num_bytes += len(frame.body)
            if num_bytes > HISTORY_TRACK_BYTES:
                raise MalformedMessage(f"more than the {HISTORY_TRACK_BYTES} bytes of a session that a node keeps")
            frames.append(frame)
        return FetchedHistory(self._order, self._raw_open, self.receipt, tuple(frames))


@dataclass(frozen=True, slots=True)
class FetchedHistory:
    """What a neighbour showed, in memory: it was asked once, however often the auditor has to begin again for reasons of its own."""

    order: m.AuditOrder
    raw_open: bytes
    receipt: bytes | None
    frames: tuple[Frame, ...]

    def reader(self) -> HistoryReader:
        """Reads it from the beginning."""
        frames = iter(self.frames)

        async def receive() -> Frame:
            await trio.lowlevel.checkpoint()
            frame = next(frames, None)
            if frame is None:
                raise CacheMiss("the history that was fetched is at its end")
            return frame

        return HistoryReader(self.order, self.raw_open, receive, self.receipt)


class _Shown:
    """Frames as a neighbour sends them.

    The digests are over bytes alone, and mark the first draw alone: what they leave open the hop's rules say (`stages.intake`), so
    these hold here too. Else rows under another dtype, or a draw that is left out, would make a liar of the stage that is audited.
    """

    def __init__(self, stream: Stream, order: m.AuditOrder, dtype: DType, positions: int) -> None:
        self._order = order
        self._positions = positions
        self._dtype = dtype
        self._reader = FrameReader(stream, self._wants)
        self._position = 0
        self._has_drawn = False

    async def receive(self) -> Frame:
        with trio.move_on_after(HISTORY_REQUEST_S):
            frame = await self._reader.receive()
            if frame is None:
                raise CacheMiss(f"the history ends at position {self._position} of {self._positions}")
            if not isinstance(frame, Frame):
                raise StreamReset("a frame of the history was damaged")
            self._position += frame.rows
            return frame
        raise HopTimeout(f"no frame of the history for {HISTORY_REQUEST_S:g} s")

    def _wants(self, header: Header) -> bool:
        order = self._order
        if header.kind is not Kind.STEP or (header.session, header.epoch) != (order.session, order.epoch):
            raise MalformedMessage(f"a {header.kind.name} frame where steps of the audited session are expected")
        if header.position != self._position or header.position + header.rows > self._positions:
            raise MalformedMessage(f"rows from position {header.position} on, where {self._position} is next")
        if header.trace_entries:
            raise MalformedMessage("a trace in a history")
        if header.dtype is not self._dtype:
            raise InvalidStep(f"rows of {header.dtype.name}, and not of {self._dtype.name}")
        if self._has_drawn and (header.rows != 1 or header.flags is not Flag.SAMPLE):
            raise InvalidStep(f"{header.rows} rows without a draw of their own, after the first draw of the session")
        self._has_drawn = header.flags is Flag.SAMPLE
        return True


def _own_history(context: StageContext, order: m.AuditOrder, side: m.HistorySide, positions: int) -> HistoryReader:
    """What this node kept itself.

    Raises:
        CacheMiss: nothing, or too little.
    """
    key = TrackKey(SessionId(order.session), order.epoch, side, PeerId(order.audited))
    track = None if context.history is None else context.history.find(key)
    kept = 0 if track is None else track.positions(positions)
    if track is None or kept < positions:
        raise CacheMiss(f"this node kept {kept} positions of {positions} itself")
    frames = track.frames(positions)

    async def receive() -> Frame:
        await trio.lowlevel.checkpoint()
        frame = next(frames, None)
        if frame is None:
            raise CacheMiss(f"the history ends before position {positions}")
        return frame

    return HistoryReader(order, track.opened, receive, track.receipt)


def _open_of(raw: bytes, order: m.AuditOrder) -> m.ChainOpen:
    """The chain-open that a neighbour shows. Whether the audited stage saw the same one, the digests say.

    Raises:
        RemoteProtocolError: forged, or for another session or stage.
    """
    body = open_envelope(raw, m.CHAIN_OPEN, now_ms=None).message(m.ChainOpen)
    stages = [(stage.peer_id, stage.layers) for stage in body.route]
    shown = (body.session, body.epoch, body.manifest_root, body.recipe)
    if shown != (order.session, order.epoch, order.manifest_root, order.recipe):
        raise RemoteProtocolError("a chain-open of another session, artifact or recipe")
    if (order.audited, order.layers) not in stages:
        raise RemoteProtocolError(f"a chain-open without {order.audited} at layers {LayerRange(*order.layers)}")
    return body


@asynccontextmanager
async def open_history(
    context: StageContext,
    order: m.AuditOrder,
    raw_order: bytes,
    side: m.HistorySide,
    dtype: DType,
    positions: int | None = None,
) -> AsyncIterator[HistoryReader]:
    """Ask the neighbour on ``side`` of the audited stage for what it kept.

    Args:
        dtype: of the rows that crossed there.
        positions: how many are needed; the order's, or up to what the newest receipt covers.

    Raises:
        TransportError: it cannot be reached, or does not answer in time.
        RefusalError: it shows nothing; the error is the one that it named.
        RemoteProtocolError: its answer is none to this request, or what it shows is of something else.
    """
    peer, addresses = PeerId(order.upstream), order.upstream_addresses
    if side == "output":
        peer, addresses = PeerId(order.downstream), order.downstream_addresses
    positions = order.positions if positions is None else positions
    if peer == context.key.peer_id:
        yield _own_history(context, order, side, positions)
        return
    now_ms = context.clock.unix_ms()
    sequence = context.sequencer.next(m.HISTORY_REQUEST, now_ms)
    request = seal(
        context.key,
        m.HISTORY_REQUEST,
        m.HistoryRequest(order=raw_order, side=side, beyond=positions > order.positions),
        sequence=sequence,
        now_ms=now_ms,
        audience=peer,
    )
    if not context.is_known(peer):
        context.network.add_addresses(peer, addresses)
    try:
        with trio.fail_after(context.hop_timeout_s):
            stream = await context.network.open_stream(peer, protocols.HISTORY)
    except trio.TooSlowError as error:
        raise HopTimeout(f"{peer} could not be reached in time") from error
    try:
        with trio.move_on_after(HISTORY_REQUEST_S) as patience:
            await send_message(stream, request)
            answer = await receive_message(stream, MAX_ENVELOPE_BYTES)
        if patience.cancelled_caught:
            raise HopTimeout(f"{peer} did not answer within {HISTORY_REQUEST_S:g} s")
        head = _opened(context, peer, answer, sequence)
        if (head.session, head.epoch, head.side) != (order.session, order.epoch, side):
            raise RemoteProtocolError("a history of another session, or of its other side")
        if head.positions < positions:
            raise CacheMiss(f"{peer} kept {head.positions} positions of {positions}")
        yield HistoryReader(order, head.open, _Shown(stream, order, dtype, head.positions).receive, head.receipt)
    finally:
        with trio.CancelScope(shield=True):
            await stream.reset()


def _opened(context: StageContext, peer: PeerId, raw: bytes | None, sequence: int) -> m.HistoryHead:
    if raw is None:
        raise StreamReset(f"{peer} closed the stream without an answer")
    envelope = open_envelope(raw, m.HISTORY, now_ms=context.clock.unix_ms(), audience=context.key.peer_id, signer=peer)
    answer = envelope.message(m.HistoryAnswer)
    if answer.to != sequence:
        raise InvalidSignature(f"an answer to request {answer.to}, not to {sequence}")
    if isinstance(answer.body, m.HistoryRefused):
        raise error_from_code(answer.body.code, answer.body.reason)
    return answer.body
