"""``chat``, ``status`` and ``peers`` against the real bridge on loopback, behind it an entry that speaks without a mesh."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import trio
from click.testing import CliRunner, Result
from starlette.types import Receive, Scope, Send

from tessella_p2p.base.errors import ConfigurationError, MalformedMessage, StreamReset, TransportError
from tessella_p2p.cli.main import cli
from tessella_p2p.cli.node_client import MAX_ANSWER_BYTES, NodeClient
from tests.bridge.bridge_doubles import ANSWER, MODEL, NO_ROUTE, SpeakingEntry, app_for, serving

TEXT = "".join(ANSWER)


async def invoke(url: str, *arguments: str, stdin: str | None = None) -> Result:
    """The command, on a thread of its own beside the server."""
    run = partial(CliRunner().invoke, cli, ["-a", url, *arguments], input=stdin)
    return await trio.to_thread.run_sync(run)


async def test_an_answer_is_written_and_ended_with_a_newline() -> None:
    entry = SpeakingEntry()
    async with serving(app_for(entry)) as url:
        result = await invoke(url, "chat", "the", "capital", "of", "France")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{TEXT}\n", "")
    (asked,) = entry.asked
    assert asked.messages is not None
    assert asked.messages[0]["content"] == "the capital of France"
    assert (asked.model, asked.max_tokens, asked.temperature) == (MODEL, 512, 0.0)


@pytest.mark.parametrize(
    ("arguments", "stdin"), [(("-p", "from a flag"), None), (("from", "words"), None), ((), "from standard input")]
)
async def test_a_prompt_comes_by_flag_words_or_standard_input(arguments: tuple[str, ...], stdin: str | None) -> None:
    entry = SpeakingEntry()
    async with serving(app_for(entry)) as url:
        await invoke(url, "chat", *arguments, stdin=stdin)
    assert entry.asked[0].messages is not None
    assert str(entry.asked[0].messages[0]["content"]).startswith("from ")


async def test_options_reach_the_node_and_a_cut_answer_is_said() -> None:
    entry = SpeakingEntry()
    async with serving(app_for(entry)) as url:
        result = await invoke(url, "chat", "-m", "2", "--temperature", "0.5", "hi")
    assert (entry.asked[0].max_tokens, entry.asked[0].temperature) == (2, 0.5)
    assert result.stdout == "The capital\n"
    assert "cut at 2 tokens" in result.stderr


async def test_json_is_one_object_and_nothing_else() -> None:
    async with serving(app_for(SpeakingEntry())) as url:
        result = await invoke(url, "--model-id", MODEL, "chat", "--json", "hi")
    answer = json.loads(result.stdout)
    assert (answer["model"], answer["text"], answer["finish_reason"]) == (MODEL, TEXT, "stop")
    assert answer["usage"]["completion_tokens"] == len(ANSWER)


async def test_a_refusal_is_one_line_with_the_nodes_words() -> None:
    async with serving(app_for(SpeakingEntry(refusal=NO_ROUTE))) as url:
        result = await invoke(url, "chat", "hi")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {NO_ROUTE}\n"


async def test_an_answer_that_fails_in_its_middle_keeps_what_came() -> None:
    async with serving(app_for(SpeakingEntry(fail_after=2, failure=NO_ROUTE))) as url:
        result = await invoke(url, "chat", "hi")
    assert (result.exit_code, result.stdout) == (1, "The capital\n")
    assert result.stderr == f"error: {NO_ROUTE}\n"


async def test_a_node_without_a_complete_route_is_said_before_anything_is_asked() -> None:
    entry = SpeakingEntry(models=())
    async with serving(app_for(entry)) as url:
        result = await invoke(url, "chat", "hi")
    assert (result.exit_code, entry.asked) == (1, [])
    assert "no complete route" in result.stderr


async def test_an_interrupt_stops_the_answer_at_the_node() -> None:
    entry = SpeakingEntry(hold_after=2)
    async with serving(app_for(entry)) as url:
        command = [sys.executable, "-m", "tessella_p2p", "-a", url, "chat", "hi"]
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stderr is not None
        async with process.stdout, process.stderr:
            seen = b""
            while b"capital" not in seen:
                part = await process.stdout.receive_some()
                assert part
                seen += part
            process.send_signal(signal.SIGINT)
            with trio.fail_after(60):
                await entry.closed.wait()
                assert await process.wait() == 130
            assert b"Traceback" not in b"".join([part async for part in process.stderr])
    assert entry.ends == ["cancelled"]


async def test_status_is_shown_to_people_and_as_json() -> None:
    async with serving(app_for(SpeakingEntry())) as url:
        people, machine = await invoke(url, "status"), await invoke(url, "status", "--json")
    assert json.loads(machine.stdout)["peer_id"] == "12D3KooWSelf"
    rows = dict(line.split(None, 1) for line in people.stdout.splitlines())
    assert rows["layer_ranges"].strip() == "0–12"
    assert rows["proofs.settled"].strip() == "3"
    assert "gpu.kind" not in rows


async def test_peers_are_shown_to_people_and_as_json() -> None:
    async with serving(app_for(SpeakingEntry())) as url:
        people, machine = await invoke(url, "peers"), await invoke(url, "peers", "--json")
        nobody = await invoke(url, "--model-id", "other", "peers")
    assert json.loads(machine.stdout)[0]["layer_ranges"] == [[12, 30]]
    assert "12–30" in people.stdout
    assert (nobody.exit_code, nobody.stdout, nobody.stderr) == (0, "", "no peers are known yet\n")


@pytest.mark.parametrize("command", [("status",), ("peers",), ("chat", "hi")])
async def test_a_node_that_is_not_there_is_said_with_what_to_do(command: tuple[str, ...]) -> None:
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    result = await invoke(f"http://127.0.0.1:{port}", *command)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: no node answers at http://127.0.0.1:{port} ")
    assert "tessella-p2p daemon" in result.stderr


@pytest.mark.parametrize("url", ["", "127.0.0.1:8080", "ftp://host", "http://", "http://[::1", "http://h:x"])
async def test_what_is_no_url_is_a_wrong_configuration(url: str) -> None:
    result = await invoke(url, "status")
    assert (result.exit_code, result.stderr.startswith("error: --api-url ")) == (2, True)


@pytest.mark.parametrize("arguments", [("chat",), ("chat", "-p", "a", "b"), ("chat", "-p", "  ")])
async def test_a_prompt_that_is_missing_or_given_twice_is_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert (await invoke("http://127.0.0.1:1", *arguments, stdin="")).exit_code == 2


# ---- Nodes that answer nonsense ----


def answering(content: bytes, status: int = 200) -> NodeClient:
    """A client of a node that gives every request these bytes."""
    return NodeClient("http://node", httpx.MockTransport(lambda _: httpx.Response(status, content=content)))


@pytest.mark.parametrize("content", [b"<html>", b"\xff\xfe", b"", b"[" * 100_000])
def test_an_answer_that_is_no_json_is_said(content: bytes) -> None:
    with answering(content) as node, pytest.raises(MalformedMessage, match="is it a Tessella node"):
        node.get("/status")


def test_an_answer_without_end_is_cut() -> None:
    with answering(b" " * (MAX_ANSWER_BYTES + 1)) as node, pytest.raises(MalformedMessage, match="over 16 MiB"):
        node.get("/status")


@pytest.mark.parametrize("body", [b"[]", b'{"error": "no"}', b"null", b'{"error": null}'])
def test_a_refusal_without_a_reason_is_said(body: bytes) -> None:
    with answering(body, 500) as node, pytest.raises(MalformedMessage, match="did not say why"):
        node.get("/status")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b'data: {"choices": []}\n\n', StreamReset),
        (b"data: {\n\ndata: [DONE]\n\n", MalformedMessage),
        (b"data: 7\n\ndata: [DONE]\n\n", MalformedMessage),
        (b"", StreamReset),
    ],
)
def test_a_stream_that_breaks_its_shape_is_said(content: bytes, error: type[Exception]) -> None:
    with answering(content) as node, pytest.raises(error):
        list(node.events("/v1/chat/completions", {}))


async def test_a_connection_that_breaks_in_an_answer_is_said() -> None:
    async def breaks(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
        await send({"type": "http.response.body", "body": b'{"', "more_body": False})

    async with serving(breaks) as url:
        result = await invoke(url, "status")
    assert (result.exit_code, result.stderr.startswith("error: the connection to ")) == (1, True)


def test_a_slow_node_is_said() -> None:
    def slow(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("", request=request)

    with NodeClient("http://node", httpx.MockTransport(slow)) as node, pytest.raises(TransportError, match="in time"):
        node.get("/status")


def test_a_url_is_checked_when_the_client_is_made() -> None:
    with pytest.raises(ConfigurationError):
        NodeClient("nowhere")


def test_a_line_of_a_stream_that_never_ends_is_refused() -> None:
    def endless(_: httpx.Request) -> httpx.Response:
        def parts() -> Iterator[bytes]:
            yield b'data: {"text": "'
            while True:
                yield b"x" * (1 << 20)

        return httpx.Response(200, content=parts())

    with (
        NodeClient("http://node", httpx.MockTransport(endless)) as node,
        pytest.raises(MalformedMessage, match="over 16 MiB"),
    ):
        next(node.events("/v1/generate", {}))


def test_the_lines_of_a_stream_come_in_any_pieces() -> None:
    text = 'data: {"text": "ü\u2028"}\r\n\r\n: still here\ndata: {"text": "b"}\n\ndata: [DONE]\n'.encode()

    def by_byte(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=(text[at : at + 1] for at in range(len(text))))

    with NodeClient("http://node", httpx.MockTransport(by_byte)) as node:
        assert [event["text"] for event in node.events("/v1/generate", {})] == ["ü\u2028", "b"]


@pytest.mark.parametrize("event", [{}, {"choices": 3}, {"choices": [{}]}, {"choices": [{"delta": None}]}])
async def test_chunks_of_another_shape_are_said(event: dict[str, Any]) -> None:
    async def odd(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"
        await send({"type": "http.response.body", "body": body})

    async with serving(odd) as url:
        result = await invoke(url, "--model-id", "m", "chat", "hi")
    assert (result.exit_code, "no chunk of an answer" in result.stderr) == (1, True)
