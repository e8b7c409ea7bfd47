"""Workers on paper: what they send to an orchestrator, signed as a worker would."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from tessella_p2p.base.ids import LayerRange
from tessella_p2p.orchestrator.member import Announced, Loaded, MemberEffect, Registered, SendAnswer
from tessella_p2p.orchestrator.members import Members
from tessella_p2p.orchestrator.terms import ANY_DEVICE, ModelTerms, ServedModel
from tessella_p2p.wire.envelope import open_envelope, seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import LEASE, STAGE_RECORD, Announce, Assigned, Lease, Ready, Register, StageRecord

NOW = 1_800_000_000_000
MODEL_ID = "toy"
ROOT = bytes(range(32))
CONTRACT = bytes(range(32, 64))
RECIPE = "f32"
LAYERS = 30
TERMS = ModelTerms(total_layers=LAYERS, layer_mb=10, kv_mb=2, embedding_mb=50, head_mb=50, usable_pct=100)
MODEL = ServedModel(MODEL_ID, ROOT, CONTRACT, LAYERS, {(RECIPE, ANY_DEVICE): TERMS})
AMPLE_MB = 10_000


def key_of(name: str) -> NodeKey:
    """A key that depends on its name alone."""
    return NodeKey(hashlib.sha256(name.encode()).digest())


ORCHESTRATOR = key_of("orchestrator")


def register(*, claim_mb: int = AMPLE_MB, layers: tuple[int, int] | None = None, **changes: object) -> Register:
    fields: dict[str, object] = {
        "addresses": ("/ip4/127.0.0.1/tcp/9080",),
        "claim_mb": claim_mb,
        "device": "cpu",
        "model_id": MODEL_ID,
        "total_layers": LAYERS,
        "manifest_root": ROOT,
        "contract_hash": CONTRACT,
        "recipe": RECIPE,
        "layers": layers,
    }
    return Register.model_validate({**fields, **changes})


def lease_of(sealed: bytes, signer: NodeKey = ORCHESTRATOR) -> Lease:
    return open_envelope(sealed, LEASE, now_ms=None, signer=signer.peer_id).message(Lease)


def stage_record(
    worker: NodeKey,
    sealed_lease: bytes,
    *,
    now_ms: int = NOW,
    sequence: int = 1,
    ttl_ms: int = 60_000,
    **changes: object,
) -> bytes:
    fields: dict[str, object] = {
        "addresses": ("/ip4/127.0.0.1/tcp/9080",),
        "model_id": MODEL_ID,
        "manifest_root": ROOT,
        "recipe": RECIPE,
        "layers": lease_of(sealed_lease).layers,
        "total_layers": LAYERS,
        "lease": sealed_lease,
        "max_positions": 2048,
    }
    body = StageRecord.model_validate({**fields, **changes})
    return seal(worker, STAGE_RECORD, body, sequence=sequence, now_ms=now_ms, ttl_ms=ttl_ms)


def answer_in(effects: Sequence[MemberEffect]) -> object:
    bodies = [effect.body for effect in effects if isinstance(effect, SendAnswer)]
    assert len(bodies) == 1
    return bodies[0]


class PaperWorker:
    """One worker that talks to a `Members` core."""

    def __init__(self, members: Members, name: str) -> None:
        self.members = members
        self.key = key_of(name)
        self.peer = self.key.peer_id
        self.lease = b""
        self.sequence = 0

    @property
    def serial(self) -> int:
        return lease_of(self.lease).serial

    @property
    def layers(self) -> LayerRange:
        return LayerRange(*lease_of(self.lease).layers)

    def _take(self, effects: list[MemberEffect]) -> list[MemberEffect]:
        body = answer_in(effects)
        if isinstance(body, Assigned):
            self.lease = body.lease
        return effects

    def record(self, now_ms: int = NOW) -> bytes:
        self.sequence += 1
        return stage_record(self.key, self.lease, now_ms=now_ms, sequence=self.sequence)

    def register(self, now_ms: int = NOW, **fields: Any) -> list[MemberEffect]:
        return self._take(self.members.handle(Registered(self.peer, register(**fields)), now_ms))

    def ready(self, now_ms: int = NOW) -> list[MemberEffect]:
        return self._take(
            self.members.handle(Loaded(self.peer, Ready(serial=self.serial, record=self.record(now_ms))), now_ms)
        )

    def announce(self, now_ms: int = NOW, state: str = "ready", *, with_record: bool = True) -> list[MemberEffect]:
        body = Announce.model_validate(
            {
                "serial": self.serial,
                "queue_depth": 3,
                "state": state,
                "record": self.record(now_ms) if with_record else None,
            }
        )
        return self._take(self.members.handle(Announced(self.peer, body), now_ms))
