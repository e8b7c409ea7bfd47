"""The serving side of token streams (shell): each belongs to one (session, epoch), and its first frame has to prove it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog
import trio

from tessella_p2p.base.errors import CapabilityRefused, HopTimeout, MalformedMessage, StreamReset, TessellaError
from tessella_p2p.base.ids import SessionId
from tessella_p2p.base.limits import CHECKPOINT_S, TOKEN_STREAM_DRAIN_S, TOKEN_STREAM_OPEN_S
from tessella_p2p.entry.chain import Chain
from tessella_p2p.net.network import Stream
from tessella_p2p.stages.frame_link import FrameLink, Unread
from tessella_p2p.wire.frames import Frame, Header, Kind

log = structlog.get_logger(__name__)


class TokenTable:
    """Which chains wait for token streams on this entry.

    Args:
        checkpoint_s: how often a tail gets a receipt; never less often than the default, on which tails count.
    """

    def __init__(self, checkpoint_s: float = CHECKPOINT_S) -> None:
        self.chains: dict[tuple[SessionId, int], Chain] = {}
        self._receipt_s = min(checkpoint_s, CHECKPOINT_S)
        self._num_open = 0
        self._idle = trio.Event()
        self._idle.set()

    async def idle(self) -> None:
        """Wait until every tail has had its last receipt."""
        await self._idle.wait()

    @contextmanager
    def accepted(self) -> Iterator[None]:
        """One more stream that belongs to a session, for as long as it lasts."""
        if not self._num_open:
            self._idle = trio.Event()
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._idle.set()

    async def serve(self, stream: Stream) -> None:
        """Handle one inbound token stream. What its peer does wrong ends it, and the session where it is the tail's stream."""
        link = FrameLink(stream)
        tokens = _Inbound(self, link)
        reason: TessellaError = StreamReset(f"{stream.peer} ended the token stream")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tend, tokens)
                try:
                    await link.run(tokens)
                except TessellaError as error:
                    reason = error
                    log.info("token stream ended", peer=stream.peer, code=error.code, reason=str(error))
                nursery.cancel_scope.cancel()
        finally:
            if tokens.chain is not None and tokens.is_closed:
                tokens.chain.token_stream_closed()
            elif tokens.chain is not None:
                tokens.chain.token_stream_lost(reason)

    async def _tend(self, tokens: _Inbound) -> None:
        """Sign for what arrives until the session ends, and see to it that the stream then ends too."""
        with trio.move_on_after(TOKEN_STREAM_OPEN_S):
            await tokens.accepted.wait()
        chain = tokens.chain
        if chain is None:
            tokens.link.abort(HopTimeout(f"no capability within {TOKEN_STREAM_OPEN_S:.0f} s"))
            return
        with self.accepted():
            while not chain.ended.is_set():
                with trio.move_on_after(self._receipt_s):
                    await chain.ended.wait()
                chain.send_receipt()
                chain.check_head()
            await trio.sleep(TOKEN_STREAM_DRAIN_S)
        tokens.link.abort(HopTimeout(f"the token stream outlived its session by {TOKEN_STREAM_DRAIN_S:.0f} s"))


@dataclass(slots=True)
class _Inbound:
    """What arrives on one token stream."""

    table: TokenTable
    link: FrameLink
    chain: Chain | None = None
    is_closed: bool = False
    """Its peer closed it in order."""
    accepted: trio.Event = field(default_factory=trio.Event)

    def wants(self, header: Header) -> bool:
        if self.chain is None:
            if header.kind is not Kind.OPEN or (header.session, header.epoch) not in self.table.chains:
                raise CapabilityRefused("a token stream for no session of this entry")
        elif header.kind is Kind.TOKEN:
            self.chain.check_token(header)
        elif header.kind is not Kind.CLOSE:
            raise MalformedMessage(f"a {header.kind.name} frame where a token is expected")
        return True

    def take(self, frame: Frame) -> None:
        if self.chain is None:
            self._accept(frame)
        elif frame.kind is Kind.TOKEN:
            self.chain.take_token(frame)
        else:  # the tail ends: its last receipt, and that is all
            self.is_closed = True
            self.chain.send_receipt()
            self.link.end()

    def _accept(self, frame: Frame) -> None:
        chain = self.table.chains.get((frame.session, frame.epoch))
        if chain is None:
            raise CapabilityRefused("a token stream for a session that is over")
        chain.accept_tokens(self.link.peer, bytes(frame.body), self.link)
        self.chain = chain
        self.accepted.set()

    def skipped(self, unread: Unread) -> None:
        raise MalformedMessage(f"a damaged {unread.header.kind.name} frame")
