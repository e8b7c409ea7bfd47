"""A real orchestrator with a real ledger behind its HTTP app, and peers that seal what they send."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlencode

from pydantic import SecretStr
from starlette.types import ASGIApp

from tessella_p2p.base.ids import PeerId
from tessella_p2p.bridge.orchestrator_app import create_orchestrator_app
from tessella_p2p.ledger.blocking import in_place
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.orchestrator.service import Orchestrator
from tessella_p2p.orchestrator.terms import ANY_DEVICE, ModelTerms, ServedModel
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import ClockSequencer, Message, seal
from tessella_p2p.wire.keys import NodeKey
from tests.bridge.bridge_doubles import Answered, Caller
from tests.orchestrator.paper_workers import stage_record

NOW = 1_800_000_000_000
MODEL_ID = "toy"
ROOT = bytes(range(32))
CONTRACT = bytes(range(32, 64))
RECIPE = "f32"
LAYERS = 30
TERMS = ModelTerms(
    total_layers=LAYERS, layer_mb=10, kv_mb=2, embedding_mb=50, head_mb=70, overhead_mb=30, usable_pct=80, min_mb=100
)
MODEL = ServedModel(MODEL_ID, ROOT, CONTRACT, LAYERS, {(RECIPE, ANY_DEVICE): TERMS})
AMPLE_MB = 10_000
TOKEN = "an admin token of the tests"
ADDRESS = "/ip4/203.0.113.7/tcp/9080"


def key_of(name: str) -> NodeKey:
    """A key that depends on its name alone."""
    return NodeKey(hashlib.sha256(name.encode()).digest())


ORCHESTRATOR = key_of("orchestrator")


@dataclass
class SetClock:
    """A date that stands still until it is moved."""

    now_ms: int = NOW

    def unix_ms(self) -> int:
        return self.now_ms


def registering(**changes: object) -> m.Register:
    """A register, as a worker of `MODEL` says it."""
    fields: dict[str, object] = {
        "addresses": (ADDRESS,),
        "claim_mb": AMPLE_MB,
        "device": "cpu",
        "model_id": MODEL_ID,
        "total_layers": LAYERS,
        "manifest_root": ROOT,
        "contract_hash": CONTRACT,
        "recipe": RECIPE,
    }
    return m.Register.model_validate({**fields, **changes})


def unbase64url(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@dataclass
class World:
    """The orchestrator, its app, and who calls it."""

    orchestrator: Orchestrator
    store: LedgerStore
    clock: SetClock
    app: ASGIApp
    _sequences: dict[str, int] = field(default_factory=dict)

    # ---- Calls ----

    async def call(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, **query: object
    ) -> Answered:
        answered = await Caller(self.app)(method, path, body, urlencode(query).encode(), headers)
        assert answered is not None
        return answered

    async def get(self, path: str, **query: object) -> Answered:
        return await self.call("GET", path, b"", None, **query)

    async def operate(self, method: str, path: str, body: object = None, **query: object) -> Answered:
        """A call with the admin token."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        return await self.call(method, path, raw, headers, **query)

    async def post(self, path: str, name: str, body: Message, **sealing: Any) -> Answered:
        """A sealed request of the peer ``name``."""
        return await self.post_raw(path, self.sealed(name, body, **sealing))

    async def post_raw(self, path: str, raw: bytes) -> Answered:
        return await self.call("POST", path, raw, {"content-type": "application/cbor"})

    async def get_sealed(self, path: str, raw: bytes) -> Answered:
        text = base64.urlsafe_b64encode(raw).decode().rstrip("=")
        return await self.call("GET", path, headers={"x-tessella-envelope": text})

    def next_sequence(self, name: str) -> int:
        self._sequences[name] = self._sequences.get(name, 0) + 1
        return self._sequences[name]

    def sealed(self, name: str, body: Any, **sealing: Any) -> bytes:
        given = {
            "sequence": self.next_sequence(name),
            "now_ms": self.clock.now_ms,
            "audience": ORCHESTRATOR.peer_id,
            **sealing,
        }
        return seal(key_of(name), m.REQUEST, m.RequestBody(body=body), **given)

    # ---- Workers ----

    async def join(self, name: str, **changes: object) -> dict[str, Any]:
        """Register a worker and let it be ready; gives the body of its registration."""
        body: dict[str, Any] = (await self.post("/register", name, registering(**changes))).json()
        lease = unbase64url(body["lease"])
        answered = await self.post("/ready", name, self.ready(name, lease))
        assert answered.status == 200, answered.body
        return body

    def ready(self, name: str, lease: bytes) -> m.Ready:
        serial = self.member(name).serial
        record = stage_record(
            key_of(name), lease, now_ms=self.clock.now_ms, sequence=serial, addresses=self.member(name).addresses
        )
        return m.Ready(serial=serial, record=record)

    def member(self, name: str) -> Any:
        return {each.peer_id: each for each in self.orchestrator.membership.members()}[key_of(name).peer_id]

    def state(self) -> object:
        """Everything that a refused request must not change."""
        return (self.orchestrator.membership.members(), self.store.content(), self.store.assignments())


@asynccontextmanager
async def world(path: Path, *, allow: frozenset[PeerId] | None = None) -> AsyncIterator[World]:
    """An orchestrator with the ledger in ``path``."""
    fabric = MemoryFabric(Random(0), VirtualClock())  # nothing travels over it: it gives the orchestrator an address
    clock = SetClock()
    with closing(LedgerStore(path, sync=False)) as store:
        async with MemoryNetwork.open(fabric, ORCHESTRATOR.peer_id, "/ip4/10.0.0.1/tcp/9090") as network:
            orchestrator = Orchestrator(
                network,
                ORCHESTRATOR,
                clock,
                store,
                models=[MODEL],
                recipe=RECIPE,
                sequencer=ClockSequencer(),
                allow=allow,
                run_blocking=in_place,
            )
            orchestrator.operating.admin_token = SecretStr(TOKEN)
            yield World(orchestrator, store, clock, create_orchestrator_app(orchestrator))
