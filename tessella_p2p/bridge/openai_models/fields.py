"""The fields that several requests share; pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field
from pydantic_core import PydanticCustomError

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import (
    MAX_LOGIT_BIASES,
    MAX_POSITIONS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    MAX_VOCABULARY,
)
from tessella_p2p.entry.api import GenerateRequest


def listed(what: str, wrap: Callable[[str], object] | None = None) -> BeforeValidator:
    """Lets a list pass; a bare string becomes a list of one where ``wrap`` says how. Null is an empty list, as if absent."""

    def as_list(value: Any) -> Any:
        if value is None:
            return []
        if isinstance(value, str) and wrap is not None:
            return [wrap(value)]
        if not isinstance(value, list):
            raise PydanticCustomError("not_a_list", "must be {what}", {"what": what})
        return value

    return BeforeValidator(as_list)


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


class Body(BaseModel):
    """An object of a request: unknown fields are refused, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StreamOptions(Body):
    """``include_obfuscation`` asks for padding against traffic analysis; a client must not rely on it, and none is sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


ModelName = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=1, le=MAX_POSITIONS)]
Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]


class Sampled(Body):
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
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)], ...],
        FailFast(),
        Field(strict=False, max_length=MAX_STOP_STRINGS),
        listed("a string or a list of strings", lambda text: text),
    ] = ()
    stream: bool | None = None
    tessella: bool | None = None
    """Whether the answer has this node's extension: the route, the tokens, the timings."""

    def alternatives(self) -> int | None:
        """How many of the likeliest tokens come with each token and its logprob; None for no logprobs at all."""
        return None

    def unsigned_seed(self) -> int | None:
        """The seed as the sampler takes it, in [0, 2**64): a negative one, which OpenAI allows, by its two's complement."""
        return None if self.seed is None else self.seed & (2**64 - 1)

    def asked_of(self, model: str) -> GenerateRequest:
        """The sampling fields, as the entry is asked; without a prompt yet.

        Without a temperature the answer is greedy: the manual's default, not OpenAI's 1.
        """
        alternatives = self.alternatives()
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
            logprobs=alternatives is not None,
            top_logprobs=alternatives or 0,
            stop=self.stop,
        )

    def check(self) -> None:
        """What no single field shows.

        Raises:
            InvalidRequest: with the field at fault as ``param``.
        """


class ScoredSampled(Sampled):
    """With chat's way to ask for logprobs."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def alternatives(self) -> int | None:
        """See `Sampled.alternatives`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """See `Sampled.check`."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: only allowed when logprobs is true", "top_logprobs")


class StreamedSampled(Sampled):
    """With OpenAI's way to ask for the usage of a stream."""

    stream_options: StreamOptions | None = None

    def wants_usage_chunk(self) -> bool:
        """Whether the stream ends with a chunk that holds the usage and no choice."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    def check(self) -> None:
        """See `Sampled.check`."""
        super().check()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only allowed when stream is true", "stream_options")


class OpenAISampled(StreamedSampled):
    """What OpenAI's own routes for text share beyond that."""

    model: ModelName
