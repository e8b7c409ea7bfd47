"""The trace that a client's request belongs to (W3C trace context): named in every log line of the request, and in its record."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from tessella_p2p.bridge.callers import caller_of

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16


def trace_id_of(traceparent: str | None) -> str | None:
    """The trace id of a ``traceparent`` header; None where there is none, or none that the standard allows: it is ignored then."""
    found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent)
    if found is None or found[1] == _NO_TRACE or found[2] == _NO_SPAN:
        return None
    is_of_version_0 = found[0].startswith("00")
    return None if is_of_version_0 and found[3] is not None else found[1]


class Traced:
    """Tells the app and the log to which trace a request belongs. Nothing is exported."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        given = Headers(scope=scope).getlist("traceparent") if scope["type"] == "http" else []
        trace_id = trace_id_of(given[0]) if len(given) == 1 else None
        if trace_id is None:
            await self._app(scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), "caller": replace(caller_of(scope), trace_id=trace_id)}
        with bound_contextvars(trace_id=trace_id):
            await self._app(scope, receive, send)
