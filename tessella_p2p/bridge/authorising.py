"""Who may use a node's HTTP surface: whoever has one of its API keys; and what a key's requests cost it.

Without a key only what tells nothing is answered: `is_open`. With one, reading is free, and everything else counts against the key's
limits: a request as it begins, tokens as they come. Whoever is refused has had nothing read or done.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Final

import trio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import ApiKeyRefused, RateLimited
from tessella_p2p.bridge.api_keys import ApiKey, ApiKeys, bearer_of
from tessella_p2p.bridge.errors import ErrorAnswer
from tessella_p2p.bridge.key_rates import KeyRates, Refused
from tessella_p2p.bridge.middleware import send_answer
from tessella_p2p.entry.api import (
    Delta,
    Embedded,
    EmbedRequest,
    Entry,
    GenerateRequest,
    Generation,
    GenerationEvent,
    HopReport,
    ModelFeatures,
    Prepared,
)
from tessella_p2p.entry.requests import RequestBook

_READING: Final = frozenset({"GET", "HEAD"})
HEALTH_PATH: Final = "/healthz"
_OPEN: Final = frozenset({"/", HEALTH_PATH})
_OPEN_FOLDER: Final = "/ui/"
_REALM: Final = 'Bearer realm="tessella"'


def is_open(method: str, path: str) -> bool:
    """Whether a route is answered without a key: the dashboard's own files, which ask for one, and whether the process answers."""
    return method in _READING and (path in _OPEN or (path.startswith(_OPEN_FOLDER) and ".." not in path))


class KeyRing:
    """The API keys as they are now, and what they have used.

    Args:
        keys: at the start.
        clock: by which they expire.
    """

    def __init__(self, keys: ApiKeys, clock: WallClock) -> None:
        self.keys = keys
        self.rates = KeyRates()
        self._clock = clock

    def replace(self, keys: ApiKeys) -> None:
        """From now on these keys count; a request that is under way goes on."""
        self.keys = keys
        self.rates.keep({key.key_id for key in keys})

    def find(self, secret: str | None) -> ApiKey | None:
        """The key that ``secret`` is, where it counts now."""
        return None if secret is None else self.keys.find(secret, self._clock.unix_ms())


class Authorising:
    """Answers 401 without a key and 429 at one of its limits; tells the app for whom a request is: ``request.state.caller``.

    ``request.state.key_counts`` says whether its key still does, for an answer that does not end by itself.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing) -> None:
        self._app = app
        self._ring = ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it unread."""
        if scope["type"] != "http" or is_open(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        secret = bearer_of(Headers(scope=scope).getlist("authorization"))
        key = self._ring.find(secret)
        if key is None:
            await send_answer(send, _unauthorised(given=secret is not None))
            return

        def counts() -> bool:
            return self._ring.find(secret) is not None

        scope["state"] = {**scope.get("state", {}), "caller": key.caller, "key_counts": counts}
        if scope["method"] in _READING:
            await self._app(scope, receive, send)
            return
        refused = self._ring.rates.enter(key.key_id, key.limits, trio.current_time())
        if refused is not None:
            await send_answer(send, _limited(refused, self._rate_headers(key)))
            return
        try:
            await self._app(scope, receive, self._with_rates(key, send))
        finally:
            self._ring.rates.leave(key.key_id)

    def _rate_headers(self, key: ApiKey) -> dict[str, str]:
        return self._ring.rates.headers(key.key_id, key.limits, trio.current_time())

    def _with_rates(self, key: ApiKey, send: Send) -> Send:
        async def send_with_rates(message: Message) -> None:
            if message["type"] == "http.response.start":
                rates = [(name.encode(), value.encode()) for name, value in self._rate_headers(key).items()]
                message = {**message, "headers": [*message.get("headers", ()), *rates]}
            await send(message)

        return send_with_rates


def _unauthorised(*, given: bool) -> ErrorAnswer:
    message = (
        "this API key is unknown here, revoked or expired"
        if given
        else "this node asks for an API key, as `Authorization: Bearer tsl-…`; its operator makes one: `tessella-p2p keys api add`"
    )
    challenge = _REALM + (', error="invalid_token"' if given else "")
    return _answer(ApiKeyRefused, "invalid_request_error", message, {"www-authenticate": challenge})


def _limited(refused: Refused, rates: dict[str, str]) -> ErrorAnswer:
    what = {
        "requests": "as many requests in a minute as it may make",
        "tokens": "as many tokens in a minute as it may use",
        "concurrent": "as many requests at a time as it may make",
    }[refused.limit]
    retry_s = max(1, math.ceil(refused.retry_s))
    message = f"this API key has had {what}: come again in {retry_s} s"
    kind = "requests" if refused.limit == "concurrent" else refused.limit
    return _answer(RateLimited, kind, message, {"retry-after": str(retry_s), **rates})


def _answer(error: type[ApiKeyRefused | RateLimited], kind: str, message: str, headers: dict[str, str]) -> ErrorAnswer:
    """An error in OpenAI's shape. The body was not read, so the connection is over."""
    body = {"message": message, "type": kind, "param": None, "code": error.code}
    return ErrorAnswer(error.http_status, {"error": body}, {**headers, "connection": "close"})


class MeteredEntry:
    """Implements `Entry`: counts the tokens of each caller as they come; what an unfinished answer cost counts too.

    Args:
        entry: does the work.
        spend: told (name of the caller, tokens).
    """

    def __init__(self, entry: Entry, spend: Callable[[str, int], None]) -> None:
        self._entry = entry
        self._spend = spend

    @property
    def requests(self) -> RequestBook:
        """See `Entry`."""
        return self._entry.requests

    def known_models(self) -> tuple[str, ...]:
        """See `Entry`."""
        return self._entry.known_models()

    def model_ids(self) -> tuple[str, ...]:
        """See `Entry`."""
        return self._entry.model_ids()

    async def check_ready(self) -> None:
        """See `Entry`."""
        await self._entry.check_ready()

    def features(self, model: str) -> ModelFeatures:
        """See `Entry`."""
        return self._entry.features(model)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """See `Entry`."""
        return self._entry.text_of(token_ids)

    async def embed(self, request: EmbedRequest) -> tuple[Embedded, ...]:
        """See `Entry`; an input is paid for once it is admitted."""
        name = request.caller.name
        return await self._entry.embed(replace(request, admitted=lambda num_tokens: self._spend(name, num_tokens)))

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        """See `Entry`; a prompt is paid for once it is admitted."""
        async with self._entry.generate(request) as generation:
            name = request.caller.name
            self._spend(name, len(generation.prepared.prompt_ids))
            yield _MeteredGeneration(generation, lambda num_tokens: self._spend(name, num_tokens))


class _MeteredGeneration:
    def __init__(self, generation: Generation, spend: Callable[[int], None]) -> None:
        self._generation = generation
        self._spend = spend

    @property
    def prepared(self) -> Prepared:
        return self._generation.prepared

    def route(self) -> tuple[HopReport, ...]:
        return self._generation.route()

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        async with aclosing(self._generation.events()) as events:
            async for event in events:
                if isinstance(event, Delta):
                    self._spend(len(event.token_ids))
                yield event
