"""The node's HTTP surface as one ASGI app. ``docs/protocols/http.md`` describes it to clients."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tessella_p2p import __version__
from tessella_p2p.base.clock import SystemClock, WallClock
from tessella_p2p.base.errors import LocalProtocolError, TessellaError, UnknownModel
from tessella_p2p.base.limits import HTTP_BODY_TIMEOUT_S, MAX_HTTP_BODY_BYTES, SSE_PING_S
from tessella_p2p.bridge.answering import GenerationEndpoint, logged_answer
from tessella_p2p.bridge.answers import encoded
from tessella_p2p.bridge.chat import read_chat
from tessella_p2p.bridge.errors import ErrorAnswer, error_answer, shaped_error
from tessella_p2p.bridge.generate import read_generate
from tessella_p2p.bridge.metrics import BridgeMetrics
from tessella_p2p.bridge.middleware import BufferedBody, Observed
from tessella_p2p.bridge.node_view import NodeView, peer_json, status_json
from tessella_p2p.entry.api import Entry

_HTTP_CODES = {404: "unknown_url", 405: "method_not_allowed"}


def create_app(
    entry: Entry,
    node: NodeView,
    *,
    version: str = __version__,
    clock: WallClock | None = None,
    max_body_bytes: int = MAX_HTTP_BODY_BYTES,
    body_timeout_s: float = HTTP_BODY_TIMEOUT_S,
    ping_s: float = SSE_PING_S,
) -> ASGIApp:
    """Everything that a node answers over HTTP.

    Args:
        entry: generates text.
        node: tells of itself and its peers.
        version: of this package, for ``/status``.
        clock: dates the answers; the machine's by default.
        max_body_bytes: of a request; beyond it, 413.
        body_timeout_s: for a request's body; beyond it, 408.
        ping_s: silence after which a stream gets a comment.
    """
    clock = clock or SystemClock()
    metrics = BridgeMetrics(node)
    surface = _NodeSurface(entry, node, metrics, version, started=clock.unix_ms() // 1000)
    chat = GenerationEndpoint(read_chat, entry, clock, metrics, ping_s)
    generate = GenerationEndpoint(lambda body: read_generate(body, entry.model_ids()), entry, clock, metrics, ping_s)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/generate", generate, methods=["POST"]),
            Route("/v1/models", surface.models),
            Route("/v1/models/{model:path}", surface.model),
            Route("/status", surface.status),
            Route("/peers", surface.peers),
            Route("/metrics", surface.metrics),
        ],
        exception_handlers={
            TessellaError: _on_tessella_error,
            HTTPException: _on_http_exception,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False  # a redirect is no JSON, and an SDK would follow it with a GET
    return Observed(BufferedBody(app, max_body_bytes, body_timeout_s), metrics)


class _NodeSurface:
    """The routes that read."""

    def __init__(self, entry: Entry, node: NodeView, metrics: BridgeMetrics, version: str, *, started: int) -> None:
        self._entry = entry
        self._node = node
        self._metrics = metrics
        self._version = version
        self._started = started

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._model_object(model) for model in self._entry.model_ids()]})

    async def model(self, request: Request) -> Response:
        model: str = request.path_params["model"]
        if model not in self._entry.model_ids():
            raise UnknownModel(f"the model {model!r} is not served here")
        return _json(self._model_object(model))

    async def status(self, _: Request) -> Response:
        return _json(status_json(self._node.status(), self._version, self._entry.model_ids()))

    async def peers(self, request: Request) -> Response:
        return _json([peer_json(peer) for peer in self._node.peers(request.query_params.get("model_id"))])

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    def _model_object(self, model: str) -> dict[str, object]:
        return {"id": model, "object": "model", "created": self._started, "owned_by": "tessella"}


def _json(value: object) -> Response:
    return Response(encoded(value), media_type="application/json", headers={"cache-control": "no-store"})


def _response(answer: ErrorAnswer) -> Response:
    return Response(answer.json(), answer.status, answer.headers, media_type="application/json")


async def _on_tessella_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, TessellaError):
        raise error
    return _response(logged_answer(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    status = error.status_code
    code = _HTTP_CODES.get(status, "invalid_request")
    what = f"{request.method} {request.scope['path']}"
    message = {404: f"there is nothing at {what}", 405: f"{what} is not answered; see the allow header"}.get(
        status, error.detail
    )
    return _response(shaped_error(status, message, code, headers=error.headers))


async def _on_bug(_: Request, __: Exception) -> Response:
    """The answer to a request that met a bug; `Observed` logs the exception, which Starlette passes on to it."""
    return _response(error_answer(LocalProtocolError()))
