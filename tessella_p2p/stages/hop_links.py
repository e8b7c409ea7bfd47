"""Frames over long-lived streams (shell): one stream per neighbour and direction carries every session between the two.

A writer task owns the sending half, so a session that is cancelled never cuts a frame of another one in two; what is queued is
bounded, and frames that wait together leave in one send.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import structlog
import trio

from tessella_p2p.base.errors import HopTimeout, MalformedMessage, StreamReset, TessellaError
from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.base.limits import KIB, MAX_QUEUED_FRAMES, MAX_QUEUED_STEPS
from tessella_p2p.net.network import Network, Stream
from tessella_p2p.wire import protocols
from tessella_p2p.wire.frames import HEADER_BYTES, Frame, Header, encode_frame, parse_header, parse_payload

log = structlog.get_logger(__name__)

_READ_BYTES = 256 * KIB
_JOIN_BYTES = 64 * KIB
_CLOSE_S = 1.0

LinkKey = tuple[SessionId, int]
"""(session, epoch)."""


class FrameReader:
    """Whole frames out of a stream. Cancelling `receive` loses nothing."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._header: Header | None = None

    async def receive(self) -> Frame | None:
        """The next frame, or None at an end of the stream between two frames.

        Raises:
            MalformedMessage, VersionMismatch, InvalidStep: the peer broke the framing; reset the stream.
            StreamReset: the stream broke, or ended inside a frame.
        """
        if self._header is None:
            if not await self._fill(HEADER_BYTES):
                return None
            self._header = parse_header(self._take(HEADER_BYTES))
        if not await self._fill(self._header.payload_bytes):
            raise StreamReset(f"the stream of {self._stream.peer} ended inside a frame")
        header, self._header = self._header, None
        return parse_payload(header, self._take(header.payload_bytes))

    def _take(self, size_bytes: int) -> bytes:
        taken = bytes(memoryview(self._buffer)[:size_bytes])
        del self._buffer[:size_bytes]
        return taken

    async def _fill(self, size_bytes: int) -> bool:
        while len(self._buffer) < size_bytes:
            part = await self._stream.receive_some(_READ_BYTES)
            if not part:
                if self._buffer:
                    raise StreamReset(f"the stream of {self._stream.peer} ended inside a frame")
                return size_bytes == 0
            self._buffer += part
        return True


class FrameLink:
    """Both directions of one stream: `run` it in a nursery, `send` from any task."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._send, self._receive = trio.open_memory_channel[bytes](MAX_QUEUED_FRAMES)
        self.lost = False

    @property
    def peer(self) -> PeerId:
        """Who is at the other end."""
        return self._stream.peer

    async def run(self, on_frame: Callable[[Frame], None]) -> None:
        """Move frames until either side ends the stream or it breaks; then the link is lost for good. Cancelled, it is reset.

        Args:
            on_frame: called for each frame, in order; it must not block. What it raises ends the link.

        Raises:
            RemoteProtocolError: the peer broke a rule.
            StreamReset: the stream broke.
        """
        failure: TessellaError | None = None
        graceful = False

        async def ending(half: Callable[[], Awaitable[None]]) -> None:
            nonlocal failure
            try:
                await half()
            except TessellaError as error:  # the first one counts: the other half fails of it
                failure = failure or error
            nursery.cancel_scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ending, self._write)
                await ending(partial(self._read, on_frame))
            graceful = failure is None
        finally:
            self.lost = True
            self._receive.close()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_S):
                await (self._stream.aclose() if graceful else self._stream.reset())
        if failure is not None:
            raise failure

    async def _read(self, on_frame: Callable[[Frame], None]) -> None:
        reader = FrameReader(self._stream)
        while (frame := await reader.receive()) is not None:
            on_frame(frame)

    async def _write(self) -> None:
        async for first in self._receive:
            parts, size_bytes = [first], len(first)
            while size_bytes < _JOIN_BYTES:
                try:
                    part = self._receive.receive_nowait()
                except (trio.WouldBlock, trio.EndOfChannel):
                    break
                parts.append(part)
                size_bytes += len(part)
            await self._stream.send_all(parts[0] if len(parts) == 1 else b"".join(parts))

    async def send(self, frame: Frame, timeout_s: float) -> None:
        """Queue a frame; waits while `MAX_QUEUED_FRAMES` are waiting already.

        Raises:
            StreamReset: the link is lost.
            HopTimeout: the peer took no frame for ``timeout_s``.
        """
        try:
            with trio.fail_after(timeout_s):
                await self._send.send(encode_frame(frame))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise StreamReset(f"the stream to {self.peer} is gone") from error
        except trio.TooSlowError as error:
            raise HopTimeout(f"{self.peer} took no frame for {timeout_s:.0f} s") from error

    def end(self) -> None:
        """Send what is queued, then close the stream; `run` returns."""
        self._send.close()

    def send_nowait(self, frame: Frame) -> bool:
        """Queue a frame if there is room; False when there is none or the link is lost."""
        try:
            self._send.send_nowait(encode_frame(frame))
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True


class Inbox:
    """What one session receives, in order: frames and the loss of a link. Bounded."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[tuple[Frame | TessellaError, float]](MAX_QUEUED_STEPS)

    def put(self, item: Frame | TessellaError) -> bool:
        """Add an item, with the time of its arrival; False when the inbox is full or closed."""
        try:
            self._send.send_nowait((item, trio.current_time()))
        except (trio.WouldBlock, trio.BrokenResourceError):
            return False
        return True

    async def get(self) -> tuple[Frame | TessellaError, float]:
        """The next item and when it arrived (trio's clock)."""
        return await self._receive.receive()

    def close(self) -> None:
        """Refuse and drop everything from now on."""
        self._receive.close()


class HopLinks:
    """This node's outbound hop streams, at most one per neighbour; opened on demand, shared by all sessions."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._links: dict[PeerId, FrameLink] = {}
        self._inboxes: dict[PeerId, dict[LinkKey, Inbox]] = {}
        self._locks: dict[PeerId, trio.Lock] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the streams until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    async def attach(self, peer: PeerId, key: LinkKey, inbox: Inbox) -> FrameLink:
        """The link to ``peer``, with ``inbox`` as the receiver of what comes back for ``key``; `detach` it in the end.

        Raises:
            DialError, VersionMismatch, StreamReset: no stream could be opened.
        """
        assert self._nursery is not None, "run() comes first"
        async with self._locks.setdefault(peer, trio.Lock()):
            link = self._links.get(peer)
            if link is None or link.lost:
                stream = await self._network.open_stream(peer, protocols.HOP)
                link = self._links[peer] = FrameLink(stream)
                self._inboxes[peer] = {}
                self._nursery.start_soon(self._run_link, peer, link, self._inboxes[peer])
        self._inboxes[peer][key] = inbox
        return link

    def detach(self, peer: PeerId, key: LinkKey, inbox: Inbox) -> None:
        """Stop delivering for ``key``; the stream stays for the next session."""
        inboxes = self._inboxes.get(peer, {})
        if inboxes.get(key) is inbox:
            del inboxes[key]

    async def _run_link(self, peer: PeerId, link: FrameLink, inboxes: dict[LinkKey, Inbox]) -> None:
        def deliver(frame: Frame) -> None:
            inbox = inboxes.get((frame.session, frame.epoch))
            if inbox is not None and not inbox.put(frame):
                raise MalformedMessage(f"{peer} sends more than a session can take")

        reason: TessellaError = StreamReset(f"{peer} ended the hop stream")
        try:
            await link.run(deliver)
        except TessellaError as error:
            reason = error
        finally:
            if self._links.get(peer) is link:
                del self._links[peer]
                del self._inboxes[peer]
            log.info("hop stream ended", peer=peer, sessions=len(inboxes), reason=str(reason))
            for inbox in list(inboxes.values()):
                inbox.put(reason)
