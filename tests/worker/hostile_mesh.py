"""Three real stages, an orchestrator, and raw peers among them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from simulations.mesh import MeshShape, SimulatedMesh, SimulatedNode, simulate
from simulations.toy_model import MODEL_ID, RECIPE, ROOT
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.ledger.client import OrchestratorClient
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.service import StageService
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import seal
from tessella_p2p.wire.frames import Kind
from tests.worker.raw_peer import DIGEST_KEY, RawPeer, RawStream, ids_step, raw_peer, stage_of

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait in virtual time."""
    deadline = trio.current_time() + timeout_s
    while not condition():
        assert trio.current_time() < deadline, "it did not become true"
        with trio.move_on_after(0.05):
            await trio.Event().wait()


async def pass_time(seconds: float) -> None:
    """Let virtual time pass."""
    with trio.move_on_after(seconds):
        await trio.Event().wait()


def stage_service(node: SimulatedNode) -> StageService:
    assert node.roles is not None
    assert node.roles.worker is not None
    assert node.roles.worker.stage is not None
    return node.roles.worker.stage


def held(node: SimulatedNode) -> int:
    """Sessions whose KV the node holds."""
    return stage_service(node).num_sessions


@dataclass
class HostileMesh:
    """``stages`` are head, middle and tail; ``entry`` is a raw peer that accepts token streams."""

    mesh: SimulatedMesh
    entry: RawPeer
    stages: list[SimulatedNode]
    _sessions: int = field(default=0)

    @property
    def head(self) -> SimulatedNode:
        return self.stages[0]

    @property
    def middle(self) -> SimulatedNode:
        return self.stages[1]

    @property
    def tail(self) -> SimulatedNode:
        return self.stages[2]

    def layers_of(self, index: int) -> LayerRange:
        size = self.mesh.shape.layers // 3
        return LayerRange(index * size, (index + 1) * size)

    def addresses_of(self, node: SimulatedNode) -> tuple[str, ...]:
        assert node.roles is not None
        return node.roles.addresses

    def route(self, *, raw_at: int | None = None, raw: RawPeer | None = None) -> tuple[m.RouteStage, ...]:
        """The route over the real stages, one of them replaced by a raw peer where asked."""
        found = []
        for index, node in enumerate(self.stages):
            if index == raw_at:
                peer = raw or self.entry
                found.append(stage_of(peer.peer_id, self.layers_of(index), peer.network.addresses))
            else:
                found.append(stage_of(node.peer_id, self.layers_of(index), self.addresses_of(node)))
        return tuple(found)

    def body(self, **changes: Any) -> m.ChainOpen:
        """A chain-open of a new session."""
        self._sessions += 1
        fields: dict[str, Any] = {
            "session": self._sessions.to_bytes(16, "big"),
            "epoch": 0,
            "request_id": f"request-{self._sessions}",
            "model_id": MODEL_ID,
            "manifest_root": ROOT,
            "recipe": RECIPE,
            "route": self.route(),
            "entry_addresses": self.entry.network.addresses,
            "max_positions": 64,
            "sampling": m.Sampling(),
            "digest_key": DIGEST_KEY,
        }
        fields |= changes
        if fields.get("ticket") is not None:
            fields["route_statement"] = self._route_statement(fields)
        return m.ChainOpen(**fields)

    def _route_statement(self, fields: dict[str, Any]) -> bytes:
        statement = m.RouteStatement(
            request_id=fields["request_id"],
            session=fields["session"],
            epoch=fields["epoch"],
            stages=tuple((stage.peer_id, stage.layers) for stage in fields["route"]),
        )
        return seal(self.entry.key, m.ROUTE, statement, sequence=1, now_ms=self.entry.clock.unix_ms())

    async def ticket(self, request_id: str, max_positions: int = 64) -> bytes:
        """A real ticket for the raw entry."""
        key = self.mesh.orchestrator_key
        client = OrchestratorClient(
            self.entry.network,
            self.entry.key,
            self.entry.clock,
            self.entry.sequencer,
            key.peer_id,
            self.mesh.orchestrator_address,
        )
        ask = m.SessionGrant(
            request_id=request_id,
            model_id=MODEL_ID,
            manifest_root=ROOT,
            recipe=RECIPE,
            max_positions=max_positions,
        )
        return (await client.ask(ask, m.Granted)).ticket

    async def to_head(self, peer: RawPeer | None = None) -> RawStream:
        return await (peer or self.entry).connect(self.head.peer_id, self.addresses_of(self.head))

    async def begin(self, hop: RawStream, body: m.ChainOpen, prompt: Sequence[int] = PROMPT) -> RawStream:
        """Open a chain, send the prompt, accept the token stream: its first frame, the capability, is read."""
        await hop.send(self.entry.open_frame(body), ids_step(body, 0, prompt, sample=True))
        tokens = await self.entry.inbound(protocols.TOKENS)
        opened = await tokens.receive()
        assert (opened.kind, opened.session) == (Kind.OPEN, body.session)
        return tokens

    async def generate(self, hop: RawStream, tokens: RawStream, body: m.ChainOpen, num_tokens: int) -> tuple[int, ...]:
        """The first tokens of a session that has begun, as an honest entry asks for them."""
        found: list[int] = []
        while True:
            frame = await tokens.receive(Kind.TOKEN)
            assert frame.session == body.session
            found.append(int.from_bytes(frame.body, "little"))
            if len(found) == num_tokens:
                return tuple(found)
            await hop.send(ids_step(body, frame.position, found[-1:], sample=True))

    def expected(self, num_tokens: int, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
        return self.mesh.expected(prompt, num_tokens)

    def digest(self, body: m.ChainOpen, rows: bytes) -> bytes:
        """What a receiver of ``rows`` signs for, the first draw's mark among them."""
        return keyed(rows, self.entry.opened[body.session])

    def token_digest(self, body: m.ChainOpen, tokens: Sequence[int], first: int = len(PROMPT)) -> bytes:
        """What an entry signs for: tokens, the first of them drawn for position ``first``."""
        drawn = (n.to_bytes(4, "little") for pair in enumerate(tokens, first) for n in pair)
        return self.digest(body, b"".join(drawn))

    def held(self) -> list[int]:
        return [held(node) for node in self.stages]

    async def is_well(self) -> None:
        """The mesh serves an honest session as if nothing had happened."""
        finished = await self.mesh.ask(self.head, PROMPT, 5)
        assert finished.token_ids == self.expected(5)
        await eventually(lambda: self.held() == [0, 0, 0])


def keyed(data: bytes, opened: bytes = b"") -> bytes:
    return hashlib.blake2b(opened + data, key=DIGEST_KEY, digest_size=32).digest()


@asynccontextmanager
async def hostile_mesh(folder: Path, clock: VirtualClock, **shape: Any) -> AsyncIterator[HostileMesh]:
    async with simulate(MeshShape(**shape), seed=1, folder=folder, clock=clock) as mesh:
        for _ in range(3):
            await mesh.start_node(mesh.add_node())
        for node in mesh.nodes:
            await mesh.wait_listed(node)

        def start_of(node: SimulatedNode) -> int:
            assert node.roles is not None
            assert node.roles.worker is not None
            assert node.roles.worker.assignment is not None
            return node.roles.worker.assignment.layers.start

        async with raw_peer(mesh.fabric, mesh.date(), "entry") as entry:
            entry.serve(protocols.TOKENS)
            yield HostileMesh(mesh, entry, sorted(mesh.nodes, key=start_of))
