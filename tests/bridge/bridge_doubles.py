"""What stands on the other sides of the bridge in its tests: an entry that speaks without a mesh, a node that knows its numbers, a
server on loopback, and a caller that needs no socket."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio
from starlette.types import ASGIApp, Message

from tessella_p2p.base.errors import InvalidRequest, NoRoute, PromptTooLong, TessellaError, UnknownModel
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import MAX_HOP_BYTES
from tessella_p2p.bridge.app import create_app
from tessella_p2p.bridge.node_view import (
    Assignment,
    Credits,
    DeviceHealth,
    NodeStatus,
    OrchestratorView,
    PeerView,
    ProofCounts,
)
from tessella_p2p.bridge.server import ServerLimits, serve
from tessella_p2p.bridge.stage_view import LoopView, StageView
from tessella_p2p.entry.api import (
    Delta,
    Embedded,
    EmbedRequest,
    Finished,
    GenerateRequest,
    Generation,
    GenerationEvent,
    HopReport,
    ModelFeatures,
    Prepared,
    ScoredToken,
    TokenScores,
)
from tessella_p2p.entry.requests import RequestBook
from tessella_p2p.stages.engine import KvUse

MODEL = "toy"
MAX_PROMPT_IDS = 128
ANSWER = ("The", " capital", " of", " France", " is", " Paris", ".")
FEATURES = ModelFeatures(fill_in_the_middle=True, tools=True, context_length=8192, embedding_length=4)
ROUTE = (
    HopReport(PeerId("12D3KooWHead"), LayerRange(0, 12), 1.5, 1.0),
    HopReport(PeerId("12D3KooWTail"), LayerRange(12, 30), 2.5, 2.0),
)


@dataclass
class SpeakingEntry:
    """Implements `Entry`: speaks `ANSWER` word by word, and tells how each generation ended.

    ``hold_after``: words after which a generation waits for ``release``. ``fail_after``: words after which ``failure`` is raised.
    ``refusal``: raised instead of admitting. ``words_for``: what is spoken for each request, in place of ``words``.
    """

    hold_after: int | None = None
    fail_after: int | None = None
    failure: Exception | None = None
    refusal: TessellaError | None = None
    words: Sequence[str] = ANSWER
    words_for: Callable[[GenerateRequest], Sequence[str]] | None = None
    models: tuple[str, ...] = (MODEL,)
    abilities: ModelFeatures = FEATURES
    release: trio.Event = field(default_factory=trio.Event)
    holding: trio.Event = field(default_factory=trio.Event)
    closed: trio.Event = field(default_factory=trio.Event)
    asked: list[GenerateRequest] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    embedded: list[EmbedRequest] = field(default_factory=list)
    requests: RequestBook = field(default_factory=RequestBook)
    not_ready: NoRoute | None = None

    def known_models(self) -> tuple[str, ...]:
        return self.models

    def model_ids(self) -> tuple[str, ...]:
        return self.models if self.not_ready is None else ()

    async def check_ready(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.not_ready is not None:
            raise self.not_ready

    def features(self, model: str) -> ModelFeatures:
        if model not in self.models:
            raise UnknownModel(f"the model {model!r} is not served here")
        return self.abilities

    def text_of(self, token_ids: Sequence[int]) -> str:
        return "".join(self.words[token_id] for token_id in token_ids)

    async def embed(self, request: EmbedRequest) -> tuple[Embedded, ...]:
        """A vector that tells an input's length and its place; waits for ``release`` where ``hold_after`` is set."""
        self.features(request.model)
        self.embedded.append(request)
        if self.refusal is not None:
            raise self.refusal
        if request.admitted is not None:
            for each in request.inputs:
                request.admitted(len(each))
        if self.hold_after is not None:
            self.holding.set()
            try:
                await self.release.wait()
            except trio.Cancelled:
                self.ends.append("cancelled")
                raise
        await trio.lowlevel.checkpoint()
        return tuple(
            Embedded((len(each) / 8, place / 8, -0.5, 1 / 3), len(each), f"req-{place}", ROUTE)
            for place, each in enumerate(request.inputs)
        )

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        self.asked.append(request)
        if request.model not in self.models:
            raise UnknownModel(f"the model {request.model!r} is not served here")
        if request.gap is not None and not self.abilities.fill_in_the_middle:
            raise InvalidRequest("this model has no fill-in-the-middle tokens", "suffix")
        prompt_ids = tuple(request.prompt_ids or _text_of(request).encode())
        if len(prompt_ids) > MAX_PROMPT_IDS:
            raise PromptTooLong(f"the prompt has {len(prompt_ids)} tokens, {MAX_PROMPT_IDS} are accepted")
        words = self.words_for(request) if self.words_for is not None else self.words
        prepared = Prepared(f"req-{len(self.asked)}", request.model, prompt_ids, request.max_tokens or len(words))
        # As a real entry's: a nursery around the generation, which wraps in a group whatever leaves it by raising.
        async with trio.open_nursery() as nursery:
            if self.refusal is not None:
                raise self.refusal
            try:
                yield SpeakingGeneration(self, prepared, request, words)
            except trio.Cancelled:
                self.ends.append("cancelled")
                raise
            else:
                self.ends.append("closed")
            finally:
                self.closed.set()
                nursery.cancel_scope.cancel()


def _text_of(request: GenerateRequest) -> str:
    if request.messages is not None:
        return "\n".join(str(message["content"]) for message in request.messages)
    if request.gap is not None:
        return request.gap.prefix + request.gap.suffix
    return request.prompt or ""


@dataclass
class SpeakingGeneration:
    entry: SpeakingEntry
    prepared: Prepared
    request: GenerateRequest
    words: Sequence[str]

    def route(self) -> tuple[HopReport, ...]:
        return ROUTE

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        spoken = self.words[: self.prepared.max_tokens]
        for index, word in enumerate(spoken):
            if index == self.entry.fail_after and self.entry.failure is not None:
                raise self.entry.failure
            if index == self.entry.hold_after:
                self.entry.holding.set()
                await self.entry.release.wait()
            await trio.lowlevel.checkpoint()
            yield Delta(word, (index,), self._scores(index, word))
        yield Finished(
            reason="stop" if len(spoken) == len(self.words) else "length",
            prompt_ids=self.prepared.prompt_ids,
            token_ids=tuple(range(len(spoken))),
            route=ROUTE,
            ttft_ms=12.0,
            tokens_per_s=34.0,
            tier="Standard",
            paid=True,
            request_id=self.prepared.request_id,
            hop_added_ms_p50=0.25,
        )

    def _scores(self, index: int, word: str) -> tuple[TokenScores, ...]:
        if not self.request.logprobs:
            return ()
        chosen = ScoredToken(index, word.encode(), -0.25 * index)
        others = tuple(ScoredToken(100 + rank, b"\xe2\x82", -1.0 - rank) for rank in range(self.request.top_logprobs))
        return (TokenScores(chosen, others),)


NO_ROUTE = NoRoute("nobody serves layers 12–20 of toy", missing=((12, 20),))


class StaticNode:
    """Implements `NodeView` with numbers that are told apart."""

    def status(self) -> NodeStatus:
        return NodeStatus(
            peer_id=PeerId("12D3KooWSelf"),
            state="ready",
            model=MODEL,
            layer_ranges=(LayerRange(0, 12),),
            assignment=Assignment(MODEL, (LayerRange(0, 12),), 7, 1_700_000_000_000),
            recipe="f32",
            conversions={"Q6_K": "F16"},
            hidden_size=576,
            queue_depth=3,
            max_input_tokens=8192,
            max_input_tokens_source="measured",
            hop_timeout_secs=10.0,
            max_concurrent_hop_bodies=4,
            hop_bodies_in_flight=1,
            max_hop_body_bytes=MAX_HOP_BYTES,
            device=DeviceHealth("cpu", healthy=True),
            orchestrator=OrchestratorView(PeerId("12D3KooWOrchestrator"), reachable=True, tickets_held=2),
            credits=Credits(1_500_000, "Standard"),
            proofs=ProofCounts(open=1, pending=2, settled=3, held=4, refused=5),
            peer_failures={PeerId("12D3KooWTail"): 2},
            stage=StageView(
                state="ready",
                sessions=2,
                waiting={"VIP": 3},
                crashes=1,
                recent_failures=1,
                memory_bytes=1000,
                kv=KvUse(64, 4096, 32, pages_used=5, pages_cached=6, prefix_positions_hit=128, sessions_evicted=7),
            ),
            event_loop=LoopView(stalls=8, longest_ms=90.5, total_ms=500.0),
        )

    def peers(self, model_id: str | None) -> Sequence[PeerView]:
        if model_id not in (None, MODEL):
            return ()
        return (
            PeerView(
                peer_id=PeerId("12D3KooWTail"),
                model_id=MODEL,
                layer_ranges=(LayerRange(12, 30),),
                status="Healthy",
                queue_depth=0,
                recipe="f32",
                addresses=("/ip4/127.0.0.1/tcp/9081",),
            ),
        )


def app_for(entry: SpeakingEntry, **settings: Any) -> ASGIApp:
    """The app under test."""
    return create_app(entry, StaticNode(), **settings)


@asynccontextmanager
async def serving(app: ASGIApp, limits: ServerLimits | None = None, port: int = 0) -> AsyncIterator[str]:
    """The app behind the real server on loopback, on a free port where none is named; gives its URL."""
    async with trio.open_nursery() as nursery:
        url: str = await nursery.start(partial(serve, app, "127.0.0.1", port, limits=limits))
        yield url
        nursery.cancel_scope.cancel()


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


@dataclass
class Answered:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Caller:
    """Calls an ASGI app in this task, without a server: ``left`` is the client's departure, ``parts`` what it was sent so far."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.left = trio.Event()
        self.parts: list[bytes] = []
        self.part_came = trio.Event()

    async def __call__(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        query: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Answered | None:
        """The whole answer, or None if there was none."""
        start: Message | None = None
        received = False

        async def receive() -> Message:
            nonlocal received
            if not received:
                received = True
                return {"type": "http.request", "body": body, "more_body": False}
            await self.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal start
            await trio.lowlevel.checkpoint()
            if message["type"] == "http.response.start":
                start = message
            elif message.get("body"):
                self.parts.append(message["body"])
                self.part_came.set()

        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.1"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "root_path": "",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()],
            "client": None,
            "server": None,
        }
        await self._app(scope, receive, send)
        if start is None:
            return None
        given = {name.decode(): value.decode() for name, value in start["headers"]}
        return Answered(start["status"], given, b"".join(self.parts))


async def call(app: ASGIApp, method: str, path: str, body: object = None, query: bytes = b"") -> Answered:
    """One request to the app; ``body`` is bytes, or an object to send as JSON."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    answered = await Caller(app)(method, path, raw, query)
    assert answered is not None
    return answered


def events_of(body: bytes) -> Iterator[Any]:
    """The events of a stream: parsed JSON, or the string ``[DONE]``."""
    for block in body.decode().split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def chat_body(**more: Any) -> dict[str, Any]:
    """A small chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}


@contextmanager
def error_shape(answered: Answered) -> Iterator[dict[str, Any]]:
    """Checks OpenAI's error object, and gives it."""
    assert answered.headers["content-type"] == "application/json"
    error = answered.json()["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    yield error
