"""Requests that a web page of another origin makes: those that the configuration allows, and no others.

A page anywhere can make its reader's browser ask a node on the reader's machine, and the node would work, though the page may not read
the answer. Browsers say where a request comes from (``Origin``; ``Sec-Fetch-Site`` where that is absent), so what is of a foreign page
is refused before anything runs. A request without either is of no browser, and passes. See the Fetch standard, "HTTP extensions".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessella_p2p.base.limits import MAX_CORS_HEADER_CHARS, PREFLIGHT_S
from tessella_p2p.base.urls import DEFAULT_PORTS, EVERY_ORIGIN
from tessella_p2p.bridge.errors import ErrorAnswer, shaped_error
from tessella_p2p.bridge.middleware import send_answer

_FORBIDDEN: Final = 403
_MAX_SHOWN_CHARS: Final = 128
_METHODS: Final = "GET, POST"
_READABLE: Final = (
    "retry-after, x-request-id, x-tessella-route, x-ratelimit-limit-requests, x-ratelimit-limit-tokens, "
    "x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
_HEADER_NAMES: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_FOREIGN: Final = frozenset({"cross-site", "same-site"})
"""What ``Sec-Fetch-Site`` says of another origin: another port of this machine is the same site."""


@dataclass(frozen=True, slots=True)
class OriginRules:
    """Whose pages may use a server.

    Attributes:
        allowed: other origins, see `base.urls.check_origin`; ``*`` is everybody.
        names: of this server behind a proxy that sends another ``Host``, in lower case; pages of these names are its own.
    """

    allowed: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()

    def allows(self, origin: str) -> bool:
        """Whether another origin's pages may use it."""
        return EVERY_ORIGIN in self.allowed or origin in self.allowed

    def is_own(self, origin: str, hosts: Iterable[str]) -> bool:
        """Whether ``origin`` is that of this server, which was asked as ``hosts``: the values of ``Host``."""
        scheme, separator, authority = origin.lower().partition("://")
        if not separator or scheme not in DEFAULT_PORTS:
            return False
        port = DEFAULT_PORTS[scheme]
        asked = [host.lower().removesuffix(port) for host in hosts]
        return asked == [authority.removesuffix(port)] or _host_of(authority) in self.names


def _host_of(authority: str) -> str:
    return authority if authority.endswith("]") else authority.rpartition(":")[0] or authority


class KnownOrigin:
    """Answers 403 to pages of other origins, and says to browsers which ones may read the answers.

    Args:
        app: answers the others.
        rules: whose pages may.
    """

    def __init__(self, app: ASGIApp, rules: OriginRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, answer a preflight, or refuse it unread."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origins = headers.getlist("origin")
        if not origins:
            if _is_foreign_without_origin(headers):
                await send_answer(send, _refused("another page's"))
            else:
                await self._app(scope, receive, send)
            return
        origin = origins[0]
        if len(origins) == 1 and self._rules.is_own(origin, headers.getlist("host")):
            await self._app(scope, receive, send)
        elif len(origins) > 1 or not self._rules.allows(origin):
            await send_answer(send, _refused(origin[:_MAX_SHOWN_CHARS]))
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _answer_preflight(headers, origin, send)
        else:
            await self._app(scope, receive, _readable_by(origin, send))


def _is_foreign_without_origin(headers: Headers) -> bool:
    """An image, script or frame in another origin's page; that a reader follows a link to here is not."""
    return headers.get("sec-fetch-site") in _FOREIGN and headers.get("sec-fetch-mode") != "navigate"


def _refused(origin: str) -> ErrorAnswer:
    message = (
        f"a web page may not use this node: the request's origin is {origin!r}; "
        "the setting cors_origins names the origins whose pages may"
    )
    return shaped_error(_FORBIDDEN, message, "origin_not_allowed", headers={"connection": "close", "vary": "origin"})


def _readable_by(origin: str, send: Send) -> Send:
    async def send_readable(message: Message) -> None:
        if message["type"] == "http.response.start":
            more = (
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", _READABLE.encode("ascii")),
                (b"vary", b"origin"),
            )
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return send_readable


async def _answer_preflight(headers: Headers, origin: str, send: Send) -> None:
    """What the page may send: whatever headers it asks for, since none of them opens anything but a key that it has to know."""
    answer = {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": _METHODS,
        "access-control-max-age": str(PREFLIGHT_S),
        "vary": "origin",
        "content-length": "0",
    }
    asked = headers.get("access-control-request-headers", "")
    if len(asked) <= MAX_CORS_HEADER_CHARS and _HEADER_NAMES.fullmatch(asked):
        answer["access-control-allow-headers"] = asked
    if headers.get("access-control-request-private-network") == "true":
        answer["access-control-allow-private-network"] = "true"
    sent = [(name.encode("ascii"), value.encode("latin-1")) for name, value in answer.items()]
    await send({"type": "http.response.start", "status": 204, "headers": sent})
    await send({"type": "http.response.body", "body": b""})
