"""The dashboard: its files, and the stream of pictures that it draws (shell).

The pages are plain files of this package: no build step, nothing from another host. Their content security policy allows scripts and
styles of this server alone, no inline ones, and no markup out of strings (trusted types without a policy), so whatever a peer calls
itself stays text.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from itertools import takewhile
from typing import Final

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import Overloaded, TessellaError
from tessella_p2p.base.limits import (
    MAX_PICTURE_WATCHERS,
    MAX_PICTURE_WATCHERS_PER_KEY,
    PICTURE_PERIOD_S,
    PICTURED_RATE_S,
    SSE_PING_S,
)
from tessella_p2p.bridge.answering import ClientWatch, EventStream
from tessella_p2p.bridge.answers import event
from tessella_p2p.bridge.callers import caller_of
from tessella_p2p.bridge.mesh_picture import Flight, flight_of, flights_json, mesh_json
from tessella_p2p.bridge.node_view import NodeView
from tessella_p2p.entry.api import Caller, Entry

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_SCRIPTS: Final = (
    *("mesh.js", "layer_map.js", "rate_picture.js", "chat.js"),
    *("node_client.js", "elements.js", "words.js"),
)
FILES: Final = {
    "index.html": "text/html; charset=utf-8",
    "chat.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(_SCRIPTS, "text/javascript; charset=utf-8"),
}
"""Every file of the dashboard, with its media type; no other name is looked for."""
DASHBOARD_PATHS: Final = frozenset({"/", "/events", *(f"/ui/{name}" for name in FILES)})
"""Every path of the dashboard. All but ``/events`` say nothing of the mesh, and need no key."""
_HEADERS: Final = {
    "cache-control": "no-cache",  # asked again each time, and answered 304: a new version shows at once
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}

_SHARED_MS: Final = round(1000 * PICTURE_PERIOD_S) // 2
"""How long one picture does for all that watch: a picture of a large mesh costs milliseconds."""


def dashboard_routes(entry: Entry, node: NodeView, clock: WallClock) -> list[Route]:
    """``/``, ``/ui/…`` and ``/events``.

    Args:
        entry: says which models are answered for, and tells of its requests.
        node: tells of itself and its peers.
        clock: dates the pictures.
    """
    pages = {name: _StaticFile(name, media_type) for name, media_type in FILES.items()}
    return [
        Route("/", pages["index.html"].answer),
        *(Route(f"/ui/{name}", page.answer) for name, page in pages.items()),
        Route("/events", PictureStream(entry, node, clock), methods=["GET"]),
    ]


class _StaticFile:
    """One file of the dashboard, read once."""

    def __init__(self, name: str, media_type: str) -> None:
        self._body = (files("tessella_p2p.bridge") / "dashboard" / name).read_bytes()
        self._media_type = media_type
        self._etag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'

    async def answer(self, request: Request) -> Response:
        """The file, or 304 for who has it."""
        headers = {**_HEADERS, "etag": self._etag}
        held = (tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(","))
        if self._etag in held:
            return Response(status_code=304, headers=headers)
        return Response(self._body, media_type=self._media_type, headers=headers)


class PictureStream:
    """An ASGI app: server-sent events, one picture of the mesh each second, until the client leaves or its key counts no longer."""

    def __init__(self, entry: Entry, node: NodeView, clock: WallClock) -> None:
        self._entry = entry
        self._node = node
        self._clock = clock
        self._watchers: Counter[str] = Counter()  # by the caller's name
        self._drawn_at_ms = -_SHARED_MS
        self._mesh: dict[str, object] = {}
        self._flights: list[Flight] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Show the mesh to one client.

        Raises:
            Overloaded: as many as are shown it already watch, in all or with this key.
        """
        request = Request(scope, receive)
        if scope["method"] == "HEAD":
            await Response(headers={"cache-control": "no-store"}, media_type="text/event-stream")(scope, receive, send)
            return
        await request.body()
        caller = caller_of(request.scope)
        if self._watchers.total() >= MAX_PICTURE_WATCHERS:
            raise Overloaded(f"{MAX_PICTURE_WATCHERS} clients watch this node already; close one of them")
        if caller.name and self._watchers[caller.name] >= MAX_PICTURE_WATCHERS_PER_KEY:
            raise Overloaded(f"{MAX_PICTURE_WATCHERS_PER_KEY} clients watch this node with this key; close one of them")
        key_counts: Callable[[], bool] = getattr(request.state, "key_counts", lambda: True)
        stream = EventStream(send, SSE_PING_S)
        self._watchers[caller.name] += 1
        try:
            watch = ClientWatch(receive)
            await watch.guard(lambda: self._show(stream, caller, key_counts), self._prove)
            if not watch.left:
                await stream.end()
        finally:
            self._watchers -= Counter((caller.name,))  # and forget a name at none

    async def _prove(self) -> None:
        """Who begins to look wants to know whether the model answers now; who leaves the page open does not keep the mesh awake."""
        with suppress(TessellaError):  # the picture tells of it
            await self._entry.check_ready()

    async def _show(self, stream: EventStream, caller: Caller, key_counts: Callable[[], bool]) -> None:
        """Until the client leaves, or its key is revoked or over."""
        while key_counts():
            await stream.write(event(self.picture(caller)))
            await trio.sleep(PICTURE_PERIOD_S)

    def picture(self, caller: Caller) -> dict[str, object]:
        """The mesh now, as ``caller`` may see it."""
        now_ms = self._clock.unix_ms()
        if not 0 <= now_ms - self._drawn_at_ms < _SHARED_MS:
            self._draw(now_ms)
        return {**self._mesh, **flights_json(self._flights, caller)}

    def _draw(self, now_ms: int) -> None:
        """Of requests: those in flight, and those that ended while the rates' seconds reach back."""
        book, since_ms = self._entry.requests, now_ms - 1000 * PICTURED_RATE_S
        ended = takewhile(lambda record: record.began_at_ms + (record.ended_ms or 0) >= since_ms, book.recent())
        self._drawn_at_ms = now_ms
        self._flights = [flight_of(record, now_ms) for record in (*book.in_flight(), *ended)]
        self._mesh = mesh_json(
            self._node.status(), self._node.peers(None), self._entry.model_ids(), self._flights, now_ms
        )
