"""One HTTP/1.1 connection: hypercorn's protocol, driven by trio in a way that a daemon can live with.

hypercorn parses HTTP and speaks ASGI well; its own trio driver (``hypercorn.trio.tcp_server``, 0.18.0) has five faults, which this
driver answers by construction. ``tests/bridge/test_server_faults.py`` shows each one in stock hypercorn and its absence here, so that a
newer hypercorn tells by itself what may go.

======================================  ==========================================================================================
fault of the stock driver               here
======================================  ==========================================================================================
``send_all`` is shielded: a client      A write has a deadline and is cancelled like anything else. A write that was cut leaves a
that does not read survives SIGTERM     broken chunk behind, so its connection is aborted.
and cancellation
a connection that carried SSE never     Idleness is a deadline on the read loop, moved without an ``await``: nothing can cancel
idles out (the app's task is cancelled  the change half-way.
while it re-arms the timer)
an app that answers without reading a   ``http.disconnect`` closes the app's channel instead of queueing behind the body; a message
large body deadlocks on its own queue   for an app that has returned is dropped.
an answer that closes the connection    After such an answer, input is read and discarded for a moment.
is lost to a TCP reset
HTTP/2 and WebSockets are spoken        Only HTTP/1.1 is; upgrades are ignored, as RFC 9110 §7.8 allows.
whatever the configuration offers
======================================  ==========================================================================================

Limit: input after a complete request (pipelining) waits until that request is answered, and until then the end of the connection behind
it goes unnoticed. No client of this API pipelines.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h11
import structlog
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ASGIReceiveEvent, ASGISendEvent, ConnectionState, Scope
from hypercorn.utils import parse_socket_addr

from tessella_p2p.base.limits import (
    HTTP_KEEP_ALIVE_S,
    HTTP_LINGER_S,
    HTTP_SEND_TIMEOUT_S,
    KIB,
    MAX_HTTP_HEAD_BYTES,
)
from tessella_p2p.bridge.errors import shaped_error

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)
_RECEIVE_BYTES = 64 * KIB
_WRITES_AT_ONCE = 16
"""So many writes in a row may go out without letting other tasks run in between."""
_HEAD_TOO_LARGE = 431
_PROTOCOL_CODES = {_HEAD_TOO_LARGE: "headers_too_large"}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How patient a connection is, in seconds; ``base/limits.py`` says what each bound is for."""

    keep_alive_s: float = HTTP_KEEP_ALIVE_S
    send_timeout_s: float = HTTP_SEND_TIMEOUT_S
    linger_s: float = HTTP_LINGER_S


class Connection:
    """Serves one accepted stream until either side ends it."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        stream: trio.SocketStream,
        limits: ConnectionLimits,
    ) -> None:
        self._app = app
        self._config = config
        self._context = context
        self._stream = stream
        self._limits = limits
        self._write_lock = trio.Lock()
        self._num_at_once = 0
        self._reading = trio.CancelScope()
        self._idle = True
        self._closing = False
        self._protocol: H11Protocol

    async def run(self) -> None:
        """Serve the connection. Cancellation aborts it at once, also in the middle of an answer."""
        raw = self._stream.socket
        try:
            client, server = raw.getpeername(), raw.getsockname()
        except OSError:  # gone before it was served
            self._abort()
            return
        try:
            async with trio.open_nursery() as nursery:
                self._protocol = _Http11Only(
                    self._app,
                    self._config,
                    self._context,
                    _AppTasks(nursery),
                    ConnectionState({}),
                    False,
                    parse_socket_addr(raw.family, client),
                    parse_socket_addr(raw.family, server),
                    self._send,
                )
                self._set_idle(True)
                await self._read()
        finally:
            self._abort()

    def drain(self) -> None:
        """Close as soon as no answer is in flight; the worker context must say ``terminated`` already."""
        if self._idle:
            self._reading.cancel()

    async def _read(self) -> None:
        """Feed the protocol until the client leaves, the connection idles out, or it was closed from this side."""
        with self._reading:
            while True:
                try:
                    data = await self._stream.receive_some(_RECEIVE_BYTES)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    break
                if not self._closing:
                    await self._protocol.handle(RawData(bytes(data)))
                if not data:
                    break
        await self._protocol.handle(Closed())

    async def _send(self, event: Event) -> None:
        """What the protocol wants done. Only a write waits; so only a write can be cancelled."""
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Updated):
            self._set_idle(event.idle)
        elif isinstance(event, Closed):
            self._close_gracefully()
            await self._protocol.handle(Closed())

    async def _write(self, data: bytes) -> None:
        sent = False
        try:
            sent = await self._write_in_time(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            if not sent:  # also when cancelled: the protocol counts these bytes as sent, so the framing is lost
                self._abort()
        if not sent:
            await self._protocol.handle(Closed())

    async def _write_in_time(self, data: bytes) -> bool:
        """Whether the client took ``data``. Most chunks find room in the kernel: no deadline, no other task's turn."""
        if self._num_at_once < _WRITES_AT_ONCE and not self._write_lock.locked():
            self._num_at_once += 1
            await trio.lowlevel.checkpoint_if_cancelled()
            data = self._send_at_once(data)
            if not data:
                return True
        self._num_at_once = 0
        with trio.move_on_after(self._limits.send_timeout_s):
            await self._send_in_turn(data)
            return True
        return False

    def _send_at_once(self, data: bytes) -> bytes:
        """Give the kernel what it takes now; returns the rest, also of a socket that is broken, as the next writer finds out."""
        try:
            return data[os.write(self._stream.socket.fileno(), data) :]
        except OSError:
            return data

    async def _send_in_turn(self, data: bytes) -> None:
        """The app's writes and the protocol's own come from different tasks."""
        if self._write_lock.locked():
            await self._write_lock.acquire()
        else:
            self._write_lock.acquire_nowait()  # a checkpoint less for each token: sending is one
        try:
            await self._stream.send_all(data)
        finally:
            self._write_lock.release()

    def _set_idle(self, idle: bool) -> None:
        self._idle = idle
        if self._closing:
            return
        if idle and self._context.terminated.is_set():
            self._reading.cancel()
        self._reading.deadline = trio.current_time() + self._limits.keep_alive_s if idle else math.inf

    def _close_gracefully(self) -> None:
        """Say that no more comes, and leave the read loop a moment to discard what the client is still sending."""
        if self._closing:
            return
        self._closing = True
        try:
            self._stream.socket.shutdown(socket.SHUT_WR)
        except OSError:  # the client was faster
            self._abort()
        self._reading.deadline = trio.current_time() + self._limits.linger_s

    def _abort(self) -> None:
        self._stream.socket.close()


class _AppTasks:
    """hypercorn's task group: runs the app for each request, in the connection's nursery."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    async def spawn_app(
        self,
        app: AppWrapper,
        config: Config,
        scope: Scope,
        send: Callable[[ASGISendEvent | None], Awaitable[None]],
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        """Start the app; returns how the protocol gives it messages."""
        to_app, inbox = trio.open_memory_channel[ASGIReceiveEvent](config.max_app_queue_size)

        async def put(event: ASGIReceiveEvent) -> None:
            if event["type"] == "http.disconnect":
                to_app.close()
                return
            # Broken or closed: the app has answered, or the client has left, and nobody wants the rest of the body.
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await to_app.send(event)

        async def receive() -> ASGIReceiveEvent:
            try:
                return await inbox.receive()
            except trio.EndOfChannel:
                return {"type": "http.disconnect"}

        async def serve_request() -> None:
            with to_app, inbox:
                try:
                    await app(scope, receive, send, trio.to_thread.run_sync, trio.from_thread.run)
                except Exception:  # noqa: BLE001 - an app's bug costs its request, never the connection's nursery or the daemon
                    _log.exception("http_app_failed")
                inbox.close()
                await send(None)

        self._nursery.start_soon(serve_request)
        return put

    def spawn(self, func: Callable[..., Any], *args: Any) -> None:
        """Part of hypercorn's interface; HTTP/1.1 spawns nothing."""
        self._nursery.start_soon(func, *args)

    async def __aenter__(self) -> _AppTasks:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


class _Http11Only(H11Protocol):
    """hypercorn's HTTP/1.1 protocol without its ways into HTTP/2 and WebSockets; its own refusals have our shape of an error."""

    async def _check_protocol(self, event: h11.Request) -> None:
        return None

    async def _create_stream(self, request: h11.Request) -> None:
        size = len(request.target) + sum(len(name) + len(value) for name, value in request.headers)
        if size > MAX_HTTP_HEAD_BYTES:  # h11 bounds only what comes in pieces
            await self._send_error_response(_HEAD_TOO_LARGE)
            await self.send(Closed())
            return
        if any(name == b"upgrade" for name, _ in request.headers):
            request = h11.Request(
                method=request.method,
                target=request.target,
                headers=[(name, value) for name, value in request.headers if name != b"upgrade"],
                http_version=request.http_version,
            )
        await super()._create_stream(request)

    async def _send_error_response(self, status_code: int) -> None:
        said = (
            f"the request line and headers are larger than the {MAX_HTTP_HEAD_BYTES} bytes that this node accepts"
            if status_code == _HEAD_TOO_LARGE
            else "this is no HTTP/1.1 request"
        )
        body = shaped_error(status_code, said, _PROTOCOL_CODES.get(status_code, "invalid_request")).json()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *self.config.response_headers("h11"),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())
