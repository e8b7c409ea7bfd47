"""A pair of connected streams within the process: what a node gets when it opens a stream to itself.

`net.memory` builds its streams on the same two ends, with a network in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from tessella_p2p.base.errors import LocalProtocolError, StreamReset
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import PIPE_WINDOW_BYTES


class Parked:
    """One task that waits to be woken."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    async def wait(self) -> None:
        """Wait for `wake`."""
        if self._task is not None:
            raise LocalProtocolError("two tasks wait on the same side of one stream")

        def give_up(_: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(give_up)

    def wake(self) -> None:
        """Let the task go on, if there is one."""
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)


class PipeStream:
    """One end of a pipe; implements `net.network.Stream`. At most `PIPE_WINDOW_BYTES` wait for its reader."""

    def __init__(self, peer: PeerId) -> None:
        self._peer = peer
        self._other: PipeStream = self
        self._chunks: deque[bytes | memoryview] = deque()
        self._consumed = 0
        self._credit = PIPE_WINDOW_BYTES
        self._eof_received = False
        self._eof_sent = False
        self._closed = False
        self._broken = False
        self._taker: Callable[[memoryview], int] | None = None
        self._reader = Parked()
        self._writer = Parked()

    @property
    def peer(self) -> PeerId:
        """Who is at the other end."""
        return self._peer

    def _post(self, arrive: Callable[..., None], *args: bytes | memoryview | int) -> None:
        """Let something happen at the other end; here at once."""
        arrive(*args)

    def _ended(self) -> None:
        """Called when nothing more can come or go."""

    async def receive_some(self, max_bytes: int) -> bytes | memoryview:
        """See `net.network.Stream`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._chunks:
            if self._closed or (self._broken and not self._eof_received):
                raise StreamReset(f"the stream to {self._peer} is gone")
            if self._eof_received:
                return b""
            await self._reader.wait()
        chunk = self._chunks.popleft()
        if len(chunk) > max_bytes:
            view = memoryview(chunk)
            self._chunks.appendleft(view[max_bytes:])
            chunk = view[:max_bytes]
        self._count_consumed(len(chunk))
        return chunk

    def _count_consumed(self, size_bytes: int) -> None:
        self._consumed += size_bytes
        if self._consumed >= PIPE_WINDOW_BYTES // 2 and not self._eof_received:
            credit, self._consumed = self._consumed, 0
            self._post(self._other._on_credit, credit)

    def offer_to(self, taker: Callable[[memoryview], int] | None) -> None:
        """See `net.network.DirectStream`."""
        self._taker = taker

    def send_nowait(self, data: bytes | bytearray | memoryview) -> bool:
        """See `net.network.DirectStream`."""
        self._check_sendable()
        if len(data) > self._credit:
            return False
        self._credit -= len(data)
        self._post(self._other._on_data, bytes(data))
        return True

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `net.network.Stream`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        left = memoryview(bytes(data))
        while True:
            self._check_sendable()
            if not left:
                return
            if not self._credit:
                await self._writer.wait()
                continue
            part = left[: self._credit]
            left = left[len(part) :]
            self._credit -= len(part)
            self._post(self._other._on_data, part)

    def _check_sendable(self) -> None:
        if self._broken or self._closed or self._eof_sent:
            raise StreamReset(f"the stream to {self._peer} is gone")

    async def send_eof(self) -> None:
        """See `net.network.Stream`."""
        if self._broken or self._closed:
            raise StreamReset(f"the stream to {self._peer} is gone")
        self._send_eof()
        await trio.lowlevel.checkpoint()

    def _send_eof(self) -> None:
        if not self._eof_sent and not self._broken:
            self._eof_sent = True
            self._post(self._other._on_eof)
            self._check_ended()

    async def aclose(self) -> None:
        """See `net.network.Stream`. Bytes that were not read are dropped, and a peer that goes on sending is told by a reset."""
        self._send_eof()
        self._closed = True
        if self._chunks:
            self._abort()  # else an end without credit would wait for ever
        self._reader.wake()
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """See `net.network.Stream`."""
        self._closed = True
        self._abort()
        await trio.lowlevel.checkpoint()

    def _abort(self) -> None:
        self._chunks.clear()
        if not self._broken and not (self._eof_sent and self._eof_received):
            self._post(self._other._on_reset)
        self._on_reset()

    def _check_ended(self) -> None:
        if self._broken or (self._eof_sent and self._eof_received):
            self._ended()

    # What arrives from the other end.

    def _on_data(self, chunk: bytes | memoryview) -> None:
        if self._closed:
            self._abort()
        elif not self._broken:
            if self._taker is not None and not self._chunks:
                taken = self._taker(memoryview(chunk))
                self._count_consumed(taken)
                chunk = memoryview(chunk)[taken:]
            if chunk and not self._broken:
                self._chunks.append(chunk)
                self._reader.wake()

    def _on_credit(self, size_bytes: int) -> None:
        self._credit += size_bytes
        self._writer.wake()

    def _on_eof(self) -> None:
        self._eof_received = True
        self._reader.wake()
        self._check_ended()

    def _on_reset(self) -> None:
        """What the other end had finished sending can still be read; everything else is over."""
        self._broken = True
        if not self._eof_received:
            self._chunks.clear()
        self._reader.wake()
        self._writer.wake()
        self._ended()


def join(near: PipeStream, far: PipeStream) -> None:
    """Make the two each other's other end."""
    near._other, far._other = far, near


def open_pipe(peer: PeerId) -> tuple[PipeStream, PipeStream]:
    """Two connected ends; both name ``peer``."""
    near, far = PipeStream(peer), PipeStream(peer)
    join(near, far)
    return near, far
