"""Whatever comes over HTTP, the orchestrator answers with an error that names the field, and nothing changes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import MAX_CBOR_DEPTH, MAX_ENVELOPE_BYTES
from tessella_p2p.bridge.orchestrator_requests import bearer_token, message_of_json, message_of_query, parameters
from tessella_p2p.bridge.orchestrator_routes import OPERATOR, PUBLIC, SIGNED, ApiRoute
from tessella_p2p.wire import cbor
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import decode_message
from tests.bridge.bridge_doubles import Answered, Caller, error_shape
from tests.bridge.orchestrator_world import (
    ADDRESS,
    CONTRACT,
    LAYERS,
    MODEL_ID,
    ORCHESTRATOR,
    RECIPE,
    ROOT,
    TOKEN,
    World,
    key_of,
    registering,
    world,
)

PEER = key_of("somebody").peer_id
VALID: dict[type, dict[str, Any]] = {
    m.Register: registering(canary="off").model_dump(exclude_none=True),
    m.Ready: {"kind": "ready", "serial": 1, "record": b"x"},
    m.Announce: {"kind": "announce", "serial": 1, "queue_depth": 0, "state": "ready"},
    m.Deregister: {"kind": "deregister"},
    m.SessionGrant: {
        "kind": "session_grant",
        "request_id": "r-1",
        "model_id": MODEL_ID,
        "manifest_root": ROOT,
        "recipe": RECIPE,
        "max_positions": 64,
    },
    m.AuditReport: {"kind": "audit_report", "audit_id": bytes(16), "outcome": "inconclusive"},
    m.WorkDone: {"kind": "work_done", "proofs": [b"x"]},
    m.ReportFailure: {"kind": "report_failure", "peer_id": PEER, "code": "hop_timeout"},
}
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        -(2**63),
        2**24 + 1,
        2**53,
        2**63,
        2**64 - 1,
        0.5,
        -0.0,
        float("inf"),
        float("nan"),
        1e308,
    ),
    *(
        "",
        " ",
        "x" * 257,
        "x" * 5000,
        "a b",
        "../../etc/passwd",
        "<script>",
        "\0",
        "\u202e",
        "Ünïcode",
        "12D3KooWnobody",
    ),
    *(b"", b"x" * 31, b"x" * 33, b"\xff" * 70_000),
    *(
        [],
        [[]],
        [None],
        [0],
        [0, 0],
        [5, 5],
        [3, 2],
        [-1, 3],
        [0, 5000],
        [0, 1, 2],
        ["a", "b"],
        [0.0, 1.0],
        ["x" * 257],
    ),
    *([ADDRESS] * 17, [b"x"] * 65, [""] * 600, {}, {"a": 1}, {"kind": "register"}, [{}], [[[[[[]]]]]]),
)


def sealed_raw(mesh: World, name: str, payload: bytes) -> bytes:
    """An envelope with a true signature around any bytes."""
    key = key_of(name)
    sequence = mesh.next_sequence(name)
    now_ms = mesh.clock.now_ms
    fields = [1, m.REQUEST, key.peer_id, ORCHESTRATOR.peer_id, sequence, now_ms, now_ms + 60_000, payload]
    return cbor.encode([*fields, key.sign(cbor.encode(["tessella-envelope", *fields]))])


async def send(mesh: World, route: ApiRoute, raw: bytes) -> Answered:
    return await (mesh.post_raw if route.method == "POST" else mesh.get_sealed)(route.path, raw)


def changed_fields(kind: type[m.Register]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The field at fault, and a message with it; pydantic says what is at fault."""
    valid = VALID[kind]
    for name in (*valid, *kind.model_fields, "colour"):
        for value in ODD:
            fields = {**valid, name: value}
            if name == "kind" or (name == "manifest_root" and value == ROOT):
                continue
            try:
                decode_message(kind, cbor.encode(fields))
            except Exception:  # noqa: BLE001 - whatever it is: the app has to name the field
                yield name, fields
    for name, field in kind.model_fields.items():
        if field.is_required():
            yield name, {other: value for other, value in valid.items() if other != name}


async def test_every_field_of_a_sealed_request_is_refused_by_its_name(tmp_path: Path) -> None:
    tried = 0
    async with world(tmp_path) as mesh:
        await mesh.join("member")
        before = mesh.state()
        for route in SIGNED:
            for name, fields in changed_fields(route.request):  # type: ignore[arg-type]
                tried += 1
                payload = cbor.encode({"body": fields})
                answered = await send(mesh, route, sealed_raw(mesh, f"w{tried % 7}", payload))
                if route.method == "GET" and len(payload) > 8192:
                    continue  # no server takes such a header; the parser is asked all the same
                assert answered.status == 400, (route.path, name, fields, answered.body)
                with error_shape(answered) as error:
                    assert error["param"].split(".")[0] == name, (route.path, name, error)
                    assert len(error["message"]) < 500
            assert mesh.state() == before
    print(f"{tried} sealed requests with one bad field")  # noqa: T201 - how many inputs were tried
    assert tried > 1500


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"claim_mb": -1}, 400, "claim_mb"),
        ({"claim_mb": 0}, 400, "claim_mb"),
        ({"claim_mb": 2**64 - 1}, 400, "claim_mb"),
        ({"layers": (LAYERS - 1, LAYERS + 1)}, 400, "layers"),
        ({"layers": (100, 200)}, 400, "layers"),
        ({"total_layers": LAYERS + 1}, 400, "total_layers"),
        ({"model_id": "another"}, 400, "model_id"),
        ({"contract_hash": ROOT}, 400, "contract_hash"),
        ({"addresses": ()}, 400, "addresses"),
        ({"api_url": "javascript:alert(1)"}, 400, "api_url"),
        ({"api_url": "http://user:password@a.example"}, 400, "api_url"),
        ({"manifest_root": CONTRACT}, 400, "manifest_root"),
        ({"recipe": "another"}, 404, None),
    ],
)
async def test_a_registration_that_fits_nothing_here_is_refused(
    tmp_path: Path, changes: dict[str, Any], status: int, param: str | None
) -> None:
    async with world(tmp_path) as mesh:
        before = mesh.state()
        payload = cbor.encode({"body": {**VALID[m.Register], **changes}})
        answered = await mesh.post_raw("/register", sealed_raw(mesh, "a", payload))
        assert mesh.state() == before
    assert answered.status == status, answered.body
    with error_shape(answered) as error:
        assert error["param"] == param


def nested(depth: int) -> bytes:
    return b"\x81" * depth + b"\x00"


@pytest.mark.parametrize(
    ("payload", "param"),
    [
        (b"", "body"),
        (b"\xff", "body"),
        (nested(MAX_CBOR_DEPTH + 1), "body"),
        (nested(200_000), "body"),
        (b"\x9a\x00\x01\x00\x01" + b"\0" * 65_537, "body"),  # too many values
        (b"\x9b" + b"\xff" * 8, "body"),  # a list of 2^64 - 1
        (b"\x5b" + b"\xff" * 8, "body"),  # a string of 2^64 - 1
        (b"\x9f\xff", "body"),  # indefinite
        (b"\xc2\x49" + b"\xff" * 9, "body"),  # a bignum
        (cbor.encode({}), "body"),
        (cbor.encode([]), "body"),
        (cbor.encode({"body": None}), "body"),
        (cbor.encode({"body": {}}), "body"),
        (cbor.encode({"body": {"kind": "nothing"}}), "body"),
        (cbor.encode({"body": {"kind": 7}}), "body"),
        (cbor.encode({"body": VALID[m.Register], "more": 1}), "more"),
        (cbor.encode({"body": VALID[m.Register]}).replace(b"ctoy", b"c\xff\xfe\xfd"), "model_id"),
        (cbor.encode({"body": VALID[m.Register]}).replace(b"cf32", b"c\xc0\x80x"), "recipe"),
        (cbor.encode({"body": VALID[m.Register]}).replace(b"ccpu", b"c\xed\xa0\x80"), "device"),
        (cbor.encode({"body": VALID[m.Register]}) + b"\0", "body"),
    ],
    ids=range(20),
)
async def test_a_signed_payload_that_is_no_message_is_refused(tmp_path: Path, payload: bytes, param: str) -> None:
    async with world(tmp_path) as mesh:
        before = mesh.state()
        answered = await mesh.post_raw("/register", sealed_raw(mesh, "a", payload))
        assert mesh.state() == before
    assert answered.status == 400
    with error_shape(answered) as error:
        assert error["param"] == param


async def test_random_and_damaged_envelopes_are_refused(tmp_path: Path) -> None:
    rng = random.Random(4)
    tried = 0
    async with world(tmp_path) as mesh:
        await mesh.join("member")
        before = mesh.state()
        for route in SIGNED:
            for _ in range(150):
                tried += 1
                good = sealed_raw(mesh, f"r{tried % 7}", cbor.encode({"body": VALID[route.request]}))
                answered = await send(mesh, route, damaged(rng, good))
                assert answered.status in (400, 401, 413), answered.body
                with error_shape(answered) as error:
                    assert answered.status == 401 or error["param"] or error["code"] == "version_mismatch"
        assert mesh.state() == before
    print(f"{tried} damaged envelopes")  # noqa: T201
    assert tried == 1350


def damaged(rng: random.Random, good: bytes) -> bytes:
    """Bytes that are no longer the sealed request ``good``."""
    bad = bytearray(good)
    match rng.randrange(5):
        case 0:
            return rng.randbytes(rng.randrange(300))
        case 1:
            return bytes(bad[: rng.randrange(len(bad))])
        case 2:
            return bytes(bad) + rng.randbytes(rng.randrange(1, 40))
        case 3:
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        case _:
            at = rng.randrange(len(bad))
            bad[at : at + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(9))
    return bytes(bad) if bytes(bad) != good else b""


@pytest.mark.parametrize("content_type", [None, "", "application/json", "text/plain", "application/cbor-seq"])
async def test_a_sealed_body_says_that_it_is_cbor(tmp_path: Path, content_type: str | None) -> None:
    async with world(tmp_path) as mesh:
        headers = {} if content_type is None else {"content-type": content_type}
        answered = await mesh.call("POST", "/register", mesh.sealed("a", registering()), headers)
    assert answered.status == 400
    with error_shape(answered) as error:
        assert error["param"] == "content-type"


@pytest.mark.parametrize("header", [None, "", "=", "!!!!", "AAAA\xff", "a", "A" * 600_000, "AAAA BBBB", "AA+/"])
async def test_a_signed_get_has_its_envelope_in_the_header(tmp_path: Path, header: str | None) -> None:
    async with world(tmp_path) as mesh:
        headers = {} if header is None else {"x-tessella-envelope": header}
        answered = await mesh.call("GET", "/api/v1/session_grant", b"", headers)
    assert answered.status == 400
    with error_shape(answered) as error:
        assert error["param"] == "x-tessella-envelope"


async def test_a_body_over_the_limit_is_too_large(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        before = mesh.state()
        answered = await mesh.post_raw("/register", bytes(MAX_ENVELOPE_BYTES + 1))
        assert mesh.state() == before
    assert answered.status == 413
    with error_shape(answered) as error:
        assert error["code"] == "request_too_large"


# ---- Parameters ----


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/peers", b"", "model_id"),
        ("/peers", b"model_id=", "model_id"),
        ("/peers", b"model_id=%ff%fe", "model_id"),
        ("/peers", b"model_id=%00", "model_id"),
        ("/peers", b"model_id=" + b"x" * 129, "model_id"),
        ("/peers", b"model_id=toy&model_id=toy", "model_id"),
        ("/peers", b"model_id=toy&colour=red", "colour"),
        ("/peers", b"model_id=toy&kind=list_peers", "kind"),
        ("/peers", b"model_id=toy&limit=0", "limit"),
        ("/peers", b"model_id=toy&limit=-1", "limit"),
        ("/peers", b"model_id=toy&limit=501", "limit"),
        ("/peers", b"model_id=toy&limit=1e3", "limit"),
        ("/peers", b"model_id=toy&limit=5.0", "limit"),
        ("/peers", b"model_id=toy&limit=%205", "limit"),
        ("/peers", b"model_id=toy&limit=1_0", "limit"),
        ("/peers", b"model_id=toy&limit=\xd9\xa3", "query"),
        ("/peers", b"model_id=toy&limit=%D9%A3", "limit"),
        ("/peers", b"model_id=toy&limit=" + b"9" * 5000, "limit"),
        ("/peers", b"model_id=toy&after=nobody", "after"),
        ("/peers", b"&".join(b"a%d=1" % i for i in range(100)), "query"),
        ("/workers", b"after=%ff", "after"),
        ("/workers", b"model_id=toy", "model_id"),
        ("/p2p_id", b"x=1", "x"),
        ("/federation/status", b"x=1", "x"),
        ("/weights/manifests", b"x=1", "x"),
        ("/weights/manifest", b"", "model_id"),
        ("/model_health", b"device=cuda", "model_id"),
        ("/model_health", b"model_id=toy&device=", "device"),
        ("/model_health", b"model_id=toy&device=a%20b", "device"),
        ("/api/v1/assignment", b"model_id=toy", "vram_mb"),
        ("/api/v1/assignment", b"model_id=toy&vram_mb=0", "vram_mb"),
        ("/api/v1/assignment", b"model_id=toy&vram_mb=-4096", "vram_mb"),
        ("/api/v1/assignment", b"model_id=toy&vram_mb=16777217", "vram_mb"),
        ("/api/v1/assignment", b"model_id=toy&vram_mb=4GB", "vram_mb"),
        ("/api/v1/assignment", b"model_id=toy&vram_mb=99999999999999999999", "vram_mb"),
        ("/ledger", b"limit=0", "limit"),
        ("/ledger", b"before=-1", "before"),
        ("/ledger", b"before=9007199254740992", "before"),
        ("/ledger/snapshot", b"since=x", "since"),
        ("/ledger/snapshot", b"chain=-1", "chain"),
        ("/credits", b"", "peer_id"),
        ("/credits", b"all=false", "peer_id"),
        ("/credits", b"all=yes", "all"),
        ("/credits", b"all=true&peer_id=" + PEER.encode(), "peer_id"),
        ("/credits", b"peer_id=x", "peer_id"),
        ("/credits", b"all=true&after=" + b"x" * 65, "after"),
        ("/reputation", b"peer_id=%ff", "peer_id"),
        ("/reputation", b"all=true&limit=501", "limit"),
    ],
)
async def test_a_bad_parameter_is_named(tmp_path: Path, path: str, query: bytes, param: str) -> None:
    async with world(tmp_path) as mesh:
        before = mesh.state()
        answered = await Caller(mesh.app)("GET", path, query=query, headers={"authorization": f"Bearer {TOKEN}"})
        assert mesh.state() == before
    assert answered is not None
    assert answered.status == 400, answered.body
    with error_shape(answered) as error:
        assert error["param"] == param


async def test_random_queries_are_answered_or_refused(tmp_path: Path) -> None:
    rng = random.Random(7)
    words = [
        b"model_id",
        b"limit",
        b"after",
        b"device",
        b"vram_mb",
        b"recipe",
        b"all",
        b"peer_id",
        b"since",
        b"chain",
        b"x",
    ]
    values = [
        b"toy",
        b"1",
        b"-1",
        b"%ff",
        b"",
        b"true",
        PEER.encode(),
        b"%F0%9F%98%80",
        b"9" * 40,
        b"..%2f..",
        b"a=b",
        b"%",
    ]
    tried = 0
    async with world(tmp_path) as mesh:
        before = mesh.state()
        for route in (each for each in (*PUBLIC, *OPERATOR) if each.method == "GET"):
            for _ in range(100):
                tried += 1
                pairs = [rng.choice(words) + b"=" + rng.choice(values) for _ in range(rng.randrange(5))]
                if rng.random() < 0.2:
                    pairs.append(quote_from_bytes(rng.randbytes(9)).encode())
                answered = await Caller(mesh.app)(
                    "GET", route.path, query=b"&".join(pairs), headers={"authorization": f"Bearer {TOKEN}"}
                )
                assert answered is not None
                assert answered.status in (200, 400, 404, 409), (route.path, pairs, answered.body)
                if answered.status == 400:
                    assert answered.json()["error"]["param"] is not None, (route.path, pairs)
        assert mesh.state() == before
    print(f"{tried} queries")  # noqa: T201
    assert tried == 1400


# ---- The operator's JSON ----


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/slash", b"", "peer_id"),
        ("/slash", b"{", "body"),
        ("/slash", b"[]", "body"),
        ("/slash", b"null", "body"),
        ("/slash", b"\xff\xfe", "body"),
        ("/slash", b"[" * 100_000, "body"),
        ("/slash", b'{"a":' * 50_000, "body"),
        ("/slash", b'{"peer_id": NaN}', "body"),
        ("/slash", {"peer_id": PEER}, "reason"),
        ("/slash", {"peer_id": PEER, "reason": ""}, "reason"),
        ("/slash", {"peer_id": PEER, "reason": "x" * 513}, "reason"),
        ("/slash", {"peer_id": PEER, "reason": "x", "micro_credits": -1}, "micro_credits"),
        ("/slash", {"peer_id": PEER, "reason": "x", "micro_credits": 2**53}, "micro_credits"),
        ("/slash", {"peer_id": PEER, "reason": "x", "micro_credits": 10**40}, "micro_credits"),
        ("/slash", {"peer_id": PEER, "reason": "x", "micro_credits": 1.0}, "micro_credits"),
        ("/slash", {"peer_id": PEER, "reason": "x", "micro_credits": "1"}, "micro_credits"),
        ("/slash", {"peer_id": PEER, "reason": "x", "micro_credits": True}, "micro_credits"),
        ("/slash", {"peer_id": PEER, "reason": "x", "blacklist": "yes"}, "blacklist"),
        ("/slash", {"peer_id": "issuance", "reason": "x"}, "peer_id"),
        ("/slash", {"peer_id": ["x"], "reason": "x"}, "peer_id"),
        ("/slash", {"peer_id": PEER, "reason": "x", "kind": "slash"}, "kind"),
        ("/slash", {"peer_id": PEER, "reason": "x", "\u202ecolour": 1}, "\\u202ecolour"),
        ("/rebalance", {"dry_run": 1}, "dry_run"),
        ("/rebalance", {"model_id": ""}, "model_id"),
        ("/rebalance", {"layers": [0, 1]}, "layers"),
        ("/weights/manifest", {}, "model_id"),
        ("/weights/manifest", {"manifest_root": "zz" * 32}, "manifest_root"),
        ("/weights/manifest", {"model_id": "m", "manifest_root": "ab" * 31}, "manifest_root"),
        ("/weights/manifest", {"model_id": "m", "manifest_root": 7}, "manifest_root"),
        ("/weights/manifest", {"model_id": "m", "manifest_root": "ab" * 32, "contract_hash": "ab cd"}, "contract_hash"),
    ],
)
async def test_a_bad_field_of_the_operators_json_is_named(tmp_path: Path, path: str, body: object, param: str) -> None:
    async with world(tmp_path) as mesh:
        before = mesh.state()
        answered = await mesh.operate("POST", path, body)
        assert mesh.state() == before
    assert answered.status == 400, answered.body
    with error_shape(answered) as error:
        assert error["param"] == param


@pytest.mark.parametrize("path", [route.path for route in OPERATOR if route.method == "POST"])
async def test_what_an_operator_posts_is_in_the_body_and_a_query_is_not_passed_over(tmp_path: Path, path: str) -> None:
    """``/rebalance?dry_run=true`` is not to move a mesh."""
    async with world(tmp_path) as mesh:
        answered = await mesh.operate("POST", path, b"", dry_run="true")
    assert answered.status == 400
    with error_shape(answered) as error:
        assert error["param"] == "query"


async def test_an_operators_body_says_that_it_is_json(tmp_path: Path) -> None:
    async with world(tmp_path) as mesh:
        body = json.dumps({"peer_id": PEER, "reason": "x", "micro_credits": 1}).encode()
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "text/plain"}
        answered = await mesh.call("POST", "/slash", body, headers)
        assert mesh.store.total() == mesh.store.account(PEER).micro_credits == 0
    assert answered.status == 400
    with error_shape(answered) as error:
        assert error["param"] == "content-type"


# ---- The pure parts: any input gives a value or a typed error ----

QUERIES = st.binary(max_size=200) | st.text(alphabet="abc=&%+12_é\0", max_size=60).map(lambda text: text.encode())
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(QUERIES)
def test_any_query_is_parameters_or_an_error_that_names_one(query: bytes) -> None:
    try:
        found = parameters(query)
    except InvalidRequest as error:
        assert error.param is not None  # noqa: PT017 - most inputs raise, some do not
    else:
        assert all(isinstance(value, str) for value in found.values())


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([route for route in OPERATOR if route.method == "POST"]), JSONS | st.binary(max_size=50))
def test_any_json_is_a_request_or_an_error_that_names_a_field(route: ApiRoute, body: object) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        assert isinstance(message_of_json(route, raw), route.request)
    except InvalidRequest as error:
        assert error.param is not None  # noqa: PT017 - most inputs raise, some do not


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([route for route in (*PUBLIC, *OPERATOR) if route.method == "GET"]),
    st.dictionaries(
        st.sampled_from(["model_id", "limit", "after", "device", "vram_mb", "peer_id", "since", "x"]),
        st.text(max_size=30),
    ),
)
def test_any_parameters_are_a_request_or_an_error_that_names_one(route: ApiRoute, given_: dict[str, str]) -> None:
    try:
        assert isinstance(message_of_query(route, given_), route.request)
    except InvalidRequest as error:
        assert error.param is not None  # noqa: PT017 - most inputs raise, some do not


def test_a_bearer_token_is_read_as_it_stands() -> None:
    assert bearer_token("Bearer abc def") == "abc def"
    assert bearer_token("bearer x") == "x"
