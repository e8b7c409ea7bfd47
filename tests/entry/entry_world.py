"""A real entry among raw stages, without an orchestrator that runs: its leases are signed on paper."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from simulations.mesh import SimulatedClock
from simulations.toy_model import MODEL_ID, RECIPE, ROOT, ToyCodec
from tessella_p2p.base.ids import LayerRange, PeerId, SessionId
from tessella_p2p.base.limits import HEARTBEAT_S
from tessella_p2p.dht.service import Discovery
from tessella_p2p.entry.api import Delta, Finished, GenerateRequest, TokenScores
from tessella_p2p.entry.finding import ServedModel
from tessella_p2p.entry.plan import EntryContext
from tessella_p2p.entry.service import EntryService
from tessella_p2p.ledger.failure_reports import FailureReports
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork, constant_latency
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.hop_links import HopLinks
from tessella_p2p.stages.toy import ToyModel
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import ClockSequencer, decode_message, open_envelope, seal
from tessella_p2p.wire.frames import DType, Frame, Kind, TraceEntry
from tessella_p2p.wire.keys import NodeKey
from tests.worker.raw_peer import RawPeer, RawStream, raw_peer

TOTAL = 6
WHOLE = LayerRange(0, TOTAL)
ENTRY_KEY = NodeKey(b"the real entry".ljust(32, b"."))
ORCHESTRATOR_KEY = NodeKey(b"orchestrator on paper".ljust(32, b"."))
PROMPT = (3, 1, 4, 1, 5)


@dataclass
class RawSession:
    """One epoch, as a raw stage sees it."""

    stage: RawStage
    hop: RawStream
    opened: m.OpenFrame
    body: m.ChainOpen

    @property
    def key(self) -> tuple[SessionId, int]:
        return SessionId(self.body.session), self.body.epoch

    async def step(self) -> Frame:
        return await self.hop.receive(Kind.STEP)

    async def known(self) -> list[int]:
        """Ids up to the step that asks for a token."""
        ids: list[int] = []
        while True:
            frame = await self.step()
            ids += [int.from_bytes(frame.body[at : at + 4], "little") for at in range(0, len(frame.body), 4)]
            if frame.flags:
                return ids

    async def open_tokens(self, capability: bytes | None = None) -> RawStream:
        """The token stream to the entry, opened as a tail opens it."""
        peer = self.stage.peer
        tokens = await peer.connect(ENTRY_KEY.peer_id, self.body.entry_addresses, protocols.TOKENS)
        await tokens.send(Frame(Kind.OPEN, *self.key, body=capability or self.opened.capability))
        return tokens

    def token(self, position: int, token_id: int, **changes: Any) -> Frame:
        fields: dict[str, Any] = {
            "position": position,
            "rows": 1,
            "dtype": DType.U32,
            "trace": (TraceEntry(10, 20, 30),) * len(self.body.route),
            "body": token_id.to_bytes(4, "little"),
        }
        return Frame(Kind.TOKEN, *self.key, **(fields | changes))

    async def answer(self, tokens: RawStream, position: int, token_ids: Sequence[int]) -> None:
        """Token after token, each when it is asked for, except that the first one is asked for already."""
        for index, token_id in enumerate(token_ids):
            if index:
                assert (await self.step()).position == position + index - 1
            await tokens.send(self.token(position + index, token_id))

    async def closed(self) -> None:
        """Wait for the entry's CLOSE."""
        assert (await self.hop.receive(Kind.CLOSE)).epoch == self.body.epoch


@dataclass
class RawStage:
    """A raw peer that a signed record lists as a stage."""

    peer: RawPeer
    layers: LayerRange

    async def session(self, hop: RawStream | None = None) -> RawSession:
        """The next chain that is opened here, on a new stream or on ``hop``."""
        hop = hop or await self.peer.inbound(protocols.HOP)
        frame = await hop.receive(Kind.OPEN)
        opened = decode_message(m.OpenFrame, bytes(frame.body))
        envelope = open_envelope(opened.open, m.CHAIN_OPEN, now_ms=None)
        assert envelope.signer == ENTRY_KEY.peer_id
        return RawSession(self, hop, opened, envelope.message(m.ChainOpen))

    def record(self, **changes: Any) -> bytes:
        """Its stage record, with a lease."""
        now_ms = self.peer.clock.unix_ms()
        layers = self.layers.as_tuple()
        lease = m.Lease(
            serial=1,
            peer_id=self.peer.peer_id,
            model_id=MODEL_ID,
            manifest_root=ROOT,
            recipe=RECIPE,
            layers=layers,
        )
        fields: dict[str, Any] = {
            "addresses": self.peer.network.addresses,
            "model_id": MODEL_ID,
            "manifest_root": ROOT,
            "recipe": RECIPE,
            "layers": layers,
            "total_layers": TOTAL,
            "lease": seal(ORCHESTRATOR_KEY, m.LEASE, lease, sequence=1, now_ms=now_ms, ttl_ms=600_000),
            "max_positions": 256,
        }
        return self.peer.seal(m.STAGE_RECORD, m.StageRecord(**(fields | changes)), ttl_ms=60_000)


@dataclass
class Asked:
    """A request that runs: its tokens so far, and how it ended."""

    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScores] = field(default_factory=list)
    finished: Finished | None = None
    error: Exception | None = None
    done: trio.Event = field(default_factory=trio.Event)
    began: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


@dataclass
class EntryWorld:
    entry: EntryService
    network: MemoryNetwork
    discovery: Discovery
    stages: list[RawStage]
    nursery: trio.Nursery
    fabric: MemoryFabric
    clock: SimulatedClock
    stated: dict[PeerId, tuple[RawStage, dict[str, Any]]] = field(default_factory=dict)

    def announce(self, stage: RawStage, **changes: Any) -> None:
        """Let the entry hear of a stage, from now on every heartbeat; its queue is what the order of preference is made of."""
        self.stated[stage.peer.peer_id] = (stage, changes)
        self.discovery.observe([stage.record(**changes)], "gossip")

    async def beat(self) -> None:
        """Heartbeats of every announced stage that lives."""
        while True:
            await trio.sleep(HEARTBEAT_S)
            for stage, changes in list(self.stated.values()):
                if stage.peer.network.alive:
                    self.announce(stage, **changes)

    def ask(self, max_tokens: int, *, pause_s: float = 0.0, prompt: Sequence[int] = PROMPT, **fields: Any) -> Asked:
        """Start a request whose client takes ``pause_s`` over each token; ``fields`` are how it is sampled."""
        asked = Asked()

        async def run() -> None:
            request = GenerateRequest(model=MODEL_ID, prompt_ids=prompt, max_tokens=max_tokens, **fields)
            with asked.scope:
                try:
                    async with self.entry.generate(request) as generation, aclosing(generation.events()) as events:
                        asked.began.set()
                        async for event in events:
                            if isinstance(event, Delta):
                                asked.token_ids += event.token_ids
                                asked.scores += event.scores
                            else:
                                asked.finished = event
                            await trio.sleep(pause_s)
                except Exception as error:  # noqa: BLE001 - the test looks at it
                    asked.error = error
            asked.done.set()

        self.nursery.start_soon(run)
        return asked

    def failures(self) -> dict[PeerId, int]:
        return dict(self.entry.peer_failures)


@asynccontextmanager
async def entry_world(
    clock: VirtualClock,
    ranges: Sequence[LayerRange],
    *,
    max_input_tokens: int | None = None,
    hop_timeout_s: float = 10.0,
    hidden_size: int = 0,
    reports: FailureReports | None = None,
    prove_routes: bool = False,
) -> AsyncIterator[EntryWorld]:
    """An entry that knows a raw stage for each of ``ranges``; of equal ones it prefers the first. With ``prove_routes`` its first
    sessions are its own, to see whether a token comes back."""
    fabric, date = MemoryFabric(random.Random(1), clock, constant_latency(0.02)), SimulatedClock(clock)
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(MemoryNetwork.open(fabric, ENTRY_KEY.peer_id))
        stages = []
        for index, layers in enumerate(ranges):
            peer = await stack.enter_async_context(raw_peer(fabric, date, f"stage {index}"))
            peer.serve(protocols.HOP)
            stages.append(RawStage(peer, layers))
        rng = random.Random(2)
        discovery = Discovery(network, date, rng, pins=frozenset({ORCHESTRATOR_KEY.peer_id}))
        links = HopLinks(network, hop_timeout_s)
        context = EntryContext(
            network, ENTRY_KEY, date, ClockSequencer(), links, rng.randbytes, hop_timeout_s=hop_timeout_s
        )
        model = ServedModel(MODEL_ID, ToyCodec(ToyModel(TOTAL)), ROOT, (RECIPE,), hidden_size)
        entry = EntryService(
            context,
            model,
            discovery,
            None,
            max_input_tokens=max_input_tokens,
            reports=reports,
            prove_routes=prove_routes,
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(links.run)
            await nursery.start(entry.run)
            world = EntryWorld(entry, network, discovery, stages, nursery, fabric, date)
            for index, stage in enumerate(stages):
                world.announce(stage, queue_depth=index)
            nursery.start_soon(world.beat)
            yield world
            nursery.cancel_scope.cancel()
