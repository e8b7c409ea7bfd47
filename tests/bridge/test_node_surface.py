"""What a node tells of itself over HTTP."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from tessella_p2p.base.errors import StorageError
from tests.bridge.bridge_doubles import MODEL, NO_ROUTE, SpeakingEntry, app_for, call, chat_body


async def test_status_has_every_field_of_the_contract() -> None:
    answered = await call(app_for(SpeakingEntry(), version="1.2.3"), "GET", "/status")

    device = {
        "kind": "cpu",
        "healthy": True,
        "oom_streak": 0,
        "memory_used_mb": None,
        "memory_total_mb": None,
    }
    assert answered.json() == {
        "version": "1.2.3",
        "peer_id": "12D3KooWSelf",
        "state": "ready",
        "model": MODEL,
        "models": [MODEL],
        "readiness": None,
        "layer_ranges": [[0, 12]],
        "assignment": {
            "model_repo": MODEL,
            "layer_ranges": [[0, 12]],
            "serial": 7,
            "expires_at_ms": 1_700_000_000_000,
        },
        "recipe": "f32",
        "conversions": {"Q6_K": "F16"},
        "hidden_size": 576,
        "queue_depth": 3,
        "max_input_tokens": 8192,
        "max_input_tokens_source": "measured",
        "hop_timeout_secs": 10.0,
        "max_concurrent_hop_bodies": 4,
        "hop_bodies_in_flight": 1,
        "max_hop_body_bytes": 64 << 20,
        "peer_failures": {"12D3KooWTail": 2},
        "device": device,
        "gpu": device,
        "orchestrator": {
            "peer_id": "12D3KooWOrchestrator",
            "reachable": True,
            "outage_secs": 0,
            "tickets_held": 2,
        },
        "credits": {"credits": 1.5, "micro_credits": 1_500_000, "tier": "Standard"},
        "proofs": {"open": 1, "pending": 2, "settled": 3, "held": 4, "refused": 5},
        "addresses": [],
        "stage": {
            "state": "ready",
            "sessions": 2,
            "waiting": {"VIP": 3, "Standard": 0, "Leech": 0},
            "crashes": 1,
            "recent_failures": 1,
            "memory_bytes": 1000,
            "kv": {
                "page_positions": 64,
                "page_bytes": 4096,
                "pages_total": 32,
                "pages_used": 5,
                "pages_cached": 6,
                "prefix_positions_hit": 128,
                "sessions_evicted": 7,
            },
        },
        "event_loop": {"stalls": 8, "longest_ms": 90.5, "total_ms": 500.0},
    }


async def test_peers_of_a_model_are_listed_and_those_of_an_unserved_one_are_none() -> None:
    app = app_for(SpeakingEntry())
    served = await call(app, "GET", "/peers", query=b"model_id=toy")
    unserved = await call(app, "GET", "/peers", query=b"model_id=other")
    every = await call(app, "GET", "/peers")

    assert served.json() == every.json()
    assert served.json() == [
        {
            "peer_id": "12D3KooWTail",
            "model_id": MODEL,
            "layer_ranges": [[12, 30]],
            "status": "Healthy",
            "queue_depth": 0,
            "canary": False,
            "recipe": "f32",
            "addresses": ["/ip4/127.0.0.1/tcp/9081"],
            "http_api_url": None,
        }
    ]
    assert (unserved.status, unserved.json()) == (200, [])


async def test_metrics_count_what_was_answered_and_show_the_node() -> None:
    entry = SpeakingEntry()
    app = app_for(entry)
    await call(app, "POST", "/v1/chat/completions", chat_body(stream=True))
    await call(app, "POST", "/v1/chat/completions", chat_body(max_tokens=2))
    await call(app, "POST", "/v1/chat/completions", chat_body(model="other"))
    entry.refusal = NO_ROUTE
    await call(app, "POST", "/v1/chat/completions", chat_body())
    for index in range(3):
        await call(app, "GET", f"/made/up/{index}")
    answered = await call(app, "GET", "/metrics")

    assert answered.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answered.body.decode())
        for sample in family.samples
    }
    assert samples["tessella_http_requests_total", "/v1/chat/completions", "200", "POST"] == 2
    assert samples["tessella_http_requests_total", "/v1/chat/completions", "404", "POST"] == 1
    assert samples["tessella_http_requests_total", "404", "GET", "other"] == 3
    assert samples["tessella_generations_total", "stop"] == 1
    assert samples["tessella_generations_total", "length"] == 1
    assert samples["tessella_generations_total", "model_not_found"] == 1
    assert samples["tessella_generations_total", "no_route"] == 1
    assert samples["tessella_generations_in_flight",] == 0
    assert samples["tessella_steps_waiting", "VIP"] == 3
    assert samples["tessella_steps_waiting", "Leech"] == 0
    assert samples["tessella_stage_state", "ready"] == 1
    assert samples["tessella_stage_state", "saturated"] == 0
    assert [samples["tessella_kv_pages", use] for use in ("total", "used", "cached")] == [32, 5, 6]
    assert samples["tessella_sessions_evicted_total",] == 7
    assert samples["tessella_loop_stall_seconds_total",] == 0.5
    assert samples["tessella_tokens_total", "answer"] == 9
    assert samples["tessella_queue_depth",] == 3
    assert samples["tessella_peer_failures_total",] == 2
    assert samples["tessella_proofs", "refused"] == 5
    assert samples["tessella_micro_credits",] == 1_500_000


async def test_each_app_counts_for_itself() -> None:
    one, other = app_for(SpeakingEntry()), app_for(SpeakingEntry())
    await call(one, "GET", "/status")

    assert b'route="/status"' in (await call(one, "GET", "/metrics")).body
    assert b'route="/status"' not in (await call(other, "GET", "/metrics")).body


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/docs", "/docs"),
        ("/", "/"),
        ("/v1/models/some/name", "/v1/models/{model}"),
        ("/requests/req-1", "/requests/{request_id}"),
        ("/v1/token_stream/req-1", "/v1/token_stream/{request_id}"),
        ("/v1/nothing", "other"),
        ("/requests", "/requests"),
    ],
)
async def test_a_request_is_counted_under_its_route(path: str, route: str) -> None:
    app = app_for(SpeakingEntry())
    await call(app, "GET", path)

    counted = [
        line for line in (await call(app, "GET", "/metrics")).body.decode().splitlines() if "requests_total{" in line
    ]
    assert len(counted) == 1
    assert f'route="{route}"' in counted[0]


async def test_every_answer_carries_the_security_headers() -> None:
    app = app_for(SpeakingEntry())
    for method, path, body in [
        ("GET", "/status", None),
        ("GET", "/nothing", None),
        ("POST", "/v1/chat/completions", chat_body(stream=True)),
        ("POST", "/v1/chat/completions", b"{"),
    ]:
        headers = (await call(app, method, path, body)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"


async def test_the_log_has_a_line_a_request_without_its_query_or_body(logs: list[MutableMapping[str, Any]]) -> None:
    app = app_for(SpeakingEntry())
    await call(app, "GET", "/peers", query=b"model_id=secret")
    await call(app, "POST", "/v1/chat/completions", chat_body(messages=[{"role": "user", "content": "secret"}]))

    assert [(line["event"], line["method"], line["path"], line["status"]) for line in logs] == [
        ("http_request", "GET", "/peers", 200),
        ("http_request", "POST", "/v1/chat/completions", 200),
    ]
    assert "secret" not in repr(logs)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fail_after", [0, 1])
async def test_what_failed_on_this_node_stands_in_its_log_and_not_in_the_answer(stream: bool, fail_after: int) -> None:
    entry = SpeakingEntry(failure=StorageError("/var/lib/proofs is full"), fail_after=fail_after)
    with capture_logs() as lines:
        answered = await call(app_for(entry), "POST", "/v1/chat/completions", chat_body(stream=stream))

    assert b"/var/lib" not in answered.body
    assert b"storage_error" in answered.body
    (line,) = [line for line in lines if line["event"] == "http_answer_failed"]
    assert (line["code"], line["reason"]) == ("storage_error", "/var/lib/proofs is full")
