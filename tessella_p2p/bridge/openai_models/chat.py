"""Body of ``POST /v1/chat/completions``; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field
from pydantic_core import PydanticCustomError

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import (
    MAX_CHAT_MESSAGES,
    MAX_CHOICES,
    MAX_CONTENT_PARTS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
)
from tessella_p2p.bridge.openai_models.fields import Body, Count, OpenAISampled, ScoredSampled, listed
from tessella_p2p.bridge.openai_models.reading import each_supported, json_object, supported, validated

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def _object(value: Any) -> Any:
    """JSON objects of a client's own making are taken as they are."""
    if not isinstance(value, dict):
        raise PydanticCustomError("not_an_object", "must be an object")
    return value


FreeObject = Annotated[Mapping[str, Any], Field(strict=False), BeforeValidator(_object)]

# ---- Messages ----


class TextPart(Body):
    """A part of a message's content; only text is understood."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """What was called; ``arguments`` is the text of a JSON object."""

    name: FunctionName
    arguments: str


class AskedCall(Body):
    """A tool call of an earlier answer, handed back."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Body):
    """One turn of the conversation. ``developer`` is OpenAI's newer name of ``system``; ``tool`` brings the result of a call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        tuple[TextPart, ...],
        FailFast(),
        Field(strict=False, max_length=MAX_CONTENT_PARTS),
        listed("a string or a list of text parts", lambda text: {"type": "text", "text": text}),
    ] = ()
    name: Annotated[str, Field(max_length=64)] | None = None
    tool_calls: Annotated[
        tuple[AskedCall, ...],
        FailFast(),
        Field(strict=False, max_length=MAX_TOOL_CALLS),
        listed("a list of tool calls"),
    ] = ()
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    def text(self) -> str:
        """The content as one string; parts are separate lines, as in the other local servers."""
        return "\n".join(part.text for part in self.content)

    def uses_tools(self) -> bool:
        """Whether only a template that knows of tools can show it."""
        return self.role == "tool" or bool(self.tool_calls)


# ---- What the answer has to be like ----


class JsonSchema(Body):
    """The schema of an answer. ``strict`` or not, an answer follows it."""

    name: FunctionName
    description: str | None = None
    schema_: Annotated[FreeObject, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """Any text, some JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(Body):
    """A function that may be called; without ``parameters`` it has none."""

    name: FunctionName
    description: str | None = None
    parameters: FreeObject = Field(default_factory=dict)
    strict: bool | None = None


class Tool(Body):
    """Something that the model may ask for; only functions are understood."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """Which function."""

    name: FunctionName


class ToolChoice(Body):
    """Whether a tool has to be called, and which; OpenAI has a word for it, or an object where it names one."""

    type: Literal["none", "auto", "required", "function"]
    function: NamedFunction | None = None


def _choice(value: Any) -> Any:
    """OpenAI's words as an object, too."""
    if isinstance(value, str) and value != "function":
        return {"type": value}
    if isinstance(value, dict) and value.get("type") in ("none", "auto", "required"):
        raise PydanticCustomError("choice", "none, auto and required are given as a text")
    return value


# ---- The request ----


class ChatRequest(ScoredSampled, OpenAISampled):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[
        tuple[ChatMessage, ...],
        FailFast(),
        Field(strict=False, min_length=1, max_length=MAX_CHAT_MESSAGES),
        listed("a list of messages"),
    ]
    max_completion_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[
        tuple[Tool, ...], FailFast(), Field(strict=False, max_length=MAX_TOOLS), listed("a list of tools")
    ] = ()
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_choice)] = None
    parallel_tool_calls: bool | None = None

    def token_limit(self) -> int | None:
        """The smaller of the two names of the same thing; None leaves it to the entry."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    def offered(self) -> tuple[Function, ...]:
        """The functions that the answer may call: with ``tool_choice: none`` the model is not even told of them."""
        return () if self._choice_type() == "none" else tuple(tool.function for tool in self.tools)

    def has_to_call(self) -> tuple[Function, ...]:
        """The functions of which the answer has to call one; none where it need not call any."""
        if self.tool_choice is not None and self.tool_choice.function is not None:
            return tuple(each for each in self.offered() if each.name == self.tool_choice.function.name)
        return self.offered() if self._choice_type() == "required" else ()

    def may_call_several(self) -> bool:
        """Whether one answer may have more than one call: not where it has to be a certain one."""
        return self.parallel_tool_calls is not False and self._choice_type() != "function"

    def answer_schema(self) -> Mapping[str, Any] | None:
        """The JSON schema of the text; None for any text."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        asked = self.response_format.json_schema
        return {"type": "object"} if asked is None else asked.schema_

    def _choice_type(self) -> str:
        return "auto" if self.tool_choice is None else self.tool_choice.type

    def check(self) -> None:
        """See `Sampled.check`."""
        super().check()
        if self.response_format is not None:
            is_there = self.response_format.json_schema is not None
            if is_there != (self.response_format.type == "json_schema"):
                raise InvalidRequest(
                    "response_format: a json_schema goes with that type", "response_format.json_schema"
                )
        self._check_tools()
        for index, message in enumerate(self.messages):
            if message.tool_calls and message.role != "assistant":
                raise InvalidRequest("only an assistant calls tools", f"messages[{index}].tool_calls")
            if message.role == "tool" and message.tool_call_id is None:
                raise InvalidRequest("it has to say which call it answers", f"messages[{index}].tool_call_id")
            if message.role != "tool" and message.tool_call_id is not None:
                raise InvalidRequest("only a tool answers a call", f"messages[{index}].tool_call_id")

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise InvalidRequest(f"tools: there are two functions {name}", f"tools[{index}].function.name")
        if self.tool_choice is None:
            return
        if (self.tool_choice.type == "function") != (self.tool_choice.function is not None):
            raise InvalidRequest("tool_choice: a function goes with that type", "tool_choice.function")
        if self.tool_choice.function is not None and self.tool_choice.function.name not in names:
            raise InvalidRequest("tool_choice: there is no such tool", "tool_choice.function.name")
        if self.tool_choice.type == "required" and not names:
            raise InvalidRequest("tool_choice: only allowed where there are tools", "tool_choice")


_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
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
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Known fields that are not supported yet, with the values (beside null) that mean the same as leaving the field out."""

_MESSAGE_NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}
"""The same for a message: what the SDKs send when an answer's message is handed back to them."""


def chat_request(body: bytes) -> ChatRequest:
    """Read a chat request.

    Raises:
        InvalidRequest: with the field at fault as ``param``.
    """
    fields = each_supported(
        json_object(body), "messages", MAX_CHAT_MESSAGES, ChatMessage, _MESSAGE_NOT_YET, frozenset()
    )
    request = validated(ChatRequest, supported(fields, ChatRequest, _NOT_YET, _WITHOUT_EFFECT))
    request.check()
    return request
