"""The manual's route for gaps."""

from __future__ import annotations

from typing import Any

import pytest

from tessella_p2p.entry.api import Gap
from tests.bridge.bridge_doubles import ANSWER, FEATURES, MODEL, SpeakingEntry, app_for, call, error_shape, events_of

PATH = "/v1/fim/completions"
GAP = {"prefix": "fn main() {", "suffix": "}"}


async def test_the_manuals_request_is_answered_without_a_model() -> None:
    entry = SpeakingEntry()
    answered = await call(app_for(entry), "POST", PATH, {**GAP, "max_tokens": 128})

    assert answered.status == 200
    (asked,) = entry.asked
    assert (asked.gap, asked.max_tokens, asked.model) == (Gap("fn main() {", "}"), 128, MODEL)
    assert (asked.prompt, asked.messages, asked.prompt_ids) == (None, None, None)
    answer = answered.json()
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == "".join(ANSWER)
    assert answer["usage"]["completion_tokens"] == len(ANSWER)


async def test_a_stream_joins_to_the_whole() -> None:
    answered = await call(app_for(SpeakingEntry()), "POST", PATH, {**GAP, "stream": True})

    *chunks, done = events_of(answered.body)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "".join(ANSWER)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_model_without_the_tokens_is_a_400_that_names_the_suffix() -> None:
    lacking = SpeakingEntry(abilities=type(FEATURES)(fill_in_the_middle=False, tools=True, context_length=8))
    answered = await call(app_for(lacking), "POST", PATH, GAP)

    assert answered.status == 400
    with error_shape(answered) as error:
        assert error["param"] == "suffix"
        assert "fill-in-the-middle" in error["message"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prefix": None}, "prefix"),
        ({"prefix": ["a"]}, "prefix"),
        ({"suffix": 5}, "suffix"),
        ({"model": ""}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": [""]}, "stop[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a"}, "prompt"),
        ({"n": 2}, "n"),
        ({"tessella": "yes"}, "tessella"),
    ],
    ids=str,
)
async def test_a_bad_request_is_a_400_that_names_the_field(more: dict[str, Any], param: str) -> None:
    entry = SpeakingEntry()
    answered = await call(app_for(entry), "POST", PATH, {**GAP, **more})

    assert answered.status == 400
    with error_shape(answered) as error:
        assert error["param"] == param
    assert entry.asked == []


async def test_both_texts_are_needed() -> None:
    for body, param in [({"prefix": "a"}, "suffix"), ({"suffix": "a"}, "prefix")]:
        answered = await call(app_for(SpeakingEntry()), "POST", PATH, body)
        assert (answered.status, answered.json()["error"]["param"]) == (400, param)
