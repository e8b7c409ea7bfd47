"""``POST /v1/generate``: a prompt as it stands, text or token ids; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from tessella_p2p.base.errors import InvalidRequest, NoRoute
from tessella_p2p.bridge.answers import (
    ChoiceLogprobs,
    Extension,
    FinishReason,
    Usage,
    encoded,
    event,
    extension_of,
    logprobs_of,
    usage_of,
)
from tessella_p2p.bridge.choices import Answer, Reading
from tessella_p2p.bridge.openai_models.generate import generate_body
from tessella_p2p.entry.api import Delta, Finished, Prepared, TokenScores


class Generated(TypedDict):
    """A whole answer of ``/v1/generate``."""

    id: str
    object: Literal["tessella.generation"]
    created: int
    model: str
    text: str
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason
    usage: Usage
    tessella: NotRequired[Extension]


class GeneratedChunk(TypedDict):
    """One event of a streamed ``/v1/generate``; the last one has the reason, the usage and, where it was asked for, the extension."""

    id: str
    object: Literal["tessella.generation.chunk"]
    created: int
    model: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None
    usage: NotRequired[Usage]
    tessella: NotRequired[Extension]


def read_generate(body: bytes, models: Sequence[str]) -> Reading:
    """Read a request for ``/v1/generate``; ``models`` are those that the node knows: a lone one need not be named.

    Raises:
        InvalidRequest: with the field at fault as ``param``.
        NoRoute: no model was named, and none is known.
    """
    asked = generate_body(body)
    model = asked.model if asked.model is not None else lone_model(models)
    request = replace(asked.asked_of(model), prompt=asked.prompt, prompt_ids=asked.prompt_ids or None)
    return Reading((request,), bool(asked.stream), partial(GenerateDialect, bool(asked.tessella)))


def lone_model(models: Sequence[str]) -> str:
    """The one of ``models``, those that the node knows, where a request names none.

    Raises:
        InvalidRequest: there are several.
        NoRoute: there is none.
    """
    if not models:
        raise NoRoute("no model has a complete route of ready stages right now")
    if len(models) > 1:
        raise InvalidRequest(f"model: several are served here, name one of {', '.join(models)}", "model")
    return models[0]


class GenerateDialect:
    """Says one generation in this node's own words."""

    def __init__(self, extension: bool, prepared: Prepared, created: int) -> None:
        self._extension = extension
        self._id = f"gen-{prepared.request_id}"
        self._model = prepared.model
        self._created = created

    def first(self, index: int) -> bytes:
        """Nothing opens the stream."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """New text and tokens; a chunk may hold tokens whose text is still held back."""
        return event(self._chunk(delta.text, delta.token_ids, delta.scores))

    def ended(self, index: int, finished: Finished) -> bytes:
        """The chunk with the reason, the usage and the extension."""
        chunk: GeneratedChunk = {
            **self._chunk("", ()),
            "finish_reason": finished.reason,
            "usage": usage_of([finished]),
        }
        if self._extension:
            chunk["tessella"] = extension_of(finished)
        return event(chunk)

    def last(self, finished: Sequence[Finished]) -> bytes:
        """Nothing more: there is one choice."""
        return b""

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """The answer in one piece."""
        (answer,) = answers
        generated: Generated = {
            "id": self._id,
            "object": "tessella.generation",
            "created": self._created,
            "model": self._model,
            "text": answer.text,
            "logprobs": logprobs_of(answer.scores),
            "finish_reason": answer.finished.reason,
            "usage": usage_of([answer.finished]),
        }
        if self._extension:
            generated["tessella"] = extension_of(answer.finished)
        return encoded(generated)

    def _chunk(self, text: str, token_ids: tuple[int, ...], scores: Sequence[TokenScores] = ()) -> GeneratedChunk:
        return {
            "id": self._id,
            "object": "tessella.generation.chunk",
            "created": self._created,
            "model": self._model,
            "text": text,
            "token_ids": token_ids,
            "logprobs": logprobs_of(scores),
            "finish_reason": None,
        }
