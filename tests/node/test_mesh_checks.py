"""What doctor finds beyond the machine: over real sockets on loopback, against a bridge, an orchestrator on paper, and nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tessella_p2p.base.clock import SystemClock
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.libp2p_host import Libp2pNetwork
from tessella_p2p.net.network import Stream
from tessella_p2p.node.findings import Finding
from tessella_p2p.node.keystore import generate_key
from tessella_p2p.node.mesh_checks import check_mesh, check_ports, check_status, read_status
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import open_envelope, seal
from tessella_p2p.wire.keys import NodeKey
from tests.bridge.bridge_doubles import SpeakingEntry, app_for, port_of, serving
from tests.node.test_machine_checks import config

ORCHESTRATOR = NodeKey(b"an orchestrator on paper".ljust(32, b"."))
OTHER = NodeKey(b"somebody else".ljust(32, b"."))


@asynccontextmanager
async def orchestrator(*, ahead_ms: int = 0, holes: tuple[tuple[int, int], ...] = ()) -> AsyncIterator[str]:
    """Answers who it is and how a model stands, dated by a clock that is so far ahead; gives its address, without the pin."""
    health = m.ModelHealth(
        model_id="toy",
        recipe="f32",
        device="cpu",
        health="degraded" if holes else "healthy",
        total_layers=12,
        covered_layers=12,
        rendered_layers=12,
        holes=holes,
        mem_per_layer_mb=10,
        weights_per_layer_mb=9,
        kv_per_layer_mb=1,
        global_tensor_mb=20,
        head_global_mb=10,
        tail_global_mb=10,
        overhead_mb=0,
        usable_vram_pct=90,
        min_vram_mb=256,
    )

    async def answer(stream: Stream) -> None:
        raw = await receive_message(stream, 1 << 18)
        assert raw is not None
        asked = open_envelope(raw, m.REQUEST, now_ms=None, audience=ORCHESTRATOR.peer_id)
        kind = asked.message(m.RequestBody).body.kind
        told = health if kind == "read_model_health" else m.Identity(peer_id=ORCHESTRATOR.peer_id, addresses=())
        body = m.AnswerBody(to=asked.sequence, body=told)
        now_ms = SystemClock().unix_ms() + ahead_ms
        await send_message(stream, seal(ORCHESTRATOR, m.ANSWER, body, sequence=1, now_ms=now_ms, audience=asked.signer))
        await stream.aclose()

    async with Libp2pNetwork.open(ORCHESTRATOR, ["/ip4/127.0.0.1/tcp/0"]) as network:
        network.serve(protocols.ORCHESTRATOR, answer)
        yield network.addresses[0]


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


async def test_a_mesh_that_is_there_has_nothing_against_it(tmp_path: Path) -> None:
    async with orchestrator() as address:
        at = f"{address}/p2p/{ORCHESTRATOR.peer_id}"
        findings = by_subject(await check_mesh(config(tmp_path, orchestrator_url=at, bootstrap=at)))
    assert {finding.level for finding in findings.values()} == {"ok"}
    assert set(findings) == {"orchestrator", "clock", "layers", "bootstrap", "DHT"}


@pytest.mark.parametrize(("ahead_ms", "level"), [(70_000, "problem"), (-70_000, "problem"), (20_000, "warning")])
async def test_a_clock_that_is_off_is_told_even_when_nothing_is_believed_any_more(
    tmp_path: Path, ahead_ms: int, level: str
) -> None:
    async with orchestrator(ahead_ms=ahead_ms) as address:
        at = f"{address}/p2p/{ORCHESTRATOR.peer_id}"
        clock = by_subject(await check_mesh(config(tmp_path, orchestrator_url=at)))["clock"]
    assert clock.level == level
    assert ("ahead" if ahead_ms > 0 else "behind") in clock.says


async def test_missing_layers_are_named_with_what_they_take(tmp_path: Path) -> None:
    async with orchestrator(holes=((4, 6),)) as address:
        at = f"{address}/p2p/{ORCHESTRATOR.peer_id}"
        layers = by_subject(await check_mesh(config(tmp_path, orchestrator_url=at)))["layers"]
    assert layers.level == "warning"
    assert "4–6 of 12" in layers.says
    assert "10 MB a layer" in layers.fix


async def test_another_peer_at_the_orchestrators_address_is_not_taken_for_it(tmp_path: Path) -> None:
    async with orchestrator() as address:
        at = f"{address}/p2p/{OTHER.peer_id}"
        findings = by_subject(await check_mesh(config(tmp_path, orchestrator_url=at, bootstrap=at)))
    assert findings["orchestrator"].level == "problem"
    for subject in ("orchestrator", "bootstrap"):
        said = findings[subject].says
        assert ("another peer answers there" in said, said.count(OTHER.peer_id)) == (True, 1), said
    assert findings["bootstrap"].level == "warning"
    assert findings["DHT"].level == "problem"
    assert "clock" not in findings


async def test_a_port_is_free_ours_or_somebody_elses(tmp_path: Path) -> None:
    key = generate_key(tmp_path / "node.key")
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        port = str(listener.socket.getsockname()[1])
        settings = config(tmp_path, api_port=port, p2p_port="0", p2p_host="127.0.0.1")
        api, p2p = await check_ports(settings, key, None)
        assert (api.level, p2p.level) == ("problem", "ok")
        api, _ = await check_ports(settings, key, {"peer_id": key.peer_id})
        assert api.level == "ok"
        api, _ = await check_ports(settings, key, {})
        assert (api.level, "this node or" in api.says) == ("warning", True)
    api, _ = await check_ports(settings, key, None)
    assert api.level == "ok"


async def test_a_node_that_runs_is_looked_at(tmp_path: Path) -> None:
    async with serving(app_for(SpeakingEntry())) as url:
        status, finding = await read_status(config(tmp_path, api_port=str(port_of(url))), None)
    assert finding.level == "ok"
    assert status is not None
    assert check_status(status, None) == []
    (stranger,) = check_status(status, generate_key(tmp_path / "node.key"))
    assert (stranger.subject, stranger.level) == ("identity", "problem")
    gone, finding = await read_status(config(tmp_path, api_port=str(port_of(url))), None)
    assert gone is None
    assert finding.level == "ok"


async def test_a_node_that_asks_for_a_key_is_not_taken_for_somebody_else(tmp_path: Path) -> None:
    async def refuse(_: Request) -> JSONResponse:
        return JSONResponse({"error": {"message": "who asks?"}}, status_code=401)

    async with serving(Starlette(routes=[Route("/status", refuse)])) as url:
        for api_key, says in ((None, "asks for an API key"), ("tsl-wrong", "does not take this API key")):
            status, finding = await read_status(config(tmp_path, api_port=str(port_of(url))), api_key)
            assert (status, finding.level) == ({}, "warning")
            assert says in finding.says


@pytest.mark.parametrize(
    ("readiness", "level"),
    [
        ({"state": "ready", "proven_secs_ago": 1.0, "missing_layers": []}, "ok"),
        ({"state": "unproven", "proven_secs_ago": None, "missing_layers": []}, "ok"),
        ({"state": "failed", "proven_secs_ago": None, "missing_layers": [[4, 6]]}, "problem"),
        ({"state": "no_route", "proven_secs_ago": None, "missing_layers": [[4, 6]]}, "warning"),
        ({}, "ok"),
    ],
)
def test_whether_the_node_answers_is_told_with_the_layers(readiness: dict[str, Any], level: str) -> None:
    (finding,) = check_status({"readiness": readiness}, None)
    assert finding.level == level
    assert bool(readiness.get("missing_layers")) == ("4, 6" in finding.says)


@pytest.mark.parametrize(
    "status", [{}, {"readiness": 3, "orchestrator": []}, {"peer_id": None, "orchestrator": {"reachable": 7}}]
)
def test_a_status_of_another_shape_breaks_nothing(status: dict[str, Any]) -> None:
    assert check_status(status, None) == []
