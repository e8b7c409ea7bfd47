"""``POST /v1/chat/completions``: OpenAI's chat in the shape that its clients were seen to need; pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pydantic_core import to_json

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import MAX_GRAMMAR_CHARS
from tessella_p2p.bridge.answers import (
    CalledFunction,
    ChatChunk,
    ChatCompletion,
    ChatFinishReason,
    Choice,
    ChoiceDelta,
    ChoiceLogprobs,
    FinishReason,
    Message,
    ToolCall,
    ToolCallDelta,
    encoded,
    event,
    extension_of,
    logprobs_of,
    usage_of,
)
from tessella_p2p.bridge.choices import Answer, Reading, numbered
from tessella_p2p.bridge.openai_models.chat import ChatMessage, ChatRequest, Function, chat_request
from tessella_p2p.bridge.tool_calls import CallArguments, CallBegun, Part, ToolCallReader, calls_grammar
from tessella_p2p.entry.api import Delta, Finished, GenerateRequest, ModelFeatures, Prepared
from tessella_p2p.model.tool_calls import CALL_END
from tessella_p2p.wire.messages import Grammar

# ---- From the body to what the entry is asked ----


def read_chat(body: bytes, features: Callable[[str], ModelFeatures]) -> Reading:
    """Read a chat request; ``features`` says what a model can be asked for.

    Raises:
        InvalidRequest: with the field at fault as ``param``.
        UnknownModel: tools are offered to a model that is not served.
    """
    chat = chat_request(body)
    _check_tools(chat, features)
    style = ChatStyle(
        usage_chunk=chat.wants_usage_chunk(),
        extension=bool(chat.tessella),
        functions=frozenset(each.name for each in chat.offered()),
    )
    return Reading(
        numbered(to_generate_request(chat), chat.n or 1),
        bool(chat.stream),
        partial(ChatDialect, style),
        {"grammar": "tools" if chat.offered() else "response_format", "prompt": "messages"},
    )


def _check_tools(chat: ChatRequest, features: Callable[[str], ModelFeatures]) -> None:
    used = next((i for i, message in enumerate(chat.messages) if message.uses_tools()), None)
    if (not chat.offered() and used is None) or features(chat.model).tools:
        return
    param = "tools" if used is None else f"messages[{used}]"
    raise InvalidRequest(f"{param}: the chat template of {chat.model!r} knows no tools", param)


def to_generate_request(chat: ChatRequest) -> GenerateRequest:
    """What the entry is asked."""
    request = replace(
        chat.asked_of(chat.model),
        messages=tuple(_template_message(message) for message in chat.messages),
        tools=tuple(_template_tool(function) for function in chat.offered()),
        max_tokens=chat.token_limit(),
        grammar=_grammar(chat),
    )
    if chat.offered() and not chat.may_call_several():
        request = replace(request, stop=(*request.stop, CALL_END))  # the answer is over with its first call
    return request


def _template_message(message: ChatMessage) -> dict[str, object]:
    """A message as chat templates know it."""
    role = "system" if message.role == "developer" else message.role
    given: dict[str, object] = {"role": role, "content": message.text()}
    if message.name is not None:
        given["name"] = message.name
    if message.tool_calls:
        given["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    if message.tool_call_id is not None:
        given["tool_call_id"] = message.tool_call_id
    return given


def _template_tool(function: Function) -> dict[str, object]:
    described = {} if function.description is None else {"description": function.description}
    return {
        "type": "function",
        "function": {"name": function.name, **described, "parameters": dict(function.parameters)},
    }


def _grammar(chat: ChatRequest) -> Grammar | None:
    """What the answer has to be a sentence of; None for any text.

    Raises:
        InvalidRequest: it is too long.
    """
    schema, has_to_call = chat.answer_schema(), chat.has_to_call()
    callable_ = has_to_call or (chat.offered() if schema is not None else ())
    if callable_:
        functions = [(each.name, each.parameters or {"type": "object"}) for each in callable_]
        text = calls_grammar(functions, several=chat.may_call_several(), otherwise=None if has_to_call else schema)
        return Grammar(kind="lark", text=_bounded(text, "tools"))
    if schema is not None:
        return Grammar(kind="json_schema", text=_bounded(to_json(schema).decode(), "response_format"))
    return None


def _bounded(text: str, param: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"{param}: what the answer has to follow comes to {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are accepted",
            param,
        )
    return text


# ---- From what comes to the answer ----


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How a chat is answered; ``functions`` are those that may be called: without any, nothing is looked for in the text."""

    usage_chunk: bool = False
    extension: bool = False
    functions: Collection[str] = ()


class ChatDialect:
    """Says the choices of one chat completion."""

    def __init__(self, style: ChatStyle, prepared: Prepared, created: int) -> None:
        self._style = style
        self._id = f"chatcmpl-{prepared.request_id}"
        self._call_id = f"call_{prepared.request_id}"
        self._model = prepared.model
        self._created = created
        self._readers: dict[int, ToolCallReader] = {}

    def first(self, index: int) -> bytes:
        """The chunk with the role."""
        if self._style.functions:  # it may all be calls, and then there is no content
            return event(self._chunk(index, {"role": "assistant", "content": None}))
        return event(self._chunk(index, {"role": "assistant", "content": ""}))

    def delta(self, index: int, delta: Delta) -> bytes:
        """The chunks with new text and its tokens' logprobs; tokens with neither are not worth one."""
        logprobs = logprobs_of(delta.scores)
        if self._style.functions:
            reader = self._readers.get(index)
            if reader is None:
                reader = self._readers[index] = ToolCallReader(self._style.functions)
            return self._parts(index, reader.feed(delta.text), logprobs)
        if not delta.text and logprobs is None:
            return b""
        return event(self._chunk(index, {"content": delta.text}, logprobs))

    def ended(self, index: int, finished: Finished) -> bytes:
        """What was held back, and the chunk with the reason and an empty delta."""
        reader = self._readers.get(index)
        rest = b"" if reader is None else self._parts(index, reader.flush(), None)
        closing = self._chunk(index, {})
        closing["choices"][0]["finish_reason"] = _reason(finished.reason, reader.num_calls if reader is not None else 0)
        if self._style.extension:
            closing["tessella"] = extension_of(finished)
        return rest + event(closing)

    def last(self, finished: Sequence[Finished]) -> bytes:
        """Where it was asked for, the usage without a choice."""
        if not self._style.usage_chunk:
            return b""
        usage: ChatChunk = {**self._chunk(0, {}), "choices": [], "usage": usage_of(finished, len(finished))}
        return event(usage)

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """The answer in one piece."""
        finished = [answer.finished for answer in answers]
        completion: ChatCompletion = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": usage_of(finished, len(finished)),
        }
        if self._style.extension:
            completion["tessella"] = extension_of(*finished)
        return encoded(completion)

    def _choice(self, index: int, answer: Answer) -> Choice:
        message: Message = {"role": "assistant", "content": answer.text, "refusal": None}
        calls: list[ToolCall] = []
        if self._style.functions:
            reader = ToolCallReader(self._style.functions)
            parts = [*reader.feed(answer.text), *reader.flush()]
            message["content"] = "".join(part for part in parts if isinstance(part, str)) or None
            calls = self._whole_calls(index, parts)
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs_of(answer.scores),
            "finish_reason": _reason(answer.finished.reason, len(calls)),
        }

    def _whole_calls(self, index: int, parts: Sequence[Part]) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for part in parts:
            if isinstance(part, CallBegun):
                function: CalledFunction = {"name": part.name, "arguments": ""}
                calls.append({"id": self._id_of_call(index, part.index), "type": "function", "function": function})
            elif isinstance(part, CallArguments):
                calls[part.index]["function"]["arguments"] += part.text
        return calls

    def _parts(self, index: int, parts: Sequence[Part], logprobs: ChoiceLogprobs | None) -> bytes:
        """A chunk for each part; the first one has the logprobs."""
        deltas = [self._delta_of(index, part) for part in parts]
        if not deltas and logprobs is not None:
            deltas = [{}]
        chunks: list[bytes] = []
        for delta in deltas:
            chunks.append(event(self._chunk(index, delta, logprobs)))
            logprobs = None
        return b"".join(chunks)

    def _delta_of(self, index: int, part: Part) -> ChoiceDelta:
        if isinstance(part, str):
            return {"content": part}
        call: ToolCallDelta
        if isinstance(part, CallBegun):
            call = {
                "index": part.index,
                "id": self._id_of_call(index, part.index),
                "type": "function",
                "function": {"name": part.name, "arguments": ""},
            }
        else:
            call = {"index": part.index, "function": {"arguments": part.text}}
        return {"tool_calls": [call]}

    def _id_of_call(self, index: int, call: int) -> str:
        return f"{self._call_id}_{index}_{call}"

    def _chunk(self, index: int, delta: ChoiceDelta, logprobs: ChoiceLogprobs | None = None) -> ChatChunk:
        chunk: ChatChunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}],
        }
        if self._style.usage_chunk:
            chunk["usage"] = None
        return chunk


def _reason(reason: FinishReason, num_calls: int) -> ChatFinishReason:
    """Calls end an answer of their own; one that was cut off, with calls or in one, was cut off."""
    return "tool_calls" if reason == "stop" and num_calls else reason
