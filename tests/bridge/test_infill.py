"""Gaps as editors ask for them: llama.cpp's fields in and out, warm-ups, and answers that are cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from tessella_p2p.base.errors import StreamReset
from tessella_p2p.bridge.infill_answer import Cut
from tessella_p2p.entry.text import first_stop
from tests.bridge.bridge_doubles import (
    FEATURES,
    MAX_PROMPT_IDS,
    MODEL,
    NO_ROUTE,
    Caller,
    SpeakingEntry,
    app_for,
    call,
    error_shape,
    events_of,
)

PATH = "/infill"
LINES = ("if x:\n", "    a", "\n", "    b\n", "\n", "c", "d")


def _body(**more: Any) -> dict[str, Any]:
    return {"input_prefix": "def f():\n", "input_suffix": "\nf()", **more}


LLAMA_VIM = _body(
    id_slot=0,
    input_extra=[{"text": "one", "time": 17, "filename": "a.py"}, {"text": "two", "filename": "b.py"}],
    prompt="    ret",
    n_predict=128,
    stop=[],
    n_indent=0,
    top_k=40,
    top_p=0.90,
    samplers=["top_k", "top_p", "infill"],
    stream=False,
    cache_prompt=True,
    t_max_prompt_ms=500,
    t_max_predict_ms=1000,
    response_fields=["content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached", "no/such"],
)
"""What llama.vim sends, as its source has it."""


async def test_an_editors_request_gets_the_fields_that_it_names() -> None:
    entry = SpeakingEntry()
    answered = await call(app_for(entry), "POST", PATH, LLAMA_VIM)

    assert answered.status == 200
    (asked,) = entry.asked
    assert asked.gap is not None
    separator = "\n\n--- snippet ---\n\n"
    assert asked.gap.prefix == f"{separator}one{separator}twodef f():\n    ret"
    assert asked.gap.suffix == "\nf()"
    assert (asked.max_tokens, asked.top_k, asked.top_p, asked.temperature) == (128, 40, 0.90, 0.0)
    answer = answered.json()
    num_prompt = len(asked.gap.prefix + asked.gap.suffix)
    assert set(answer) == {"content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"}
    assert answer["content"] == "The capital of France is Paris."
    assert (answer["timings/prompt_n"], answer["tokens_cached"]) == (num_prompt, num_prompt + 7)
    assert answer["truncated"] is False


async def test_a_whole_answer_has_what_an_editor_reads() -> None:
    answer = (await call(app_for(SpeakingEntry(words=LINES)), "POST", PATH, _body(n_predict=4))).json()

    assert answer["content"] == "if x:\n    a\n    b\n"
    assert (answer["stop"], answer["stop_type"], answer["has_new_line"]) == (True, "limit", True)
    assert answer["tokens"] == [0, 1, 2, 3]
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (4, len("def f():\n\nf()"))
    assert answer["timings"]["predicted_n"] == 4
    assert answer["model"] == MODEL


@pytest.mark.parametrize(
    ("stop", "stop_type", "word"), [([], "eos", ""), (["nowhere"], "eos", ""), (["is", " France"], "word", " France")]
)
async def test_what_stopped_an_answer_is_told(stop: list[str], stop_type: str, word: str) -> None:
    answer = (await call(app_for(SpeakingEntry()), "POST", PATH, _body(stop=stop))).json()

    assert (answer["stop_type"], answer["stopping_word"]) == (stop_type, word)


async def test_a_stream_is_llama_cpps() -> None:
    answered = await call(app_for(SpeakingEntry()), "POST", PATH, _body(stream=True))

    *chunks, last = events_of(answered.body)
    assert "".join(chunk["content"] for chunk in chunks) == "The capital of France is Paris."
    assert [chunk["stop"] for chunk in chunks] == [False] * 7
    assert (last["stop"], last["content"], last["tokens_predicted"], last["stop_type"]) == (True, "", 7, "eos")


async def test_any_seed_is_llama_cpps_minus_one() -> None:
    entry = SpeakingEntry()
    for seed in (-1, 7):
        await call(app_for(entry), "POST", PATH, _body(seed=seed))

    assert [asked.seed for asked in entry.asked] == [None, 7]


async def test_a_sampler_that_is_not_named_does_not_work() -> None:
    entry = SpeakingEntry()
    await call(app_for(entry), "POST", PATH, _body(top_k=5, top_p=0.5, min_p=0.1, samplers=["top_p"]))

    (asked,) = entry.asked
    assert (asked.top_k, asked.top_p, asked.min_p) == (0, 0.5, 0.0)


async def test_a_warm_up_asks_the_stages_and_answers_nothing() -> None:
    entry = SpeakingEntry()
    answered = await call(app_for(entry), "POST", PATH, _body(n_predict=0, samplers=[], t_max_predict_ms=1))
    streamed = await call(app_for(SpeakingEntry()), "POST", PATH, _body(n_predict=0, stream=True))

    assert [asked.max_tokens for asked in entry.asked] == [1]
    assert entry.ends == ["closed"]
    assert (answered.json()["content"], answered.json()["tokens_predicted"]) == ("", 0)
    (last,) = events_of(streamed.body)
    assert (last["content"], last["stop"]) == ("", True)


async def test_extra_texts_without_room_are_left_out_the_oldest_first() -> None:
    entry = SpeakingEntry()
    extra = [{"text": str(index) * 15} for index in range(8)]
    answered = await call(app_for(entry), "POST", PATH, _body(input_extra=extra))

    asked = entry.asked[-1]
    assert asked.gap is not None
    assert "7" * 15 in asked.gap.prefix
    assert "0" * 15 not in asked.gap.prefix
    assert answered.json()["truncated"] is True


async def test_a_gap_without_room_is_refused_once_there_is_nothing_to_leave_out() -> None:
    long = _body(input_prefix="x" * (MAX_PROMPT_IDS + 1), input_extra=[{"text": "a"}] * 3)
    answered = await call(app_for(SpeakingEntry()), "POST", PATH, long)

    assert (answered.status, answered.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_line_that_is_indented_too_little_ends_the_answer() -> None:
    entry = SpeakingEntry(words=LINES)
    app = app_for(entry)
    answer = (await call(app, "POST", PATH, _body(n_indent=4))).json()
    streamed = await call(app, "POST", PATH, _body(n_indent=4, stream=True))
    scraped = (await call(app, "GET", "/metrics")).body

    assert answer["content"] == "if x:\n    a\n    b\n\n"
    assert answer["stop_type"] == "limit"
    assert "".join(event["content"] for event in events_of(streamed.body)) == answer["content"]
    assert entry.ends == ["closed", "closed"]
    assert b'tessella_generations_total{outcome="cut"} 2.0' in scraped


async def test_time_ends_an_answer_that_has_a_line(autojump_clock: MockClock) -> None:
    entry = SpeakingEntry(words=LINES, hold_after=2)
    answers: list[Any] = []

    async def ask() -> None:
        answers.append(await call(app_for(entry), "POST", PATH, _body(t_max_predict_ms=1500)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await entry.holding.wait()
        autojump_clock.jump(1.6)
        entry.release.set()

    answer = answers[0].json()
    assert (answer["content"], answer["stop_type"]) == ("if x:\n    a\n", "limit")


async def test_a_model_without_the_tokens_is_a_400() -> None:
    lacking = SpeakingEntry(abilities=type(FEATURES)(fill_in_the_middle=False, tools=True, context_length=8))
    answered = await call(app_for(lacking), "POST", PATH, _body())

    assert answered.status == 400
    with error_shape(answered) as error:
        assert error["param"] == "input_suffix"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 5}, "input_suffix"),
        ({"input_extra": "text"}, "input_extra"),
        ({"input_extra": ["text"]}, "input_extra[0]"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"input_extra": [{"text": "", "colour": 1}]}, "input_extra[0].colour"),
        ({"input_extra": [{"text": ""}] * 257}, "input_extra"),
        ({"prompt": 1}, "prompt"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_predict": True}, "n_predict"),
        ({"n_indent": -1}, "n_indent"),
        ({"t_max_predict_ms": 0.5}, "t_max_predict_ms"),
        ({"samplers": ["sparkle"]}, "samplers[0]"),
        ({"samplers": "top_k"}, "samplers"),
        ({"response_fields": ["x" * 129]}, "response_fields[0]"),
        ({"lora": [{"id": 0}]}, "lora"),
        ({"tessella": True}, "tessella"),
        ({"grammar": "root ::= x"}, "grammar"),
    ],
    ids=lambda value: str(value)[:48],
)
async def test_a_bad_request_is_a_400_that_names_the_field(more: dict[str, Any], param: str) -> None:
    entry = SpeakingEntry()
    answered = await call(app_for(entry), "POST", PATH, _body(**more))

    assert answered.status == 400
    with error_shape(answered) as error:
        assert error["param"] == param
    assert entry.asked == []


async def test_refusals_have_a_status_and_failures_in_a_stream_are_an_event() -> None:
    refused = await call(app_for(SpeakingEntry(refusal=NO_ROUTE)), "POST", PATH, _body(stream=True))
    failing = SpeakingEntry(fail_after=2, failure=StreamReset("gone"))
    broken = await call(app_for(failing), "POST", PATH, _body(stream=True))
    whole = await call(app_for(failing), "POST", PATH, _body())

    assert refused.status == 503
    assert broken.status == 200
    assert list(events_of(broken.body))[-1]["error"]["code"] == "stream_reset"
    assert (whole.status, whole.json()["error"]["code"]) == (502, "stream_reset")


async def test_a_bug_in_a_stream_is_an_event_without_its_details() -> None:
    failing = SpeakingEntry(fail_after=2, failure=RuntimeError("secret"))
    broken = await call(app_for(failing), "POST", PATH, _body(stream=True))

    assert list(events_of(broken.body))[-1]["error"]["code"] == "internal_error"
    assert b"secret" not in broken.body


async def test_a_stream_that_the_node_breaks_off_says_so() -> None:
    entry = SpeakingEntry(hold_after=2)
    caller = Caller(app_for(entry))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller, "POST", PATH, json.dumps(_body(stream=True)).encode())
        await entry.holding.wait()
        nursery.cancel_scope.cancel()

    assert list(events_of(b"".join(caller.parts)))[-1]["error"]["code"] == "overloaded"


async def test_a_client_that_leaves_frees_its_generation() -> None:
    entry = SpeakingEntry(hold_after=2)
    caller = Caller(app_for(entry))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller, "POST", PATH, json.dumps(_body(stream=True)).encode())
        await entry.holding.wait()
        caller.left.set()

    assert entry.ends == ["cancelled"]


@given(
    text=st.text(alphabet="ab \t\n", max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    indent=st.integers(0, 3),
)
def test_the_cut_does_not_depend_on_how_the_text_comes(text: str, cuts: list[int], indent: int) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    cut = Cut(indent, None)
    shown = ""
    for start, end in pairwise(bounds):
        if not cut.cut:
            shown += cut.feed(text[start:end], 0.0)

    assert text.startswith(shown)
    lines = shown.split("\n")[1:]
    assert all(len(line) - len(line.lstrip(" \t")) >= indent for line in lines if line.strip(" \t"))
    if not cut.cut:
        assert shown == text
    else:
        rest = text[len(shown) :]
        assert rest[0] in "ab"
        assert len(lines[-1]) < indent


def test_time_alone_does_not_cut_a_first_line() -> None:
    cut = Cut(0, 1.0)
    assert [cut.feed("a", now) for now in (0.0, 5.0)] == ["a", "a"]
    assert not cut.cut
    assert cut.feed("b\n", 6.0) == "b\n"
    assert cut.cut


def test_the_first_stop_of_the_text_is_the_one_that_ended_it() -> None:
    assert first_stop("a b c", ("c", "b")) == "b"
    assert first_stop("a", ("b",)) is None
    assert first_stop("abcd", ("abcd", "bc")) == "bc", "it was complete first, and the answer ended there"
    assert first_stop("abc", ("bc", "abc")) == "abc"
