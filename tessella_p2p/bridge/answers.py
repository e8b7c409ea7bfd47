"""The objects that answers are made of, and their JSON; pure.

Typed dicts, not validated models: what goes out is built here, so mypy checks its shape, and a chunk costs no more than its JSON.
``docs/protocols/http.md`` says which client needs which field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from pydantic_core import to_json
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from tessella_p2p.entry.api import Finished, HopReport, ScoredToken, TokenScores

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
DONE = b"data: [DONE]\n\n"
"""The last event of a stream, also of a failed one."""
PING = b": ping\n\n"
"""A comment: clients skip it, and a dead client's connection breaks on it."""


class Usage(TypedDict):
    """Counts of tokens; the end token is not one of them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Timings(TypedDict):
    """What the entry measured."""

    ttft_ms: float
    tokens_per_s: float
    hop_added_ms_p50: float | None


class Hop(TypedDict):
    """One stage of the route; ``layers`` is half-open; ``cached`` is in positions, null before the first token."""

    peer_id: str
    layers: tuple[int, int]
    hop_ms: float
    compute_ms: float
    cached: int | None


class Extension(TypedDict):
    """What Tessella tells beyond OpenAI's fields: which peers did the work, for which tokens, and how it was paid."""

    request_id: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    route: list[Hop]
    tier: str
    paid: bool
    timings: Timings
    others: NotRequired[list[Extension]]
    """Of the further choices, in their order; each has been a request of its own."""


class CalledFunction(TypedDict):
    """What is called; ``arguments`` is JSON as text, cut off where the answer was."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(TypedDict):
    """The assistant's turn; its content is null where it only calls tools."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class TokenLogprob(TypedDict):
    """A token: its text (U+FFFD where its bytes are no whole character), its bytes (null for a control token), its logprob."""

    token: str
    bytes: list[int] | None
    logprob: float


class ContentLogprob(TokenLogprob):
    """A token of the answer, and the likeliest ones at its place."""

    top_logprobs: list[TokenLogprob]


class ChoiceLogprobs(TypedDict):
    """OpenAI's ``logprobs``: one entry per token of the answer."""

    content: list[ContentLogprob]
    refusal: None


class Choice(TypedDict):
    """One answer."""

    index: int
    message: Message
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(TypedDict):
    """A whole chat answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    tessella: NotRequired[Extension]


class FunctionDelta(TypedDict):
    """What a chunk adds to a call: its name in the first one, arguments after it."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """The same for the call around it."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChoiceDelta(TypedDict):
    """What a chunk adds: the role in the first one, text and calls after it, and nothing (``{}``) in the last."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChunkChoice(TypedDict):
    """``finish_reason`` is null until the last chunk."""

    index: int
    delta: ChoiceDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatChunk(TypedDict):
    """One event of a streamed chat answer. ``usage`` is there only where the client asked for it: null, and last the counts."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    tessella: NotRequired[Extension]


def encoded(value: Any) -> bytes:
    """UTF-8 JSON; a number that JSON cannot say is null."""
    return to_json(value, inf_nan_mode="null")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encoded(value) + b"\n\n"


def usage_of(finished: Sequence[Finished], per_prompt: int = 1) -> Usage:
    """The counts of some generations, each prompt once: every ``per_prompt`` of them in a row had the same one."""
    prompt = sum(len(each.prompt_ids) for each in finished[::per_prompt])
    answer = sum(len(each.token_ids) for each in finished)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def logprobs_of(scores: Sequence[TokenScores]) -> ChoiceLogprobs | None:
    """What a choice tells of its tokens' probabilities; null where there is nothing to tell."""
    if not scores:
        return None
    content: list[ContentLogprob] = [
        {**_token_logprob(each.chosen), "top_logprobs": [_token_logprob(other) for other in each.top]}
        for each in scores
    ]
    return {"content": content, "refusal": None}


def _token_logprob(scored: ScoredToken) -> TokenLogprob:
    return {
        "token": scored.token.decode("utf-8", "replace"),
        "bytes": list(scored.token) or None,
        "logprob": scored.logprob,
    }


def hop_of(hop: HopReport) -> Hop:
    """One stage of a route."""
    return {
        "peer_id": hop.peer_id,
        "layers": hop.layers.as_tuple(),
        "hop_ms": hop.hop_ms,
        "compute_ms": hop.compute_ms,
        "cached": hop.cached,
    }


def extension_of(finished: Finished, *others: Finished) -> Extension:
    """The ``tessella`` object of a generation, and of those beside it."""
    extension = _extension(finished)
    if others:
        extension["others"] = [_extension(other) for other in others]
    return extension


def _extension(finished: Finished) -> Extension:
    return {
        "request_id": finished.request_id,
        "token_ids": finished.token_ids,
        "prompt_ids": finished.prompt_ids,
        "route": [hop_of(hop) for hop in finished.route],
        "tier": finished.tier,
        "paid": finished.paid,
        "timings": {
            "ttft_ms": finished.ttft_ms,
            "tokens_per_s": finished.tokens_per_s,
            "hop_added_ms_p50": finished.hop_added_ms_p50,
        },
    }
