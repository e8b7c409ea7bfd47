"""``POST /v1/chat/completions``: OpenAI's chat in the shape that its clients were seen to need; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tessella_p2p.bridge.answering import Reading
from tessella_p2p.bridge.answers import (
    ChatChunk,
    ChatCompletion,
    ChoiceDelta,
    ChoiceLogprobs,
    Extension,
    FinishReason,
    encoded,
    event,
    extension_of,
    logprobs_of,
    usage_of,
)
from tessella_p2p.bridge.openai_models.chat import ChatMessage, ChatRequest, chat_request
from tessella_p2p.entry.api import Delta, Finished, GenerateRequest, Prepared, TokenScores


def read_chat(body: bytes) -> Reading:
    """Read a chat request.

    Raises:
        InvalidRequest: with the field at fault as ``param``.
    """
    chat = chat_request(body)
    return Reading(to_generate_request(chat), bool(chat.stream), partial(ChatDialect, chat.wants_usage_chunk()))


def to_generate_request(chat: ChatRequest) -> GenerateRequest:
    """What the entry is asked."""
    messages = tuple(_template_message(message) for message in chat.messages)
    return replace(chat.asked_of(chat.model), messages=messages, max_tokens=chat.token_limit())


def _template_message(message: ChatMessage) -> dict[str, object]:
    """A message as chat templates know it."""
    role = "system" if message.role == "developer" else message.role
    named = {"name": message.name} if message.name is not None else {}
    return {"role": role, "content": message.text(), **named}


class ChatDialect:
    """Says one generation as a chat completion."""

    def __init__(self, usage_chunk: bool, prepared: Prepared, created: int) -> None:
        self._usage_chunk = usage_chunk
        self._id = f"chatcmpl-{prepared.request_id}"
        self._model = prepared.model
        self._created = created

    def first(self) -> bytes:
        """The chunk with the role."""
        return event(self._chunk({"role": "assistant", "content": ""}))

    def delta(self, delta: Delta) -> bytes:
        """The chunk with new text and its tokens' logprobs; tokens with neither are not worth one."""
        if not delta.text and not delta.scores:
            return b""
        return event(self._chunk({"content": delta.text}, logprobs=logprobs_of(delta.scores)))

    def last(self, finished: Finished) -> bytes:
        """The chunk with the reason and an empty delta; then, where it was asked for, the usage without a choice."""
        closing = event(self._chunk({}, finished.reason, extension_of(finished)))
        if not self._usage_chunk:
            return closing
        usage: ChatChunk = {**self._chunk({}), "choices": [], "usage": usage_of(finished)}
        return closing + event(usage)

    def whole(self, text: str, scores: Sequence[TokenScores], finished: Finished) -> bytes:
        """The answer in one piece."""
        completion: ChatCompletion = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": logprobs_of(scores),
                    "finish_reason": finished.reason,
                }
            ],
            "usage": usage_of(finished),
            "tessella": extension_of(finished),
        }
        return encoded(completion)

    def _chunk(
        self,
        delta: ChoiceDelta,
        reason: FinishReason | None = None,
        extension: Extension | None = None,
        logprobs: ChoiceLogprobs | None = None,
    ) -> ChatChunk:
        chunk: ChatChunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}],
        }
        if self._usage_chunk:
            chunk["usage"] = None
        if extension is not None:
            chunk["tessella"] = extension
        return chunk
