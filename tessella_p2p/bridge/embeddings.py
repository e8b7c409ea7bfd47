"""``POST /v1/embeddings``: vectors of texts, in OpenAI's shape."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from tessella_p2p.base.errors import InvalidRequest, LocalProtocolError
from tessella_p2p.bridge.answer_headers import answer_headers
from tessella_p2p.bridge.answering import ClientWatch, understood
from tessella_p2p.bridge.answers import encoded
from tessella_p2p.bridge.callers import caller_of
from tessella_p2p.bridge.metrics import BridgeMetrics
from tessella_p2p.bridge.openai_models.embeddings import EmbeddingsBody, embeddings_body
from tessella_p2p.entry.api import Embedded, EmbedRequest, Entry
from tessella_p2p.ledger.blocking import in_thread


class Embedding(TypedDict):
    """One input's vector: numbers, or base64 of them as little-endian f32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Counts of tokens; nothing is generated."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """The answer, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def embedding_list(model: str, vectors: Sequence[Embedded], *, as_base64: bool) -> EmbeddingList:
    """The answer that tells ``vectors``; pure."""
    tokens = sum(each.num_tokens for each in vectors)
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64(each.vector) if as_base64 else list(each.vector),
            }
            for index, each in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


class EmbeddingsEndpoint:
    """An ASGI app for the one path."""

    def __init__(self, entry: Entry, metrics: BridgeMetrics) -> None:
        self._entry = entry
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. When the client leaves, or at a cancellation, every session of it is closed.

        Raises:
            TessellaError: the app's handler turns it into an answer.
        """
        request = Request(scope, receive)
        asked = await understood(request, embeddings_body)
        self._check_dimensions(asked)
        caller = caller_of(request.scope)
        vectors: tuple[Embedded, ...] = ()

        async def embed() -> None:
            nonlocal vectors
            vectors = await self._entry.embed(EmbedRequest(asked.model, asked.input, caller))

        watch = ClientWatch(receive)
        await watch.guard(embed)
        if watch.left:
            return
        if len(vectors) != len(asked.input):
            raise LocalProtocolError(f"{len(vectors)} vectors came for {len(asked.input)} inputs")
        self._metrics.embedded(len(vectors), sum(each.num_tokens for each in vectors))
        as_base64 = asked.encoding_format == "base64"
        # On a thread: a thousand vectors are millions of digits, and tokens are streamed meanwhile.
        body = await in_thread(lambda: encoded(embedding_list(asked.model, vectors, as_base64=as_base64)))
        headers = answer_headers(vectors[0].request_id, vectors[0].route) if vectors else {}
        await Response(body, media_type="application/json", headers=headers)(scope, receive, send)

    def _check_dimensions(self, asked: EmbeddingsBody) -> None:
        """Before any peer works for the request."""
        if asked.dimensions is None:
            return
        own = self._entry.features(asked.model).embedding_length
        if asked.dimensions != own:
            raise InvalidRequest(
                f"dimensions: the vectors of {asked.model} have {own}; a part of one means nothing", "dimensions"
            )
