"""Tools: which templates show them, what of a request reaches the model, and what never becomes a control token."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import InvalidRequest, PromptTooLong
from tessella_p2p.base.limits import MAX_PROMPT_CHARS, MAX_TOOL_CALLS, MAX_TOOL_DEPTH, MAX_TOOLS
from tessella_p2p.model.chat import encode_chat, parse_messages
from tessella_p2p.model.template import ChatTemplate
from tessella_p2p.model.tokenizer import Tokenizer
from tessella_p2p.model.tool_calls import ToolCall, parse_tools, read_call, read_calls
from tests.model.fim_artifact import TOOL_TEMPLATE, text_metadata

TOKENIZER = Tokenizer.from_metadata(text_metadata(), "m")
TEMPLATE = ChatTemplate(TOOL_TEMPLATE, {}, "m")
ASK = {"role": "user", "content": "What is it like in Ghent?"}
WEATHER: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How the weather is",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ghent"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


def ids_of(messages: list[Mapping[str, object]], tools: list[dict[str, object]] | None = None) -> list[int]:
    return encode_chat(TOKENIZER, TEMPLATE, parse_messages(messages), now_ms=0, tools=parse_tools(tools or []))


def test_the_model_reads_what_the_template_makes_of_tools_and_calls() -> None:
    messages: list[Mapping[str, object]] = [ASK, CALLED, RESULT]
    plain = TEMPLATE.render(parse_messages(messages), now_ms=0, tools=[WEATHER])
    assert json.dumps(WEATHER) in plain
    assert read_calls(plain) == [ToolCall("weather", {"city": "Ghent"})]
    assert ids_of(messages, [WEATHER]) == TOKENIZER.encode(plain, parse_special=True)


@pytest.mark.parametrize(
    ("text", "is_shown"),
    [
        (TOOL_TEMPLATE, True),
        ("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}", False),
        ("{{ tools | tojson }}{{ messages[-1].content }}", False),  # calls are lost
        ("{{ tools | tojson }}{% for c in messages[-1].tool_calls or [] %}[CALL]{{ c | tojson }}{% endfor %}", False),
        ("{{ raise_exception('no') if tools }}", False),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", False),
        ("{{ messages.x.y }}", False),
    ],
)
def test_tools_are_there_where_they_are_shown_and_calls_can_be_read_back(text: str, is_shown: bool) -> None:
    assert ChatTemplate(text, {}, "m").shows_tools is is_shown


def test_a_template_without_tools_refuses_them_by_name() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {}, "m")
    with pytest.raises(InvalidRequest) as offered:
        encode_chat(TOKENIZER, template, parse_messages([ASK]), now_ms=0, tools=[WEATHER])
    with pytest.raises(InvalidRequest) as called:
        encode_chat(TOKENIZER, template, parse_messages([ASK, CALLED]), now_ms=0)
    assert (offered.value.param, called.value.param) == ("tools", "messages")


HOSTILE = st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|", "im_end", "|>", '"', "\\", "x", "é"])).map(
    "".join
)


@given(description=HOSTILE, key=HOSTILE, value=HOSTILE, name=HOSTILE, result=HOSTILE)
@settings(max_examples=100, deadline=None)
def test_nothing_in_tools_and_calls_adds_a_control_token(
    description: str, key: str, value: str, name: str, result: str
) -> None:
    def control_ids(description: str, key: str, value: str, name: str, result: str) -> list[int]:
        tool: dict[str, object] = {
            "type": "function",
            "function": {"name": name or "x", "description": description, "parameters": {key: {"enum": [value]}}},
        }
        call = {"id": value, "function": {"name": name or "x", "arguments": json.dumps({key: [value, {key: value}]})}}
        answer = {"role": "tool", "tool_call_id": value, "name": name, "content": result}
        ids = ids_of([ASK, {"role": "assistant", "tool_calls": [call]}, answer], [tool])
        control = set(TOKENIZER.control.values())
        return [token for token in ids if token in control]

    assert control_ids(description, key, value, name, result) == control_ids("a", "b", "c", "d", "e")


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('\n{"name": "f", "arguments": {"a": 1}}\n', ToolCall("f", {"a": 1})),
        ('{"name": "f"}', ToolCall("f", {})),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', ToolCall("f", {"a": 1})),
        ('{"name": "", "arguments": {}}', None),
        ('{"name": 5, "arguments": {}}', None),
        ('{"name": "f", "arguments": [1]}', None),
        ('{"name": "f", "arguments": {"a": NaN}}', None),
        ("[1]", None),
        ("", None),
        ("[" * 100_000, None),
    ],
)
def test_what_a_model_wrote_is_a_call_or_none(text: str, call: ToolCall | None) -> None:
    assert read_call(text) == call


def test_calls_are_found_among_text() -> None:
    text = (
        'I ask.<tool_call>{"name": "f"}</tool_call> and <tool_call>no</tool_call><tool_call>{"name": "g"}</tool_call>'
    )
    assert [call.name for call in read_calls(text + '<tool_call>{"name": "cut off"}')] == ["f", "g"]


def deep(levels: int) -> object:
    value: object = "x"
    for _ in range(levels):
        value = {"inner": value}
    return value


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "retrieval", "function": {"name": "x"}}], "tools[0]"),
        ([{"type": "function"}], "tools[0]"),
        (["weather"], "tools[0]"),
        ([WEATHER, {"type": "function", "function": {}}], "tools[1].function.name"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "x", "parameters": deep(MAX_TOOL_DEPTH)}}], "tools[0]"),
        ([WEATHER] * (MAX_TOOLS + 1), "tools"),
    ],
)
def test_a_bad_tool_names_its_field(tools: list[Mapping[str, object]], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_tools(tools)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ("weather", ""),
        ([1], "[0]"),
        ([{"type": "custom", "function": {"name": "x", "arguments": "{}"}}], "[0]"),
        ([{"function": {"arguments": "{}"}}], "[0].function.name"),
        ([{"id": 5, "function": {"name": "x", "arguments": "{}"}}], "[0].id"),
        ([{"function": {"name": "x", "arguments": "{"}}], "[0].function.arguments"),
        ([{"function": {"name": "x", "arguments": "[]"}}], "[0].function.arguments"),
        ([{"function": {"name": "x"}}], "[0].function.arguments"),
        ([{"function": {"name": "x", "arguments": deep(MAX_TOOL_DEPTH + 1)}}], "[0].function.arguments"),
        ([{"function": {"name": "x", "arguments": "{}"}}] * (MAX_TOOL_CALLS + 1), ""),
    ],
)
def test_a_bad_call_names_its_field(calls: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_messages([ASK, {"role": "assistant", "tool_calls": calls}])
    assert caught.value.param == f"messages[1].tool_calls{param}"


def test_only_an_assistant_calls() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_messages([{**ASK, "tool_calls": CALLED["tool_calls"]}])
    assert caught.value.param == "messages[0].tool_calls"


def test_tools_count_as_part_of_the_prompt() -> None:
    long: dict[str, object] = {"type": "function", "function": {"name": "x", "description": "y" * MAX_PROMPT_CHARS}}
    with pytest.raises(PromptTooLong):
        ids_of([ASK], [long])
