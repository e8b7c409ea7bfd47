"""Body of ``POST /v1/completions``; pure."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import (
    LEGACY_MAX_TOKENS,
    MAX_CHOICES,
    MAX_LEGACY_LOGPROBS,
    MAX_POSITIONS,
    MAX_PROMPTS_AND_CHOICES,
)
from tessella_p2p.bridge.openai_models.fields import OpenAISampled
from tessella_p2p.bridge.openai_models.reading import json_object, supported, validated

Prompt = str | tuple[int, ...]
"""A text as it stands, or token ids."""


def _prompts(value: Any) -> Any:
    """OpenAI's four forms of a prompt (text, texts, ids, lists of ids) as a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise PydanticCustomError(
            "prompt", "must be a text, a list of texts, token ids, or a list of lists of token ids"
        )
    if _is_id(value[0]):
        return (_ids(value),)
    if len(value) > MAX_PROMPTS_AND_CHOICES:
        raise PydanticCustomError("prompt", "at most {most} prompts are accepted", {"most": MAX_PROMPTS_AND_CHOICES})
    return tuple(each if isinstance(each, str) else _ids(each) for each in value)


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or len(value) > MAX_POSITIONS or not all(map(_is_id, value)):
        raise PydanticCustomError("prompt", "a prompt is a text or a list of token ids")
    return tuple(value)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


class CompletionRequest(OpenAISampled):
    """Body of ``POST /v1/completions``: OpenAI's older route, for prompts as they stand."""

    prompt: Annotated[Any, BeforeValidator(_prompts)]
    suffix: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None

    def prompts(self) -> tuple[Prompt, ...]:
        """Each prompt."""
        return self.prompt  # type: ignore[no-any-return]  # `_prompts` made it

    def alternatives(self) -> int | None:
        """See `Sampled.alternatives`."""
        return self.logprobs

    def token_limit(self) -> int:
        """OpenAI's default is its own: 16 tokens."""
        return self.max_tokens if self.max_tokens is not None else LEGACY_MAX_TOKENS

    def check(self) -> None:
        """See `Sampled.check`."""
        super().check()
        n = self.n or 1
        if n * len(self.prompts()) > MAX_PROMPTS_AND_CHOICES:
            raise InvalidRequest(
                f"n: {len(self.prompts())} prompts with {n} answers each; {MAX_PROMPTS_AND_CHOICES} answers are accepted",
                "n",
            )
        if self.best_of is not None and self.best_of != n:
            raise InvalidRequest("best_of: only the value of n is supported: every answer is told", "best_of")
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("logprobs: the prompt's are not known, so not with echo", "logprobs")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts()):
            raise InvalidRequest("suffix: only with a prompt that is text", "suffix")


_WITHOUT_EFFECT = frozenset({"metadata", "service_tier", "store", "user"})
"""Known fields that do not change what is answered."""


def completion_request(body: bytes) -> CompletionRequest:
    """Read a request for text completions.

    Raises:
        InvalidRequest: with the field at fault as ``param``.
    """
    request = validated(CompletionRequest, supported(json_object(body), CompletionRequest, {}, _WITHOUT_EFFECT))
    request.check()
    return request
