"""Requests that were sent to this server under a name of its own, and no others.

A web page of anybody's may have its own name lead to 127.0.0.1 (DNS rebinding); the browser then takes this server for the page's own,
and lets the page read and send what is meant for whoever sits at this machine. The name in ``Host`` is the page's, so the request is
refused. A server on another address is behind a proxy, or meant for everybody, and does not look; but if it asks nobody for a key,
its network alone keeps strangers out of it, and a page in a browser there is in that network: then it looks, too.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tessella_p2p.bridge.errors import shaped_error
from tessella_p2p.bridge.middleware import send_answer

_MISDIRECTED = 421
_MAX_SHOWN_CHARS = 128


def own_names(api_host: str, names: Iterable[str], *, is_guarded: bool = True) -> frozenset[str] | None:
    """The names beside ``localhost`` under which a server on ``api_host`` may be asked; None where every name will do.

    Args:
        api_host: the address that it listens on.
        names: those of the configuration.
        is_guarded: whether what is worth something there needs a secret that a page does not know.
    """
    if is_guarded and not ipaddress.ip_address(api_host).is_loopback:
        return None
    return frozenset(name.lower() for name in names)


def is_own(host: str, names: frozenset[str]) -> bool:
    """Whether the value of a ``Host`` header is an address, ``localhost``, or one of ``names`` (lower case), with or without a port.

    An address cannot be made to lead elsewhere, so no page can pose as one.
    """
    bracketed, bracket, port = host.partition("]")
    name, port = (bracketed[1:], port) if bracket and host.startswith("[") else host.partition(":")[::2]
    if port and not port.removeprefix(":").isdecimal():
        return False
    name = name.lower().removesuffix(".")
    return name == "localhost" or name.endswith(".localhost") or name in names or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class KnownHost:
    """Answers 421 to what was sent to another name. A request without ``Host`` (HTTP/1.0) is of no browser, and passes.

    Args:
        app: answers the others.
        names: see `own_names`.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it unread."""
        hosts = Headers(scope=scope).getlist("host") if scope["type"] == "http" else []
        foreign = next((host for host in hosts if not is_own(host, self._names)), None)
        if foreign is None:
            await self._app(scope, receive, send)
            return
        message = (
            f"this server is not {foreign[:_MAX_SHOWN_CHARS]!r}: ask it as localhost or by its address, "
            "or name it in the setting api_names"
        )
        answer = shaped_error(_MISDIRECTED, message, "misdirected_request", headers={"connection": "close"})
        await send_answer(send, answer)
