"""Text completions: four forms of a prompt, echo, a gap, and logprobs in their older form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.bridge.completions import TextOffsets, text_logprobs
from tessella_p2p.entry.api import Gap, ScoredToken, TokenScores
from tests.bridge import openai_description as openai
from tests.bridge.bridge_doubles import ANSWER, MODEL, SpeakingEntry, app_for, call, events_of

PATH = "/v1/completions"
TEXT = "".join(ANSWER)
USAGE = {"prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9}


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", **more}


async def ask(entry: SpeakingEntry | None = None, **more: Any) -> Any:
    """The answer: whole, or the events of the stream without the last."""
    answered = await call(app_for(entry or SpeakingEntry()), "POST", PATH, body(**more))
    assert answered.status == 200, answered.body
    if not more.get("stream"):
        openai.check_completion(answered.json())
        return answered.json()
    *events, done = events_of(answered.body)
    assert done == "[DONE]"
    for event in events:
        openai.check_completion_chunk(event)
    return events


async def test_a_whole_answer_has_every_field_that_clients_need() -> None:
    completion = await ask()

    assert completion.pop("created") > 1_700_000_000
    assert completion == {
        "id": "cmpl-req-1",
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE,
    }


async def test_a_stream_brings_text_then_the_reason_then_the_usage_that_was_asked_for() -> None:
    *chunks, last, usage = await ask(stream=True, stream_options={"include_usage": True})

    assert [chunk["choices"][0]["text"] for chunk in chunks] == list(ANSWER)
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
    assert last["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}]
    assert (usage["choices"], usage["usage"]) == ([], USAGE)
    assert [chunk["usage"] for chunk in (*chunks, last)] == [None] * (len(chunks) + 1)


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("hi", [("hi", None)]),
        (["hi"], [("hi", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([1, 2], [(None, (1, 2))]),
        ([[1, 2], [3]], [(None, (1, 2)), (None, (3,))]),
        (["a", [3]], [("a", None), (None, (3,))]),
    ],
)
async def test_each_form_of_a_prompt_is_asked_as_it_stands(prompt: Any, asked: list[Any]) -> None:
    entry = SpeakingEntry()
    completion = await ask(entry, prompt=prompt)

    assert sorted(((each.prompt, each.prompt_ids) for each in entry.asked), key=str) == sorted(asked, key=str)
    assert [choice["index"] for choice in completion["choices"]] == list(range(len(asked)))


async def test_a_limit_that_is_not_given_is_openais() -> None:
    entry = SpeakingEntry()
    await ask(entry)
    await ask(entry, max_tokens=3)

    assert [each.max_tokens for each in entry.asked] == [16, 3]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_stands_before_its_answers(stream: bool) -> None:
    answer = await ask(prompt=["hi ", [0, 1]], n=2, echo=True, stream=stream)

    texts = [""] * 4
    for chunk in answer if stream else [answer]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["hi " + TEXT] * 2 + ["The capital" + TEXT] * 2


async def test_a_suffix_makes_a_gap_of_each_prompt() -> None:
    entry = SpeakingEntry()
    await ask(entry, prompt=["a", "b"], suffix="z")
    await ask(entry, suffix="")

    *gaps, plain = entry.asked
    assert {each.gap for each in gaps} == {Gap("a", "z"), Gap("b", "z")}
    assert {each.prompt for each in gaps} == {None}
    assert (plain.gap, plain.prompt) == (None, "hi")


async def test_logprobs_are_lists_with_an_entry_for_each_token() -> None:
    told = (await ask(logprobs=2, max_tokens=3))["choices"][0]["logprobs"]
    *chunks, last = await ask(logprobs=2, max_tokens=3, stream=True)

    assert told["tokens"] == list(ANSWER[:3])
    assert told["token_logprobs"] == [0.0, -0.25, -0.5]
    assert told["text_offset"] == [0, 3, 11]
    assert told["top_logprobs"][1] == {" capital": -0.25, "bytes:\\xe2\\x82": -1.0}
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {name: [each for part in parts for each in part[name]] for name in told} == told
    assert last["choices"][0]["logprobs"] is None


async def test_no_alternatives_is_not_no_logprobs() -> None:
    entry = SpeakingEntry()
    answer = await ask(entry, logprobs=0, max_tokens=1)

    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"The": 0.0}]
    assert [(each.logprobs, each.top_logprobs) for each in entry.asked] == [(True, 0)]


@given(st.text(max_size=20), st.lists(st.integers(1, 4), max_size=20))
def test_offsets_point_at_the_character_that_a_token_begins_in(text: str, sizes: list[int]) -> None:
    data, tokens = text.encode(), list[bytes]()
    for size in (*sizes, len(data)):
        tokens.append(data[:size])
        data = data[size:]
    scores = [TokenScores(ScoredToken(0, token, -1.0), ()) for token in tokens]

    offsets = text_logprobs(scores, TextOffsets())["text_offset"]

    so_far = b""
    for offset, token in zip(offsets, tokens, strict=True):
        whole = so_far.decode("utf-8", "ignore")  # what is complete before the token
        assert offset == len(whole)
        so_far += token
