"""The chat surface, field by field: what each client was seen to need."""

from __future__ import annotations

import json

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tessella_p2p.base.errors import StreamReset
from tessella_p2p.entry.api import GenerateRequest
from tests.bridge.bridge_doubles import ANSWER, MODEL, Caller, SpeakingEntry, app_for, call, chat_body, events_of

TESSELLA = {
    "request_id": "req-1",
    "token_ids": [0, 1, 2, 3, 4, 5, 6],
    "prompt_ids": [104, 105],
    "route": [
        {"peer_id": "12D3KooWHead", "layers": [0, 12], "hop_ms": 1.5, "compute_ms": 1.0, "cached": None},
        {"peer_id": "12D3KooWTail", "layers": [12, 30], "hop_ms": 2.5, "compute_ms": 2.0, "cached": None},
    ],
    "tier": "Standard",
    "paid": True,
    "timings": {"ttft_ms": 12.0, "tokens_per_s": 34.0, "hop_added_ms_p50": 0.25},
}
USAGE = {"prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9}


async def test_a_whole_answer_has_every_field_that_clients_need() -> None:
    answered = await call(app_for(SpeakingEntry()), "POST", "/v1/chat/completions", chat_body(tessella=True))

    assert answered.status == 200
    completion = answered.json()
    assert completion.pop("created") > 1_700_000_000
    assert completion == {
        "id": "chatcmpl-req-1",
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "".join(ANSWER), "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
        "tessella": TESSELLA,
    }


async def test_a_stream_opens_with_the_role_and_closes_with_the_reason_and_done() -> None:
    body = chat_body(stream=True, tessella=True)
    answered = await call(app_for(SpeakingEntry()), "POST", "/v1/chat/completions", body)

    assert answered.status == 200
    assert answered.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events_of(answered.body)
    assert done == "[DONE]"
    for chunk in chunks:
        assert chunk["id"] == "chatcmpl-req-1"
        assert chunk["object"] == "chat.completion.chunk"
        assert [choice["index"] for choice in chunk["choices"]] == [0]
        assert "usage" not in chunk
    first, *middle, last = (chunk["choices"][0] for chunk in chunks)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in middle] == [{"content": word} for word in ANSWER]
    assert {choice["finish_reason"] for choice in (first, *middle)} == {None}
    assert last == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert [chunk.get("tessella") for chunk in chunks] == [None] * (len(chunks) - 1) + [TESSELLA]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/generate"])
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_this_nodes_own_is_told_unless_asked(path: str, stream: bool) -> None:
    body = chat_body(stream=stream) if "chat" in path else {"model": MODEL, "prompt": "hi", "stream": stream}
    answered = await call(app_for(SpeakingEntry()), "POST", path, body)

    assert b"tessella" not in answered.body.replace(b"tessella.generation", b"")


async def test_the_usage_chunk_comes_last_and_only_when_asked_for() -> None:
    body = chat_body(stream=True, stream_options={"include_usage": True})
    answered = await call(app_for(SpeakingEntry()), "POST", "/v1/chat/completions", body)

    *chunks, usage, _ = events_of(answered.body)
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert usage["choices"] == []
    assert usage["usage"] == USAGE


async def test_the_token_limit_is_the_smaller_of_its_two_names() -> None:
    body = chat_body(max_tokens=5, max_completion_tokens=3)
    answered = await call(app_for(SpeakingEntry()), "POST", "/v1/chat/completions", body)

    choice = answered.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("".join(ANSWER[:3]), "length")


async def test_what_the_request_says_reaches_the_entry() -> None:
    entry = SpeakingEntry()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
    ]
    body = chat_body(
        messages=messages, temperature=0.5, seed=-1, stop="\n", n=1, top_p=1, tools=[], user="u", store=True
    )
    await call(app_for(entry), "POST", "/v1/chat/completions", body)

    (asked,) = entry.asked
    assert asked.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": ""},
    )
    assert (asked.temperature, asked.seed, asked.stop) == (0.5, 2**64 - 1, ("\n",))


async def test_absent_null_and_neutral_sampling_fields_are_greedy_and_leave_the_seed_to_the_entry() -> None:
    entry = SpeakingEntry()
    neutral = {
        "temperature": 0,
        "top_k": -1,
        "top_p": 1,
        "min_p": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "logprobs": False,
        "top_logprobs": 0,
    }
    nulls = dict.fromkeys((*neutral, "seed", "max_tokens"))
    for fields in ({}, nulls, neutral):
        await call(app_for(entry), "POST", "/v1/chat/completions", chat_body(**fields))

    asked = entry.asked[0]
    assert asked == GenerateRequest(model=MODEL, messages=asked.messages)
    assert entry.asked == [asked] * 3


async def test_logprobs_stand_beside_the_text_that_they_belong_to() -> None:
    fields = {"logprobs": True, "top_logprobs": 1, "max_tokens": 2}
    other = {"token": "\ufffd", "bytes": [0xE2, 0x82], "logprob": -1.0}  # half a character
    content = [
        {"token": word, "bytes": list(word.encode()), "logprob": -0.25 * index, "top_logprobs": [other]}
        for index, word in enumerate(ANSWER[:2])
    ]

    whole = await call(app_for(SpeakingEntry()), "POST", "/v1/chat/completions", chat_body(**fields))
    streamed = await call(app_for(SpeakingEntry()), "POST", "/v1/chat/completions", chat_body(**fields, stream=True))
    generated = await call(app_for(SpeakingEntry()), "POST", "/v1/generate", {"prompt": "hi", **fields})
    chunks = await call(app_for(SpeakingEntry()), "POST", "/v1/generate", {"prompt": "hi", **fields, "stream": True})

    assert whole.json()["choices"][0]["logprobs"] == {"content": content, "refusal": None}
    *events, _ = events_of(streamed.body)
    told = [chunk["choices"][0]["logprobs"] for chunk in events]
    assert told == [None, *({"content": [entry], "refusal": None} for entry in content), None]
    assert generated.json()["logprobs"] == {"content": content, "refusal": None}
    *events, _ = events_of(chunks.body)
    assert [chunk["logprobs"] for chunk in events] == told[1:]


async def test_a_token_without_text_still_tells_its_logprob() -> None:
    body = chat_body(logprobs=True, stream=True)
    answered = await call(app_for(SpeakingEntry(words=("", "é"))), "POST", "/v1/chat/completions", body)

    *events, _ = events_of(answered.body)
    _, held, shown, _ = (chunk["choices"][0] for chunk in events)
    assert held["delta"] == {"content": ""}
    assert held["logprobs"]["content"][0]["bytes"] is None
    assert shown["logprobs"]["content"][0]["bytes"] == [0xC3, 0xA9]


async def test_a_failure_before_the_first_token_has_a_status_even_when_streamed() -> None:
    entry = SpeakingEntry(fail_after=0, failure=StreamReset("the tail is gone"))
    answered = await call(app_for(entry), "POST", "/v1/chat/completions", chat_body(stream=True))

    assert answered.status == 502
    assert answered.json()["error"]["code"] == "stream_reset"


async def test_a_failure_in_mid_stream_is_an_event_and_then_done() -> None:
    entry = SpeakingEntry(fail_after=3, failure=StreamReset("the tail is gone"))
    answered = await call(app_for(entry), "POST", "/v1/chat/completions", chat_body(stream=True))

    assert answered.status == 200
    *chunks, failure, done = events_of(answered.body)
    assert len(chunks) == 4
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert failure == {
        "error": {"message": "the tail is gone", "type": "server_error", "param": None, "code": "stream_reset"}
    }
    assert done == "[DONE]"


@pytest.mark.parametrize("fail_after", [0, 3])
async def test_a_bug_of_the_entry_is_told_without_its_details(fail_after: int) -> None:
    entry = SpeakingEntry(fail_after=fail_after, failure=RuntimeError("secret"))
    answered = await call(app_for(entry), "POST", "/v1/chat/completions", chat_body(stream=True))

    assert b"internal_error" in answered.body
    assert b"secret" not in answered.body
    assert answered.status == (500 if fail_after == 0 else 200)


async def test_a_silent_stream_is_pinged_every_15_seconds(mock_clock: MockClock) -> None:
    entry = SpeakingEntry(hold_after=0)
    caller = Caller(app_for(entry))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller, "POST", "/v1/chat/completions", json.dumps(chat_body(stream=True)).encode())
        await wait_all_tasks_blocked()
        for pings in range(3):
            assert caller.parts == [b": ping\n\n"] * pings
            mock_clock.jump(15)
            await wait_all_tasks_blocked()
        entry.release.set()

    assert next(events_of(b"".join(caller.parts)))["choices"][0]["delta"]["role"] == "assistant"
    assert caller.parts[-1].endswith(b"data: [DONE]\n\n")


async def test_a_prompt_and_token_ids_are_answered_as_they_stand() -> None:
    entry = SpeakingEntry()
    app = app_for(entry)
    text = await call(app, "POST", "/v1/generate", {"model": MODEL, "prompt": "hi", "tessella": True})
    ids = await call(app, "POST", "/v1/generate", {"prompt_ids": [104, 105], "max_tokens": 2})

    generated = text.json()
    assert generated["object"] == "tessella.generation"
    assert (generated["text"], generated["finish_reason"]) == ("".join(ANSWER), "stop")
    assert (generated["usage"], generated["tessella"]) == (USAGE, TESSELLA)
    assert (ids.json()["text"], ids.json()["finish_reason"]) == ("The capital", "length")
    assert [asked.model for asked in entry.asked] == [MODEL, MODEL]
    assert [(asked.prompt, asked.prompt_ids) for asked in entry.asked] == [("hi", None), (None, (104, 105))]


async def test_a_streamed_generation_tells_text_and_tokens() -> None:
    body = {"prompt": "hi", "stream": True, "tessella": True}
    answered = await call(app_for(SpeakingEntry()), "POST", "/v1/generate", body)

    *chunks, last, done = events_of(answered.body)
    assert [(chunk["text"], chunk["token_ids"]) for chunk in chunks] == [(w, [i]) for i, w in enumerate(ANSWER)]
    assert (last["text"], last["finish_reason"], last["usage"]) == ("", "stop", USAGE)
    assert last["tessella"] == TESSELLA
    assert done == "[DONE]"
