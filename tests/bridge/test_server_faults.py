"""Each fault of hypercorn's own trio driver: that it is still there, and that it is not in ours.

`run_stock` runs the app as hypercorn 0.18.0 does; `run_ours` as the node does. When hypercorn is upgraded, a test of stock that fails
says that its fault is gone and ``bridge/connection.py`` may be simpler.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import hypercorn.trio
import pytest
import trio
from hypercorn.config import Config
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tessella_p2p.base.errors import ConfigurationError, PortInUseError
from tessella_p2p.bridge.connection import ConnectionLimits
from tessella_p2p.bridge.server import ServerLimits, serve
from tests.bridge.bridge_doubles import SpeakingEntry, app_for, chat_body, port_of
from tests.bridge.raw_http import GET, head_bytes, open_unread, post_bytes, receive_all, receive_until

PATIENCE_S = 5.0
"""Longer than anything here takes; only a fault waits for it."""
FAULT_S = 0.3
"""How long a fault of stock is watched before it counts as a hang."""
SHORT_S = 0.05

Run = Callable[[ASGIApp, trio.Event, float, trio.TaskStatus[str]], Awaitable[None]]


async def run_ours(app: ASGIApp, drain: trio.Event, keep_alive_s: float, task_status: trio.TaskStatus[str]) -> None:
    patient = ConnectionLimits(keep_alive_s=keep_alive_s, send_timeout_s=PATIENCE_S, linger_s=PATIENCE_S)
    limits = ServerLimits(grace_s=SHORT_S, connection=patient)
    await serve(app, "127.0.0.1", 0, drain=drain, limits=limits, task_status=task_status)


async def run_stock(app: ASGIApp, drain: trio.Event, keep_alive_s: float, task_status: trio.TaskStatus[str]) -> None:
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.errorlog = None
    config.keep_alive_timeout = keep_alive_s
    config.graceful_timeout = SHORT_S
    await hypercorn.trio.serve(
        app,  # type: ignore[arg-type]
        config,
        shutdown_trigger=drain.wait,
        task_status=_FirstUrl(task_status),  # type: ignore[arg-type]
        mode="asgi",
    )


class _FirstUrl:
    def __init__(self, inner: trio.TaskStatus[str]) -> None:
        self._inner = inner

    def started(self, urls: list[str]) -> None:
        self._inner.started(urls[0])


class Running:
    """A server in a task: how to end it, and whether it has ended."""

    def __init__(self, port: int, scope: trio.CancelScope, drain: trio.Event, ended: trio.Event) -> None:
        self.port = port
        self.scope = scope
        self.drain = drain
        self.ended = ended

    async def ends_within(self, seconds: float) -> bool:
        with trio.move_on_after(seconds):
            await self.ended.wait()
        return self.ended.is_set()


@asynccontextmanager
async def running(run: Run, app: ASGIApp, keep_alive_s: float = 2 * PATIENCE_S) -> AsyncIterator[Running]:
    drain, ended, scope = trio.Event(), trio.Event(), trio.CancelScope()

    async def main(task_status: trio.TaskStatus[str]) -> None:
        with scope:
            await run(app, drain, keep_alive_s, task_status)
        ended.set()

    async with trio.open_nursery() as nursery:
        url: str = await nursery.start(main)
        yield Running(port_of(url), scope, drain, ended)
        scope.cancel()


async def connect(server: Running) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", server.port)


def only_http(scope: Scope) -> None:
    """Stock hypercorn asks for ASGI's lifespan first; an app that has none says so by raising."""
    if scope["type"] != "http":
        raise NotImplementedError(scope["type"])


class Pouring:
    """An app that sends more than any kernel takes."""

    def __init__(self) -> None:
        self.pouring = trio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        only_http(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.pouring.set()
        while True:
            await send({"type": "http.response.body", "body": b"x" * 1_000_000, "more_body": True})


async def event_stream(scope: Scope, receive: Receive, send: Send) -> None:
    """Starlette's own SSE answer, which cancels its task when the server reports a disconnect."""

    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"

    only_http(scope)
    await StreamingResponse(events(), media_type="text/event-stream")(scope, receive, send)


async def ignores_body(scope: Scope, receive: Receive, send: Send) -> None:
    only_http(scope)
    await send({"type": "http.response.start", "status": 413, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": b"too large"})


def test_hypercorn_is_the_version_these_faults_were_seen_in() -> None:
    assert importlib.metadata.version("hypercorn") == "0.18.0"


@pytest.mark.parametrize("way", ["cancel", "drain"])
@pytest.mark.parametrize(("run", "hangs"), [(run_ours, False), (run_stock, True)])
async def test_a_client_that_does_not_read_cannot_keep_the_server(run: Run, hangs: bool, way: str) -> None:
    app = Pouring()
    async with running(run, app) as server:
        client = await open_unread(server.port)
        await client.send_all(GET)
        await app.pouring.wait()
        await trio.testing.wait_all_tasks_blocked(0.02)
        if way == "cancel":
            server.scope.cancel()
        else:
            server.drain.set()
        assert await server.ends_within(FAULT_S if hangs else PATIENCE_S) is not hangs
        await client.aclose()


@pytest.mark.parametrize(("run", "stays"), [(run_ours, False), (run_stock, True)])
async def test_a_connection_that_carried_a_stream_idles_out(run: Run, stays: bool) -> None:
    async with running(run, event_stream, keep_alive_s=2 * SHORT_S) as server:
        client = await connect(server)
        await client.send_all(GET)
        await receive_until(client, b"0\r\n\r\n")
        with trio.move_on_after(FAULT_S if stays else PATIENCE_S) as waiting:
            assert await client.receive_some() == b""
        assert waiting.cancelled_caught is stays
        await client.aclose()


@pytest.mark.parametrize(("run", "lost"), [(run_ours, False), (run_stock, True)])
async def test_an_answer_to_an_unread_body_arrives_and_frees_the_connection(run: Run, lost: bool) -> None:
    async with running(run, ignores_body) as server:
        client = await connect(server)
        received = b""
        with trio.move_on_after(FAULT_S if lost else PATIENCE_S) as waiting:
            try:
                await client.send_all(post_bytes("/", b"x" * 5_000_000))
                await client.send_eof()
                received = await receive_all(client)
            except trio.BrokenResourceError:
                pass
        complete = not waiting.cancelled_caught and b"too large" in received
        assert complete is not lost
        await client.aclose()


@pytest.mark.parametrize(("run", "spoken"), [(run_ours, False), (run_stock, True)])
async def test_only_http_1_is_spoken(run: Run, spoken: bool) -> None:
    async with running(run, ignores_body) as server:
        client = await connect(server)
        await client.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        first = await client.receive_some()
        assert (first[3:4] == b"\x04") is spoken  # the type of HTTP/2's SETTINGS frame
        await client.aclose()


async def test_a_websocket_upgrade_is_answered_as_plain_http() -> None:
    async with running(run_ours, app_for(SpeakingEntry())) as server:
        client = await connect(server)
        await client.send_all(
            b"GET /status HTTP/1.1\r\nhost: test\r\nconnection: upgrade, close\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert (await receive_all(client)).startswith(b"HTTP/1.1 200 ")
        await client.aclose()


# ---- What the node's server and app bound together ----


async def test_a_dripped_body_is_a_408() -> None:
    async with running(run_ours, app_for(SpeakingEntry(), body_timeout_s=SHORT_S)) as server:
        client = await connect(server)
        await client.send_all(head_bytes("/v1/chat/completions", 100) + b"{")
        with trio.fail_after(PATIENCE_S):
            answer = await receive_until(client, b"request_timeout")
            await client.send_eof()
            await receive_all(client)
        assert answer.startswith(b"HTTP/1.1 408 ")
        await client.aclose()


async def test_a_huge_body_is_a_413_that_the_client_gets_to_read() -> None:
    async with running(run_ours, app_for(SpeakingEntry(), max_body_bytes=1000)) as server:
        for headers in ((), ("expect: 100-continue",)):
            client = await connect(server)
            with trio.fail_after(PATIENCE_S):
                await client.send_all(post_bytes("/v1/chat/completions", b"x" * 5_000_000, *headers))
                await client.send_eof()
                answer = await receive_all(client)
            assert b"HTTP/1.1 413 " in answer
            assert b"request_too_large" in answer
            await client.aclose()


async def test_a_head_that_does_not_come_ends_the_connection() -> None:
    async with running(run_ours, app_for(SpeakingEntry()), keep_alive_s=SHORT_S) as server:
        client = await connect(server)
        await client.send_all(b"POST / HTTP/1.1\r\nhost")
        with trio.fail_after(PATIENCE_S):
            assert await receive_all(client) == b""
        await client.aclose()


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_huge_head_is_a_431_in_the_shape_of_errors(at_once: bool) -> None:
    async with running(run_ours, app_for(SpeakingEntry())) as server:
        client = await connect(server)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-length: 2\r\nx: " + b"a" * 17_000
        with trio.fail_after(PATIENCE_S):
            await client.send_all(head + (b"\r\n\r\n{}" if at_once else b""))
            answer = await receive_until(client, b"headers_too_large")
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"content-type: application/json" in answer
        await client.aclose()


async def test_what_is_no_http_is_a_400_in_the_shape_of_errors() -> None:
    async with running(run_ours, app_for(SpeakingEntry())) as server:
        client = await connect(server)
        with trio.fail_after(PATIENCE_S):
            await client.send_all(b"\x16\x03\x01\r\n\r\n")
            answer = await receive_until(client, b"invalid_request")
        assert answer.startswith(b"HTTP/1.1 400 ")
        await client.aclose()


async def test_garbage_and_huge_heads_end_their_connection_only() -> None:
    async with running(run_ours, app_for(SpeakingEntry())) as server:
        for garbage in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
            b"x: " * 20_000,
            b"\x00" * 100 + b"\r\n\r\n",
        ):
            client = await connect(server)
            with trio.fail_after(PATIENCE_S):
                await client.send_all(garbage)
                await client.send_eof()
                assert (await receive_all(client)).split(b" ")[0] in (b"HTTP/1.1", b"")
            await client.aclose()
        client = await connect(server)
        await client.send_all(b"GET /v1/models HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
        assert (await receive_all(client)).startswith(b"HTTP/1.1 200 ")
        await client.aclose()


async def test_connections_over_the_limit_are_told_to_come_again() -> None:
    limits = ServerLimits(max_connections=1)
    async with trio.open_nursery() as nursery:
        url: str = await nursery.start(partial(serve, app_for(SpeakingEntry()), "127.0.0.1", 0, limits=limits))
        request = b"GET /v1/models HTTP/1.1\r\nhost: test\r\n\r\n"
        first = await trio.open_tcp_stream("127.0.0.1", port_of(url))
        await first.send_all(request)
        await receive_until(first, b"toy")
        second = await trio.open_tcp_stream("127.0.0.1", port_of(url))
        await second.send_all(request)
        await second.send_eof()
        refusal = await receive_all(second)
        assert refusal.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in refusal
        assert b'"code":"overloaded"' in refusal
        await first.send_all(request)
        assert b"toy" in await receive_until(first, b"toy")
        await first.aclose()
        await second.aclose()
        nursery.cancel_scope.cancel()


async def test_a_drain_lets_answers_finish_closes_idle_connections_and_takes_no_more() -> None:
    entry, drain, ended = SpeakingEntry(hold_after=2), trio.Event(), trio.Event()

    async def main(task_status: trio.TaskStatus[str]) -> None:
        await serve(app_for(entry), "127.0.0.1", 0, drain=drain, task_status=task_status)
        ended.set()

    async with trio.open_nursery() as nursery:
        url: str = await nursery.start(main)
        idle = await trio.open_tcp_stream("127.0.0.1", port_of(url))
        busy = await trio.open_tcp_stream("127.0.0.1", port_of(url))
        await busy.send_all(post_bytes("/v1/chat/completions", chat_body(stream=True)))
        await entry.holding.wait()
        drain.set()
        with trio.fail_after(PATIENCE_S):
            assert await receive_all(idle) == b""
            with pytest.raises(OSError, match=r"refused|connect"):
                await trio.open_tcp_stream("127.0.0.1", port_of(url))
            entry.release.set()
            assert b"data: [DONE]\n\n" in await receive_all(busy)
            await busy.aclose()
            await ended.wait()
        await idle.aclose()

    assert entry.ends == ["closed"]


async def test_a_port_in_use_is_named_with_its_setting() -> None:
    async with running(run_ours, app_for(SpeakingEntry())) as server:
        with pytest.raises(PortInUseError, match=rf"127\.0\.0\.1 port {server.port}.* setting api_port"):
            await serve(app_for(SpeakingEntry()), "127.0.0.1", server.port)


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("127.0.0.1", 70_000), ("host\ud800", 0)])
async def test_what_cannot_be_bound_is_a_configuration_error(host: str, port: int) -> None:
    with pytest.raises(ConfigurationError, match="my_port"):
        await serve(app_for(SpeakingEntry()), host, port, setting="my_port")


async def test_the_bound_url_is_reported_for_ipv6_too() -> None:
    try:
        async with trio.open_nursery() as nursery:
            url: str = await nursery.start(serve, app_for(SpeakingEntry()), "::1", 0)
            assert url.startswith("http://[::1]:")
            nursery.cancel_scope.cancel()
    except* ConfigurationError:
        pytest.skip("this machine has no IPv6 loopback")
