"""A page whose name leads to this machine (DNS rebinding) is answered nothing; whoever sits here is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.bridge.known_host import is_own, own_names
from tessella_p2p.bridge.orchestrator_app import create_orchestrator_app
from tests.bridge.bridge_doubles import Caller, SpeakingEntry, app_for, chat_body, error_shape, port_of, serving
from tests.bridge.orchestrator_world import registering, world
from tests.bridge.raw_http import receive_all

NAMES = frozenset({"mesh.example"})
OWN = [
    "127.0.0.1",
    "127.0.0.1:9091",
    "192.168.1.5:80",
    "[::1]",
    "[::1]:9091",
    "localhost",
    "LocalHost:9091",
    "localhost.",
    "node.localhost:1",
    "mesh.example",
    "MESH.example:443",
]
FOREIGN = [
    "",
    "evil.example",
    "evil.example:9091",
    "mesh.example.evil.example",
    "localhost.evil.example",
    "notlocalhost",
    "127.0.0.1.evil.example",
    "evil.example:127.0.0.1",
    "[evil.example]",
    "[::1",
    "::1",
    "localhost:port",
    "localhost evil.example",
    "user@localhost",
    "127.1",
    "2130706433",
]


@pytest.mark.parametrize("host", OWN)
def test_addresses_localhost_and_configured_names_are_its_own(host: str) -> None:
    assert is_own(host, NAMES)


@pytest.mark.parametrize("host", FOREIGN)
def test_every_other_name_is_foreign(host: str) -> None:
    assert not is_own(host, NAMES)


@given(st.text(max_size=80))
def test_whatever_a_client_sends_is_one_or_the_other(host: str) -> None:
    is_own(host, NAMES)


def test_names_matter_on_loopback_and_where_nobody_needs_a_key() -> None:
    assert own_names("127.0.0.1", ["Mesh.Example"]) == own_names("::1", ["mesh.example"]) == NAMES
    assert own_names("0.0.0.0", ["mesh.example"]) is None
    assert own_names("192.168.1.5", []) is None
    for host in ("0.0.0.0", "192.168.1.5", "127.0.0.1"):
        assert own_names(host, ["Mesh.Example"], is_guarded=False) == NAMES


async def test_the_orchestrator_answers_a_foreign_name_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        app = create_orchestrator_app(made.orchestrator, names=NAMES)
        raw = made.sealed("worker", registering())
        headers = {"content-type": "application/cbor"}
        before = made.state()
        for method, path, body in (("GET", "/workers", b""), ("GET", "/nothing", b""), ("POST", "/register", raw)):
            answered = await Caller(app)(method, path, body, b"", {**headers, "host": "evil.example:9091"})
            assert answered is not None
            assert answered.status == 421
            with error_shape(answered) as error:
                assert error["code"] == "misdirected_request"
                assert "evil.example" in error["message"]
        assert made.state() == before
        for own in ("127.0.0.1:9091", "mesh.example"):
            answered = await Caller(app)("GET", "/workers", headers={"host": own})
            assert answered is not None
            assert answered.status == 200
        answered = await Caller(app)("POST", "/register", raw, b"", {**headers, "host": "localhost"})
        assert answered is not None
        assert answered.status == 200, "the refusal did not use up the sequence"


async def test_a_page_whose_name_leads_to_a_node_without_keys_is_no_page_of_its_own() -> None:
    entry = SpeakingEntry()
    app = app_for(entry, names=own_names("0.0.0.0", (), is_guarded=False))
    rebound = {"host": "evil.example:8080", "origin": "http://evil.example:8080", "sec-fetch-site": "same-origin"}
    body = json.dumps(chat_body()).encode()
    answered = await Caller(app)("POST", "/v1/chat/completions", body, headers=rebound)
    assert answered is not None
    assert (answered.status, entry.asked) == (421, [])
    answered = await Caller(app)("POST", "/v1/chat/completions", body, headers={"host": "192.168.1.5:8080"})
    assert answered is not None
    assert answered.status == 200


async def test_the_nodes_api_does_so_on_the_wire() -> None:
    async with serving(app_for(SpeakingEntry(), names=frozenset())) as url:
        for host, status in (("evil.example", b"421"), (f"127.0.0.1:{port_of(url)}", b"200"), ("localhost", b"200")):
            stream = await trio.open_tcp_stream("127.0.0.1", port_of(url))
            async with stream:
                await stream.send_all(f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
                assert (await receive_all(stream)).startswith(b"HTTP/1.1 " + status)
