"""OpenAI's objects as this node speaks them, checked at the edge; pure.

What a request may carry is decided by one rule: nothing that would change the answer is ignored. A field that changes nothing
(``store``, ``metadata``, …) is accepted; a field that is not supported yet is accepted at the value that means "as if absent" and
refused by name otherwise; a field nobody knows is refused, as OpenAI does. `chat_request` applies it.

``answers.py`` has the other direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import PydanticCustomError, from_json

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import (
    MAX_CHAT_MESSAGES,
    MAX_CONTENT_PARTS,
    MAX_LOGIT_BIASES,
    MAX_POSITIONS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    MAX_VOCABULARY,
)
from tessella_p2p.entry.api import GenerateRequest

FinishReason = Literal["stop", "length"]

_ECHOED_CHARS = 64
"""How much of an unknown field's name an error repeats."""

# ---- Requests ----


def _listed(what: str, wrap: Callable[[str], object] | None = None) -> BeforeValidator:
    """Lets a list pass; a bare string becomes a list of one where ``wrap`` says how. Null is an empty list, as if absent."""

    def listed(value: Any) -> Any:
        if value is None:
            return []
        if isinstance(value, str) and wrap is not None:
            return [wrap(value)]
        if not isinstance(value, list):
            raise PydanticCustomError("not_a_list", "must be {what}", {"what": what})
        return value

    return BeforeValidator(listed)


def _biases(value: Any) -> Any:
    """OpenAI's object of token ids (JSON has no other keys than texts) and biases, as pairs."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise PydanticCustomError("biases", "must be an object that gives token ids a bias each")
    if len(value) > MAX_LOGIT_BIASES:
        raise PydanticCustomError("biases", "at most {most} tokens may have a bias", {"most": MAX_LOGIT_BIASES})
    pairs: dict[int, float] = {}
    for key, bias in value.items():
        token_id = int(key) if key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_CHARS else MAX_VOCABULARY
        if token_id >= MAX_VOCABULARY or token_id in pairs:
            raise PydanticCustomError("biases", "the names in it must be token ids, each once")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise PydanticCustomError(
                "biases", "the bias of token {id} must be a number from -100 to 100", {"id": token_id}
            )
        pairs[token_id] = float(bias)
    return tuple(pairs.items())


_MAX_ID_CHARS = len(str(MAX_VOCABULARY))


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TextPart(_Request):
    """A part of a message's content; only text is understood."""

    type: Literal["text"]
    text: str


class ChatMessage(_Request):
    """One turn of the conversation. ``developer`` is OpenAI's newer name of ``system``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        tuple[TextPart, ...],
        FailFast(),
        Field(strict=False, max_length=MAX_CONTENT_PARTS),
        _listed("a string or a list of text parts", lambda text: {"type": "text", "text": text}),
    ] = ()
    name: Annotated[str, Field(max_length=64)] | None = None

    def text(self) -> str:
        """The content as one string; parts are separate lines, as in the other local servers."""
        return "\n".join(part.text for part in self.content)


class StreamOptions(_Request):
    """``include_obfuscation`` asks for padding against traffic analysis; a client must not rely on it, and none is sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


Count = Annotated[int, Field(ge=1, le=MAX_POSITIONS)]
Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]


class Sampled(_Request):
    """The fields that every request for generated text shares. Bounds are those of `wire.messages.Sampling`."""

    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_VOCABULARY)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10.0, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_biases)] = ()
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)], ...],
        FailFast(),
        Field(strict=False, max_length=MAX_STOP_STRINGS),
        _listed("a string or a list of strings", lambda text: text),
    ] = ()
    stream: bool | None = None

    def unsigned_seed(self) -> int | None:
        """The seed as the sampler takes it, in [0, 2**64): a negative one, which OpenAI allows, by its two's complement."""
        return None if self.seed is None else self.seed & (2**64 - 1)

    def asked_of(self, model: str) -> GenerateRequest:
        """The sampling fields, as the entry is asked; without a prompt yet.

        Without a temperature the answer is greedy: the manual's default, not OpenAI's 1.
        """
        return GenerateRequest(
            model=model,
            max_tokens=self.max_tokens,
            temperature=self.temperature if self.temperature is not None else 0.0,
            top_k=max(self.top_k or 0, 0),
            top_p=self.top_p if self.top_p is not None else 1.0,
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty if self.repetition_penalty is not None else 1.0,
            logit_bias=self.logit_bias,
            seed=self.unsigned_seed(),
            logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
            stop=self.stop,
        )


class ChatRequest(Sampled):
    """Body of ``POST /v1/chat/completions``."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Annotated[
        tuple[ChatMessage, ...],
        FailFast(),
        Field(strict=False, min_length=1, max_length=MAX_CHAT_MESSAGES),
        _listed("a list of messages"),
    ]
    max_completion_tokens: Count | None = None
    stream_options: StreamOptions | None = None

    def token_limit(self) -> int | None:
        """The smaller of the two names of the same thing; None leaves it to the entry."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    def wants_usage_chunk(self) -> bool:
        """Whether the stream ends with a chunk that holds the usage and no choice."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class GenerateBody(Sampled):
    """Body of ``POST /v1/generate``: a prompt as it stands, without a chat template."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    prompt: str | None = None
    prompt_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=2**31)], ...],
        FailFast(),
        Field(strict=False, max_length=MAX_POSITIONS),
        _listed("a list of token ids"),
    ] = ()


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
    fields = _object(body)
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [
            _supported(message, ChatMessage, _MESSAGE_NOT_YET, frozenset(), f"messages[{index}].")
            if isinstance(message, dict)
            else message
            for index, message in enumerate(messages[: MAX_CHAT_MESSAGES + 1])
        ]
    request = _validated(ChatRequest, _supported(fields, ChatRequest, _NOT_YET, _WITHOUT_EFFECT, ""))
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options: only allowed when stream is true", "stream_options")
    return _with_logprobs_for_top(request)


def generate_body(body: bytes) -> GenerateBody:
    """Read a request for ``/v1/generate``.

    Raises:
        InvalidRequest: with the field at fault as ``param``.
    """
    fields = _object(body)
    request = _validated(GenerateBody, _supported(fields, GenerateBody, {}, frozenset(), ""))
    if (request.prompt is None) == (not request.prompt_ids):
        raise InvalidRequest("give exactly one of prompt (text) and prompt_ids (token ids)", "prompt")
    return _with_logprobs_for_top(request)


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise InvalidRequest(f"the body is no JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def _supported(
    fields: Mapping[str, Any],
    model: type[BaseModel],
    not_yet: Mapping[str, tuple[Any, ...]],
    without_effect: frozenset[str],
    where: str,
) -> dict[str, Any]:
    """``fields`` without those that change nothing; raises for the first one that would be ignored otherwise."""
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in model.model_fields:
            kept[name] = value
        elif name in not_yet:
            if value is not None and not any(_same(value, neutral) for neutral in not_yet[name]):
                raise InvalidRequest(f"{where}{name} is not supported by this node yet; leave it out", f"{where}{name}")
        elif name not in without_effect:
            param = f"{where}{name[:_ECHOED_CHARS]}"
            raise InvalidRequest(f"unknown parameter: {param}", param)
    return kept


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells ``true`` from ``1``, as JSON does."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


_Model = TypeVar("_Model", bound=BaseModel)
_Sampled = TypeVar("_Sampled", bound=Sampled)


def _with_logprobs_for_top(request: _Sampled) -> _Sampled:
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs: only allowed when logprobs is true", "top_logprobs")
    return request


def _validated(model: type[_Model], fields: Mapping[str, Any]) -> _Model:
    try:
        return model.model_validate(fields)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_context=False, include_input=False)[0]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]).lstrip(".")
    raise InvalidRequest(f"{param}: {first['msg']}", param)
