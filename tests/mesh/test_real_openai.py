"""OpenAI's own client against a mesh of real daemons: choices, text completions, schemas and tool calls, all the way to the tail."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall, ChatCompletionMessageParam, ChatCompletionToolParam

from tests.mesh.mesh_thread import MeshThread
from tests.model.fim_artifact import MODEL_ID

# The SDK leaves the generators of its streams to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator '(openai|httpx|httpcore):ResourceWarning")

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Look."}]
SWITCH = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
TOOL: ChatCompletionToolParam = {"type": "function", "function": {"name": "switch", "parameters": SWITCH}}


def client(mesh: MeshThread) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{mesh.mesh.entry_url}/v1", api_key="none", max_retries=0, timeout=120.0)


async def test_choices_differ_by_their_seed_and_are_the_same_again(fim_mesh: MeshThread) -> None:
    more: dict[str, Any] = {"model": MODEL_ID, "max_tokens": 8, "temperature": 1.5, "seed": 5}
    async with client(fim_mesh) as api:
        once = await api.completions.create(prompt="def", n=4, **more)
        again = await api.completions.create(prompt="def", n=2, **{**more, "seed": 6})
        chat = await api.chat.completions.create(messages=MESSAGES, n=3, **more)
        stream = await api.chat.completions.create(messages=MESSAGES, n=3, stream=True, **more)
        streamed = ["", "", ""]
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""

    texts = [choice.text for choice in once.choices]
    assert len(set(texts)) > 1
    assert [choice.text for choice in again.choices] == texts[1:3]
    assert streamed == [choice.message.content for choice in chat.choices]


async def test_a_text_completion_echoes_and_tells_its_logprobs(fim_mesh: MeshThread) -> None:
    async with client(fim_mesh) as api:
        echoed = await api.completions.create(model=MODEL_ID, prompt=["ab", "cd"], echo=True, max_tokens=4)
        scored = await api.completions.create(model=MODEL_ID, prompt="ab", logprobs=2, max_tokens=4)
        filled = await api.completions.create(model=MODEL_ID, prompt="de", suffix="on", max_tokens=4)

    assert [choice.text[:2] for choice in echoed.choices] == ["ab", "cd"]
    told = scored.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert len(told.tokens) == len(told.text_offset or ()) == len(told.top_logprobs or ())
    assert echoed.choices[0].text == "ab" + scored.choices[0].text
    assert filled.choices[0].finish_reason in ("stop", "length")


async def test_an_answer_keeps_to_its_schema_whatever_the_model_would_say(fim_mesh: MeshThread) -> None:
    more: dict[str, Any] = {"model": MODEL_ID, "messages": MESSAGES, "max_tokens": 100, "seed": 3, "temperature": 1.0}
    more["response_format"] = {"type": "json_schema", "json_schema": {"name": "switch", "schema": SWITCH}}
    async with client(fim_mesh) as api:
        answer = await api.chat.completions.create(**more)

    assert answer.choices[0].finish_reason == "stop"
    assert set(json.loads(answer.choices[0].message.content or "")) == {"on"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_tool_that_has_to_be_called_is_called(fim_mesh: MeshThread, temperature: float) -> None:
    async with client(fim_mesh) as api:
        more: dict[str, Any] = {"model": MODEL_ID, "messages": MESSAGES, "tools": [TOOL], "seed": 1}
        more |= {"tool_choice": {"type": "function", "function": {"name": "switch"}}, "temperature": temperature}
        whole = await api.chat.completions.create(**more, max_tokens=200)
        async with api.chat.completions.stream(**more, max_tokens=200) as stream:
            streamed = await stream.get_final_completion()
        assert whole.choices[0].message.tool_calls is not None
        turn = whole.choices[0].message.model_dump()
        result = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "done"}
        later: dict[str, Any] = {"messages": [*MESSAGES, turn, result], "tools": [TOOL], "max_tokens": 4}
        after = await api.chat.completions.create(model=MODEL_ID, **later)

    for completion in (whole, streamed):
        (choice,) = completion.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        assert call.function.name == "switch"
        assert set(json.loads(call.function.arguments)) == {"on"}
    assert after.usage is not None
    assert whole.usage is not None
    assert after.usage.prompt_tokens > whole.usage.prompt_tokens


async def test_a_schema_that_no_grammar_can_follow_is_refused_by_the_field_that_has_it(fim_mesh: MeshThread) -> None:
    wrong = {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}}
    asked: dict[str, Any] = {"model": MODEL_ID, "messages": MESSAGES}
    of_format = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": wrong}}}
    tool = {"type": "function", "function": {"name": "x", "parameters": wrong}}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("response_format", of_format),
        ("tools", {"tools": [tool], "tool_choice": "required"}),
    ]
    async with client(fim_mesh) as api:
        for field, more in cases:
            with pytest.raises(openai.BadRequestError) as caught:
                await api.chat.completions.create(**asked, **more)
            assert caught.value.param == field
