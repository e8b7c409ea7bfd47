"""A client that leaves ends its generation at once; one that reads slowly holds up nothing but its own."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest
import trio

from tessella_p2p.bridge.connection import ConnectionLimits
from tessella_p2p.bridge.server import ServerLimits
from tests.bridge.bridge_doubles import Caller, SpeakingEntry, app_for, chat_body, events_of, port_of, serving
from tests.bridge.raw_http import open_unread, post_bytes

CHAT = "/v1/chat/completions"
LONG_WORD = "@" * 1_000_000


@pytest.mark.parametrize("hold_after", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/generate"])
async def test_a_departure_cancels_the_generation(path: str, stream: bool, hold_after: int) -> None:
    entry = SpeakingEntry(hold_after=hold_after)
    body = chat_body(stream=stream) if path == CHAT else {"prompt": "hi", "stream": stream}
    async with serving(app_for(entry)) as url:
        client = await trio.open_tcp_stream("127.0.0.1", port_of(url))
        await client.send_all(post_bytes(path, body))
        await entry.holding.wait()
        await client.aclose()
        with trio.fail_after(5):
            await entry.closed.wait()

    assert entry.ends == ["cancelled"]


async def test_a_departure_after_the_last_event_does_not_cut_the_closing_short() -> None:
    entry = SpeakingEntry()
    caller = Caller(app_for(entry))

    async def leave_when_done() -> None:
        while b"[DONE]" not in b"".join(caller.parts):
            await caller.part_came.wait()
            caller.part_came = trio.Event()
        caller.left.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave_when_done)
        await caller("POST", CHAT, json.dumps(chat_body(stream=True)).encode())

    assert entry.ends == ["closed"]


async def test_a_departure_is_logged_without_an_answer_and_without_the_prompt(
    logs: list[MutableMapping[str, Any]],
) -> None:
    entry = SpeakingEntry(hold_after=0)
    caller = Caller(app_for(entry))

    async def leave() -> None:
        await entry.holding.wait()
        caller.left.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave)
        assert await caller("POST", CHAT, json.dumps(chat_body()).encode()) is None

    (line,) = logs
    assert {name: line[name] for name in ("event", "method", "path", "status")} == {
        "event": "http_request",
        "method": "POST",
        "path": CHAT,
        "status": 499,
    }
    assert "hi" not in line.values()


async def test_a_client_that_does_not_read_hurts_nobody_and_is_dropped() -> None:
    stalled = SpeakingEntry(words=(LONG_WORD,) * 40)
    limits = ServerLimits(connection=ConnectionLimits(send_timeout_s=0.3))
    async with serving(app_for(stalled), limits) as url:
        client = await open_unread(port_of(url))
        await client.send_all(post_bytes(CHAT, chat_body(stream=True)))
        with trio.fail_after(5):
            async with httpx.AsyncClient(base_url=url, timeout=5) as other:
                quick = await other.post(CHAT, json=chat_body(max_tokens=1, stream=True))
            await stalled.closed.wait()
        await client.aclose()

    assert list(events_of(quick.content))[-1] == "[DONE]"
    assert sorted(stalled.ends) == ["cancelled", "closed"]


async def test_a_slow_reader_gets_every_byte() -> None:
    entry = SpeakingEntry(words=(LONG_WORD,) * 8)
    async with serving(app_for(entry)) as url:
        client = await open_unread(port_of(url))
        await client.send_all(post_bytes(CHAT, chat_body(stream=True), "connection: close"))
        received = 0
        while data := await client.receive_some(4096):
            received += data.count(b"@")
        await client.aclose()

    assert received == 8 * len(LONG_WORD)
    assert entry.ends == ["closed"]
