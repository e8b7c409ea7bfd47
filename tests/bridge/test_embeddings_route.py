"""Vectors over HTTP: every form of input, both encodings, and nothing done for what is refused."""

from __future__ import annotations

import json
import struct
from base64 import b64decode
from typing import Any

import openai as sdk
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import NoRoute
from tessella_p2p.base.limits import MAX_EMBEDDING_INPUTS
from tests.bridge import openai_description as openai
from tests.bridge.bridge_doubles import MODEL, NO_ROUTE, Caller, SpeakingEntry, app_for, call, error_shape, serving

# The SDK leaves the generators of its streams to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator '(openai|httpx|httpcore):ResourceWarning")
PATH = "/v1/embeddings"


@pytest.mark.parametrize(
    ("given_input", "inputs"),
    [
        ("hello", ("hello",)),
        (["hello", "you"], ("hello", "you")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
async def test_each_form_of_input_gives_a_vector_each(given_input: object, inputs: tuple[Any, ...]) -> None:
    entry = SpeakingEntry()
    answered = await call(app_for(entry), "POST", PATH, {"model": MODEL, "input": given_input, "user": "me"})

    assert answered.status == 200
    openai.check_embeddings(answered.json())
    (asked,) = entry.embedded
    assert asked.inputs == inputs
    assert [each["index"] for each in answered.json()["data"]] == list(range(len(inputs)))
    tokens = sum(map(len, inputs))
    assert answered.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_base64_is_the_same_numbers_as_f32() -> None:
    app = app_for(SpeakingEntry())
    body = {"model": MODEL, "input": ["a", "bb"]}
    floats = (await call(app, "POST", PATH, body)).json()
    packed = (await call(app, "POST", PATH, {**body, "encoding_format": "base64"})).json()

    openai.check_base64_embeddings(packed)
    for plain, coded in zip(floats["data"], packed["data"], strict=True):
        assert b64decode(coded["embedding"]) == struct.pack("<4f", *plain["embedding"])


async def test_the_sdk_reads_vectors_in_its_own_default_encoding() -> None:
    async with (
        serving(app_for(SpeakingEntry())) as url,
        sdk.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api,
    ):
        answer = await api.embeddings.create(model=MODEL, input=["a", "bb"])
        with pytest.raises(sdk.BadRequestError) as refused:
            await api.embeddings.create(model=MODEL, input="a", dimensions=3)
        with pytest.raises(sdk.NotFoundError):
            await api.embeddings.create(model="other", input="a")

    assert [each.embedding[:3] for each in answer.data] == [[0.125, 0.0, -0.5], [0.25, 0.125, -0.5]]
    assert refused.value.param == "dimensions"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 5]}, "input[1]"),
        ({"input": ["a", [1]]}, "input[1]"),
        ({"input": [[1], "a"]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [1, True]}, "input[1]"),
        ({"input": [1, -1]}, "input[1]"),
        ({"input": [1, 2.0]}, "input[1]"),
        ({"input": [[1, 2**20]]}, "input[0][1]"),
        ({"input": [None]}, "input[0]"),
        ({"input": ["a"] * (MAX_EMBEDDING_INPUTS + 1)}, "input"),
        ({"model": None}, "model"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 3}, "dimensions"),
        ({"dimensions": "4"}, "dimensions"),
        ({"colour": "red"}, "colour"),
    ],
    ids=lambda value: str(value)[:48],
)
async def test_a_bad_request_is_a_400_that_names_the_field(more: dict[str, Any], param: str) -> None:
    entry = SpeakingEntry()
    answered = await call(app_for(entry), "POST", PATH, {"model": MODEL, "input": "a", **more})

    assert answered.status == 400
    with error_shape(answered) as error:
        assert (error["param"], error["code"]) == (param, "invalid_request")
    openai.check_error(answered.json())
    assert entry.embedded == []


async def test_the_models_own_number_of_dimensions_and_nulls_are_as_if_absent() -> None:
    body = {"model": MODEL, "input": "a", "dimensions": 4, "encoding_format": None}

    assert (await call(app_for(SpeakingEntry()), "POST", PATH, body)).status == 200


async def test_missing_layers_and_unknown_models_have_their_status() -> None:
    hole = await call(app_for(SpeakingEntry(refusal=NO_ROUTE)), "POST", PATH, {"model": MODEL, "input": "a"})
    unknown = await call(app_for(SpeakingEntry()), "POST", PATH, {"model": "other", "input": "a"})

    assert (hole.status, hole.json()["error"]["code"]) == (503, NoRoute.code)
    assert hole.json()["error"]["missing_layers"] == [[12, 20]]
    assert (unknown.status, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_client_that_leaves_cancels_its_vectors() -> None:
    entry = SpeakingEntry(hold_after=0)
    caller = Caller(app_for(entry))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller, "POST", PATH, json.dumps({"model": MODEL, "input": "a"}).encode())
        await entry.holding.wait()
        caller.left.set()

    assert entry.ends == ["cancelled"]
    assert caller.parts == []


async def test_vectors_and_their_tokens_are_counted() -> None:
    app = app_for(SpeakingEntry())
    await call(app, "POST", PATH, {"model": MODEL, "input": ["abc", "de"]})
    scraped = (await call(app, "GET", "/metrics")).body

    assert b"tessella_embeddings_total 2.0" in scraped
    assert b'tessella_tokens_total{kind="prompt"} 5.0' in scraped
    assert b'route="/v1/embeddings"' in scraped


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**21) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)


@settings(deadline=None, max_examples=80)
@given(given_input=json_values, more=st.dictionaries(st.sampled_from(["dimensions", "encoding_format"]), json_values))
async def test_any_input_gives_vectors_or_a_400(given_input: object, more: dict[str, object]) -> None:
    answered = await call(app_for(SpeakingEntry()), "POST", PATH, {"model": MODEL, "input": given_input, **more})

    assert answered.status in (200, 400)
    if answered.status == 400:
        openai.check_error(answered.json())
