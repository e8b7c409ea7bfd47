"""``why`` against the real bridge, and the picture that it draws."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx
import pytest
import trio
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import HopTimeout, NoRoute
from tessella_p2p.base.ids import PeerId
from tessella_p2p.bridge.request_view import request_json
from tessella_p2p.cli.main import cli
from tessella_p2p.cli.timeline import BAR_CHARS, Row, Told, bar, rows_of, verdict
from tessella_p2p.entry.api import Caller
from tessella_p2p.entry.requests import RequestBook
from tests.bridge.bridge_doubles import MODEL, ROUTE, SpeakingEntry, app_for, serving


async def invoke(url: str, *arguments: str) -> Result:
    return await trio.to_thread.run_sync(partial(CliRunner().invoke, cli, ["-a", url, "why", *arguments]))


def answered(book: RequestBook, request_id: str) -> None:
    """A request that lost its first route."""
    trail = book.begin(request_id, "answer", MODEL, Caller(), now=1.0, now_unix_ms=1_700_000_000_000)
    trail.tokenised(5, 8, 1.001)
    trail.granted(request_id, "Standard", 1.020, paid=True)
    trail.placed(1.020)
    trail.opened(0, lambda: ROUTE, 1.021)
    trail.rerouted(HopTimeout("late").blame(PeerId("12D3KooWTail")), 1.5)
    trail.opened(1, lambda: ROUTE, 1.6)
    for at in (1.7, 1.8, 1.9):
        trail.token(at)
    trail.end("stop", 2.0)


async def test_a_request_is_told_with_its_waits_routes_and_end() -> None:
    entry = SpeakingEntry()
    answered(entry.requests, "req-a")
    async with serving(app_for(entry)) as url:
        result = await invoke(url, "req-a")
        by_answer_id = await invoke(url, "chatcmpl-req-a")
        newest = await invoke(url)
    assert result.exit_code == 0, result.output
    assert by_answer_id.output == newest.output == result.output
    for told in (
        "req-a: complete after 3 tokens",
        "Standard, paid",
        "leave of the orchestrator",
        "wait for a route",
        "route 1: to the first token",
        "route 0, given up: hop_timeout by 12D3KooWTail",
        "0–12",
        "█",
    ):
        assert told in result.output


async def test_json_is_the_nodes_own() -> None:
    entry = SpeakingEntry()
    answered(entry.requests, "req-a")
    async with serving(app_for(entry)) as url:
        result = await invoke(url, "--json", "req-a")
    (record,) = entry.requests.recent()
    assert json.loads(result.stdout) == json.loads(json.dumps(request_json(record)))


@pytest.mark.parametrize("arguments", [("req-none",), (), ("../status",)])
async def test_a_request_that_is_not_remembered_is_said(arguments: tuple[str, ...]) -> None:
    async with serving(app_for(SpeakingEntry())) as url:
        result = await invoke(url, *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")


def told_of(book: RequestBook) -> Told:
    (record,) = (*book.in_flight(), *book.recent())
    return Told.model_validate_json(json.dumps(request_json(record)))


def test_a_refused_request_says_what_was_missing() -> None:
    book = RequestBook()
    book.begin("req-a", "answer", MODEL, Caller(), now=1.0, now_unix_ms=5).fail(NoRoute("no", ((4, 6),)), 1.1)
    told = told_of(book)
    assert verdict(told) == "failed: no_route of layers 4–6"
    assert rows_of(told) == []


def test_the_rows_follow_each_other_without_a_gap() -> None:
    book = RequestBook()
    answered(book, "req-a")
    rows = rows_of(told_of(book))
    assert rows[0].start_ms == 0.0
    assert rows[-1].end_ms == 1000.0
    assert [row.what for row in rows if row.end_ms - row.start_ms > 90] == [
        "route 0: 0 tokens",
        "wait for a route",
        "route 1: to the first token",
        "route 1: 2 tokens more",
    ]


times = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)


@given(times, times, times)
def test_a_bar_has_its_width_and_is_never_empty(start: float, end: float, span: float) -> None:
    drawn = bar(Row("x", start, end), span)
    assert len(drawn) == BAR_CHARS
    assert "█" in drawn
    assert drawn.strip(" ").strip("█") == ""


HOSTILE: list[Any] = [[], {}, {"request_id": "\x1b]0;owned\x07"}, None, "text", {"in_flight": 3, "recent": []}]


@pytest.mark.parametrize("body", HOSTILE)
def test_an_answer_of_another_shape_is_said(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=body)

    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **given: real(**{**given, "transport": httpx.MockTransport(reply)}))
    for arguments in (["why"], ["why", "req-a"]):
        result = CliRunner().invoke(cli, ["-a", "http://node", *arguments])
        assert result.exit_code == 1
        assert "\x1b" not in result.output
