"""Who may use a node's HTTP surface, and what web pages may."""

from __future__ import annotations

import json
import os
from typing import Any

import openai
import pytest
import trio

from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.limits import PREFLIGHT_S
from tessella_p2p.bridge.api_keys import ApiKey, ApiKeys, KeyLimits, new_key
from tessella_p2p.bridge.authorising import KeyRing, is_open
from tessella_p2p.bridge.known_origin import OriginRules
from tests.bridge.bridge_doubles import (
    MODEL,
    NO_ROUTE,
    Answered,
    Caller,
    SpeakingEntry,
    app_for,
    chat_body,
    error_shape,
    serving,
)

NOW = SystemClock().unix_ms()
PAGE = "https://chat.example.org"


def ring_of(*keys: ApiKey) -> KeyRing:
    return KeyRing(ApiKeys(keys), SystemClock())


def a_key(limits: KeyLimits | None = None, **changes: Any) -> tuple[str, ApiKey]:
    return new_key(os.urandom, label="", now_ms=changes.pop("now_ms", NOW), limits=limits, **changes)


async def ask(app: Any, path: str, headers: dict[str, str], body: bytes = b"", method: str = "GET") -> Answered:
    answered = await Caller(app)(method, path, body, headers={"host": "node.example", **headers})
    assert answered is not None
    return answered


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def chat_bytes(**more: Any) -> bytes:
    return json.dumps(chat_body(**more)).encode()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("/v1/models", "/status", "/peers", "/metrics", "/events", "/nowhere", "/ui")),
        *(("POST", path) for path in ("/v1/chat/completions", "/infill", "/v1/embeddings", "/", "/ui/app.js")),
        ("GET", "/ui/../status"),
        ("OPTIONS", "/status"),
    ],
)
async def test_without_a_key_nothing_that_tells_or_does_something_is_answered(method: str, path: str) -> None:
    entry = SpeakingEntry()
    _, key = a_key()
    app = app_for(entry, keys=ring_of(key))
    for headers in ({}, bearer("tsl-" + "A" * 43), bearer("x"), {"authorization": f"Basic {key.key_id}"}):
        answered = await ask(app, path, headers, chat_bytes(), method)
        assert answered.status == 401
        assert answered.headers["www-authenticate"].startswith('Bearer realm="tessella"')
        with error_shape(answered) as error:
            assert error["code"] == "invalid_api_key"
    assert entry.asked == []


def test_only_files_of_the_dashboard_and_the_health_check_are_open() -> None:
    assert [path for path in ("/", "/healthz", "/ui/app.js", "/metrics", "/docs", "/uix") if is_open("GET", path)] == [
        *("/", "/healthz", "/ui/app.js")
    ]
    assert not is_open("POST", "/healthz")


async def test_the_health_check_needs_no_key_and_tells_that_the_process_answers_alone() -> None:
    entry = SpeakingEntry(not_ready=NO_ROUTE)
    for app in (app_for(entry, keys=ring_of()), app_for(entry)):
        answered = await ask(app, "/healthz", {})
        assert (answered.status, answered.json()) == (200, {"status": "ok"})
        assert (await ask(app, "/healthz", {"origin": PAGE})).status == 403


async def test_a_body_is_not_read_before_its_key_is() -> None:
    app = app_for(SpeakingEntry(), keys=ring_of(), max_body_bytes=10)
    answered = await ask(app, "/v1/chat/completions", {"content-length": "11"}, b"x" * 11, "POST")
    assert (answered.status, answered.headers["connection"]) == (401, "close")


async def test_a_key_opens_and_tells_the_entry_for_whom() -> None:
    entry = SpeakingEntry()
    secret, key = a_key(KeyLimits(tier="Standard"), delegation=b"sealed")
    app = app_for(entry, keys=ring_of(key))
    assert (await ask(app, "/status", bearer(secret))).status == 200
    assert (await ask(app, "/v1/chat/completions", bearer(secret), chat_bytes(), "POST")).status == 200
    (asked,) = entry.asked
    assert (asked.caller.name, asked.caller.delegation, asked.caller.tier) == (key.key_id, b"sealed", "Standard")


async def test_where_no_key_is_asked_for_everybody_is_one_caller() -> None:
    entry = SpeakingEntry()
    for headers in ({}, bearer("sk-anything"), {"authorization": "junk"}):
        assert (await ask(app_for(entry), "/v1/chat/completions", headers, chat_bytes(), "POST")).status == 200
    assert {asked.caller.name for asked in entry.asked} == {""}


async def test_a_key_that_is_revoked_or_over_opens_nothing_from_then_on() -> None:
    (secret, key), (over, expired) = a_key(), a_key(now_ms=NOW - 2000, expires=NOW - 1000)
    ring = ring_of(key, expired)
    app = app_for(SpeakingEntry(), keys=ring)
    assert (await ask(app, "/status", bearer(over))).status == 401
    assert (await ask(app, "/status", bearer(secret))).status == 200
    ring.replace(ApiKeys([expired]))
    assert (await ask(app, "/status", bearer(secret))).status == 401


async def test_an_answer_says_what_is_left_and_too_many_requests_are_429() -> None:
    secret, key = a_key(KeyLimits(requests_per_minute=2, tokens_per_minute=1000))
    app = app_for(SpeakingEntry(), keys=ring_of(key))
    left = []
    for _ in range(2):
        answered = await ask(app, "/v1/chat/completions", bearer(secret), chat_bytes(), "POST")
        assert answered.status == 200
        assert answered.headers["x-ratelimit-limit-requests"] == "2"
        left.append(answered.headers["x-ratelimit-remaining-requests"])
    assert left == ["1", "0"]
    refused = await ask(app, "/v1/chat/completions", bearer(secret), chat_bytes(), "POST")
    assert refused.status == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    with error_shape(refused) as error:
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "requests")
    assert (await ask(app, "/status", bearer(secret))).status == 200, "reading costs nothing"


@pytest.mark.parametrize("stream", [True, False])
async def test_prompt_and_answer_count_against_the_tokens_of_a_key(stream: bool) -> None:
    secret, key = a_key(KeyLimits(tokens_per_minute=9))
    ring = ring_of(key)
    app = app_for(SpeakingEntry(), keys=ring)
    answered = await ask(app, "/v1/chat/completions", bearer(secret), chat_bytes(stream=stream), "POST")
    assert answered.status == 200
    with_answer = ring.rates.headers(key.key_id, key.limits, trio.current_time())
    assert with_answer["x-ratelimit-remaining-tokens"] == "0", "2 of the prompt, 7 of the answer"
    refused = await ask(app, "/v1/chat/completions", bearer(secret), chat_bytes(), "POST")
    with error_shape(refused) as error:
        assert (refused.status, error["type"]) == (429, "tokens")


async def test_vectors_count_though_nobody_waits_for_them() -> None:
    secret, key = a_key(KeyLimits(tokens_per_minute=10))
    ring, entry = ring_of(key), SpeakingEntry(hold_after=0)
    app = app_for(entry, keys=ring)
    caller, body = Caller(app), json.dumps({"model": MODEL, "input": ["four", "three"]}).encode()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller, "POST", "/v1/embeddings", body, b"", bearer(secret))
        await entry.holding.wait()
        caller.left.set()
    assert entry.ends == ["cancelled"]
    left = ring.rates.headers(key.key_id, key.limits, trio.current_time())
    assert left["x-ratelimit-remaining-tokens"] == "1"
    entry.hold_after = None
    assert (await ask(app, "/v1/embeddings", bearer(secret), body, "POST")).status == 200
    refused = await ask(app, "/v1/embeddings", bearer(secret), body, "POST")
    with error_shape(refused) as error:
        assert (refused.status, error["type"]) == (429, "tokens")


async def test_requests_at_a_time_are_bounded_and_a_client_that_leaves_frees_its_place() -> None:
    secret, key = a_key(KeyLimits(concurrent=1))
    entry = SpeakingEntry(hold_after=1)
    app = app_for(entry, keys=ring_of(key))
    first = Caller(app)
    body = chat_bytes(stream=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first, "POST", "/v1/chat/completions", body, b"", bearer(secret))
        await entry.holding.wait()
        refused = await ask(app, "/v1/chat/completions", bearer(secret), body, "POST")
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        first.left.set()
    entry.hold_after = None
    assert (await ask(app, "/v1/chat/completions", bearer(secret), body, "POST")).status == 200


async def test_the_official_client_raises_its_own_classes() -> None:
    secret, key = a_key(KeyLimits(requests_per_minute=1))
    async with serving(app_for(SpeakingEntry(), keys=ring_of(key))) as url:

        def with_key(api_key: str) -> list[str]:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0)
            found = []
            for _ in range(2):
                try:
                    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
                    found.append("ok")
                except openai.APIStatusError as error:
                    found.append(f"{type(error).__name__} {error.code}")
            client.close()
            return found

        assert await trio.to_thread.run_sync(with_key, "tsl-wrong") == ["AuthenticationError invalid_api_key"] * 2
        assert await trio.to_thread.run_sync(with_key, secret) == ["ok", "RateLimitError rate_limit_exceeded"]


# ---- Web pages ----


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": PAGE},
        {"origin": "null"},
        {"origin": "http://node.example:3000"},
        {"origin": "http://node.example.evil.org"},
        {"origin": "garbage"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
    ],
)
async def test_a_page_of_another_origin_is_refused_before_anything_runs(headers: dict[str, str]) -> None:
    entry = SpeakingEntry()
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/status"), ("OPTIONS", "/status")):
        answered = await ask(app_for(entry), path, headers, chat_bytes(), method)
        assert answered.status == 403
        assert "access-control-allow-origin" not in answered.headers
        with error_shape(answered) as error:
            assert error["code"] == "origin_not_allowed"
    assert entry.asked == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://node.example"},
        {"origin": "https://node.example"},
        {"origin": "http://NODE.example:80"},
        {"origin": "http://[::1]:8080", "host": "[::1]:8080"},
        {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"},
        {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    ],
)
async def test_programs_own_pages_and_links_to_here_are_answered(headers: dict[str, str]) -> None:
    assert (await ask(app_for(SpeakingEntry()), "/status", headers)).status == 200


async def test_behind_a_proxy_its_names_are_own() -> None:
    app = app_for(SpeakingEntry(), origins=OriginRules(names=frozenset({"llm.example.org"})))
    for origin in ("https://llm.example.org", "https://llm.example.org:8443"):
        assert (await ask(app, "/status", {"origin": origin, "host": "127.0.0.1:8080"})).status == 200
    assert (await ask(app, "/status", {"origin": PAGE, "host": "127.0.0.1:8080"})).status == 403


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_an_allowed_page_may_ask_and_read_also_what_is_refused(allowed: str) -> None:
    secret, key = a_key()
    app = app_for(SpeakingEntry(), keys=ring_of(key), origins=OriginRules(frozenset({allowed})))
    for headers, status in ((bearer(secret), 200), ({}, 401)):
        answered = await ask(app, "/v1/chat/completions", {"origin": PAGE, **headers}, chat_bytes(), "POST")
        assert answered.status == status
        assert answered.headers["access-control-allow-origin"] == PAGE
        assert answered.headers["vary"] == "origin"
        assert "access-control-allow-credentials" not in answered.headers
        assert "x-tessella-route" in answered.headers["access-control-expose-headers"]


async def test_a_preflight_is_answered_without_a_key_and_runs_nothing() -> None:
    entry = SpeakingEntry()
    app = app_for(entry, keys=ring_of(), origins=OriginRules(frozenset({PAGE})))
    wanted = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
        "access-control-request-private-network": "true",
    }
    answered = await ask(app, "/v1/chat/completions", wanted, method="OPTIONS")
    assert (answered.status, answered.body) == (204, b"")
    headers = answered.headers
    assert headers["access-control-allow-origin"] == PAGE
    assert headers["access-control-allow-methods"] == "GET, POST"
    assert headers["access-control-allow-headers"] == wanted["access-control-request-headers"]
    assert headers["access-control-max-age"] == str(PREFLIGHT_S)
    assert headers["access-control-allow-private-network"] == "true"
    for junk in ("a b", "x" * 2000, "x\u00e4", "a,,b"):
        answered = await ask(app, "/status", {**wanted, "access-control-request-headers": junk}, method="OPTIONS")
        assert (answered.status, "access-control-allow-headers" in answered.headers) == (204, False)
    assert entry.asked == []
