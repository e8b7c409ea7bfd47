"""Routes of the manual that are libp2p protocols here: they live on to say so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tessella_p2p.base.errors import Moved
from tessella_p2p.bridge.errors import shaped_error
from tessella_p2p.bridge.responses import error_response
from tessella_p2p.wire import protocols

MOVED: Final[Mapping[str, str]] = {
    "/v1/forward": protocols.HOP,
    "/v1/token_stream/{request_id}": protocols.TOKENS,
    "/api/v1/update_assignment": protocols.ORDERS,
}
"""By path, the protocol that does the work."""


def moved_routes() -> list[Route]:
    """Routes that answer 410, and name the protocol."""
    return [Route(path, _gone(protocol), methods=["POST"]) for path, protocol in MOVED.items()]


def _gone(protocol: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        message = f"{request.method} {request.scope['path']} is no HTTP route here: peers speak {protocol} over libp2p"
        return error_response(shaped_error(Moved.http_status, message, Moved.code, more={"protocol": protocol}))

    return answer
