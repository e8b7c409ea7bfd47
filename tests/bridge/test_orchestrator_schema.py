"""Schemathesis reads the OpenAPI document, calls every route of a served orchestrator with what it makes up, and checks each answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tessella_p2p.bridge.orchestrator_openapi import openapi
from tessella_p2p.bridge.orchestrator_requests import CBOR
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import seal
from tests.bridge.bridge_doubles import serving
from tests.bridge.orchestrator_world import MODEL_ID, NOW, ORCHESTRATOR, RECIPE, ROOT, TOKEN, key_of, registering, world
from tests.bridge.served_in_thread import ServerThread

# Schemathesis compiles each schema once more for itself, and leaves sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
_SEQUENCES = count(1_000_000)
_BODIES = (
    registering(),
    m.Announce(serial=1, queue_depth=0, state="ready"),
    m.Ready(serial=1, record=b"no record"),
    m.Deregister(),
    m.AuditReport(audit_id=bytes(16), outcome="inconclusive"),
    m.WorkDone(proofs=(b"no proof",)),
    m.ReportFailure(peer_id=key_of("somebody").peer_id, code="hop_timeout"),
    m.SessionGrant(request_id="r", model_id=MODEL_ID, manifest_root=ROOT, recipe=RECIPE, max_positions=8),
)


def _sealed(name: str, index: int) -> bytes:
    return seal(
        key_of(name),
        m.REQUEST,
        m.RequestBody(body=_BODIES[index]),
        sequence=next(_SEQUENCES),
        now_ms=NOW,
        audience=ORCHESTRATOR.peer_id,
    )


schemathesis.openapi.media_type(
    CBOR,
    st.binary(max_size=80) | st.builds(_sealed, st.sampled_from("abc"), st.integers(0, len(_BODIES) - 1)),
)
schemathesis.openapi.format("peer-id", st.sampled_from([key_of(name).peer_id for name in "abc"]))
_SCHEMA = schemathesis.openapi.from_dict(openapi("test"))
_CALLS = [0]


@_SCHEMA.auth()
class _Operator:
    """Schemathesis calls with the token, and without it where it looks whether that is noticed."""

    def get(self, case: schemathesis.Case[Any], context: schemathesis.AuthContext) -> str:
        return TOKEN

    def set(self, case: schemathesis.Case[Any], data: str, context: schemathesis.AuthContext) -> None:
        case.headers["authorization"] = f"Bearer {data}"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A served orchestrator with one worker."""
    path = tmp_path_factory.mktemp("ledger")

    @asynccontextmanager
    async def opened() -> AsyncIterator[str]:
        async with world(path) as mesh, serving(mesh.app) as url:
            await mesh.join("a")
            yield url

    with ServerThread(opened) as server:
        yield server.url
    print(f"{_CALLS[0]} calls")  # noqa: T201 - how many inputs were tried


@_SCHEMA.parametrize()
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
)
def test_every_answer_is_one_that_the_document_promises(case: schemathesis.Case[Any], url: str) -> None:
    _CALLS[0] += 1
    # A schema says neither that bytes are a sealed envelope, nor that an account can lose so much.
    excluded: list[Any] = [] if "public" in case.operation.tags else [positive_data_acceptance]
    case.call_and_validate(base_url=url, excluded_checks=excluded)
