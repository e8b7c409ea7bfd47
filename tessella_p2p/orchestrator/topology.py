"""The topology, told as it changes (shell): ``/tessella/topology/1``.

A subscriber's first message is a sealed `Subscribe`, judged as any request. What goes back are answers to it, as many as there is
something to tell: the whole list at once, then, with each change, what is new of it; now and then the whole list again, because
records run out; and, when nothing changes, that nothing does. A subscriber that reads too slowly is let go, and asks again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog
import trio

from tessella_p2p.base.errors import Overloaded, RefusalError, RemoteProtocolError, TransportError, UnknownModel
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    MAX_ENVELOPE_BYTES,
    MAX_TOPOLOGY_STREAMS,
    ORCHESTRATOR_REQUEST_S,
    TOPOLOGY_KEEPALIVE_S,
    TOPOLOGY_PAUSE_S,
    TOPOLOGY_REFRESH_S,
    TOPOLOGY_SEND_S,
)
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.network import Stream
from tessella_p2p.orchestrator.context import refused
from tessella_p2p.orchestrator.membership import Membership
from tessella_p2p.orchestrator.news import Listing, News
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import peek_sequence

_LOG: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Judge = Callable[[bytes, PeerId], m.Subscribe]
"""Gives the `Subscribe` in a sealed request of an authenticated peer, or raises the `TessellaError` that it is refused with."""
Seal = Callable[[PeerId, int, m.OrchestratorAnswer], bytes]
"""Seals an answer to a peer's request of a sequence."""


@dataclass(frozen=True, slots=True)
class _Subscription:
    """``sequence`` is the request's, which every message answers."""

    sequence: int
    root: bytes


class Topology:
    """Tells subscribers of a model's stages. A peer has one stream for each model: the newest.

    Args:
        membership: what is told, and when it changes.
        judge: of the first message.
        sealed: of everything that goes out.
        max_streams: at the bound newcomers are refused; they can ask for the list.
    """

    def __init__(
        self, membership: Membership, judge: Judge, sealed: Seal, max_streams: int = MAX_TOPOLOGY_STREAMS
    ) -> None:
        self._membership = membership
        self._judge = judge
        self._sealed = sealed
        self.max_streams = max_streams
        self._streams: dict[tuple[PeerId, bytes], trio.CancelScope] = {}
        self._listed: dict[bytes, tuple[trio.Event, float, Listing]] = {}

    @property
    def num_streams(self) -> int:
        """Subscribers now, each model of a peer counted."""
        return len(self._streams)

    async def serve(self, stream: Stream) -> None:
        """Serve one subscriber until it leaves, is replaced by its next stream, or takes too long over a message."""
        subscription: _Subscription | None = None
        with trio.move_on_after(ORCHESTRATOR_REQUEST_S):
            subscription = await self._accept(stream)
        if subscription is None:
            return
        key = (stream.peer, subscription.root)
        with trio.CancelScope() as scope:
            before, self._streams[key] = self._streams.get(key), scope
            if before is not None:  # it may be the remains of a broken connection
                before.cancel()
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_wait_for_end, stream, scope)
                    await self._tell(stream, subscription)
                    scope.cancel()
            finally:
                if self._streams.get(key) is scope:  # the one in its place may be over already
                    del self._streams[key]

    async def _accept(self, stream: Stream) -> _Subscription | None:
        """The subscription that begins; None where nothing was sent, or it is refused."""
        sequence = 0
        try:
            raw = await receive_message(stream, MAX_ENVELOPE_BYTES)
            if raw is None:
                return None
            sequence = peek_sequence(raw)
            root = self._judge(raw, stream.peer).manifest_root
            self._listing(root)
            if len(self._streams) >= self.max_streams and (stream.peer, root) not in self._streams:
                raise Overloaded(f"{self.max_streams} topology streams are open: ask for the list")
        except (RemoteProtocolError, RefusalError) as error:
            await send_message(stream, self._sealed(stream.peer, sequence, refused(error)))
            return None
        return _Subscription(sequence, root)

    async def _tell(self, stream: Stream, subscription: _Subscription) -> None:
        """Tell for ever; ends when the subscriber cannot be told."""
        news, whole_at, root = News(), -math.inf, subscription.root
        try:
            while True:
                changed, now = self._membership.changed, trio.current_time()
                if now >= whole_at + TOPOLOGY_REFRESH_S:
                    news, whole_at = News(), now
                body = news.since(self._listing(root))
                await self._send(stream, subscription, body)
                await trio.sleep(TOPOLOGY_PAUSE_S)
                while await self._is_quiet(changed) and trio.current_time() < whole_at + TOPOLOGY_REFRESH_S:
                    await self._send(stream, subscription, m.Acknowledged())
        except TransportError as error:
            _LOG.info("subscriber_lost", peer=stream.peer, reason=str(error))
        except UnknownModel as error:
            _LOG.info("subscriber_let_go", peer=stream.peer, reason=str(error))
        except trio.TooSlowError:
            _LOG.info("subscriber_lost", peer=stream.peer, reason="it reads too slowly")

    async def _is_quiet(self, changed: trio.Event) -> bool:
        """Wait for a change, and not for long; whether there was none."""
        with trio.move_on_after(TOPOLOGY_KEEPALIVE_S):
            await changed.wait()
        return not changed.is_set()

    async def _send(self, stream: Stream, subscription: _Subscription, body: m.Stages | m.Acknowledged) -> None:
        with trio.fail_after(TOPOLOGY_SEND_S):
            await send_message(stream, self._sealed(stream.peer, subscription.sequence, body))

    def _listing(self, root: bytes) -> Listing:
        """The list as it is now; subscribers who are told of one change share it.

        Raises:
            UnknownModel: the model is not served.
        """
        now = trio.current_time()
        changed, made_at, listing = self._listed.get(root, (None, 0.0, None))
        if listing is None or changed is not self._membership.changed or now >= made_at + TOPOLOGY_PAUSE_S:
            listing = Listing.of(self._membership.stages(root))
            self._listed[root] = (self._membership.changed, now, listing)
        return listing


async def _wait_for_end(stream: Stream, scope: trio.CancelScope) -> None:
    """Cancel ``scope`` when the subscriber ends its side, breaks off, or sends what nobody asked it for."""
    with suppress(TransportError):
        await stream.receive_some(1)
    scope.cancel()
