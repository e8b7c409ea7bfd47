"""What a client learns of its requests: headers of each answer, the node's book, and why a model is not there."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import HopTimeout, NoRoute, Overloaded
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.bridge.answer_headers import route_list
from tessella_p2p.bridge.traced import trace_id_of
from tessella_p2p.entry.api import Caller, HopReport
from tests.bridge.bridge_doubles import (
    MODEL,
    ROUTE,
    SpeakingEntry,
    app_for,
    call,
    chat_body,
    error_shape,
    events_of,
)
from tests.bridge.bridge_doubles import Caller as Client

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
ROUTE_TEXT = '"12D3KooWHead";layers="0-12";ms=1.500, "12D3KooWTail";layers="12-30";ms=2.500'


@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_names_its_request_and_its_route(stream: bool) -> None:
    answered = await call(app_for(SpeakingEntry()), "POST", "/v1/chat/completions", chat_body(stream=stream))
    assert answered.status == 200
    assert answered.headers["x-request-id"] == "req-1"
    assert answered.headers["x-tessella-route"] == ROUTE_TEXT


async def test_an_error_names_its_request_and_when_to_come_again() -> None:
    refusal = NoRoute("layers 4–8 do not answer", ((4, 8),), retry_after_s=2.2)
    refusal.request_id = "req-7"
    answered = await call(app_for(SpeakingEntry(refusal=refusal)), "POST", "/v1/chat/completions", chat_body())
    with error_shape(answered) as error:
        assert error["missing_layers"] == [[4, 8]]
        assert error["request_id"] == "req-7"
    assert answered.status == 503
    assert (answered.headers["x-request-id"], answered.headers["retry-after"]) == ("req-7", "3")


async def test_an_error_in_mid_stream_names_its_request() -> None:
    failure = HopTimeout("late")
    failure.request_id = "req-7"
    app = app_for(SpeakingEntry(fail_after=2, failure=failure))
    answered = await call(app, "POST", "/v1/chat/completions", chat_body(stream=True))
    *_, error, done = events_of(answered.body)
    assert error["error"]["request_id"] == "req-7"
    assert done == "[DONE]"


async def test_a_model_that_is_not_ready_is_not_listed_and_its_own_page_says_why() -> None:
    entry = SpeakingEntry(not_ready=NoRoute("layers 4–8 do not answer", ((4, 8),), retry_after_s=3.0))
    listed = await call(app_for(entry), "GET", "/v1/models")
    assert (listed.status, listed.json()["data"]) == (200, [])
    asked = await call(app_for(entry), "GET", f"/v1/models/{MODEL}")
    with error_shape(asked) as error:
        assert (error["code"], error["missing_layers"]) == ("no_route", [[4, 8]])
    assert (asked.status, asked.headers["retry-after"]) == (503, "3")
    unknown = await call(app_for(entry), "GET", "/v1/models/other")
    assert unknown.status == 404


async def test_a_lone_model_need_not_be_named_even_while_it_waits_for_its_proof() -> None:
    entry = SpeakingEntry(not_ready=NoRoute("nothing has answered yet"))
    answered = await call(app_for(entry), "POST", "/v1/generate", {"prompt": "hi"})
    assert answered.status == 200
    assert entry.asked[0].model == MODEL


def remember(entry: SpeakingEntry, request_id: str, caller: str = "") -> None:
    book = entry.requests
    trail = book.begin(request_id, "answer", MODEL, Caller(caller, trace_id=TRACE), now=1.0, now_unix_ms=1_000)
    trail.tokenised(5, 8, 1.001)
    trail.proven(1.0015)
    trail.granted(request_id, "Standard", 1.002, paid=True)
    trail.placed(1.003)
    trail.opened(0, lambda: ROUTE, 1.004)
    trail.rerouted(HopTimeout("late").blame(PeerId("12D3KooWTail")), 1.5)
    trail.opened(1, lambda: ROUTE, 1.6)
    trail.token(1.7)


async def test_a_request_is_told_to_whoever_made_it_in_flight_and_afterwards() -> None:
    entry = SpeakingEntry()
    remember(entry, "req-a")
    told = (await call(app_for(entry), "GET", "/requests/req-a")).json()
    hops: list[dict[str, Any]] = [
        {
            "peer_id": hop.peer_id,
            "layers": list(hop.layers.as_tuple()),
            "hop_ms": hop.hop_ms,
            "compute_ms": hop.compute_ms,
        }
        | {"cached": None}
        for hop in ROUTE
    ]
    fault = {"code": "hop_timeout", "peer_id": "12D3KooWTail", "missing_layers": []}
    assert told == {
        "request_id": "req-a",
        "object": "tessella.request",
        "kind": "answer",
        "model": MODEL,
        "trace_id": TRACE,
        "began_at_ms": 1_000,
        "tokenised_ms": 1.0,
        "proven_ms": 1.5,
        "granted_ms": 2.0,
        "placed_ms": 3.0,
        "first_token_ms": 700.0,
        "last_token_ms": 700.0,
        "ended_ms": None,
        "prompt_tokens": 5,
        "max_tokens": 8,
        "num_tokens": 1,
        "tier": "Standard",
        "paid": True,
        "end": None,
        "fault": None,
        "epochs": [
            {"epoch": 0, "opened_ms": 4.0, "ended_ms": 500.0, "num_tokens": 0, "fault": fault, "route": hops},
            {"epoch": 1, "opened_ms": 600.0, "ended_ms": None, "num_tokens": 1, "fault": None, "route": hops},
        ],
    }
    listed = (await call(app_for(entry), "GET", "/requests")).json()
    assert listed == {"in_flight": [told], "recent": []}


async def test_nobody_sees_the_requests_of_another_key() -> None:
    entry = SpeakingEntry()
    remember(entry, "req-a", caller="key-1")
    unseen = await call(app_for(entry), "GET", "/requests/req-a")
    with error_shape(unseen) as error:
        assert error["code"] == "request_not_found"
    assert unseen.status == 404
    never = await call(app_for(entry), "GET", "/requests/req-b")
    assert never.json() == unseen.json(), "and cannot tell them from those that never were"
    assert (await call(app_for(entry), "GET", "/requests")).json() == {"in_flight": [], "recent": []}


async def test_a_trace_reaches_the_entry() -> None:
    entry = SpeakingEntry()
    body = b'{"model": "toy", "messages": [{"role": "user", "content": "hi"}]}'
    await Client(app_for(entry))("POST", "/v1/chat/completions", body, headers={"traceparent": TRACEPARENT})
    assert entry.asked[0].caller.trace_id == TRACE


@pytest.mark.parametrize(
    ("traceparent", "expected"),
    [
        (TRACEPARENT, TRACE),
        (f"01-{TRACE}-b7ad6b7169203331-01-what-comes-later", TRACE),
        (f"00-{TRACE}-b7ad6b7169203331-01-more", None),
        (f"ff-{TRACE}-b7ad6b7169203331-01", None),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-b7ad6b7169203331-01", None),
        ("", None),
        (None, None),
    ],
)
def test_a_trace_is_read_as_the_standard_says(traceparent: str | None, expected: str | None) -> None:
    assert trace_id_of(traceparent) == expected


@given(st.text())
def test_whatever_a_client_calls_its_trace_is_an_id_or_ignored(text: str) -> None:
    found = trace_id_of(text)
    assert found is None or re.fullmatch("[0-9a-f]{32}", found)


_MEMBER = r'"[0-9A-Za-z]+";layers="\d+-\d+"(;ms=\d{1,12}\.\d{1,3})?'


@given(st.lists(st.floats(0.0, 1e300), min_size=1, max_size=8))
def test_a_route_is_always_a_list_of_structured_fields(times: list[float]) -> None:
    route = [HopReport(PeerId(f"12D3{at}"), LayerRange(at, at + 1), ms, 0.0) for at, ms in enumerate(times)]
    assert re.fullmatch(f"{_MEMBER}(, {_MEMBER})*", route_list(route))


async def test_a_refusal_without_a_request_has_no_id() -> None:
    answered = await call(
        app_for(SpeakingEntry(refusal=Overloaded("full"))), "POST", "/v1/chat/completions", chat_body()
    )
    assert "x-request-id" not in answered.headers
