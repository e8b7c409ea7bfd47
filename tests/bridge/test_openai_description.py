"""Every answer and chunk that this node gives on OpenAI's routes is one that OpenAI's own description allows, to the field."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import ValidationError

from tests.bridge import openai_description as openai
from tests.bridge.bridge_doubles import MODEL, NO_ROUTE, SpeakingEntry, app_for, call, chat_body, events_of

CHAT = "/v1/chat/completions"


async def _whole(path: str, body: dict[str, Any], entry: SpeakingEntry | None = None) -> Any:
    answered = await call(app_for(entry or SpeakingEntry()), "POST", path, body)
    assert answered.status == 200, answered.body
    return answered.json()


async def _streamed(path: str, body: dict[str, Any], entry: SpeakingEntry | None = None) -> list[Any]:
    answered = await call(app_for(entry or SpeakingEntry()), "POST", path, {**body, "stream": True})
    assert answered.status == 200, answered.body
    *events, end = events_of(answered.body)
    assert end == "[DONE]"
    assert events
    return events


TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}},
    }
]
CALLING = ("<tool_call>", '{"name": "weather",', ' "arguments": {"town": "Oslo"}}', "</tool_call>")
CHATS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 2},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"tessella": True},
    {"n": 3, "tessella": True},
    {"n": 2, "logprobs": True},
    {"response_format": {"type": "json_object"}},
    {"tools": TOOLS},
]


@pytest.mark.parametrize("more", CHATS, ids=str)
async def test_a_chat_answer_is_as_described(more: dict[str, Any]) -> None:
    openai.check_chat_completion(await _whole(CHAT, chat_body(**more)))


@pytest.mark.parametrize("more", [*CHATS, {"stream_options": {"include_usage": True}}], ids=str)
async def test_each_chunk_of_a_chat_is_as_described(more: dict[str, Any]) -> None:
    for event in await _streamed(CHAT, chat_body(**more)):
        openai.check_chat_chunk(event)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}], ids=str)
async def test_calls_of_tools_are_as_described(choice: object) -> None:
    body = chat_body(tools=TOOLS, tool_choice=choice)
    whole = await _whole(CHAT, body, SpeakingEntry(words=CALLING))
    events = await _streamed(CHAT, body, SpeakingEntry(words=CALLING))

    openai.check_chat_completion(whole)
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    for event in events:
        openai.check_chat_chunk(event)
    assert any(choice["delta"].get("tool_calls") for event in events for choice in event["choices"])


COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "hi"},
    {"prompt": ["hi", "ho"], "n": 2},
    {"prompt": [1, 2]},
    {"prompt": [[1, 2], [3]], "echo": True},
    {"prompt": "hi", "echo": True, "max_tokens": 2},
    {"prompt": "hi", "logprobs": 0},
    {"prompt": "hi", "logprobs": 5},
    {"prompt": "hi", "suffix": "ho", "tessella": True},
]
GAP = {"prefix": "def f(", "suffix": "):"}
TEXTS: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/completions", {"model": MODEL, **each}) for each in COMPLETIONS),
    ("/v1/fim/completions", GAP),
    ("/v1/fim/completions", {**GAP, "model": MODEL, "max_tokens": 3, "logprobs": 2, "tessella": True}),
]


@pytest.mark.parametrize(("path", "body"), TEXTS, ids=str)
async def test_a_text_completion_is_as_described(path: str, body: dict[str, Any]) -> None:
    openai.check_completion(await _whole(path, body))


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(("path", "body"), TEXTS, ids=str)
async def test_each_chunk_of_a_text_completion_is_as_described(path: str, body: dict[str, Any], usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    events = await _streamed(path, {**body, **options})

    for event in events:
        openai.check_completion_chunk(event)
    assert bool(events[-1].get("usage")) is usage
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert reasons[-1] in ("stop", "length")


async def test_models_are_as_described() -> None:
    app = app_for(SpeakingEntry(models=("toy", "org/toy")))

    openai.check_models((await call(app, "GET", "/v1/models")).json())
    openai.check_model((await call(app, "GET", "/v1/models/org/toy")).json())


async def test_errors_are_as_described_whole_and_in_a_stream() -> None:
    refused = await call(app_for(SpeakingEntry(refusal=NO_ROUTE)), "POST", CHAT, chat_body())
    wrong = await call(app_for(SpeakingEntry()), "POST", CHAT, chat_body(n="x"))
    nowhere = await call(app_for(SpeakingEntry()), "GET", "/nowhere")
    moved = await call(app_for(SpeakingEntry()), "POST", "/v1/forward")
    *_, broken = await _streamed(CHAT, chat_body(), SpeakingEntry(fail_after=2, failure=NO_ROUTE))

    for answered, status in [(refused, 503), (wrong, 400), (nowhere, 404), (moved, 410)]:
        assert answered.status == status
        openai.check_error(answered.json())
    openai.check_error(broken)


def test_a_field_that_is_not_described_does_not_pass() -> None:
    model = {"id": "m", "object": "model", "created": 1, "owned_by": "us"}
    openai.check_model(model)

    for wrong in ({**model, "colour": "red"}, {**model, "created": 1.5}, {"id": "m"}, {**model, "object": "list"}):
        with pytest.raises(ValidationError):
            openai.check_model(wrong)
