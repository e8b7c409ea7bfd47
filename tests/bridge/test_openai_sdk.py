"""The official SDK against the app on the real server: what it parses, and which class it raises for each refusal."""

from __future__ import annotations

import json

import openai
import pytest
import trio
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
    ChatCompletionToolParam,
)
from pydantic import BaseModel

from tessella_p2p.base.errors import (
    HopBodyTooLarge,
    HopTimeout,
    InvalidRequest,
    NotAuthorized,
    Overloaded,
    StaleEpoch,
    StreamReset,
    TessellaError,
    TooManyHopBodies,
)
from tessella_p2p.entry.api import Caller, Gap
from tests.bridge.bridge_doubles import ANSWER, MODEL, NO_ROUTE, SpeakingEntry, app_for, serving

# The SDK leaves the generators of its streams to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator '(openai|httpx|httpcore):ResourceWarning")

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = "".join(ANSWER)


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def test_the_async_client_reads_a_whole_answer() -> None:
    async with serving(app_for(SpeakingEntry())) as url, client(url) as api:
        completion = await api.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"tessella": True})

    assert completion.choices[0].message.content == TEXT
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len(ANSWER)
    assert completion.model_extra is not None
    assert completion.model_extra["tessella"]["tier"] == "Standard"


async def test_the_async_client_reads_a_stream_with_usage() -> None:
    async with serving(app_for(SpeakingEntry())) as url, client(url) as api:
        stream = await api.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]

    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + len(ANSWER)


async def test_the_stream_helper_accumulates_an_answer() -> None:
    async with (
        serving(app_for(SpeakingEntry())) as url,
        client(url) as api,
        api.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream,
    ):
        kinds = [event.type async for event in stream]
        completion = await stream.get_final_completion()

    assert kinds.count("content.delta") == 1 + len(ANSWER)  # the role's chunk has empty text, as OpenAI's has
    assert kinds.count("content.done") == 1
    assert completion.choices[0].message.content == TEXT


async def test_the_sync_client_reads_both_forms_on_one_connection() -> None:
    def ask(url: str) -> tuple[ChatCompletion, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
            whole = api.chat.completions.create(model=MODEL, messages=MESSAGES)
            stream = api.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            return whole, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    async with serving(app_for(SpeakingEntry())) as url:
        whole, streamed = await trio.to_thread.run_sync(ask, url)

    assert whole.choices[0].message.content == streamed == TEXT


async def test_an_answers_message_can_be_handed_back() -> None:
    async with serving(app_for(SpeakingEntry())) as url, client(url) as api:
        first = await api.chat.completions.create(model=MODEL, messages=MESSAGES)
        turn = first.choices[0].message.model_dump()
        second = await api.chat.completions.create(model=MODEL, messages=[*MESSAGES, turn, *MESSAGES])  # type: ignore[list-item]

    assert second.choices[0].message.content == TEXT


async def test_models_are_listed_and_retrieved() -> None:
    async with serving(app_for(SpeakingEntry(models=("toy", "org/toy")))) as url, client(url) as api:
        listed = [model.id async for model in api.models.list()]
        one = await api.models.retrieve("org/toy")
        with pytest.raises(openai.NotFoundError) as missing:
            await api.models.retrieve("other")

    assert listed == ["toy", "org/toy"]
    assert (one.id, one.object) == ("org/toy", "model")
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("refusal", "raised", "code"),
    [
        (InvalidRequest("stop: no", "stop"), openai.BadRequestError, "invalid_request"),
        (NotAuthorized("not you"), openai.PermissionDeniedError, "not_authorized"),
        (StaleEpoch("rerouted"), openai.ConflictError, "stale_epoch"),
        (NO_ROUTE, openai.InternalServerError, "no_route"),
        (Overloaded("full"), openai.InternalServerError, "overloaded"),
        (TooManyHopBodies("full"), openai.InternalServerError, "too_many_hop_bodies"),
        (HopBodyTooLarge("long"), openai.APIStatusError, "hop_body_too_large"),
        (StreamReset("gone"), openai.InternalServerError, "stream_reset"),
        (HopTimeout("slow"), openai.InternalServerError, "hop_timeout"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_each_refusal_raises_its_class(
    refusal: TessellaError, raised: type[openai.APIStatusError], code: str, stream: bool
) -> None:
    async with serving(app_for(SpeakingEntry(refusal=refusal))) as url, client(url) as api:
        with pytest.raises(raised) as caught:
            await api.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)

    assert caught.value.code == code
    assert caught.value.status_code == type(refusal).http_status
    assert str(refusal) in caught.value.message


async def test_an_unknown_model_and_a_long_prompt_are_the_clients_errors() -> None:
    async with serving(app_for(SpeakingEntry())) as url, client(url) as api:
        with pytest.raises(openai.NotFoundError) as unknown:
            await api.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as long:
            await api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 200}])

    assert (unknown.value.code, long.value.code) == ("model_not_found", "context_length_exceeded")


async def test_missing_layers_are_named_and_the_sdk_is_told_when_to_retry() -> None:
    async with serving(app_for(SpeakingEntry(refusal=NO_ROUTE))) as url, client(url) as api:
        with pytest.raises(openai.InternalServerError) as caught:
            await api.chat.completions.create(model=MODEL, messages=MESSAGES)

    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "5"
    assert caught.value.body == {
        "message": "nobody serves layers 12–20 of toy",
        "type": "server_error",
        "param": None,
        "code": "no_route",
        "missing_layers": [[12, 20]],
    }


async def test_a_failure_in_mid_stream_is_raised_by_the_sdk() -> None:
    entry = SpeakingEntry(fail_after=3, failure=StreamReset("the tail is gone"))
    texts: list[str] = []
    async with serving(app_for(entry)) as url, client(url) as api:
        stream = await api.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)

        async def read() -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError, match="the tail is gone") as caught:
            await read()

    assert "".join(texts) == "".join(ANSWER[:3])
    assert caught.value.code == "stream_reset"


async def test_an_unsupported_field_is_a_bad_request_that_names_it() -> None:
    async with serving(app_for(SpeakingEntry())) as url, client(url) as api:
        with pytest.raises(openai.BadRequestError, match="audio is not supported") as caught:
            await api.chat.completions.create(model=MODEL, messages=MESSAGES, audio={"voice": "alloy", "format": "wav"})

    assert caught.value.param == "audio"


async def test_logprobs_are_read_whole_streamed_and_by_the_stream_helper() -> None:
    async with serving(app_for(SpeakingEntry())) as url, client(url) as api:
        whole = await api.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
        stream = await api.chat.completions.create(
            model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True
        )
        chunks = [chunk async for chunk in stream]
        async with api.chat.completions.stream(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2) as helper:
            kinds = [event.type async for event in helper]
            helped = await helper.get_final_completion()

    told = whole.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [entry.token for entry in told.content] == list(ANSWER)
    assert bytes(byte for entry in told.content for byte in entry.bytes or ()) == TEXT.encode()
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in told.content)
    assert [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or ()
    ] == told.content
    assert kinds.count("logprobs.content.done") == 1
    assert helped.choices[0].logprobs is not None
    assert helped.choices[0].logprobs.content == told.content


async def test_every_sampling_field_of_the_sdk_reaches_the_entry() -> None:
    entry = SpeakingEntry()
    async with serving(app_for(entry)) as url, client(url) as api:
        await api.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0.7,
            top_p=0.9,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"5": -100, "7": 2},
            seed=11,
            logprobs=True,
            top_logprobs=20,
            extra_body={"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1},
        )

    (asked,) = entry.asked
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.seed) == (0.7, 0.9, 40, 0.05, 11)
    assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (0.5, -0.5, 1.1)
    assert asked.logit_bias == ((5, -100.0), (7, 2.0))
    assert (asked.logprobs, asked.top_logprobs) == (True, 20)
    assert asked.caller == Caller()  # without keys, a key says nothing


LOOK: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
LOOKING = ("I look.", "\n<tool_call>", '{"name": "look", "argu', 'ments": {"at": "Par', 'is"}}', "</tool_call>")


async def test_tool_calls_are_read_whole_streamed_and_by_the_stream_helper() -> None:
    async with serving(app_for(SpeakingEntry(words=LOOKING))) as url, client(url) as api:
        whole = await api.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[LOOK])
        async with api.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[LOOK]) as stream:
            events = [event async for event in stream]
            helped = await stream.get_final_completion()

    for completion in (whole, helped):
        (choice,) = completion.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert choice.message.tool_calls is not None
        (asked,) = choice.message.tool_calls
        assert isinstance(asked, ChatCompletionMessageFunctionToolCall)
        assert (asked.function.name, json.loads(asked.function.arguments)) == ("look", {"at": "Paris"})
        assert asked.id.startswith("call_")
    grown = [event.arguments for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert grown[-1] == '{"at": "Paris"}'
    assert len(set(grown)) > 1


async def test_a_call_and_its_result_can_be_handed_back() -> None:
    entry = SpeakingEntry(words=LOOKING)
    async with serving(app_for(entry)) as url, client(url) as api:
        first = await api.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[LOOK])
        turn = first.choices[0].message.model_dump()
        call_id = turn["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": call_id, "content": "a tower"}
        await api.chat.completions.create(model=MODEL, messages=[*MESSAGES, turn, result], tools=[LOOK])  # type: ignore[list-item]

    assert entry.asked[1].messages is not None
    assert entry.asked[1].messages[2] == {"role": "tool", "content": "a tower", "tool_call_id": call_id}


class Place(BaseModel):
    name: str


async def test_an_answer_is_parsed_by_the_schema_of_a_model() -> None:
    entry = SpeakingEntry(words=('{"name": ', '"Paris"}'))
    async with serving(app_for(entry)) as url, client(url) as api:
        parsed = await api.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Place)

    assert parsed.choices[0].message.parsed == Place(name="Paris")
    grammar = entry.asked[0].grammar
    assert grammar is not None
    assert json.loads(grammar.text)["required"] == ["name"]


async def test_several_choices_are_read_whole_and_by_the_stream_helper() -> None:
    async with serving(app_for(SpeakingEntry())) as url, client(url) as api:
        whole = await api.chat.completions.create(model=MODEL, messages=MESSAGES, n=3)
        async with api.chat.completions.stream(model=MODEL, messages=MESSAGES, n=3) as stream:
            helped = await stream.get_final_completion()

    for completion in (whole, helped):
        assert [choice.index for choice in completion.choices] == [0, 1, 2]
        assert {choice.message.content for choice in completion.choices} == {TEXT}


async def test_text_completions_are_read_whole_and_streamed() -> None:
    entry = SpeakingEntry()
    async with serving(app_for(entry)) as url, client(url) as api:
        whole = await api.completions.create(model=MODEL, prompt=["hi ", "ho "], echo=True, n=2)
        stream = await api.completions.create(model=MODEL, prompt="hi", suffix="end", logprobs=1, stream=True)
        chunks = [chunk async for chunk in stream]

    assert [choice.text for choice in whole.choices] == ["hi " + TEXT] * 2 + ["ho " + TEXT] * 2
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 6
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert entry.asked[-1].gap == Gap("hi", "end")
    told = [chunk.choices[0].logprobs for chunk in chunks[:-1]]
    assert [token for each in told if each is not None for token in each.tokens or ()] == list(ANSWER)
