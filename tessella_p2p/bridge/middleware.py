"""What surrounds every request: its bounds, its log line and its headers."""

from __future__ import annotations

from collections.abc import Callable

import structlog
import trio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessella_p2p.base.limits import HTTP_BODY_TIMEOUT_S, MAX_HTTP_BODY_BYTES
from tessella_p2p.bridge.errors import ErrorAnswer, shaped_error
from tessella_p2p.bridge.metrics import HttpMetrics

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)
_MAX_PATH_CHARS = 256
_CLIENT_LEFT = 499
"""nginx's status for a request whose client did not wait for the answer; it is logged, never sent."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)


class Observed:
    """Logs and counts each request (never its body or query), adds the security headers, and is the end of every bug's way up.

    Args:
        app: answers.
        metrics: counts.
        route_of: the name under which a path is counted; one of a fixed set, ``other`` for a path that is no route.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, route_of: Callable[[str], str]) -> None:
        self._app = app
        self._metrics = metrics
        self._route_of = route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. Cancellation passes through, and is logged like a client's departure."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_LEFT
        began = trio.current_time()

        async def observe(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", ()))
                own = {name for name, _ in headers}
                message = {
                    **message,
                    "headers": [*headers, *(each for each in _SECURITY_HEADERS if each[0] not in own)],
                }
            await send(message)

        try:
            await self._app(scope, receive, observe)
        except Exception:  # noqa: BLE001 - a bug: Starlette has answered 500, or the connection ends where it could not
            _log.exception("http_request_failed", method=scope["method"], path=_shown_path(scope))
        finally:
            seconds = trio.current_time() - began
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.answered(method, self._route_of(scope["path"]), status, seconds)
            _log.info(
                "http_request", method=method, path=_shown_path(scope), status=status, ms=round(seconds * 1000, 1)
            )


class BufferedBody:
    """Reads each body before the app runs: all of it, within a size and a time, or an answer 413 or 408.

    What the app receives after its body is then the client's departure and nothing else.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int = MAX_HTTP_BODY_BYTES, timeout_s: float = HTTP_BODY_TIMEOUT_S
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its body in one message."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await self._read(scope, receive)
        if body is None:
            return
        if isinstance(body, ErrorAnswer):
            await send_answer(send, body)
            return
        pending: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def replay() -> Message:
            nonlocal pending
            if pending is None:
                return await receive()
            message, pending = pending, None
            return message

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | ErrorAnswer | None:
        """The body; the answer that refuses it; or None when the client left meanwhile."""
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared) > self._max_bytes:
            return self._too_large()
        body = bytearray()
        with trio.move_on_after(self._timeout_s):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                body += message.get("body", b"")
                if len(body) > self._max_bytes:
                    return self._too_large()
                if not message.get("more_body", False):
                    return bytes(body)
        return shaped_error(
            408,
            f"the body was not complete within {self._timeout_s:g} seconds",
            "request_timeout",
            headers={"connection": "close"},
        )

    def _too_large(self) -> ErrorAnswer:
        return shaped_error(
            413,
            f"the body is larger than the {self._max_bytes} bytes that this node accepts",
            "request_too_large",
            headers={"connection": "close"},
        )


async def send_answer(send: Send, answer: ErrorAnswer) -> None:
    """Send an error as a whole answer."""
    body = answer.json()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *((name.encode("ascii"), value.encode("latin-1")) for name, value in answer.headers.items()),
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _shown_path(scope: Scope) -> str:
    """The path as it was sent, percent-encoded: no control character reaches a log."""
    raw: bytes = scope.get("raw_path") or b""
    return raw[:_MAX_PATH_CHARS].decode("ascii", "replace")
