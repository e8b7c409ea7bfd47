"""The orchestrator's HTTP surface as one ASGI app: a thin mirror of the handlers that answer over P2P.

``docs/protocols/orchestrator-http.md`` describes it. A signed route hands the sealed request on as it came; so whatever is judged over
P2P is judged here, in the same order, but for the stream's peer, whom HTTP does not authenticate.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import structlog
import trio
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, compile_path
from starlette.types import ASGIApp

from tessella_p2p import __version__
from tessella_p2p.base.errors import InvalidRequest, MalformedMessage, NotOperator, Overloaded
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import HTTP_BODY_TIMEOUT_S, MAX_ENVELOPE_BYTES, ORCHESTRATOR_REQUEST_S
from tessella_p2p.bridge import orchestrator_json as j
from tessella_p2p.bridge.api_docs import CONTENT_SECURITY_POLICY, docs_page
from tessella_p2p.bridge.known_host import KnownHost
from tessella_p2p.bridge.metrics import HttpMetrics
from tessella_p2p.bridge.middleware import BufferedBody, Observed
from tessella_p2p.bridge.moved import MOVED, moved_routes
from tessella_p2p.bridge.orchestrator_metrics import OrchestratorReadings
from tessella_p2p.bridge.orchestrator_openapi import openapi
from tessella_p2p.bridge.orchestrator_requests import (
    BODY,
    CBOR,
    JSON,
    bearer_token,
    check_content_type,
    flag,
    message_of_json,
    message_of_query,
    named_field,
    parameters,
    sealed_of_header,
)
from tessella_p2p.bridge.orchestrator_routes import (
    DOCS_PATH,
    ENVELOPE_HEADER,
    METRICS_PATH,
    NEXT_HEADER,
    OPENAPI_PATH,
    ROUTES,
    ApiRoute,
)
from tessella_p2p.bridge.responses import exception_handlers, json_response, logged_answer
from tessella_p2p.orchestrator.reading import replica_groups
from tessella_p2p.orchestrator.service import Orchestrator
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import peek_signer

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)
_PATHS = frozenset({*(route.path for route in ROUTES), METRICS_PATH, OPENAPI_PATH, DOCS_PATH})
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
_MOVED = [(compile_path(path)[0], path) for path in MOVED]


def create_orchestrator_app(
    orchestrator: Orchestrator,
    *,
    version: str = __version__,
    max_body_bytes: int = MAX_ENVELOPE_BYTES,
    body_timeout_s: float = HTTP_BODY_TIMEOUT_S,
    names: frozenset[str] | None = None,
) -> ASGIApp:
    """Everything that an orchestrator answers over HTTP.

    Args:
        orchestrator: answers.
        version: of this package, for the OpenAPI document.
        max_body_bytes: of a request; beyond it, 413.
        body_timeout_s: for a request's body; beyond it, 408.
        names: under which it may be asked, see `known_host.own_names`; None: under any.
    """
    surface = _Surface(orchestrator, version)
    app = Starlette(
        routes=[
            *(Route(path, endpoint, methods=methods) for path, methods, endpoint in surface.endpoints()),
            Route(METRICS_PATH, surface.metrics),
            Route(OPENAPI_PATH, surface.openapi),
            Route(DOCS_PATH, surface.docs),
            *moved_routes(),
        ],
        exception_handlers=exception_handlers(partial(logged_answer, of_client=True)),
    )
    app.router.redirect_slashes = False
    answering: ASGIApp = BufferedBody(app, max_body_bytes, body_timeout_s)
    if names is not None:
        answering = KnownHost(answering, names)
    return Observed(answering, surface.http_metrics, _route_of)


class _Surface:
    """What the routes do."""

    def __init__(self, orchestrator: Orchestrator, version: str) -> None:
        self._orchestrator = orchestrator
        self._document = openapi(version)
        self._page = docs_page(self._document)
        self.http_metrics = HttpMetrics()
        self._readings = OrchestratorReadings()
        self.http_metrics.registry.register(self._readings)

    def endpoints(self) -> Iterator[tuple[str, list[str], Endpoint]]:
        """Each path with its methods and what answers them."""
        by_path: dict[str, dict[str, ApiRoute]] = {}
        for route in ROUTES:
            by_path.setdefault(route.path, {})[route.method] = route
        for path, routes in by_path.items():
            yield path, list(routes), self._endpoint(routes)

    def _endpoint(self, routes: Mapping[str, ApiRoute]) -> Endpoint:
        """What answers ``routes`` of one path, by method, within the time that a request has over P2P."""
        answers = {"public": self._public, "signed": self._signed, "operator": self._operator}

        async def serve(request: Request) -> Response:
            route = routes["GET" if request.method == "HEAD" else request.method]
            with trio.move_on_after(ORCHESTRATOR_REQUEST_S):
                return await answers[route.access](route, request)
            raise Overloaded(f"no answer within {ORCHESTRATOR_REQUEST_S:g} s; it may be done or not: ask again")

        return serve

    # ---- Public ----

    async def _public(self, route: ApiRoute, request: Request) -> Response:
        message: Any = message_of_query(route, parameters(request.scope["query_string"]))
        return _answered(route, await self._orchestrator.read(message))

    async def metrics(self, _: Request) -> Response:
        """Counters, in Prometheus' text format."""
        orchestrator = self._orchestrator
        answer = await orchestrator.read(m.ReadMetrics())
        assert isinstance(answer, m.Metrics)
        self._readings.counters = answer.counters
        self._readings.coverage = orchestrator.reading.coverage()
        return Response(self.http_metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def openapi(self, _: Request) -> Response:
        """The OpenAPI document."""
        return json_response(self._document)

    async def docs(self, _: Request) -> Response:
        """The same, to be read."""
        return Response(
            self._page, media_type="text/html", headers={"content-security-policy": CONTENT_SECURITY_POLICY}
        )

    # ---- Signed ----

    async def _signed(self, route: ApiRoute, request: Request) -> Response:
        parameters_given = parameters(request.scope["query_string"])
        if parameters_given:
            raise InvalidRequest("a signed route takes no parameters: all of it is in the envelope", "query")
        if route.method == "POST":
            check_content_type(request.headers.get("content-type"), CBOR)
            raw, where = await request.body(), BODY
        else:
            raw, where = sealed_of_header(request.headers.get(ENVELOPE_HEADER)), ENVELOPE_HEADER
        try:
            answer = await self._orchestrator.handle(raw, None, route.check)
        except MalformedMessage as error:
            raise named_field(error, where) from error
        match answer:
            case m.Assigned():
                return json_response(j.json_of(await self._registration(peek_signer(raw), answer)))
            case m.Acknowledged():
                return json_response(j.json_of(j.Acknowledgement()))
            case _:
                return _answered(route, answer)

    async def _registration(self, peer: PeerId, answer: m.Assigned) -> j.Registration:
        """``answer`` with the peers that the manual's has in it, and the number of the copy that the worker holds."""
        listed = await self._orchestrator.read(m.ListPeers(model_id=answer.model_id))
        assert isinstance(listed, m.Peers)
        groups = replica_groups(self._orchestrator.membership.members())
        return j.registration(answer, listed.peers, groups.get(peer, 0))

    # ---- Operator ----

    async def _operator(self, route: ApiRoute, request: Request) -> Response:
        token = bearer_token(request.headers.get("authorization"))
        where = f"http {request.client.host}" if request.client is not None else "http"
        try:
            self._orchestrator.operating.check(token)  # before anything is said about the request
        except NotOperator as error:
            _log.warning("operator_refused", where=where, reason=str(error))
            raise
        given = parameters(request.scope["query_string"])
        one_row = False
        if route.also:
            one_row = not flag(given, "all")
            if one_row == ("peer_id" not in given):
                raise InvalidRequest("give one peer_id, or all=true", "peer_id")
        if route.method == "POST":
            if given:  # one that passed over `dry_run=true` would do what was not asked
                raise InvalidRequest("this route takes no parameters: what is asked is in the body", "query")
            check_content_type(request.headers.get("content-type"), JSON)
            message: Any = message_of_json(route, await request.body())
        else:
            message = message_of_query(route, given)
        answer = await self._orchestrator.operate(token, message, where=where)
        if isinstance(answer, m.SnapshotPage) and "chain" not in given and answer.chain != message.chain:
            pull = m.PullSnapshot(chain=answer.chain, since=message.since, limit=message.limit)
            answer = await self._orchestrator.operate(token, pull, where=where)
        if one_row:
            return json_response(j.json_of(route.of(answer)[0]))
        return _answered(route, answer)


def _answered(route: ApiRoute, answer: Any) -> Response:
    body: BaseModel | list[BaseModel] = route.of(answer)
    if not isinstance(body, list):
        return json_response(j.json_of(body))
    headers = {}
    if route.next_key is not None and body and answer.more:
        headers[NEXT_HEADER] = str(getattr(body[-1], route.next_key))
    return json_response([j.json_of(row) for row in body], headers)


def _route_of(path: str) -> str:
    """The name under which a path is counted."""
    if path in _PATHS:
        return path
    return next((name for pattern, name in _MOVED if pattern.match(path)), "other")
