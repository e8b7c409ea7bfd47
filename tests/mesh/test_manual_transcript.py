"""The manual's sections 03 and 07 against real processes: each call, its body, its status, in order."""

from __future__ import annotations

import base64
import itertools
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import trio

from tessella_p2p.base.limits import MICRO_PER_LAYER_POSITION
from tessella_p2p.bridge.orchestrator_json import base64url
from tessella_p2p.cli.demo_mesh import Mesh, MeshPlan, Node
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import Message, open_envelope, seal
from tessella_p2p.wire.keys import NodeKey
from tests.ledger.proving import Stage, key_of, proof_body
from tests.mesh.mesh_thread import MeshThread

MODEL = "smollm2-135m-instruct"
RECIPE = "f32"
TOKEN = "the-operators-token-in-the-transcript"
PATIENCE_S = 60.0


@dataclass
class Transcript:
    """Calls of one orchestrator: each says which status it expects."""

    http: httpx.AsyncClient
    pinned: str = ""
    root: bytes = b""
    contract: bytes = b""
    layers: int = 0
    lines: list[str] = field(default_factory=list)
    sequences: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def call(self, status: int, method: str, path: str, **request: Any) -> Any:
        answered = await self.http.request(method, path, **request)
        self.lines.append(f"{method} {path.partition('?')[0]} {answered.status_code}")
        assert answered.status_code == status, (self.lines[-1], answered.text)
        return answered.json() if "json" in answered.headers["content-type"] else answered.text

    async def get(self, path: str, **parameters: object) -> Any:
        return await self.call(200, "GET", path, params=parameters)

    async def post(self, status: int, path: str, key: NodeKey, body: Any, **sealing: Any) -> Any:
        headers = {"content-type": "application/cbor"}
        return await self.call(status, "POST", path, content=self.sealed(key, body, **sealing), headers=headers)

    async def operate(self, status: int, method: str, path: str, token: str = TOKEN, **request: Any) -> Any:
        return await self.call(status, method, path, headers={"authorization": f"Bearer {token}"}, **request)

    def sealed(self, key: NodeKey, body: Any, **sealing: Any) -> bytes:
        given = {"sequence": next(self.sequences), "now_ms": now_ms(), "audience": self.pinned, **sealing}
        return seal(key, m.REQUEST, m.RequestBody(body=body), **given)

    def register(self, address: str, **changes: object) -> Message:
        fields: dict[str, object] = {
            "addresses": (address,),
            "claim_mb": 4096,
            "device": "cpu",
            "model_id": MODEL,
            "total_layers": self.layers,
            "manifest_root": self.root,
            "contract_hash": self.contract,
            "recipe": RECIPE,
        }
        return m.Register.model_validate({**fields, **changes})

    def ready(self, key: NodeKey, lease: bytes, address: str) -> m.Ready:
        body = open_envelope(lease, m.LEASE, now_ms=now_ms()).message(m.Lease)
        record = m.StageRecord(
            addresses=(address,),
            model_id=MODEL,
            manifest_root=self.root,
            recipe=RECIPE,
            layers=body.layers,
            total_layers=self.layers,
            lease=lease,
            max_positions=512,
        )
        sealed = seal(key, m.STAGE_RECORD, record, sequence=next(self.sequences), now_ms=now_ms(), ttl_ms=60_000)
        return m.Ready(serial=body.serial, record=sealed)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def unsealed(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@asynccontextmanager
async def orchestrator(home: Path, model: Path) -> AsyncIterator[tuple[Node, Transcript]]:
    """An orchestrator's process, alone, with an admin token in its configuration file."""
    mesh = Mesh(MeshPlan(home=home, model=str(model), workers=1, recipe=RECIPE), lambda line: None)
    node = mesh.orchestrator
    write_config(node)
    node.arguments = [
        *("--p2p-host", "127.0.0.1", "--p2p-port", "0", "--api-port", "0", "--allow-private-addrs"),
        *("--model-id", str(model), "--recipe", RECIPE, "--config", str(node.home / "orchestrator.toml")),
    ]
    try:
        await mesh.launch(node, "orchestrator", node.arguments)
        with trio.fail_after(PATIENCE_S):
            await mesh.wait_ready(node)
        async with httpx.AsyncClient(base_url=node.api_url, timeout=30.0) as http:
            yield node, Transcript(http)
    finally:
        with trio.CancelScope(shield=True):
            await mesh.stop(node)


def write_config(node: Node, *allow: str) -> None:
    path = node.home / "orchestrator.toml"
    path.touch(mode=0o600)
    path.write_text(f'admin_token = "{TOKEN}"\nallow = {list(allow)!r}\n')


async def until(condition: Callable[[], Any]) -> None:
    """Ask again and again whether ``condition`` (a coroutine function) holds."""
    with trio.fail_after(PATIENCE_S):
        while not await condition():
            await trio.lowlevel.checkpoint()


async def test_the_manuals_handshake_and_every_route_in_order(tmp_path: Path, smollm2_path: Path) -> None:
    seed, entry = key_of("the seed node"), key_of("an entry")
    seed_at = "/ip4/127.0.0.1/tcp/19081"
    async with orchestrator(tmp_path, smollm2_path) as (node, script):
        # 02: who is there, before anything is installed
        identity = await script.get("/p2p_id")
        assert identity["peer_id"] == node.peer_id
        assert identity["addresses"][0] == node.p2p_address
        script.pinned = identity["peer_id"]
        assert await script.get("/api/network/models") == [{"model_id": MODEL, "active_workers": 0}]
        assert await script.get("/peers", model_id=MODEL) == []
        assert await script.get("/peers", model_id="Qwen/Qwen2.5-0.5B-Instruct") == []
        manifest = await script.get("/weights/manifest", model_id=MODEL)
        assert await script.get("/weights/manifests") == [manifest]
        script.root = bytes.fromhex(manifest["manifest_root"])
        script.contract = bytes.fromhex(manifest["contract_hash"])
        script.layers = manifest["total_layers"]
        whole = [0, script.layers]

        # 03: sizing a shard without guessing
        health = await script.get("/model_health", model_id=MODEL, device="cpu")
        assert (health["health"], health["holes"], health["covered_layers"]) == ("incomplete", [whole], 0)
        used = script.layers * health["mem_per_layer_mb"] + health["global_tensor_mb"]
        claim = max(-(-used * 100 // health["usable_vram_pct"]), health["min_vram_mb"])
        preview = await script.get("/api/v1/assignment", model_id=MODEL, vram_mb=claim, device="cpu")
        assert preview == {
            "model_repo": MODEL,
            "layer_ranges": [whole],
            "replica_group_id": 0,
            "expert_range": None,
            "claim_mb": claim,
        }

        # 03.1–2: register, or a refusal
        malformed = {"content": b"no cbor", "headers": {"content-type": "application/cbor"}}
        assert (await script.call(400, "POST", "/register", **malformed))["error"]["param"] == "body"
        foreign = script.register(seed_at, contract_hash=bytes(32))
        assert (await script.post(400, "/register", seed, foreign))["error"]["param"] == "contract_hash"
        small = await script.post(409, "/register", seed, script.register(seed_at, claim_mb=health["min_vram_mb"] - 1))
        assert small["error"]["code"] == "claim_too_small"
        skewed = await script.post(401, "/register", seed, script.register(seed_at), now_ms=now_ms() + 200_000)
        assert "in the future" in skewed["error"]["message"]
        write_config(node, entry.peer_id)
        assert node.process is not None
        node.process.send_signal(signal.SIGHUP)
        await until(lambda: is_private(script, seed, seed_at))
        write_config(node)
        node.process.send_signal(signal.SIGHUP)
        await until(lambda: is_open(script, seed))
        script.lines.clear()
        registered = await script.post(200, "/register", seed, script.register(seed_at, claim_mb=claim))
        assert registered["assignment"] == {
            "model_repo": MODEL,
            "layer_ranges": [whole],
            "replica_group_id": 0,
            "expert_range": None,
        }
        assert registered["peers"] == []
        lease = unsealed(registered["lease"])

        # 03.3: load, then say so
        assert [row["status"] for row in await script.get("/workers")] == ["PendingLoad"]
        assert await script.get("/peers", model_id=MODEL) == []
        assert (await script.get("/model_health", model_id=MODEL))["holes"] == [whole]
        ready = script.ready(seed, lease, seed_at)
        assert await script.post(200, "/ready", seed, ready) == {"acknowledged": True}
        (peer,) = await script.get("/peers", model_id=MODEL)
        shown = {name: peer[name] for name in ("peer_id", "status", "layer_ranges", "p2p_addrs", "http_addr", "canary")}
        assert shown == {
            "peer_id": seed.peer_id,
            "status": "Healthy",
            "layer_ranges": [whole],
            "p2p_addrs": [seed_at],
            "http_addr": "127.0.0.1",
            "canary": False,
        }
        assert await script.get("/api/network/models") == [{"model_id": MODEL, "active_workers": 1}]
        health = await script.get("/model_health", model_id=MODEL)
        assert (health["health"], health["holes"], health["rendered_layers"]) == ("healthy", [], script.layers)

        # 03.4: heartbeat
        announce = m.Announce(serial=ready.serial, queue_depth=3, state="ready")
        await script.post(200, "/announce", seed, announce)
        (worker,) = await script.get("/workers")
        assert worker == {
            "peer_id": seed.peer_id,
            "model_id": MODEL,
            "status": "Healthy",
            "vram_mb": claim,
            "queue_depth": 3,
        }

        # 07, worker-signed: a grant, a proof, its replay, a batch, a failure, an audit that nobody ordered
        request = m.SessionGrant(
            request_id="transcript-1", model_id=MODEL, manifest_root=script.root, recipe=RECIPE, max_positions=400
        )
        header = {"x-tessella-envelope": base64url(script.sealed(entry, request))}
        granted = await script.call(200, "GET", "/api/v1/session_grant", headers=header)
        assert granted["tier"] == "Leech"
        proof = proof_of(script, seed, entry, lease, unsealed(granted["ticket"]))
        paid = script.layers * 300 * MICRO_PER_LAYER_POSITION
        settled = await script.post(200, "/work_done", seed, m.WorkDone(proofs=(proof,)))
        assert (settled["status"], settled["micro_credits"]) == ("settled", paid)
        again = await script.post(200, "/api/v1/work_done_batch", seed, m.WorkDone(proofs=(proof, b"no proof")))
        assert [row["status"] for row in again["results"]] == ["duplicate", "refused"]
        failure = m.ReportFailure(peer_id=seed.peer_id, code="hop_timeout")
        assert await script.post(200, "/report_failure", entry, failure) == {"acknowledged": True}
        report = m.AuditReport(audit_id=bytes(16), outcome="inconclusive")
        await script.post(403, "/api/v1/audit_report", entry, report)

        # 07, operator: nothing without the token
        for method, path in OPERATOR_ROUTES:
            assert (await script.call(401, method, path))["error"]["code"] == "admin_token_required"
            await script.operate(401, method, path, token="guessed")
        lines = await script.operate(200, "GET", "/ledger", params={"limit": 10})
        assert (lines["head"], lines["entries"][0]["peer_id"]) == (len(lines["entries"]), seed.peer_id)
        page = await script.operate(200, "GET", "/ledger/snapshot", params={"since": 0, "limit": 10})
        assert (page["head"], len(page["entries"])) == (lines["head"], lines["head"])
        balance = await script.operate(200, "GET", "/credits", params={"peer_id": seed.peer_id})
        assert (balance["micro_credits"], balance["tier"], balance["settled_proofs"]) == (paid, "Standard", 1)
        table = await script.operate(200, "GET", "/credits", params={"all": "true"})
        assert sum(row["micro_credits"] for row in table) == 0
        slash = {"peer_id": seed.peer_id, "micro_credits": paid + 1, "reason": "caught in the transcript"}
        slashed = await script.operate(200, "POST", "/slash", json=slash)
        assert (slashed["account"]["micro_credits"], slashed["account"]["tier"]) == (-1, "Leech")
        reputation = await script.operate(200, "GET", "/reputation", params={"peer_id": seed.peer_id})
        assert reputation["slashes"] == 1
        assert reputation["score"] < 1000
        plan = await script.operate(200, "POST", "/rebalance", json={"dry_run": True})
        assert (plan["moves"], plan["begun"]) == ([], False)
        terms = {"recipe": RECIPE, "device": "*", "layer_mb": 4, "kv_mb": 1, "embedding_mb": 8, "head_mb": 8}
        second = {
            "model_id": "second",
            "manifest_root": "ab" * 32,
            "contract_hash": "cd" * 32,
            "total_layers": 12,
            "terms": [terms],
        }
        published = await script.operate(200, "POST", "/weights/manifest", json=second)
        assert published in await script.get("/weights/manifests")

        # 07: the rest of what anybody reads
        federation = await script.get("/federation/status")
        assert (federation["peer_id"], federation["peers"]) == (script.pinned, [])
        metrics = await script.get("/metrics")
        assert 'tessella_orchestrator_requests_total{kind="register",outcome="ok"}' in metrics
        assert (await script.get("/openapi.json"))["openapi"] == "3.1.0"
        assert "POST /register" in await script.get("/docs")

        # 05: what libp2p does here
        for path in ("/v1/forward", "/v1/token_stream/transcript-1", "/api/v1/update_assignment"):
            assert (await script.call(410, "POST", path))["error"]["code"] == "moved_to_libp2p"

        # 03.5: leave cleanly
        assert await script.post(200, "/deregister", seed, m.Deregister()) == {"acknowledged": True}
        assert await script.get("/peers", model_id=MODEL) == []
        assert (await script.get("/model_health", model_id=MODEL))["holes"] == [whole]
    print("\n".join(script.lines))  # noqa: T201 - the transcript


OPERATOR_ROUTES = (
    ("GET", "/ledger"),
    ("GET", "/ledger/snapshot"),
    ("GET", "/credits"),
    ("GET", "/reputation"),
    ("POST", "/slash"),
    ("POST", "/rebalance"),
    ("POST", "/weights/manifest"),
)


async def is_private(script: Transcript, key: NodeKey, address: str) -> bool:
    """Whether the reloaded allow-list refuses ``key``, as the manual says."""
    body = script.sealed(key, script.register(address, claim_mb=1))
    answered = await script.http.post("/register", content=body, headers={"content-type": "application/cbor"})
    if answered.status_code == 409:  # not reloaded yet: the claim is too small
        return False
    assert answered.status_code == 403, answered.text
    assert answered.json()["error"]["code"] == "worker_not_authorized"
    return True


async def is_open(script: Transcript, key: NodeKey) -> bool:
    body = script.sealed(key, m.Deregister())
    answered = await script.http.post("/deregister", content=body, headers={"content-type": "application/cbor"})
    return answered.status_code == 200


def proof_of(script: Transcript, worker: NodeKey, requester: NodeKey, lease: bytes, ticket: bytes) -> bytes:
    """The sealed proof of a worker that served the whole model for 300 positions; the requester signed for all of them."""
    route = (Stage(worker, (0, script.layers)),)
    paper = proof_body(
        0,
        route=route,
        request_id="transcript-1",
        opened_at=now_ms(),
        sealed_ticket=ticket,
        sealed_lease=lease,
        requester=requester,
    )
    body = paper.model_copy(update={"manifest_root": script.root})
    sequence = next(script.sequences)
    return seal(
        worker, m.PROOF, body, sequence=sequence, now_ms=now_ms(), audience=script.pinned, ttl_ms=7 * 24 * 3_600_000
    )


async def test_a_mesh_of_real_nodes_is_what_the_public_routes_say(f32_mesh: MeshThread) -> None:
    mesh = f32_mesh.mesh
    async with httpx.AsyncClient(base_url=mesh.orchestrator.api_url, timeout=30.0) as http:
        peers = (await http.get("/peers", params={"model_id": MODEL})).json()
        models = (await http.get("/api/network/models")).json()
        health = (await http.get("/model_health", params={"model_id": MODEL, "device": "cpu"})).json()
        moved = await http.post(f"{mesh.entry_url}/v1/forward", content=b"{}")
    assert {row["peer_id"] for row in peers} == {worker.peer_id for worker in mesh.workers}
    assert {row["status"] for row in peers} == {"Healthy"}
    ranges = sorted(tuple(row["layer_ranges"][0]) for row in peers)
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert models == [{"model_id": MODEL, "active_workers": 3}]
    assert (health["health"], health["holes"]) == ("healthy", [])
    assert (moved.status_code, moved.json()["error"]["protocol"]) == (410, "/tessella/hop/1")
