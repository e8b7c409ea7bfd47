"""Body of ``POST /v1/chat/completions``; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from tessella_p2p.base.limits import MAX_CHAT_MESSAGES, MAX_CONTENT_PARTS
from tessella_p2p.bridge.openai_models.fields import Body, Count, OpenAISampled, ScoredSampled, listed
from tessella_p2p.bridge.openai_models.reading import json_object, supported, validated


class TextPart(Body):
    """A part of a message's content; only text is understood."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One turn of the conversation. ``developer`` is OpenAI's newer name of ``system``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        tuple[TextPart, ...],
        FailFast(),
        Field(strict=False, max_length=MAX_CONTENT_PARTS),
        listed("a string or a list of text parts", lambda text: {"type": "text", "text": text}),
    ] = ()
    name: Annotated[str, Field(max_length=64)] | None = None

    def text(self) -> str:
        """The content as one string; parts are separate lines, as in the other local servers."""
        return "\n".join(part.text for part in self.content)


class ChatRequest(ScoredSampled, OpenAISampled):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[
        tuple[ChatMessage, ...],
        FailFast(),
        Field(strict=False, min_length=1, max_length=MAX_CHAT_MESSAGES),
        listed("a list of messages"),
    ]
    max_completion_tokens: Count | None = None

    def token_limit(self) -> int | None:
        """The smaller of the two names of the same thing; None leaves it to the entry."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)


_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",  # shapes tool calls, and tools are refused
        "prediction",  # a hint for speed
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Known fields of a chat request that do not change what is answered."""

_NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Known fields that are not supported yet, with the values (beside null) that mean the same as leaving the field out."""

_MESSAGE_NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_calls": ([],),
}
"""The same for a message: what the SDKs send when an answer's message is handed back to them."""


def chat_request(body: bytes) -> ChatRequest:
    """Read a chat request.

    Raises:
        InvalidRequest: with the field at fault as ``param``.
    """
    fields = json_object(body)
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [
            supported(message, ChatMessage, _MESSAGE_NOT_YET, frozenset(), f"messages[{index}].")
            if isinstance(message, dict)
            else message
            for index, message in enumerate(messages[: MAX_CHAT_MESSAGES + 1])
        ]
    request = validated(ChatRequest, supported(fields, ChatRequest, _NOT_YET, _WITHOUT_EFFECT))
    request.check()
    return request
