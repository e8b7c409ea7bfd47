"""The serving half of ``/tessella/history/1`` (shell): what this node kept, shown to the auditor that an order names.

History is rows of a client's prompt, so it is shown to nobody else: the order has to be one of a pinned orchestrator, for this auditor,
for a session that this node was a neighbour in, and not past its time; and each direction of a session is shown to each auditor a few
times only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import trio

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import (
    CacheMiss,
    Expired,
    InvalidRequest,
    LocalProtocolError,
    NotAuthorized,
    Overloaded,
    TessellaError,
)
from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.base.limits import (
    CLOCK_SKEW_MS,
    HISTORY_REQUEST_S,
    HISTORY_SHOWN_BURST,
    HISTORY_SHOWN_PER_S,
    MAX_AUDITOR_STREAMS,
    MAX_ENVELOPE_BYTES,
    MAX_HISTORY_STREAMS,
    MAX_REASON_CHARS,
)
from tessella_p2p.dht.rate_limit import RateLimit
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.network import Network, Stream
from tessella_p2p.stages.history import History, Track, TrackKey
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import Sequencer, open_envelope, peek_sequence, seal
from tessella_p2p.wire.frames import encode_frame
from tessella_p2p.wire.keys import NodeKey

log = structlog.get_logger(__name__)

_FORGET_EVERY_S = 60.0


class HistoryServer:
    """Shows a node's `History` to auditors.

    Args:
        pins: whose orders count; they come from the node's own configuration and from nowhere else.
    """

    def __init__(
        self,
        network: Network,
        key: NodeKey,
        clock: WallClock,
        sequencer: Sequencer,
        history: History,
        pins: frozenset[PeerId],
    ) -> None:
        self._network = network
        self._key = key
        self._clock = clock
        self._sequencer = sequencer
        self._history = history
        self._pins = pins
        self._rate: RateLimit[PeerId] = RateLimit(HISTORY_SHOWN_PER_S, HISTORY_SHOWN_BURST)
        self._open: Counter[PeerId] = Counter()
        self.shown = 0
        """Histories that were shown to their end."""

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve, and forget what is old, until cancelled."""
        self._network.serve(protocols.HISTORY, self._serve)
        task_status.started()
        while True:
            await trio.sleep(_FORGET_EVERY_S)
            self._history.expire(trio.current_time())

    async def _serve(self, stream: Stream) -> None:
        """Answer one request. What the peer does wrong, or too slowly, ends the stream."""
        if not self._rate.allows(stream.peer, trio.current_time()):  # before a byte is read, or a signature verified
            log.info("too many requests for history", peer=stream.peer)
            await stream.reset()
            return
        with trio.move_on_after(HISTORY_REQUEST_S) as patience:
            raw = await receive_message(stream, MAX_ENVELOPE_BYTES)
        if patience.cancelled_caught or raw is None:
            await stream.reset()
            return
        to = peek_sequence(raw)
        try:
            with self._counted(stream.peer):
                positions, track = self._admit(stream.peer, raw)
                await self._show(stream, to, positions, track)
        except LocalProtocolError:
            raise
        except TessellaError as error:
            log.info("history is not shown", peer=stream.peer, code=error.code, reason=str(error))
            await self._answer(stream, to, m.HistoryRefused(code=error.code, reason=str(error)[:MAX_REASON_CHARS]))

    @contextmanager
    def _counted(self, auditor: PeerId) -> Iterator[None]:
        """One auditor cannot hold what the others need: who reads nothing has its place for a while."""
        if self._open.total() >= MAX_HISTORY_STREAMS or self._open[auditor] >= MAX_AUDITOR_STREAMS:
            raise Overloaded(f"{self._open.total()} histories are being shown already; try again")
        self._open[auditor] += 1
        try:
            yield
        finally:
            self._open[auditor] -= 1
            if not self._open[auditor]:
                del self._open[auditor]

    def _admit(self, auditor: PeerId, raw: bytes) -> tuple[int, Track]:
        """How many positions a request may see, and of which track.

        Raises:
            RemoteProtocolError: the request or the order is malformed, forged, expired or for somebody else.
            NotAuthorized: no pinned orchestrator ordered this; or it was shown often enough.
            InvalidRequest: this node is not the neighbour that the order names.
            CacheMiss: it is not kept, or not any more.
        """
        now_ms = self._clock.unix_ms()
        own = self._key.peer_id
        request = open_envelope(raw, m.HISTORY_REQUEST, now_ms=now_ms, audience=own, signer=auditor).message(
            m.HistoryRequest
        )
        # An order is taken within its envelope's minute; it is carried out until its own deadline.
        envelope = open_envelope(request.order, m.ORDER, now_ms=None, audience=auditor)
        if envelope.signer not in self._pins:
            raise NotAuthorized(f"an order of {envelope.signer}, which this node does not pin")
        order = envelope.message(m.OrderBody).body
        if not isinstance(order, m.AuditOrder) or order.auditor != auditor:
            raise NotAuthorized("no order for an audit by this peer")
        if order.report_before <= now_ms or envelope.issued_at > now_ms + CLOCK_SKEW_MS:
            raise Expired("the audit's time is over, or has not come")
        if own != (order.upstream if request.side == "input" else order.downstream):
            raise InvalidRequest(f"the {request.side} of {order.audited} is not this node's to show", param="side")
        audited = PeerId(order.audited)
        track = self._history.find(TrackKey(SessionId(order.session), order.epoch, request.side, audited))
        if track is None:
            raise CacheMiss("nothing is kept of this session, or not any more")
        if not track.read_by(auditor):
            raise NotAuthorized("this was shown to you, or to others, as often as it is shown")
        return (max(order.positions, track.receipted) if request.beyond else order.positions), track

    async def _show(self, stream: Stream, to: int, positions: int, track: Track) -> None:
        key = track.key
        head = m.HistoryHead(
            open=track.opened,
            session=key.session,
            epoch=key.epoch,
            side=key.side,
            positions=track.positions(positions),
            receipt=track.receipt,
        )
        await self._answer(stream, to, head)
        for frame in track.frames(positions):
            with trio.move_on_after(HISTORY_REQUEST_S) as patience:
                await stream.send_all(encode_frame(frame))
            if patience.cancelled_caught:
                log.info("an auditor reads nothing", peer=stream.peer)
                await stream.reset()
                return
        self.shown += 1
        log.info("history shown", peer=stream.peer, audited=key.audited, side=key.side, positions=head.positions)

    async def _answer(self, stream: Stream, to: int, body: m.HistoryHead | m.HistoryRefused) -> None:
        now_ms = self._clock.unix_ms()
        sealed = seal(
            self._key,
            m.HISTORY,
            m.HistoryAnswer(to=to, body=body),
            sequence=self._sequencer.next(m.HISTORY, now_ms),
            now_ms=now_ms,
            audience=stream.peer,
        )
        with trio.move_on_after(HISTORY_REQUEST_S):
            await send_message(stream, sealed)
