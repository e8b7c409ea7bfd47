"""A pair of connected streams within the process: what a node gets when it opens a stream to itself."""

from __future__ import annotations

from collections import deque

import trio

from tessella_p2p.base.errors import StreamReset
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import PIPE_WINDOW_BYTES


class PipeStream:
    """One end of a pipe; implements `net.network.Stream`. At most `PIPE_WINDOW_BYTES` wait for its reader."""

    def __init__(self, peer: PeerId) -> None:
        self._peer = peer
        self._other: PipeStream = self
        self._chunks: deque[bytes] = deque()
        self._held_bytes = 0
        self._eof_received = False
        self._eof_sent = False
        self._closed = False
        self._broken = False
        self._changed = trio.Event()

    @property
    def peer(self) -> PeerId:
        """Who is at the other end."""
        return self._peer

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def receive_some(self, max_bytes: int) -> bytes:
        """See `net.network.Stream`."""
        await trio.lowlevel.checkpoint()
        while not self._chunks:
            if self._closed or (self._broken and not self._eof_received):
                raise StreamReset(f"the stream to {self._peer} is gone")
            if self._eof_received:
                return b""
            await self._changed.wait()
        chunk = self._chunks.popleft()
        if len(chunk) > max_bytes:
            self._chunks.appendleft(chunk[max_bytes:])
            chunk = chunk[:max_bytes]
        self._held_bytes -= len(chunk)
        self._other._notify()
        return chunk

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `net.network.Stream`."""
        await trio.lowlevel.checkpoint()
        with memoryview(data) as source, source.cast("B") as view:
            sent = 0
            while True:
                if self._broken or self._eof_sent or self._closed:
                    raise StreamReset(f"the stream to {self._peer} is gone")
                if sent == len(view):
                    return
                room = PIPE_WINDOW_BYTES - self._other._held_bytes
                if room <= 0:
                    await self._changed.wait()
                    continue
                self._other._deliver(bytes(view[sent : sent + room]))
                sent += min(room, len(view) - sent)

    def _deliver(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._held_bytes += len(chunk)
        self._notify()

    def _send_eof(self) -> None:
        if not self._eof_sent and not self._broken:
            self._eof_sent = True
            self._other._eof_received = True
            self._other._notify()

    async def send_eof(self) -> None:
        """See `net.network.Stream`."""
        if self._broken or self._closed:
            raise StreamReset(f"the stream to {self._peer} is gone")
        self._send_eof()
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """See `net.network.Stream`."""
        self._send_eof()
        self._closed = True
        self._chunks.clear()
        self._notify()
        self._other._break()  # its reads still reach the end; its sends have nobody to go to
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """See `net.network.Stream`."""
        if not self._closed:
            self._closed = True
            self._chunks.clear()
            self._break()
            self._other._break()
        await trio.lowlevel.checkpoint()

    def _break(self) -> None:
        self._broken = True
        if not self._eof_received:
            self._chunks.clear()
        self._notify()


def open_pipe(peer: PeerId) -> tuple[PipeStream, PipeStream]:
    """Two connected ends; both name ``peer``."""
    near, far = PipeStream(peer), PipeStream(peer)
    near._other, far._other = far, near
    return near, far
