"""Whatever a client sends, it gets an answer or an error in OpenAI's shape, and no peer works for what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.bridge.openai_models.chat import chat_request
from tessella_p2p.bridge.openai_models.completions import completion_request
from tessella_p2p.bridge.openai_models.generate import generate_body
from tests.bridge.bridge_doubles import FEATURES, MODEL, SpeakingEntry, app_for, call, chat_body, error_shape

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"\xff\xfe", None),
        (b'{"model": "\\ud800"}', None),
        (b"[" * 100_000, None),
        (b'{"model": NaN}', None),
        ({}, "model"),
        (chat_body(model=""), "model"),
        (chat_body(model=7), "model"),
        (chat_body(messages=[]), "messages"),
        (chat_body(messages="hi"), "messages"),
        (chat_body(messages=["hi"]), "messages[0]"),
        (chat_body(messages=[{"content": "hi"}]), "messages[0].role"),
        (chat_body(messages=[{"role": "function", "content": "hi"}]), "messages[0].role"),
        (chat_body(messages=[{"role": "tool", "content": "hi"}]), "messages[0].tool_call_id"),
        (chat_body(messages=[{"role": "user", "content": "hi", "tool_call_id": "c"}]), "messages[0].tool_call_id"),
        (chat_body(messages=[{"role": "user", "tool_calls": [CALL]}]), "messages[0].tool_calls"),
        (
            chat_body(messages=[{"role": "assistant", "tool_calls": [{**CALL, "id": 5}]}]),
            "messages[0].tool_calls[0].id",
        ),
        (
            chat_body(messages=[{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}]),
            "messages[0].tool_calls[0].type",
        ),
        (chat_body(messages=[{"role": "user", "content": 7}]), "messages[0].content"),
        (chat_body(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0].type"),
        (chat_body(messages=[{"role": "user", "content": "", "tool_calls": [{}]}]), "messages[0].tool_calls[0].id"),
        (chat_body(messages=[{"role": "user", "content": "", "colour": "red"}]), "messages[0].colour"),
        (chat_body(messages=[{"role": "user"}] * 4097), "messages"),
        (chat_body(max_tokens=-1), "max_tokens"),
        (chat_body(max_tokens=0), "max_tokens"),
        (chat_body(max_tokens="5"), "max_tokens"),
        (chat_body(max_tokens=True), "max_tokens"),
        (chat_body(max_tokens=10**30), "max_tokens"),
        (chat_body(max_completion_tokens=-1), "max_completion_tokens"),
        (chat_body(temperature=-0.1), "temperature"),
        (chat_body(temperature=2.1), "temperature"),
        (json.dumps(chat_body()).encode().replace(b"{", b'{"temperature": 1e999, ', 1), "temperature"),
        (chat_body(seed=1.5), "seed"),
        (chat_body(seed=2**64), "seed"),
        (chat_body(stop=""), "stop[0]"),
        (chat_body(stop=["a"] * 17), "stop"),
        (chat_body(stop=5), "stop"),
        (chat_body(stream="yes"), "stream"),
        (chat_body(stream_options={"include_usage": True}), "stream_options"),
        (chat_body(n=9), "n"),
        (chat_body(n=0), "n"),
        (chat_body(n=True), "n"),
        (chat_body(top_p=1.5), "top_p"),
        (chat_body(top_p=-0.1), "top_p"),
        (chat_body(top_p="0.5"), "top_p"),
        (chat_body(top_k=-2), "top_k"),
        (chat_body(top_k=0.5), "top_k"),
        (chat_body(top_k=2**20 + 1), "top_k"),
        (chat_body(min_p=1.01), "min_p"),
        (chat_body(min_p=True), "min_p"),
        (chat_body(presence_penalty=2.1), "presence_penalty"),
        (chat_body(frequency_penalty=-2.1), "frequency_penalty"),
        (chat_body(repetition_penalty=0), "repetition_penalty"),
        (chat_body(repetition_penalty=10.5), "repetition_penalty"),
        (chat_body(logprobs=5), "logprobs"),
        (chat_body(logprobs=True, top_logprobs=21), "top_logprobs"),
        (chat_body(logprobs=True, top_logprobs=-1), "top_logprobs"),
        (chat_body(top_logprobs=1), "top_logprobs"),
        (chat_body(logprobs=False, top_logprobs=1), "top_logprobs"),
        (chat_body(logit_bias={"5": 101}), "logit_bias"),
        (chat_body(logit_bias={"5": "1"}), "logit_bias"),
        (chat_body(logit_bias={"5": True}), "logit_bias"),
        (chat_body(logit_bias={"5": None}), "logit_bias"),
        (chat_body(logit_bias={"-5": 1}), "logit_bias"),
        (chat_body(logit_bias={"five": 1}), "logit_bias"),
        (chat_body(logit_bias={"\u0665": 1}), "logit_bias"),
        (chat_body(logit_bias={"": 1}), "logit_bias"),
        (chat_body(logit_bias={"5": 1, "05": 1}), "logit_bias"),
        (chat_body(logit_bias={str(2**20): 1}), "logit_bias"),
        (chat_body(logit_bias={"9" * 5000: 1}), "logit_bias"),
        (chat_body(logit_bias={str(token): 1 for token in range(301)}), "logit_bias"),
        (chat_body(logit_bias=[[5, 1]]), "logit_bias"),
        (chat_body(response_format={"type": "xml"}), "response_format.type"),
        (chat_body(response_format="json"), "response_format"),
        (chat_body(response_format={"type": "json_schema"}), "response_format.json_schema"),
        (
            chat_body(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
            "response_format.json_schema.schema",
        ),
        (
            chat_body(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": []}}),
            "response_format.json_schema.schema",
        ),
        (
            chat_body(response_format={"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}),
            "response_format.json_schema.name",
        ),
        (
            chat_body(
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": "x" * 40_000}}}
            ),
            "response_format",
        ),
        (
            chat_body(response_format={"type": "json_object", "json_schema": {"name": "x", "schema": {}}}),
            "response_format.json_schema",
        ),
        (chat_body(tools=[{"type": "function"}]), "tools[0].function"),
        (chat_body(tools=[{"type": "custom", "custom": {"name": "x"}}]), "tools[0].type"),
        (chat_body(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name"),
        (chat_body(tools=[TOOL, TOOL]), "tools[1].function.name"),
        (chat_body(tools=[TOOL] * 129), "tools"),
        (chat_body(tools="look"), "tools"),
        (
            chat_body(tools=[{"type": "function", "function": {"name": "look", "parameters": 5}}]),
            "tools[0].function.parameters",
        ),
        (chat_body(tool_choice="required"), "tool_choice"),
        (chat_body(tools=[TOOL], tool_choice="always"), "tool_choice.type"),
        (chat_body(tools=[TOOL], tool_choice={"type": "auto"}), "tool_choice"),
        (chat_body(tools=[TOOL], tool_choice={"type": "function"}), "tool_choice.function"),
        (
            chat_body(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}),
            "tool_choice.function.name",
        ),
        (chat_body(tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": {}}), "tool_choice.type"),
        (chat_body(functions=[{"name": "look"}]), "functions"),
        (chat_body(function_call={"name": "look"}), "function_call"),
        (chat_body(audio={"voice": "x"}), "audio"),
        (chat_body(tessella="yes"), "tessella"),
        (chat_body(reasoning_effort="high"), "reasoning_effort"),
        (chat_body(colour="red"), "colour"),
    ],
    ids=lambda value: str(value)[:48],
)
async def test_a_bad_chat_request_is_a_400_that_names_the_field(body: object, param: str | None) -> None:
    entry = SpeakingEntry()
    answered = await call(app_for(entry), "POST", CHAT, body)

    assert answered.status == 400
    with error_shape(answered) as error:
        assert (error["param"], error["type"], error["code"]) == (param, "invalid_request_error", "invalid_request")
    assert entry.asked == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": MODEL}, "prompt"),
        ({"prompt": "hi", "prompt_ids": [1]}, "prompt"),
        ({"prompt_ids": []}, "prompt"),
        ({"prompt_ids": [-1]}, "prompt_ids[0]"),
        ({"prompt_ids": [2**31]}, "prompt_ids[0]"),
        ({"prompt_ids": "hi"}, "prompt_ids"),
        ({"prompt": "hi", "max_tokens": -3}, "max_tokens"),
        ({"prompt": "hi", "min_p": -1}, "min_p"),
        ({"prompt": "hi", "top_logprobs": 3}, "top_logprobs"),
        ({"prompt": "hi", "logit_bias": 3}, "logit_bias"),
        ({"prompt": "hi", "messages": []}, "messages"),
    ],
)
async def test_a_bad_generate_request_is_a_400_that_names_the_field(body: object, param: str) -> None:
    entry = SpeakingEntry()
    answered = await call(app_for(entry), "POST", "/v1/generate", body)

    assert answered.status == 400
    with error_shape(answered) as error:
        assert error["param"] == param
    assert entry.asked == []


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["hi", 5]}, "prompt"),
        ({"prompt": [5, "hi"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": {"text": "hi"}}, "prompt"),
        ({"prompt": ["hi"] * 65}, "prompt"),
        ({"prompt": ["hi"] * 33, "n": 2}, "n"),
        ({"n": 9}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"suffix": 5}, "suffix"),
        ({"prompt": [1, 2], "suffix": "end"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 2}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"tools": [TOOL]}, "tools"),
    ],
    ids=lambda value: str(value)[:48],
)
async def test_a_bad_text_completion_is_a_400_that_names_the_field(more: dict[str, Any], param: str) -> None:
    entry = SpeakingEntry()
    answered = await call(app_for(entry), "POST", "/v1/completions", {"model": MODEL, "prompt": "hi", **more})

    assert answered.status == 400
    with error_shape(answered) as error:
        assert (error["param"], error["type"], error["code"]) == (param, "invalid_request_error", "invalid_request")
    assert entry.asked == []


async def test_tools_are_refused_where_the_models_template_knows_none() -> None:
    app = app_for(SpeakingEntry(abilities=replace(FEATURES, tools=False)))
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [CALL]}]

    for body, param in [
        (chat_body(tools=[TOOL]), "tools"),
        (chat_body(messages=turns), "messages[1]"),
        (chat_body(tools=[TOOL], messages=turns, tool_choice="none"), "messages[1]"),
    ]:
        answered = await call(app, "POST", CHAT, body)
        assert (answered.status, answered.json()["error"]["param"]) == (400, param)
    assert (await call(app, "POST", CHAT, chat_body(tools=[TOOL], tool_choice="none"))).status == 200


@pytest.mark.parametrize(
    ("path", "body", "entrys", "clients"),
    [
        (CHAT, chat_body(response_format={"type": "json_object"}), "grammar", "response_format"),
        (CHAT, chat_body(tools=[TOOL], tool_choice="required"), "grammar", "tools"),
        (CHAT, chat_body(), "prompt", "messages"),
        ("/v1/completions", {"model": MODEL, "prompt": [1, 2]}, "prompt_ids", "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": "hi", "suffix": "end"}, "gap", "suffix"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_entry_refuses_has_the_clients_name(
    path: str, body: dict[str, Any], entrys: str, clients: str, stream: bool
) -> None:
    entry = SpeakingEntry(refusal=InvalidRequest("no", entrys))
    answered = await call(app_for(entry), "POST", path, {**body, "stream": stream})

    assert (answered.status, answered.json()["error"]["param"]) == (400, clients)


async def test_a_prompt_without_a_model_needs_one_that_is_served() -> None:
    several = await call(app_for(SpeakingEntry(models=("a", "b"))), "POST", "/v1/generate", {"prompt": "hi"})
    none = await call(app_for(SpeakingEntry(models=())), "POST", "/v1/generate", {"prompt": "hi"})

    assert (several.status, several.json()["error"]["param"]) == (400, "model")
    assert (none.status, none.json()["error"]["code"]) == (503, "no_route")


async def test_unknown_paths_and_methods_are_json() -> None:
    app = app_for(SpeakingEntry())
    for method, path, status in [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/responses", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", CHAT, 405),
        ("POST", "/status", 405),
        ("DELETE", "/v1/models/toy", 405),
    ]:
        answered = await call(app, method, path)
        assert answered.status == status
        with error_shape(answered) as error:
            assert error["code"] == {404: "unknown_url", 405: "method_not_allowed"}[status]


async def test_a_body_over_the_limit_is_a_413_and_one_at_the_limit_is_not() -> None:
    body = json.dumps(chat_body()).encode()
    entry = SpeakingEntry()
    fits = await call(app_for(entry, max_body_bytes=len(body)), "POST", CHAT, body)
    over = await call(app_for(entry, max_body_bytes=len(body) - 1), "POST", CHAT, body)

    assert (fits.status, over.status) == (200, 413)
    with error_shape(over) as error:
        assert error["code"] == "request_too_large"
    assert len(entry.asked) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
FIELDS = [
    *("model", "messages", "max_tokens", "max_completion_tokens", "temperature", "seed", "stop", "stream", "prompt"),
    *("stream_options", "n", "user", "tools", "top_p", "logit_bias", "response_format", "metadata", "prompt_ids"),
    *("logprobs", "top_logprobs", "top_k", "min_p", "presence_penalty", "repetition_penalty"),
    *("tool_choice", "parallel_tool_calls", "suffix", "echo", "best_of", "tessella"),
]
messages = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "refusal"]),
        json_values | st.just("user"),
    ),
    max_size=3,
)
bodies = st.binary() | st.builds(
    lambda fields: json.dumps(fields).encode(),
    json_values
    | st.dictionaries(st.sampled_from(FIELDS), json_values)
    | st.builds(
        lambda more, turns: {**chat_body(messages=turns), **more},
        st.dictionaries(st.sampled_from(FIELDS), json_values),
        messages,
    )
    | st.builds(lambda more: chat_body(**more), st.dictionaries(st.sampled_from(FIELDS[2:]), json_values, max_size=2)),
)


@settings(deadline=None, max_examples=80)
@given(body=bodies, path=st.sampled_from([CHAT, "/v1/completions", "/v1/generate"]))
async def test_any_body_gives_an_answer_or_an_error_object_and_never_a_500(body: bytes, path: str) -> None:
    answered = await call(app_for(SpeakingEntry()), "POST", path, body)

    if answered.status == 200:
        return
    assert answered.status in (400, 404)
    with error_shape(answered) as error:
        assert error["type"] == "invalid_request_error"


@settings(deadline=None, max_examples=80)
@given(body=bodies)
def test_reading_a_body_gives_a_request_or_an_invalid_request(body: bytes) -> None:
    for read in (chat_request, completion_request, generate_body):
        try:
            request: Any = read(body)
        except InvalidRequest:
            continue
        assert all(isinstance(stop, str) for stop in request.stop)


@settings(deadline=None, max_examples=50)
@given(
    path=st.text(max_size=40).map("/".__add__),
    query=st.binary(max_size=40),
    method=st.sampled_from(["GET", "PUT", "BREW"]),
)
async def test_any_path_gives_an_answer(path: str, query: bytes, method: str) -> None:
    answered = await call(app_for(SpeakingEntry()), method, path.encode("ascii", "replace").decode(), query=query)

    assert answered.status in (200, 404, 405)
