"""The node's HTTP surface as one ASGI app. ``docs/protocols/http.md`` describes it to clients."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tessella_p2p import __version__
from tessella_p2p.base.clock import SystemClock, WallClock
from tessella_p2p.base.errors import NoRoute, UnknownModel
from tessella_p2p.base.limits import HTTP_BODY_TIMEOUT_S, MAX_HTTP_BODY_BYTES, SSE_PING_S
from tessella_p2p.bridge.answering import GenerationEndpoint
from tessella_p2p.bridge.answers import encoded
from tessella_p2p.bridge.api_docs import CONTENT_SECURITY_POLICY, docs_page
from tessella_p2p.bridge.authorising import HEALTH_PATH, Authorising, KeyRing, MeteredEntry
from tessella_p2p.bridge.chat import read_chat
from tessella_p2p.bridge.completions import read_completion
from tessella_p2p.bridge.dashboard_app import DASHBOARD_PATHS, dashboard_routes
from tessella_p2p.bridge.embeddings import EmbeddingsEndpoint
from tessella_p2p.bridge.fim import read_fim
from tessella_p2p.bridge.generate import read_generate
from tessella_p2p.bridge.infill import InfillEndpoint
from tessella_p2p.bridge.known_host import KnownHost
from tessella_p2p.bridge.known_origin import KnownOrigin, OriginRules
from tessella_p2p.bridge.metrics import BridgeMetrics
from tessella_p2p.bridge.middleware import BufferedBody, Observed
from tessella_p2p.bridge.moved import MOVED, moved_routes
from tessella_p2p.bridge.node_openapi import DOCS_PATH, OPENAPI_PATH, OPERATIONS, openapi
from tessella_p2p.bridge.node_view import NodeView, peer_json, status_json
from tessella_p2p.bridge.request_view import request_routes
from tessella_p2p.bridge.responses import exception_handlers, json_response, logged_answer
from tessella_p2p.bridge.traced import Traced
from tessella_p2p.entry.api import Entry

_ROUTES = frozenset((*(each.path for each in OPERATIONS), *MOVED, *DASHBOARD_PATHS))
_OPEN_ENDED = {path.partition("{")[0]: path for path in _ROUTES if "{" in path}


def create_app(
    entry: Entry,
    node: NodeView,
    *,
    version: str = __version__,
    clock: WallClock | None = None,
    max_body_bytes: int = MAX_HTTP_BODY_BYTES,
    body_timeout_s: float = HTTP_BODY_TIMEOUT_S,
    ping_s: float = SSE_PING_S,
    names: frozenset[str] | None = None,
    origins: OriginRules | None = None,
    keys: KeyRing | None = None,
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
        names: under which it may be asked, see `known_host.own_names`; None: under any.
        origins: whose web pages may use it; None: its own alone.
        keys: who may use it, and how much; None: everybody who can reach it.
    """
    if keys is not None:
        entry = MeteredEntry(entry, keys.rates.spend)
    clock = clock or SystemClock()
    metrics = BridgeMetrics(node)
    surface = _NodeSurface(entry, node, metrics, version, started=clock.unix_ms() // 1000)
    chat = GenerationEndpoint(lambda body: read_chat(body, entry.features), entry, clock, metrics, ping_s)
    completions = GenerationEndpoint(lambda body: read_completion(body, entry.text_of), entry, clock, metrics, ping_s)
    generate = GenerationEndpoint(lambda body: read_generate(body, entry.known_models()), entry, clock, metrics, ping_s)
    fim = GenerationEndpoint(lambda body: read_fim(body, entry.known_models()), entry, clock, metrics, ping_s)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/generate", generate, methods=["POST"]),
            Route("/v1/fim/completions", fim, methods=["POST"]),
            Route("/v1/embeddings", EmbeddingsEndpoint(entry, metrics), methods=["POST"]),
            Route("/infill", InfillEndpoint(entry, metrics, ping_s), methods=["POST"]),
            Route("/v1/models", surface.models),
            Route("/v1/models/{model:path}", surface.model),
            Route("/status", surface.status),
            Route("/peers", surface.peers),
            Route("/metrics", surface.metrics),
            Route(HEALTH_PATH, surface.health),
            Route(OPENAPI_PATH, surface.openapi),
            Route(DOCS_PATH, surface.docs),
            *request_routes(entry),
            *moved_routes(),
            *dashboard_routes(entry, node, clock),
        ],
        exception_handlers=exception_handlers(logged_answer),
    )
    app.router.redirect_slashes = False  # a redirect is no JSON, and an SDK would follow it with a GET
    answering: ASGIApp = Traced(BufferedBody(app, max_body_bytes, body_timeout_s))
    if keys is not None:
        answering = Authorising(answering, keys)
    answering = KnownOrigin(answering, origins or OriginRules())
    if names is not None:
        answering = KnownHost(answering, names)
    return Observed(answering, metrics, _route_of)


class _NodeSurface:
    """The routes that read."""

    def __init__(self, entry: Entry, node: NodeView, metrics: BridgeMetrics, version: str, *, started: int) -> None:
        self._entry = entry
        self._node = node
        self._metrics = metrics
        self._version = version
        self._started = started
        self._document, self._page = _described(version)

    async def models(self, _: Request) -> Response:
        with suppress(NoRoute):  # then there is nothing to list
            await self._entry.check_ready()
        return json_response(
            {"object": "list", "data": [self._model_object(model) for model in self._entry.model_ids()]}
        )

    async def model(self, request: Request) -> Response:
        model: str = request.path_params["model"]
        if model not in self._entry.known_models():
            raise UnknownModel(f"the model {model!r} is not served here")
        await self._entry.check_ready()
        return json_response(self._model_object(model))

    async def status(self, _: Request) -> Response:
        return json_response(status_json(self._node.status(), self._version, self._entry.model_ids()))

    async def peers(self, request: Request) -> Response:
        return json_response([peer_json(peer) for peer in self._node.peers(request.query_params.get("model_id"))])

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def health(self, _: Request) -> Response:
        """Whoever restarts processes asks this, without a key: it says that this one answers, and nothing of the mesh."""
        return json_response({"status": "ok"})

    async def openapi(self, _: Request) -> Response:
        return Response(self._document, media_type="application/json", headers={"cache-control": "no-store"})

    async def docs(self, _: Request) -> Response:
        return Response(
            self._page, media_type="text/html", headers={"content-security-policy": CONTENT_SECURITY_POLICY}
        )

    def _model_object(self, model: str) -> dict[str, object]:
        features = self._entry.features(model)
        return {
            "id": model,
            "object": "model",
            "created": self._started,
            "owned_by": "tessella",
            "context_length": features.context_length,
            "embedding_length": features.embedding_length,
            "features": {"fill_in_the_middle": features.fill_in_the_middle, "tools": features.tools},
        }


@cache
def _described(version: str) -> tuple[bytes, str]:
    """The OpenAPI document, as JSON and as a page; made once, since it takes longer than the event loop may stand still."""
    document = openapi(version)
    return encoded(document), docs_page(document)


def _route_of(path: str) -> str:
    """The name under which a path is counted."""
    if path in _ROUTES:
        return path
    return next((route for start, route in _OPEN_ENDED.items() if path.startswith(start)), "other")
