"""Chain-opens on paper: an entry, a route of three stages over a toy of six layers, a ticket, and ways to get each of them wrong."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from tessella_p2p.base.ids import LayerRange
from tessella_p2p.stages.opening import Opening, StageIdentity, open_hash, seal_capability, verify_open
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import seal
from tessella_p2p.wire.keys import NodeKey

NOW = 1_800_000_000_000
HOUR = 3_600_000
ROOT = bytes(range(32))
RECIPE = "f32"
TOTAL = 6


def key_of(name: str) -> NodeKey:
    return NodeKey(hashlib.sha256(name.encode()).digest())


ENTRY, STRANGER, ORCHESTRATOR = key_of("entry"), key_of("stranger"), key_of("orchestrator")
STAGES = [key_of(f"stage {i}") for i in range(3)]
RANGES = [LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 6)]
ROUTE = tuple(
    m.RouteStage(peer_id=key.peer_id, layers=layers.as_tuple(), addresses=("/ip4/10.0.0.1/tcp/1",))
    for key, layers in zip(STAGES, RANGES, strict=True)
)


def identity(index: int, **changes: Any) -> StageIdentity:
    honest = StageIdentity(
        peer_id=STAGES[index].peer_id,
        manifest_root=ROOT,
        recipe=RECIPE,
        layers=RANGES[index],
        total_layers=TOTAL,
        max_positions=100,
        pins=frozenset({ORCHESTRATOR.peer_id}),
        lease=b"the lease in force",
    )
    return replace(honest, **changes)


def ticket(
    *,
    minter: NodeKey = ORCHESTRATOR,
    requester: NodeKey = ENTRY,
    request_id: str = "request-1",
    root: bytes = ROOT,
    recipe: str = RECIPE,
    max_positions: int = 100,
    open_before: int = NOW + HOUR,
) -> bytes:
    body = m.Ticket(
        request_id=request_id,
        requester=requester.peer_id,
        manifest_root=root,
        recipe=recipe,
        tier="VIP",
        max_positions=max_positions,
        open_before=open_before,
        settle_before=NOW + 24 * HOUR,
    )
    return seal(minter, m.TICKET, body, sequence=1, now_ms=NOW - 1000, ttl_ms=HOUR)


def route_statement(*, signer: NodeKey = ENTRY, at: int = NOW, **changes: Any) -> bytes:
    """What the entry states of the route of `open_body`, but for ``changes``."""
    fields: dict[str, Any] = {"request_id": "request-1", "session": b"s" * 16, "epoch": 0, "stages": stages_of(ROUTE)}
    return seal(signer, m.ROUTE, m.RouteStatement(**(fields | changes)), sequence=1, now_ms=at)


def stages_of(route: tuple[m.RouteStage, ...]) -> tuple[tuple[str, tuple[int, int]], ...]:
    return tuple((stage.peer_id, stage.layers) for stage in route)


def open_body(**changes: Any) -> m.ChainOpen:
    """A chain-open; one with a ticket states its route."""
    fields: dict[str, Any] = {
        "session": b"s" * 16,
        "epoch": 0,
        "request_id": "request-1",
        "model_id": "toy",
        "manifest_root": ROOT,
        "recipe": RECIPE,
        "route": ROUTE,
        "entry_addresses": ("/ip4/10.0.0.9/tcp/1",),
        "max_positions": 50,
        "sampling": m.Sampling(),
        "digest_key": b"k" * 32,
    }
    fields |= changes
    if fields.get("ticket") is not None and "route_statement" not in fields:
        fields["route_statement"] = route_statement(session=fields["session"], epoch=fields["epoch"])
    return m.ChainOpen(**fields)


@dataclass(frozen=True)
class Sealed:
    """A chain-open and its capability; `twin` makes one that differs in one thing."""

    body: m.ChainOpen
    open: bytes
    capability: bytes

    def frame(self) -> m.OpenFrame:
        return m.OpenFrame(open=self.open, capability=self.capability)


def sealed(
    body: m.ChainOpen | None = None, *, signer: NodeKey = ENTRY, at: int = NOW, ttl_ms: int = 60_000, **changes: Any
) -> Sealed:
    body = body or open_body(**changes)
    envelope = seal(signer, m.CHAIN_OPEN, body, sequence=1, now_ms=at, ttl_ms=ttl_ms)
    return Sealed(body, envelope, seal_capability(signer, body, envelope, sequence=2, now_ms=at, ttl_ms=60_000))


def capability(
    *, signer: NodeKey = ENTRY, audience: NodeKey = STAGES[2], ttl_ms: int = 60_000, of: Sealed, **changes: Any
) -> bytes:
    """A capability whose fields are those of ``of``, but for ``changes``."""
    fields: dict[str, Any] = {
        "session": of.body.session,
        "epoch": of.body.epoch,
        "open_hash": open_hash(of.open),
        "tail": STAGES[2].peer_id,
    }
    grant = m.CapabilityGrant(**(fields | changes))
    return seal(signer, m.CAPABILITY, grant, sequence=3, now_ms=NOW, audience=audience.peer_id, ttl_ms=ttl_ms)


def opened(index: int = 0, **changes: Any) -> Opening:
    """A verified opening at one of the stages."""
    upstream = STAGES[index - 1] if index else ENTRY
    return verify_open(sealed(**changes).frame(), identity(index), upstream=upstream.peer_id, now_ms=NOW)
