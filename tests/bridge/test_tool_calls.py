"""Calls in a model's text: found in any split, said as OpenAI says them, and nothing of what is none is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tessella_p2p.bridge.tool_calls import CallArguments, CallBegun, Part, ToolCallReader, calls_grammar
from tests.bridge import openai_description as openai
from tests.bridge.bridge_doubles import MODEL, SpeakingEntry, app_for, call, chat_body, events_of

CHAT = "/v1/chat/completions"
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
WAIT = {"type": "function", "function": {"name": "wait"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "</tool_call> \\" {"}}\n</tool_call>'
BACKWARDS = '<tool_call>{"arguments": "{\\"s\\": 1}", "name": "wait"}</tool_call>'

# ---- The reader ----


def read(pieces: Sequence[str]) -> list[Part]:
    """The parts, neighbours joined."""
    reader = ToolCallReader({"look", "wait"})
    joined: list[Part] = []
    for part in [part for piece in pieces for part in reader.feed(piece)] + reader.flush():
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.index == last.index:
            joined[-1] = CallArguments(part.index, last.text + part.text)
        else:
            joined.append(part)
    return joined


fragments = st.sampled_from(
    [
        *(CALL, BACKWARDS, '<tool_call>{"name": "other", "arguments": {}}</tool_call>', "<tool_call>", "</tool_call>"),
        *("\n", " ", "word", "<tool", '{"name": "look", "arguments": {', '"', "\\", "{", "}", ": [1, {}]}"),
    ]
)
written = st.lists(fragments, max_size=8).map("".join)


@given(written, st.lists(st.integers(1, 9), max_size=40))
def test_any_split_gives_the_same_parts(text: str, sizes: list[int]) -> None:
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]

    assert read([*pieces, rest]) == read([text]) == read(list(text))


@given(st.text("<tol_ca>/ \n", max_size=30).filter(lambda text: "<tool_call>" not in text))
def test_text_without_a_call_is_all_text(text: str) -> None:
    assert "".join(str(part) for part in read(list(text))) == text


def test_text_and_calls_are_told_apart_in_order() -> None:
    assert read(["I look.\n" + CALL + "\n" + BACKWARDS + "\n"]) == [
        "I look.",
        CallBegun(0, "look"),
        CallArguments(0, '{"at": "</tool_call> \\" {"}'),
        CallBegun(1, "wait"),
        CallArguments(1, '{"s":1}'),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
        "<tool_call>look(at)</tool_call> then",
        '<tool_call>{"name": "lo',
        "<tool_ca",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert read([text]) == read(list(text)) == [text]


def test_arguments_come_as_they_are_written_and_not_only_at_their_end() -> None:
    reader = ToolCallReader({"look"})

    assert reader.feed('<tool_call>{"name": "look", "arguments": ') == []
    assert reader.feed('{"at": "h') == [CallBegun(0, "look"), CallArguments(0, '{"at": "h')]
    assert reader.feed('ere"}') == [CallArguments(0, 'ere"}')]
    assert reader.feed("}</tool_call>") == []


def test_a_name_without_end_is_looked_at_once_and_stays_text() -> None:
    """The head is looked for with each token: looking at all that is held would make an answer cost the square of its length."""
    endless = '<tool_call>{"name": "' + "x" * 60_000
    began = time.process_time()
    assert "".join(str(part) for part in read([endless[at : at + 4] for at in range(0, len(endless), 4)])) == endless
    assert time.process_time() - began < 10.0


def test_a_head_that_reaches_too_far_is_no_beginning_whatever_the_pieces_are() -> None:
    far = '<tool_call>{"name": "look", ' + " " * 2000 + '"arguments": {"at": 1}}</tool_call>'
    assert read([far]) == read(list(far)) == [CallBegun(0, "look"), CallArguments(0, '{"at":1}')]


def test_a_call_that_breaks_off_ends_with_its_mark() -> None:
    assert read(['<tool_call>{"name": "look", "arguments": {"at": 1</tool_call>after']) == [
        CallBegun(0, "look"),
        CallArguments(0, '{"at": 1'),
        "after",
    ]


# ---- The grammar ----


def accepts(grammar: str, text: str) -> bool:
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return bool(matcher.consume_tokens(tokens)) and bool(matcher.is_accepting())


FUNCTIONS: list[tuple[str, Mapping[str, object]]] = [
    ("look", {"$ref": "#/$defs/At", "$defs": {"At": LOOK["function"]["parameters"]}}),  # type: ignore[index]
    ("wait", {"type": "object"}),
]
ONE = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "wait", "arguments": {"a": [1]}}\n</tool_call>'


def test_a_grammar_of_calls_takes_calls_alone_and_as_many_as_it_may() -> None:
    several = calls_grammar(FUNCTIONS, several=True)
    single = calls_grammar(FUNCTIONS, several=False)

    assert accepts(several, ONE)
    assert accepts(several, f"{ONE}\n{TWO}\n{ONE}")
    assert accepts(single, TWO)
    assert not accepts(single, f"{ONE}\n{TWO}")
    for grammar in (several, single):
        for wrong in ("", "hello", "{}", ONE.replace("look", "other"), ONE.replace('"é"', "5"), f"{ONE} and"):
            assert not accepts(grammar, wrong)


def test_a_grammar_with_another_answer_takes_it_instead() -> None:
    grammar = calls_grammar(FUNCTIONS, several=True, otherwise={"type": "array"})

    assert accepts(grammar, "[1, 2]")
    assert accepts(grammar, ONE)
    assert not accepts(grammar, "{}")


def test_what_the_grammar_takes_is_read_back_as_calls() -> None:
    reader = ToolCallReader({"look", "wait"})
    parts = [*reader.feed(ONE + "\n" + TWO), *reader.flush()]

    assert not [part for part in parts if isinstance(part, str)]
    assert reader.num_calls == 2


# ---- The surface ----


async def answer(words: Sequence[str], stream: bool = False, **more: Any) -> tuple[Any, str, list[Any]]:
    """Content, reason and calls of an answer that consists of ``words``."""
    body = chat_body(tools=[LOOK, WAIT], stream=stream, **more)
    answered = await call(app_for(SpeakingEntry(words=words)), "POST", CHAT, body)
    assert answered.status == 200, answered.body
    if not stream:
        openai.check_chat_completion(answered.json())
        choice = answered.json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"], choice["message"].get("tool_calls", [])
    *chunks, _ = events_of(answered.body)
    content, calls = None, list[Any]()
    for chunk in chunks:
        openai.check_chat_chunk(chunk)
        delta = chunk["choices"][0]["delta"]
        if delta.get("content") is not None:
            content = (content or "") + delta["content"]
        for each in delta.get("tool_calls", []):
            if each["index"] == len(calls):
                calls.append({"id": each["id"], "type": each["type"], "function": dict(each["function"])})
            else:
                calls[each["index"]]["function"]["arguments"] += each["function"]["arguments"]
    return content, chunks[-1]["choices"][0]["finish_reason"], calls


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_are_told_with_their_ids_and_end_the_answer(stream: bool) -> None:
    content, reason, calls = await answer([*CALL, "\n", *BACKWARDS], stream)

    assert (content, reason) == (None, "tool_calls")
    assert [each["function"]["name"] for each in calls] == ["look", "wait"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"at": '</tool_call> " {'}
    assert len({each["id"] for each in calls}) == 2
    assert {each["type"] for each in calls} == {"function"}


@pytest.mark.parametrize("words", [["no ", "call"], list("look: " + CALL), list(CALL[:40]), list(CALL + "\nand")])
async def test_a_streamed_answer_joins_to_the_whole_one(words: list[str]) -> None:
    assert await answer(words) == await answer(words, stream=True)


async def test_an_answer_that_is_cut_off_in_a_call_says_so() -> None:
    _, reason, (cut,) = await answer(list(CALL), max_tokens=60)

    assert reason == "length"
    assert cut["function"]["arguments"].startswith('{"at"')


async def test_without_tools_nothing_is_looked_for() -> None:
    answered = await call(app_for(SpeakingEntry(words=[CALL])), "POST", CHAT, chat_body())

    assert answered.json()["choices"][0]["message"] == {"role": "assistant", "content": CALL, "refusal": None}


async def test_each_token_of_a_call_tells_its_logprob() -> None:
    words = list(CALL)
    body = chat_body(tools=[LOOK], logprobs=True)
    whole = await call(app_for(SpeakingEntry(words=words)), "POST", CHAT, body)
    streamed = await call(app_for(SpeakingEntry(words=words)), "POST", CHAT, {**body, "stream": True})

    told = whole.json()["choices"][0]["logprobs"]["content"]
    *chunks, _ = events_of(streamed.body)
    assert [each["token"] for each in told] == words
    assert [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]] == told


async def asked_for(**more: Any) -> Any:
    entry = SpeakingEntry()
    answered = await call(app_for(entry), "POST", CHAT, chat_body(tools=[LOOK, WAIT], **more))
    assert answered.status == 200, answered.body
    (asked,) = entry.asked
    return asked


async def test_tools_reach_the_template_unless_none_may_be_called() -> None:
    auto, none = await asked_for(), await asked_for(tool_choice="none")

    assert auto.tools[0] == LOOK
    assert auto.tools[1] == {"type": "function", "function": {"name": "wait", "parameters": {}}}
    assert (auto.grammar, auto.stop, none.tools, none.grammar) == (None, (), (), None)


async def test_a_call_that_has_to_be_is_a_matter_of_the_grammar() -> None:
    required = await asked_for(tool_choice="required")
    single = await asked_for(tool_choice="required", parallel_tool_calls=False)
    named = await asked_for(tool_choice={"type": "function", "function": {"name": "wait"}})

    assert accepts(required.grammar.text, f"{ONE}\n{TWO}")
    assert accepts(single.grammar.text, ONE)
    assert not accepts(single.grammar.text, f"{ONE}\n{TWO}")
    assert accepts(named.grammar.text, TWO)
    assert not accepts(named.grammar.text, ONE)
    assert {each.grammar.kind for each in (required, single, named)} == {"lark"}


async def test_one_call_at_most_ends_the_answer_behind_it() -> None:
    asked = await asked_for(parallel_tool_calls=False, stop="x")

    assert asked.stop == ("x", "</tool_call>")
    content, reason, calls = await answer(list(CALL.removesuffix("</tool_call>")), parallel_tool_calls=False)
    assert (content, reason, len(calls)) == (None, "tool_calls", 1)


async def test_a_schema_beside_tools_binds_the_answer_that_calls_none() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}
    asked = await asked_for(response_format=schema)

    assert accepts(asked.grammar.text, "[]")
    assert accepts(asked.grammar.text, ONE)


async def test_a_schema_alone_is_the_grammar() -> None:
    entry = SpeakingEntry()
    schema = {"type": "object", "properties": {"é": {"const": 1}}}
    for wanted in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        {"type": "text"},
    ):
        await call(app_for(entry), "POST", CHAT, chat_body(response_format=wanted))

    grammars = [asked.grammar for asked in entry.asked]
    assert [grammar and (grammar.kind, json.loads(grammar.text)) for grammar in grammars] == [
        ("json_schema", {"type": "object"}),
        ("json_schema", schema),
        None,
    ]


async def test_earlier_calls_and_their_results_reach_the_template() -> None:
    entry = SpeakingEntry()
    earlier = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
    ]
    await call(app_for(entry), "POST", CHAT, {"model": MODEL, "messages": turns})

    assert entry.asked[0].messages == (
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [earlier]},
        {"role": "tool", "content": "seen", "tool_call_id": "c1"},
    )
