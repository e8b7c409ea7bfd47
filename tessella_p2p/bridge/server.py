"""The node's HTTP server: listens, bounds the connections, and ends them in time."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import structlog
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework
from starlette.types import ASGIApp

from tessella_p2p.base.errors import ConfigurationError, PortInUseError
from tessella_p2p.base.limits import HTTP_GRACE_S, MAX_HTTP_CONNECTIONS, MAX_HTTP_HEAD_BYTES
from tessella_p2p.bridge.connection import Connection, ConnectionLimits
from tessella_p2p.bridge.errors import raw_refusal

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)
_REFUSAL_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What the server bears."""

    max_connections: int = MAX_HTTP_CONNECTIONS
    grace_s: float = HTTP_GRACE_S
    """After ``drain``: how long answers in flight may still take."""
    connection: ConnectionLimits = field(default_factory=ConnectionLimits)


async def serve(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    setting: str = "api_port",
    drain: trio.Event | None = None,
    limits: ServerLimits | None = None,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``app`` over HTTP/1.1 until ``drain`` is set or the call is cancelled.

    ``task_status`` reports the bound URL (port 0 binds a free one) once connections are accepted. After ``drain`` no connection is
    accepted, idle ones are closed, and answers in flight have ``limits.grace_s`` to finish; then the call returns. Cancellation ends
    all of it at once, whatever the clients do. ASGI's lifespan protocol is not spoken: the node's nursery starts and stops things.

    Args:
        app: an ASGI 3 application.
        host: a name or an address; each address it resolves to is bound.
        port: 0 to 65535.
        setting: the configuration key of ``port``, for messages.
        drain: set it to stop gracefully.
        limits: defaults to `ServerLimits()`.
        task_status: of ``nursery.start``.

    Raises:
        PortInUseError: the port is taken; the message names host, port and setting.
        ConfigurationError: the host or port cannot be bound for another reason.
    """
    server = _Server(app, limits or ServerLimits())
    listeners = await _listen(host, port, setting)
    try:
        await server.run(
            listeners, trio.Event() if drain is None else drain, partial(task_status.started, _url_of(listeners[0]))
        )
    finally:
        for listener in listeners:
            listener.socket.close()


async def _listen(host: str, port: int, setting: str) -> list[trio.SocketListener]:
    if not 0 <= port <= 65535:  # the resolver would take it modulo 65536
        raise ConfigurationError(f"the setting {setting} is {port}; a port is 0 (any free one) to 65535")
    try:
        return await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"cannot listen on {host} port {port}: another program, or another node, uses it; "
                f"stop that one or choose another port with the setting {setting}"
            ) from error
        raise ConfigurationError(f"cannot listen on {host} port {port} (setting {setting}): {error}") from error
    except UnicodeError as error:
        raise ConfigurationError(f"cannot listen on {host!r} port {port} (setting {setting}): {error}") from error


def _url_of(listener: trio.SocketListener) -> str:
    host, port = listener.socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _http11_config() -> Config:
    config = Config()
    config.include_server_header = False
    config.h11_max_incomplete_size = MAX_HTTP_HEAD_BYTES
    # The node's structlog is the log: hypercorn's own writes to stderr, and its access log repeats lines.
    config.accesslog = None
    config.errorlog = None
    return config


class _Server:
    def __init__(self, app: ASGIApp, limits: ServerLimits) -> None:
        self._app = ASGIWrapper(cast(ASGIFramework, app))
        self._limits = limits
        self._config = _http11_config()
        self._context = WorkerContext(None)
        self._live: set[Connection] = set()

    async def run(self, listeners: list[trio.SocketListener], drain: trio.Event, started: partial[None]) -> None:
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                await accepting.start(
                    partial(trio.serve_listeners, self._serve_stream, listeners, handler_nursery=connections)
                )
                started()
                await drain.wait()
                accepting.cancel_scope.cancel()
            for listener in listeners:
                listener.socket.close()
            await self._context.terminated.set()
            for connection in self._live:
                connection.drain()
            connections.cancel_scope.deadline = trio.current_time() + self._limits.grace_s

    async def _serve_stream(self, stream: trio.SocketStream) -> None:
        if len(self._live) >= self._limits.max_connections:
            await _refuse(stream)
            return
        connection = Connection(self._app, self._config, self._context, stream, self._limits.connection)
        self._live.add(connection)
        try:
            await connection.run()
        except Exception:  # noqa: BLE001 - a bug in one connection must not take the daemon's other work down
            _log.exception("http_connection_failed")
        finally:
            self._live.discard(connection)


async def _refuse(stream: trio.SocketStream) -> None:
    """Tell a client beyond the limit to come again; best effort, briefly."""
    async with stream:
        with trio.move_on_after(_REFUSAL_TIMEOUT_S):
            try:
                await stream.send_all(raw_refusal("this node has as many HTTP connections as it accepts; try again"))
                await stream.send_eof()
                while await stream.receive_some(4096):
                    pass  # closing on unread input would reset the connection and lose the answer
            except trio.BrokenResourceError:
                pass
