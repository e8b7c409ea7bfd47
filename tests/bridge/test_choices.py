"""Several answers to one request: each has its index, its seed and its end, and the prompt is counted once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tessella_p2p.base.errors import StreamReset
from tessella_p2p.base.limits import MAX_CONCURRENT_CHOICES, SHARED_PROMPT_TOKENS
from tessella_p2p.entry.api import GenerateRequest
from tests.bridge import openai_description as openai
from tests.bridge.bridge_doubles import ANSWER, MODEL, Caller, SpeakingEntry, app_for, call, chat_body, events_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NAMES = ("ann", "bob", "cid")


def by_seed(request: GenerateRequest) -> Sequence[str]:
    """Tells the seed, and ends after it."""
    return (f"seed {request.seed}", "!")


def texts_of(chunks: Sequence[Any]) -> dict[int, str]:
    """The text of each choice of a streamed answer."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


async def test_each_choice_draws_with_a_seed_of_its_own() -> None:
    for path, body in [(CHAT, chat_body()), (TEXT, {"model": MODEL, "prompt": "hi"})]:
        entry = SpeakingEntry(words_for=by_seed)
        answered = await call(app_for(entry), "POST", path, {**body, "n": 3, "seed": 2**64 - 2})

        choices = answered.json()["choices"]
        said = [choice.get("text") or choice["message"]["content"] for choice in choices]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        assert said == [f"seed {2**64 - 2}!", f"seed {2**64 - 1}!", "seed 0!"]


async def test_without_a_seed_the_entry_draws_each() -> None:
    entry = SpeakingEntry()
    await call(app_for(entry), "POST", CHAT, chat_body(n=2))

    assert [asked.seed for asked in entry.asked] == [None, None]


async def test_the_prompt_is_counted_once_and_every_answer() -> None:
    whole = (await call(app_for(SpeakingEntry()), "POST", CHAT, chat_body(n=3))).json()
    texts = {"model": MODEL, "prompt": ["hi", "hello"], "n": 2}
    completion = (await call(app_for(SpeakingEntry()), "POST", TEXT, texts)).json()
    body = chat_body(n=3, stream=True, stream_options={"include_usage": True})
    *_, usage, _ = events_of((await call(app_for(SpeakingEntry()), "POST", CHAT, body)).body)

    assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 21, "total_tokens": 23}
    assert usage["usage"] == whole["usage"]
    assert completion["usage"] == {"prompt_tokens": 7, "completion_tokens": 28, "total_tokens": 35}


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body()), (TEXT, {"model": MODEL, "prompt": "hi"})])
async def test_a_stream_interleaves_its_choices_and_closes_each_once(path: str, body: dict[str, Any]) -> None:
    entry = SpeakingEntry(words_for=by_seed)
    answered = await call(app_for(entry), "POST", path, {**body, "n": 4, "seed": 5, "stream": True, "tessella": True})

    *chunks, done = events_of(answered.body)
    assert done == "[DONE]"
    assert texts_of(chunks) == {index: f"seed {5 + index}!" for index in range(4)}
    assert len({chunk["id"] for chunk in chunks}) == 1
    ended = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"] is not None]
    assert sorted(chunk["choices"][0]["index"] for chunk in ended) == [0, 1, 2, 3]
    assert len({chunk["tessella"]["request_id"] for chunk in ended}) == 4
    for chunk in chunks:
        (openai.check_chat_chunk if path == CHAT else openai.check_completion_chunk)(chunk)
    of_one = [[c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["index"] == i] for i in range(4)]
    assert all(reasons[-1] == "stop" and set(reasons[:-1]) == {None} for reasons in of_one)


async def test_the_extension_tells_of_every_choice() -> None:
    answered = await call(app_for(SpeakingEntry()), "POST", CHAT, chat_body(n=3, tessella=True))

    openai.check_chat_completion(answered.json())
    told = answered.json()["tessella"]
    assert len(told["others"]) == 2
    assert {told["request_id"], *(other["request_id"] for other in told["others"])} == {"req-1", "req-2", "req-3"}


@dataclass
class CountingEntry(SpeakingEntry):
    """Knows how many generations were open at once."""

    most: int = 0

    def __post_init__(self) -> None:
        self.words_for = self._count

    def _count(self, request: GenerateRequest) -> Sequence[str]:
        self.most = max(self.most, len(self.asked) - len(self.ends))
        return ANSWER


async def test_only_so_many_are_generated_at_a_time_and_all_are_answered() -> None:
    entry = CountingEntry()
    answered = await call(app_for(entry), "POST", TEXT, {"model": MODEL, "prompt": ["hi"] * 8, "n": 8})

    choices = answered.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(64))
    assert {choice["text"] for choice in choices} == {"".join(ANSWER)}
    assert 1 < entry.most <= MAX_CONCURRENT_CHOICES
    assert entry.ends == ["closed"] * 64


LONG = "x" * SHARED_PROMPT_TOKENS


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_prompt_is_read_once_before_its_other_choices_follow(stream: bool) -> None:
    entry = SpeakingEntry(hold_after=0)
    body = {"model": MODEL, "prompt": [LONG, LONG, "short"], "n": 3, "stream": stream}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Caller(app_for(entry)), "POST", TEXT, json.dumps(body).encode())
        await wait_all_tasks_blocked()
        assert sorted(len(asked.prompt or "") for asked in entry.asked) == [*[5] * 3, *[len(LONG)] * 2]
        entry.release.set()
    assert sorted(len(asked.prompt or "") for asked in entry.asked) == [*[5] * 3, *[len(LONG)] * 6]
    assert entry.ends == ["closed"] * 9


async def test_a_first_choice_that_fails_lets_no_other_wait_for_it() -> None:
    entry = SpeakingEntry(fail_after=0, failure=StreamReset("the tail is gone"))
    answered = await call(app_for(entry), "POST", TEXT, {"model": MODEL, "prompt": LONG, "n": 8})
    assert (answered.status, len(entry.asked)) == (502, 1)


async def test_the_headers_and_the_id_of_a_whole_answer_are_those_of_its_first_choice() -> None:
    entry = SpeakingEntry(words_for=lambda request: ("a",) * (9 if request.prompt == "slow" else 1))
    answered = await call(app_for(entry), "POST", TEXT, {"model": MODEL, "prompt": ["slow", *["fast"] * 7]})
    (number,) = (number for number, asked in enumerate(entry.asked, 1) if asked.prompt == "slow")
    assert answered.headers["x-request-id"] == f"req-{number}"
    assert answered.json()["id"] == f"cmpl-req-{number}"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_of_one_ends_all(stream: bool) -> None:
    entry = SpeakingEntry(fail_after=3, failure=StreamReset("the tail is gone"))
    answered = await call(app_for(entry), "POST", CHAT, chat_body(n=3, stream=stream))

    if stream:
        *_, failure, done = events_of(answered.body)
        assert done == "[DONE]"
    else:
        failure = answered.json()
        assert answered.status == 502
    assert failure["error"]["code"] == "stream_reset"
    assert len(entry.ends) == len(entry.asked)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_departure_cancels_every_choice(stream: bool) -> None:
    entry = SpeakingEntry(hold_after=2)
    caller = Caller(app_for(entry))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller, "POST", CHAT, json.dumps(chat_body(n=3, stream=stream)).encode())
        await wait_all_tasks_blocked()
        assert (len(entry.asked), entry.ends) == (3, [])
        caller.left.set()

    assert entry.ends == ["cancelled"] * 3
