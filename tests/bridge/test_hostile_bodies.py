"""Binary, huge, empty and deeply nested bodies, and templates that loop, cost their own request and change nothing for the next one."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
from starlette.requests import Request
from starlette.types import Message

from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import MAX_HTTP_BODY_BYTES
from tessella_p2p.bridge.answering import understood
from tessella_p2p.entry.api import GenerateRequest, Generation
from tessella_p2p.entry.codec import ArtifactCodec
from tessella_p2p.model.artifact import Artifact
from tests.bridge import openai_description as openai
from tests.bridge.bridge_doubles import (
    ANSWER,
    MODEL,
    Answered,
    SpeakingEntry,
    app_for,
    call,
    chat_body,
    port_of,
    serving,
)
from tests.bridge.raw_http import post_bytes, receive_all
from tests.model.fim_artifact import write_fim_artifact

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat_body(),
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/embeddings": {"model": MODEL, "input": "hi"},
    "/v1/generate": {"prompt": "hi"},
    "/v1/fim/completions": {"prefix": "a", "suffix": "b"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
}
DEEP = 20_000
HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "blanks": b" \n\t ",
    "binary": bytes(range(256)) * 16,
    "half a character": b'{"model": "\xe2\x82',
    "a lone surrogate": b'{"model": "\\ud800"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"model": "toy"}'.encode("utf-16"),
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep in a field": b'{"model": "toy", "prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "a long number": b'{"seed": ' + b"9" * 100_000 + b"}",
    "a tiny exponent": b'{"temperature": 1e-999999999}',
    "no number": b'{"temperature": NaN}',
    "many fields": json.dumps({f"f{index}": index for index in range(50_000)}).encode(),
    "a long name": json.dumps({"x" * 1_000_000: 1}).encode(),
    "a field twice": b'{"model": "toy", "model": 5}',
    "a list": b"[]",
    "null": b"null",
    "two objects": b"{}{}",
    "a form": b"model=toy&prompt=hi",
    "zeros": bytes(100_000),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("path", GOOD)
async def test_a_hostile_body_is_a_small_400_and_nothing_is_asked(path: str, what: str) -> None:
    entry = SpeakingEntry()
    answered = await call(app_for(entry), "POST", path, HOSTILE[what])

    assert answered.status == 400
    openai.check_error(answered.json())
    assert len(answered.body) < 1000
    assert entry.asked == []
    assert entry.embedded == []


async def test_a_served_node_answers_everybody_after_all_of_it() -> None:
    async with serving(app_for(SpeakingEntry())) as url:
        for body in (*HOSTILE.values(), b"x" * (MAX_HTTP_BODY_BYTES + 1)):
            for path in GOOD:
                await _post(url, path, body)
        for path, good in GOOD.items():
            answer = await _post(url, path, json.dumps(good).encode())
            assert answer.startswith(b"HTTP/1.1 200 "), path


@pytest.mark.parametrize("path", GOOD)
async def test_a_body_over_the_limit_is_a_413_on_every_route(path: str) -> None:
    body = json.dumps(GOOD[path]).encode()
    fits = await call(app_for(SpeakingEntry(), max_body_bytes=len(body)), "POST", path, body)
    over = await call(app_for(SpeakingEntry(), max_body_bytes=len(body) - 1), "POST", path, body)

    assert (fits.status, over.status) == (200, 413)
    openai.check_error(over.json())


async def test_a_large_body_is_read_beside_the_event_loop_and_its_errors_come_from_there() -> None:
    loop, threads = threading.get_ident(), list[int]()

    def read(body: bytes) -> int:
        threads.append(threading.get_ident())
        if body.startswith(b"!"):
            raise InvalidRequest("it does not begin so", "prompt")
        return len(body)

    def request_of(body: bytes) -> Request:
        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        return Request({"type": "http", "method": "POST", "headers": []}, receive)

    assert [await understood(request_of(b"x" * size), read) for size in (10, 1_000_000)] == [10, 1_000_000]
    with pytest.raises(InvalidRequest):
        await understood(request_of(b"!" * 1_000_000), read)
    assert [each == loop for each in threads] == [True, False, False]


async def _post(url: str, path: str, body: bytes) -> bytes:
    stream = await trio.open_tcp_stream("127.0.0.1", port_of(url))
    async with stream:
        await stream.send_all(post_bytes(path, body, "connection: close"))
        return await receive_all(stream)


# ---- Templates ----


@dataclass
class TemplatedEntry(SpeakingEntry):
    """Renders each conversation by a real artifact's template, as a node does, before it speaks."""

    codec: ArtifactCodec | None = None

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        if request.messages is not None and self.codec is not None:
            await self.codec.encode_chat(request.messages)
        async with super().generate(request) as generation:
            yield generation


LOOPING = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "raises": ("{{ raise_exception('roles must alternate') }}", 400, "roles must alternate"),
    "loops": (LOOPING, 500, "its log says why"),
    "grows": (
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        500,
        "log",
    ),
    "divides by zero": ("{{ 1 // 0 }}", 500, "log"),
    "reaches for classes": ("{{ ''.__class__.__mro__ }}", 500, "log"),
}


@pytest.mark.parametrize("which", TEMPLATES)
async def test_a_bad_template_costs_its_request_only(which: str, tmp_path: Path) -> None:
    template, status, said = TEMPLATES[which]
    path = write_fim_artifact(tmp_path, metadata={"tokenizer.chat_template": template})
    answers: dict[str, Answered] = {}
    with Artifact.open(path) as artifact:
        entry = TemplatedEntry(codec=ArtifactCodec(artifact, SystemClock()))
        app = app_for(entry)

        async def ask(name: str, path: str, body: object) -> None:
            answers[name] = await call(app, "POST", path, body)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, "chat", "/v1/chat/completions", chat_body())
                nursery.start_soon(ask, "streamed", "/v1/chat/completions", chat_body(stream=True))
                nursery.start_soon(ask, "beside", "/v1/generate", {"prompt": "hi"})
            await ask("after", "/v1/generate", {"prompt": "hi"})

    for name in ("chat", "streamed"):
        assert answers[name].status == status
        openai.check_error(answers[name].json())
        assert said in answers[name].json()["error"]["message"]
        assert str(tmp_path) not in answers[name].body.decode()
    for name in ("beside", "after"):
        assert (answers[name].status, answers[name].json()["text"]) == (200, "".join(ANSWER))
