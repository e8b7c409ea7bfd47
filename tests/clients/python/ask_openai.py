"""openai: sync, async, streams and their helper, raw answers, parsing, completions, vectors, and errors by class."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import openai
from asked import ANSWER, CITY_QUESTION, MESSAGES, MODEL, NO_KEY, QUESTION, URL, VECTOR_ELEMENTS, City, check

KEYED_URL = os.environ["CLIENT_KEYED_URL"]
KEY = os.environ["CLIENT_KEY"]
"""It may ask once a minute."""
ASKED: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}


def ask_in_sync(client: openai.OpenAI) -> None:
    """Whole, streamed, and by the stream helper."""
    whole = client.chat.completions.create(**ASKED)
    check((whole.choices[0].message.content, whole.choices[0].finish_reason), (ANSWER, "stop"))
    assert whole.usage is not None
    check((whole.usage.prompt_tokens, whole.usage.completion_tokens), (37, 7))
    chunks = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    check("".join(each.choices[0].delta.content or "" for each in chunks if each.choices), ANSWER)
    check(chunks[-1].usage, whole.usage)
    with client.chat.completions.stream(**ASKED) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    check((said, final.choices[0].message.content, final.choices[0].finish_reason), (ANSWER, ANSWER, "stop"))


def ask_for_more(client: openai.OpenAI) -> None:
    """Raw answers, a schema, several choices, logprobs, completions, vectors, models."""
    raw = client.chat.completions.with_raw_response.create(**ASKED)
    assert raw.headers["x-request-id"]
    check(raw.parse().choices[0].message.content, ANSWER)
    parsed = client.chat.completions.parse(
        model=MODEL, messages=CITY_QUESTION, temperature=0, max_tokens=60, response_format=City
    )
    assert isinstance(parsed.choices[0].message.parsed, City)
    several = client.chat.completions.create(**{**ASKED, "temperature": 1, "seed": 7}, n=2, logprobs=True)
    check([each.index for each in several.choices], [0, 1])
    assert several.choices[0].logprobs is not None
    text = client.completions.create(model=MODEL, prompt=["Once upon", "The sky is"], max_tokens=4, temperature=0)
    check([each.index for each in text.choices], [0, 1])
    pieces = [
        each.choices[0].text
        for each in client.completions.create(model=MODEL, prompt="Once upon", max_tokens=4, stream=True)
    ]
    check("".join(pieces), text.choices[0].text)
    vectors = client.embeddings.create(model=MODEL, input=[QUESTION, "Bread"])  # as base64, without being asked
    check([len(each.embedding) for each in vectors.data], [VECTOR_ELEMENTS] * 2)
    floats = client.embeddings.create(model=MODEL, input=QUESTION, encoding_format="float")
    assert max(abs(a - b) for a, b in zip(floats.data[0].embedding, vectors.data[0].embedding, strict=True)) < 1e-6
    check([each.id for each in client.models.list()], [MODEL])
    check(client.models.retrieve(MODEL).id, MODEL)


async def ask_async() -> None:
    """Whole and streamed, several at a time, and a stream that is left early."""
    async with openai.AsyncOpenAI(base_url=URL, api_key=NO_KEY, max_retries=0) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**ASKED) for _ in range(4)))
        check({each.choices[0].message.content for each in answers}, {ANSWER})
        stream = await client.chat.completions.create(**ASKED, stream=True)
        pieces = [each.choices[0].delta.content or "" async for each in stream]
        check("".join(pieces), ANSWER)
        async with client.chat.completions.stream(**ASKED) as helped:
            check((await helped.get_final_completion()).choices[0].message.content, ANSWER)
        left = await client.chat.completions.create(**{**ASKED, "max_tokens": 500}, stream=True)
        async for _ in left:
            break
        await left.close()


def refusals(client: openai.OpenAI) -> None:
    """Each refusal is raised as its class, with its code."""
    cases: list[tuple[type[openai.APIStatusError], str, dict[str, Any]]] = [
        (openai.BadRequestError, "invalid_request", {"max_tokens": -1}),
        (openai.BadRequestError, "invalid_request", {"reasoning_effort": "high"}),
        (
            openai.BadRequestError,
            "context_length_exceeded",
            {"messages": [{"role": "user", "content": "word " * 9000}]},
        ),
        (openai.NotFoundError, "model_not_found", {"model": "other"}),
        (openai.APIStatusError, "request_too_large", {"messages": [{"role": "user", "content": "x" * 3_000_000}]}),
    ]
    for kind, code, changed in cases:
        refused(client, kind, code, **changed)
    try:
        client.responses.create(model=MODEL, input=QUESTION)
    except openai.NotFoundError as error:
        check(error.code, "unknown_url")
    else:
        raise AssertionError("the responses were answered")
    with openai.OpenAI(base_url=KEYED_URL, api_key="tsl-wrong", max_retries=0) as unknown:
        refused(unknown, openai.AuthenticationError, "invalid_api_key")
    with openai.OpenAI(base_url=KEYED_URL, api_key=KEY, max_retries=0) as known:
        try:
            check(known.chat.completions.create(**ASKED).choices[0].message.content, ANSWER)
        except openai.RateLimitError as error:  # another client of the matrix has spent this minute's request
            check(error.code, "rate_limit_exceeded")
        else:
            refused(known, openai.RateLimitError, "rate_limit_exceeded")


def refused(client: openai.OpenAI, kind: type[openai.APIStatusError], code: str, **changed: Any) -> None:
    """One request that is to be refused so."""
    try:
        client.chat.completions.create(**{**ASKED, **changed})
    except kind as error:
        check(error.code, code)
    else:
        raise AssertionError(f"{changed} was answered")


def main() -> None:
    """Everything; where the route has been broken, that alone."""
    with openai.OpenAI(base_url=URL, api_key=NO_KEY, max_retries=0) as client:
        if os.environ.get("CLIENT_NO_ROUTE"):
            refused(client, openai.InternalServerError, "no_route")
            return
        ask_in_sync(client)
        ask_for_more(client)
        refusals(client)
    asyncio.run(ask_async())
    print(f"openai {openai.__version__}")


main()
