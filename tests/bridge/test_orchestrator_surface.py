"""The orchestrator's routes answer as the manual's sections 03 and 07 say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import CLOCK_SKEW_MS
from tessella_p2p.bridge.orchestrator_routes import OPERATOR, PUBLIC, ROUTES, SIGNED
from tessella_p2p.orchestrator.reading import replica_group
from tessella_p2p.wire import messages as m
from tests.bridge.bridge_doubles import error_shape
from tests.bridge.orchestrator_world import (
    ADDRESS,
    CONTRACT,
    LAYERS,
    MODEL_ID,
    ORCHESTRATOR,
    RECIPE,
    ROOT,
    TERMS,
    key_of,
    registering,
    unbase64url,
    world,
)

GRANT = m.SessionGrant(request_id="r-1", model_id=MODEL_ID, manifest_root=ROOT, recipe=RECIPE, max_positions=64)


async def test_the_manuals_routes_are_all_there() -> None:
    assert {(route.method, route.path) for route in PUBLIC} == {
        ("GET", "/peers"),
        ("GET", "/api/network/models"),
        ("GET", "/workers"),
        ("GET", "/model_health"),
        ("GET", "/api/v1/assignment"),
        ("GET", "/weights/manifest"),
        ("GET", "/weights/manifests"),
        ("GET", "/p2p_id"),
        ("GET", "/federation/status"),
    }
    assert {(route.method, route.path) for route in SIGNED} == {
        ("POST", "/register"),
        ("POST", "/announce"),
        ("POST", "/ready"),
        ("POST", "/deregister"),
        ("GET", "/api/v1/session_grant"),
        ("POST", "/api/v1/audit_report"),
        ("POST", "/work_done"),
        ("POST", "/api/v1/work_done_batch"),
        ("POST", "/report_failure"),
    }
    assert {(route.method, route.path) for route in OPERATOR} == {
        ("GET", "/ledger"),
        ("GET", "/ledger/evidence"),
        ("GET", "/ledger/snapshot"),
        ("GET", "/credits"),
        ("GET", "/reputation"),
        ("POST", "/slash"),
        ("POST", "/rebalance"),
        ("POST", "/weights/manifest"),
    }


# ---- Public ----


async def test_peers_are_those_that_serve_with_where_to_dial_them(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        assert (await mesh.get("/peers", model_id=MODEL_ID)).json() == []
        registered = await mesh.post("/register", "a", registering(layers=(0, 10), api_url="https://a.example"))
        assert (await mesh.get("/peers", model_id=MODEL_ID)).json() == []  # it loads
        await mesh.post("/ready", "a", mesh.ready("a", unbase64url(registered.json()["lease"])))
        assert (await mesh.get("/peers", model_id=MODEL_ID)).json() == [
            {
                "peer_id": key_of("a").peer_id,
                "model_id": MODEL_ID,
                "recipe": RECIPE,
                "layer_ranges": [[0, 10]],
                "status": "Healthy",
                "p2p_addrs": [ADDRESS],
                "http_addr": "203.0.113.7",
                "http_api_url": "https://a.example",
                "queue_depth": 0,
                "canary": False,
                "failures": 0,
                "reputation": 1000,
                "replica_group_id": 0,
            }
        ]


async def test_a_model_that_nobody_serves_has_no_peers(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        answered = await mesh.get("/peers", model_id="Qwen/Qwen2.5-0.5B-Instruct")
    assert (answered.status, answered.json()) == (200, [])


async def test_peers_come_in_pages(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        for name in "abcde":
            await mesh.join(name)
        whole = [row["peer_id"] for row in (await mesh.get("/peers", model_id=MODEL_ID)).json()]
        rows: list[str] = []
        after: dict[str, str] = {}
        while True:
            page = await mesh.get("/peers", model_id=MODEL_ID, limit=2, **after)
            rows += [row["peer_id"] for row in page.json()]
            if "x-tessella-next" not in page.headers:
                break
            after = {"after": page.headers["x-tessella-next"]}
    assert len(whole) == 5
    assert rows == whole == sorted(whole)


async def test_a_replica_is_told_by_its_group(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        groups = [(await mesh.join(name))["assignment"]["replica_group_id"] for name in "abc"]
        rows = (await mesh.get("/peers", model_id=MODEL_ID)).json()
    assert groups == [0, 1, 2]
    assert sorted(row["replica_group_id"] for row in rows) == [0, 1, 2]


def test_a_replica_group_is_the_number_of_whole_copies_before_it() -> None:
    held = [LayerRange(0, 10), LayerRange(10, 30), LayerRange(5, 15)]
    assert replica_group(LayerRange(5, 15), held) == 2
    assert replica_group(LayerRange(0, 15), held) == 1
    assert replica_group(LayerRange(0, 31), held) == 0


async def test_models_are_listed_with_their_active_workers(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        assert (await mesh.get("/api/network/models")).json() == [{"model_id": MODEL_ID, "active_workers": 0}]
        await mesh.join("a")
        assert (await mesh.get("/api/network/models")).json() == [{"model_id": MODEL_ID, "active_workers": 1}]


async def test_the_monitoring_view_has_no_addresses(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        await mesh.post("/register", "a", registering(claim_mb=2048))
        answered = await mesh.get("/workers")
    assert answered.json() == [
        {
            "peer_id": key_of("a").peer_id,
            "model_id": MODEL_ID,
            "status": "PendingLoad",
            "vram_mb": 2048,
            "queue_depth": 0,
        }
    ]
    assert b"203.0.113.7" not in answered.body


@pytest.mark.parametrize(
    ("ready", "health", "holes", "rendered"),
    [
        ([], "incomplete", [[0, 30]], 0),
        ([(0, 30)], "healthy", [], 30),
        ([(0, 10), (20, 30)], "degraded", [[10, 20]], 10),
        ([(10, 30)], "degraded", [[0, 10]], 0),
        ([(0, 20)], "incomplete", [[20, 30]], 20),
    ],
)
async def test_health_is_one_of_three_words(
    tmp_path: Path, ready: list[tuple[int, int]], health: str, holes: list[list[int]], rendered: int
) -> None:
    async with world(tmp_path) as mesh:
        for index, layers in enumerate(ready):
            await mesh.join(f"w{index}", layers=layers)
        found = (await mesh.get("/model_health", model_id=MODEL_ID, device="cuda")).json()
    covered = sum(end - start for start, end in ready)
    assert (found["health"], found["holes"], found["rendered_layers"]) == (health, holes, rendered)
    assert (found["covered_layers"], found["total_layers"], found["device"]) == (covered, LAYERS, "cuda")


async def test_who_loads_is_a_hole(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        await mesh.post("/register", "a", registering())
        found = (await mesh.get("/model_health", model_id=MODEL_ID)).json()
    assert (found["health"], found["covered_layers"], found["holes"]) == ("incomplete", 0, [[0, LAYERS]])


@pytest.mark.parametrize("held", [[], [(0, 10)], [(0, 10), (20, 30)], [(10, 30)], [(0, 25)]])
async def test_the_manuals_division_gives_the_claim_that_fills_the_first_hole_and_a_megabyte_less_does_not(
    tmp_path: Path, held: list[tuple[int, int]]
) -> None:
    async with world(tmp_path) as mesh:
        for index, layers in enumerate(held):
            await mesh.join(f"w{index}", layers=layers)
        found = (await mesh.get("/model_health", model_id=MODEL_ID)).json()
        start, end = found["holes"][0]
        used = (end - start) * found["mem_per_layer_mb"] + found["global_tensor_mb"]
        claim = max(-(-used * 100 // found["usable_vram_pct"]), found["min_vram_mb"])
        fits = await mesh.get("/api/v1/assignment", model_id=MODEL_ID, vram_mb=claim)
        less = await mesh.get("/api/v1/assignment", model_id=MODEL_ID, vram_mb=claim - 1)
    assert fits.json() == {
        "model_repo": MODEL_ID,
        "layer_ranges": [[start, end]],
        "replica_group_id": 0,
        "expert_range": None,
        "claim_mb": claim,
    }
    ((less_start, less_end),) = less.json()["layer_ranges"]
    assert less_end - less_start < end - start


async def test_a_preview_is_what_a_register_then_gets_and_changes_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        before = mesh.state()
        previewed = (await mesh.get("/api/v1/assignment", model_id=MODEL_ID, vram_mb=400, device="cpu")).json()
        assert mesh.state() == before
        granted = (await mesh.post("/register", "a", registering(claim_mb=400))).json()["assignment"]
    assert granted == {name: value for name, value in previewed.items() if name != "claim_mb"}
    assert TERMS.claim_mb(LayerRange(*previewed["layer_ranges"][0])) == previewed["claim_mb"] <= 400


async def test_manifests_are_told_by_their_roots(tmp_path: Path) -> None:
    expected = {
        "model_id": MODEL_ID,
        "manifest_root": ROOT.hex(),
        "contract_hash": CONTRACT.hex(),
        "total_layers": LAYERS,
    }
    async with world(tmp_path) as mesh:
        assert (await mesh.get("/weights/manifest", model_id=MODEL_ID)).json() == expected
        assert (await mesh.get("/weights/manifests")).json() == [expected]


@pytest.mark.parametrize("path", ["/model_health", "/weights/manifest", "/api/v1/assignment"])
async def test_a_model_that_is_not_served_is_not_found(tmp_path: Path, path: str) -> None:
    more = {"vram_mb": 4096} if "assignment" in path else {}
    async with world(tmp_path) as mesh:
        answered = await mesh.get(path, model_id="another", **more)
    assert answered.status == 404
    with error_shape(answered) as error:
        assert error["code"] == "model_not_found"


async def test_a_node_can_pin_what_p2p_id_says(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        found = (await mesh.get("/p2p_id")).json()
    assert found["peer_id"] == ORCHESTRATOR.peer_id
    assert found["addresses"] == [f"/ip4/10.0.0.1/tcp/9090/p2p/{ORCHESTRATOR.peer_id}"]


async def test_the_federation_tells_the_head_of_the_journal(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        found = (await mesh.get("/federation/status")).json()
    assert found == {"peer_id": ORCHESTRATOR.peer_id, "chain": 0, "head": 0, "head_hash": "00" * 32, "peers": []}


async def test_metrics_count_requests_by_kind_and_outcome(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        await mesh.join("a")
        await mesh.post("/register", "b", registering(claim_mb=1))
        text = (await mesh.get("/metrics")).body.decode()
    assert 'tessella_orchestrator_requests_total{kind="register",outcome="ok"} 1.0' in text
    assert 'tessella_orchestrator_requests_total{kind="register",outcome="claim_too_small"} 1.0' in text
    assert 'tessella_orchestrator_members{state="Healthy"} 1.0' in text
    assert f'tessella_orchestrator_layers{{model="{MODEL_ID}",which="covered"}} {LAYERS}.0' in text
    assert 'tessella_http_requests_total{method="POST",route="/register",status="409"} 1.0' in text


# ---- Signed ----


async def test_a_registration_answers_with_the_assignment_and_the_peers_to_dial(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        first = await mesh.join("a", layers=(0, 10))
        assert first["peers"] == first["records"] == []
        second = (await mesh.post("/register", "b", registering())).json()
    assert second["assignment"] == {
        "model_repo": MODEL_ID,
        "layer_ranges": [[10, 30]],
        "replica_group_id": 0,
        "expert_range": None,
    }
    (peer,) = second["peers"]
    shown = {name: peer[name] for name in ("peer_id", "layer_ranges", "http_addr", "queue_depth", "canary")}
    assert shown == {
        "peer_id": key_of("a").peer_id,
        "layer_ranges": [[0, 10]],
        "http_addr": "203.0.113.7",
        "queue_depth": 0,
        "canary": False,
    }
    assert len(second["records"]) == 1


async def test_a_worker_lives_over_http_from_register_to_deregister(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:

        async def status() -> Any:
            return (await mesh.get("/workers")).json()[0]["status"]

        registered = (await mesh.post("/register", "a", registering())).json()
        assert await status() == "PendingLoad"
        assert (await mesh.post("/ready", "a", mesh.ready("a", unbase64url(registered["lease"])))).json() == {
            "acknowledged": True
        }
        assert await status() == "Healthy"
        announce = m.Announce(serial=mesh.member("a").serial, queue_depth=7, state="ready")
        assert (await mesh.post("/announce", "a", announce)).json() == {"acknowledged": True}
        assert (await mesh.get("/peers", model_id=MODEL_ID)).json()[0]["queue_depth"] == 7
        draining = m.Announce(serial=mesh.member("a").serial, queue_depth=0, state="draining")
        await mesh.post("/announce", "a", draining)
        assert await status() == "Draining"
        assert (await mesh.post("/deregister", "a", m.Deregister())).json() == {"acknowledged": True}
        assert (await mesh.get("/workers")).json() == []


async def test_a_lease_that_is_half_over_comes_back_renewed(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        await mesh.join("a")
        mesh.clock.now_ms += 400_000
        announce = m.Announce(serial=mesh.member("a").serial, queue_depth=0, state="ready")
        answered = (await mesh.post("/announce", "a", announce)).json()
    assert answered["assignment"]["layer_ranges"] == [[0, LAYERS]]
    assert answered["lease"]


async def test_a_session_grant_is_the_tier_and_the_ticket_of_a_get(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        answered = await mesh.get_sealed("/api/v1/session_grant", mesh.sealed("entry", GRANT))
    assert answered.status == 200
    found = answered.json()
    assert found["tier"] == "Leech"
    assert unbase64url(found["ticket"])


async def test_one_proof_has_one_answer_and_a_batch_as_many(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        one = await mesh.post("/work_done", "a", m.WorkDone(proofs=(b"no proof",)))
        two = await mesh.post("/api/v1/work_done_batch", "a", m.WorkDone(proofs=(b"no proof", b"nor this")))
        wrong = await mesh.post("/work_done", "a", m.WorkDone(proofs=(b"no proof", b"nor this")))
    assert one.status == 200
    assert one.json()["status"] == "refused"
    assert [row["status"] for row in two.json()["results"]] == ["refused", "refused"]
    assert wrong.status == 400
    with error_shape(wrong) as error:
        assert error["param"] == "proofs"


async def test_a_reported_failure_is_counted_for_whoever_looks(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        await mesh.join("a")
        report = m.ReportFailure(peer_id=key_of("a").peer_id, code="hop_timeout")
        assert (await mesh.post("/report_failure", "b", report)).json() == {"acknowledged": True}
        assert (await mesh.get("/peers", model_id=MODEL_ID)).json()[0]["failures"] == 1


async def test_an_audit_report_that_nobody_ordered_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        report = m.AuditReport(audit_id=bytes(16), outcome="inconclusive")
        answered = await mesh.post("/api/v1/audit_report", "a", report)
    assert 400 <= answered.status < 500


async def test_a_claim_that_cannot_hold_a_layer_is_a_conflict(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        before = mesh.state()
        answered = await mesh.post("/register", "a", registering(claim_mb=60))
        assert mesh.state() == before
    assert answered.status == 409
    with error_shape(answered) as error:
        assert error["code"] == "claim_too_small"


async def test_a_private_mesh_refuses_an_unlisted_peer_before_its_signature_is_verified(tmp_path: Path) -> None:
    async with world(tmp_path, allow=frozenset({key_of("friend").peer_id})) as mesh:
        forged = mesh.sealed("stranger", registering())[:-1] + b"\0"  # a signature that does not verify
        answered = await mesh.post_raw("/register", forged)
        listed = await mesh.post("/register", "friend", registering())
    assert answered.status == 403
    with error_shape(answered) as error:
        assert error["code"] == "worker_not_authorized"
    assert listed.status == 200


async def test_a_forged_signature_a_skewed_clock_and_a_replay_are_not_authorised(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        before = mesh.state()
        sealed = mesh.sealed("a", registering())
        forged = await mesh.post_raw("/register", sealed[:-1] + bytes([sealed[-1] ^ 1]))
        ahead = await mesh.post("/register", "a", registering(), now_ms=mesh.clock.now_ms + CLOCK_SKEW_MS + 61_000)
        late = await mesh.post("/register", "a", registering(), now_ms=mesh.clock.now_ms - 300_000)
        addressed = await mesh.post("/register", "a", registering(), audience=key_of("another").peer_id)
        assert mesh.state() == before
        assert (await mesh.post_raw("/register", sealed)).status == 200
        replayed = await mesh.post_raw("/register", sealed)
    codes = [answered.json()["error"]["code"] for answered in (forged, ahead, late, addressed, replayed)]
    assert codes == ["invalid_signature", "expired", "expired", "invalid_signature", "replayed"]
    assert {answered.status for answered in (forged, ahead, late, addressed, replayed)} == {401}
    assert "121 s in the future" in ahead.json()["error"]["message"]


async def test_each_signed_route_takes_its_own_request_only(tmp_path: Path) -> None:
    bodies = {
        m.Register: registering(),
        m.Announce: m.Announce(serial=1, queue_depth=0, state="loading"),
        m.Ready: m.Ready(serial=1, record=b"x"),
        m.Deregister: m.Deregister(),
        m.SessionGrant: GRANT,
        m.AuditReport: m.AuditReport(audit_id=bytes(16), outcome="inconclusive"),
        m.WorkDone: m.WorkDone(proofs=(b"x",)),
        m.ReportFailure: m.ReportFailure(peer_id=key_of("b").peer_id, code="x"),
        m.Operate: m.Operate(admin_token="x", request=m.ReadLedger()),
        m.ReadCredits: m.ReadCredits(),
    }
    tried = 0
    async with world(tmp_path) as mesh:
        await mesh.join("a")
        before = mesh.state()
        for route in SIGNED:
            for kind, body in bodies.items():
                if kind is route.request:
                    continue
                tried += 1
                sealed = mesh.sealed("a", body)
                send = mesh.post_raw if route.method == "POST" else mesh.get_sealed
                answered = await send(route.path, sealed)
                assert (answered.status, answered.json()["error"]["param"]) == (400, "kind"), (route.path, kind)
        assert mesh.state() == before
    assert tried == 81


# ---- Operator ----


@pytest.mark.parametrize("route", OPERATOR, ids=lambda route: f"{route.method} {route.path}")
@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer wrong", "Bearer " + "x" * 600, "Bearer \xff"]
)
async def test_without_the_admin_token_an_operators_route_does_nothing(
    tmp_path: Path, route: Any, authorization: str | None
) -> None:
    async with world(tmp_path) as mesh:
        before = mesh.state()
        headers = {"content-type": "application/json"}
        if authorization is not None:
            headers["authorization"] = authorization
        answered = await mesh.call(route.method, route.path, b"{}", headers)
        assert mesh.state() == before
    assert answered.status == 401
    assert answered.headers["www-authenticate"] == "Bearer"
    with error_shape(answered) as error:
        assert error["code"] == "admin_token_required"


async def test_the_operator_slashes_and_reads_what_became_of_it(tmp_path: Path) -> None:
    peer = key_of("a").peer_id
    async with world(tmp_path) as mesh:
        slashed = await mesh.operate(
            "POST", "/slash", {"peer_id": peer, "micro_credits": 2_500_000, "reason": "a lie", "blacklist": True}
        )
        assert slashed.status == 200, slashed.body
        balance = (await mesh.operate("GET", "/credits", peer_id=peer)).json()
        table = (await mesh.operate("GET", "/credits", all="true")).json()
        reputation = (await mesh.operate("GET", "/reputation", peer_id=peer)).json()
        lines = (await mesh.operate("GET", "/ledger", limit=10)).json()
        page = (await mesh.operate("GET", "/ledger/snapshot", since=0, limit=10)).json()
        refused = await mesh.post("/register", "a", registering())
    assert slashed.json()["account"] == balance
    assert balance == {
        "name": peer,
        "peer_id": peer,
        "credits": -2.5,
        "micro_credits": -2_500_000,
        "foreign_micro_credits": 0,
        "settled_proofs": 0,
        "tier": "Leech",
    }
    assert [row["micro_credits"] for row in table if row["peer_id"] is None] == [2_500_000]
    assert (reputation["blacklisted"], reputation["slashes"]) == (True, 1)
    assert lines["head"] == page["head"] == len(lines["entries"]) == len(page["entries"])
    assert [line["sequence"] for line in lines["entries"]] == sorted(range(1, lines["head"] + 1), reverse=True)
    assert (refused.status, refused.json()["error"]["code"]) == (403, "blacklisted")


async def test_the_operator_publishes_a_manifest(tmp_path: Path) -> None:
    terms = {"recipe": RECIPE, "device": "*", "layer_mb": 4, "kv_mb": 1, "embedding_mb": 8, "head_mb": 8}
    body = {
        "model_id": "second",
        "manifest_root": "ab" * 32,
        "contract_hash": "cd" * 32,
        "total_layers": 12,
        "terms": [terms],
    }
    async with world(tmp_path) as mesh:
        published = await mesh.operate("POST", "/weights/manifest", body)
        assert published.status == 200, published.body
        listed = (await mesh.get("/weights/manifests")).json()
        health = (await mesh.get("/model_health", model_id="second")).json()
    assert published.json() in listed
    assert (health["total_layers"], health["mem_per_layer_mb"]) == (12, 5)


async def test_the_operator_sees_a_rebalance_before_it_is_made(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        await mesh.join("a")
        plan = await mesh.operate("POST", "/rebalance", {"dry_run": True})
    assert plan.status == 200, plan.body
    assert (plan.json()["moves"], plan.json()["begun"]) == ([], False)


# ---- Moved, described ----


@pytest.mark.parametrize(
    ("path", "protocol"),
    [
        ("/v1/forward", "/tessella/hop/1"),
        ("/v1/token_stream/req-1", "/tessella/tokens/1"),
        ("/api/v1/update_assignment", "/tessella/orders/1"),
    ],
)
async def test_what_moved_to_libp2p_names_its_protocol(tmp_path: Path, path: str, protocol: str) -> None:
    async with world(tmp_path) as mesh:
        answered = await mesh.call("POST", path, b"{}")
    assert answered.status == 410
    with error_shape(answered) as error:
        assert (error["code"], error["protocol"]) == ("moved_to_libp2p", protocol)
        assert protocol in error["message"]


async def test_the_docs_need_nothing_from_elsewhere_and_name_every_route(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        answered = await mesh.get("/docs")
    page = answered.body.decode()
    policy = answered.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "<script" not in page
    assert not re.search(r"(src|href)=\"(?!#)", page)
    assert all(f"{route.method} {route.path}" in page for route in ROUTES)


async def test_the_document_describes_every_route(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        answered = await mesh.get("/openapi.json")
    document = answered.json()
    assert document["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described >= {(route.method, route.path) for route in ROUTES}
    assert len(described) == len(ROUTES) + 6
    references = set(re.findall(r'"#/components/schemas/(\w+)"', answered.body.decode()))
    assert references <= set(document["components"]["schemas"])


async def test_a_model_without_the_orchestrators_recipe_is_told_of_under_its_own(tmp_path: Path) -> None:
    terms = {"recipe": "q8_0", "device": "cuda", "layer_mb": 4, "kv_mb": 1, "embedding_mb": 8, "head_mb": 8}
    body = {"model_id": "second", "manifest_root": "ab" * 32, "contract_hash": "cd" * 32, "total_layers": 12}
    async with world(tmp_path) as mesh:
        assert (await mesh.operate("POST", "/weights/manifest", {**body, "terms": [terms]})).status == 200
        health = (await mesh.get("/model_health", model_id="second", device="cuda")).json()
        other_device = await mesh.get("/model_health", model_id="second", device="metal")
        metrics = await mesh.get("/metrics")
    assert (health["recipe"], health["total_layers"]) == ("q8_0", 12)
    assert other_device.status == 404
    assert b'tessella_orchestrator_layers{model="second",which="covered"} 0.0' in metrics.body
