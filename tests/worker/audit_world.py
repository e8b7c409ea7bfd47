"""A session of three stages played by hand, what their neighbours keep of it, and an auditor with a real engine of its own."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import trio

from simulations.mesh import SimulatedClock
from simulations.toy_model import toy_grammars
from tessella_p2p.base.ids import LayerRange, PeerId, SessionId
from tessella_p2p.base.limits import ORCHESTRATOR_REQUEST_S
from tessella_p2p.ledger.blocking import in_place
from tessella_p2p.ledger.client import OrchestratorClient
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork, constant_latency
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.digest import RunningDigest
from tessella_p2p.stages.engine import Sampled, SessionKey, StageEngine, StepInput, StepOutput
from tessella_p2p.stages.history import History, TrackKey
from tessella_p2p.stages.hop_links import HopLinks
from tessella_p2p.stages.opening import StageIdentity, open_hash
from tessella_p2p.stages.sampler import answer_of, sampler_of
from tessella_p2p.stages.service import StageService
from tessella_p2p.stages.toy import ToyEngine, ToyModel
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import ClockSequencer, seal
from tessella_p2p.wire.frames import DType, Flag, Frame, Kind, encode_frame
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.worker.auditing import Auditor
from tessella_p2p.worker.context import StageContext
from tessella_p2p.worker.grammars import Grammars
from tessella_p2p.worker.guest_stage import GuestStage
from tessella_p2p.worker.history_server import HistoryServer
from tests.stages.openings import ENTRY, ORCHESTRATOR, ROOT, STAGES, key_of, open_body

TOY = ToyModel(6, vocabulary=256)
GRAMMARS = toy_grammars(TOY.vocabulary)
RANGES = (LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 6))
AUDITOR = key_of("auditor")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
CUTS = (4, 4, 3)
RECIPE = "f32"
AUDIT_ID = b"audit audit audi"

Lie = Callable[[int, int, bytes], bytes]
"""(stage, position of the first row, true output) → what is sent; of a tail the token's four bytes."""
Loader = Callable[[LayerRange], StageEngine]


def toy_engine(layers: LayerRange) -> ToyEngine:
    return ToyEngine(TOY, layers)


def honest(stage: int, position: int, output: bytes) -> bytes:
    return output


@dataclass
class Played:
    """One epoch: ``frames[i]`` is what stage i received, ``tokens`` the draws of the tail by position."""

    body: m.ChainOpen
    opened: bytes
    frames: list[list[Frame]]
    tokens: list[tuple[int, int]]

    def positions(self) -> int:
        return self.frames[0][-1].position + self.frames[0][-1].rows

    def input_digest(self, stage: int, positions: int) -> bytes:
        """What a worker's proof says that it received."""
        return self._rows_digest(self.frames[stage], positions)

    def output_digest(self, stage: int, positions: int) -> bytes:
        """What its proof says that it sent."""
        if stage + 1 < len(self.frames):
            return self._rows_digest(self.frames[stage + 1], positions)
        digest = RunningDigest(self.body.digest_key, open_hash(self.opened))
        for position, token in self.tokens:
            if position <= positions:
                digest.update_draw(position, token.to_bytes(4, "little"))
        return digest.digest()

    def _rows_digest(self, frames: Sequence[Frame], positions: int) -> bytes:
        digest, has_drawn = RunningDigest(self.body.digest_key, open_hash(self.opened)), False
        for frame in frames:
            rows = min(frame.rows, positions - frame.position)
            if rows <= 0:
                break
            digest.update(memoryview(frame.body)[: len(frame.body) // frame.rows * rows])
            if frame.flags is Flag.SAMPLE and rows == frame.rows and not has_drawn:
                digest.mark_first_draw()
                has_drawn = True
        return digest.digest()


def play(
    load: Loader = toy_engine,
    ranges: Sequence[LayerRange] = RANGES,
    *,
    lie: Lie = honest,
    prompt: Sequence[int] = PROMPT,
    cuts: Sequence[int] = CUTS,
    num_tokens: int = 5,
    **changes: Any,
) -> Played:
    """Play a session through a chain of engines; ``changes`` are of the chain-open."""
    route = tuple(
        m.RouteStage(peer_id=key.peer_id, layers=layers.as_tuple(), addresses=())
        for key, layers in zip(STAGES, ranges, strict=False)
    )
    body = open_body(route=route, recipe=RECIPE, **changes)
    opened = seal(ENTRY, m.CHAIN_OPEN, body, sequence=1, now_ms=1)
    engines = [load(layers) for layers in ranges]
    key = SessionKey(SessionId(body.session), body.epoch)
    for engine in engines:
        engine.open_session(key, body.max_positions)
    grammar = body.sampling.grammar
    constraint = None if grammar is None else GRAMMARS.compile(grammar, answer_of(body))
    sampler = sampler_of(body, engines[-1].vocabulary, constraint)
    frames: list[list[Frame]] = [[] for _ in engines]
    tokens: list[tuple[int, int]] = []
    steps = [list(prompt[sum(cuts[:i]) : sum(cuts[: i + 1])]) for i in range(len(cuts))]
    position = 0
    while steps:
        ids = steps.pop(0)
        flags = Flag.NONE if steps else Flag.SAMPLE
        data, dtype = b"".join(token.to_bytes(4, "little") for token in ids), DType.U32
        for index, engine in enumerate(engines):
            frame = Frame(Kind.STEP, SessionId(body.session), body.epoch, 0, position, len(ids), dtype, flags, (), data)
            frames[index].append(frame)
            sample = sampler if flags is Flag.SAMPLE else None
            (answer,) = engine.forward([StepInput(key, position, len(ids), dtype, data, sample)])
            if isinstance(answer, StepOutput):
                data, dtype = lie(index, position, bytes(answer.body)), answer.dtype
            elif isinstance(answer, Sampled):
                end = position + len(ids)
                token = int.from_bytes(lie(index, end, answer.token_id.to_bytes(4, "little")), "little")
                tokens.append((end, token))
                if len(tokens) < num_tokens:
                    steps.append([token])
            else:
                assert answer is None, answer
        position += len(ids)
    for engine in engines:
        engine.close()
    return Played(body, opened, frames, tokens)


class Recorder(OrchestratorClient):
    """The way to the orchestrator ends here; calls fail with ``failures`` first."""

    def __init__(self, network: MemoryNetwork, clock: SimulatedClock) -> None:
        super().__init__(network, AUDITOR, clock, ClockSequencer(), ORCHESTRATOR.peer_id, None)
        self.reports: list[m.AuditReport] = []
        self.arrived = trio.Event()
        self.failures: list[Exception] = []

    async def call(
        self, body: m.OrchestratorRequest, timeout_s: float = ORCHESTRATOR_REQUEST_S
    ) -> m.OrchestratorAnswer:
        await trio.lowlevel.checkpoint()
        if self.failures:
            raise self.failures.pop(0)
        assert isinstance(body, m.AuditReport)
        self.reports.append(body)
        self.arrived.set()
        return m.Acknowledged()


@dataclass
class Neighbour:
    """Who keeps history, and shows it."""

    key: NodeKey
    network: MemoryNetwork
    history: History
    server: HistoryServer

    def keep(self, played: Played, stage: int, side: m.HistorySide, *, encoded: bool = True) -> None:
        """Keep one side of ``stage``."""
        audited = PeerId(STAGES[stage].peer_id)
        key = TrackKey(SessionId(played.body.session), played.body.epoch, side, audited)
        track = self.history.begin(key, played.opened)
        for frame in played.frames[stage + (side == "output")]:
            track.note(frame, encode_frame(frame) if encoded else None)
        track.end(trio.current_time())


@dataclass
class AuditWorld:
    """Three stages' neighbours, and an auditor of stage ``stage``."""

    stage: int
    clock: SimulatedClock
    fabric: MemoryFabric
    auditor: Auditor
    service: StageService
    context: StageContext
    recorder: Recorder
    upstream: Neighbour
    downstream: Neighbour
    nursery: trio.Nursery
    identity: StageIdentity
    serving: list[tuple[StageService, StageIdentity] | None] = field(default_factory=list)
    guests: GuestStage | None = None

    def order(self, played: Played, **changes: Any) -> m.AuditOrder:
        """An honest order to audit all of it."""
        positions = changes.pop("positions", played.positions())
        fields: dict[str, Any] = {
            "audit_id": AUDIT_ID,
            "auditor": AUDITOR.peer_id,
            "audited": STAGES[self.stage].peer_id,
            "session": played.body.session,
            "epoch": played.body.epoch,
            "manifest_root": ROOT,
            "recipe": RECIPE,
            "layers": played.body.route[self.stage].layers,
            "positions": positions,
            "input_digest": played.input_digest(self.stage, positions),
            "upstream": self.upstream.key.peer_id,
            "upstream_addresses": self.upstream.network.addresses,
            "downstream": self.downstream.key.peer_id,
            "downstream_addresses": self.downstream.network.addresses,
            "comparison": "bitwise",
            "report_before": self.clock.unix_ms() + 120_000,
        }
        return m.AuditOrder(**(fields | changes))

    def by_tolerance(self, played: Played, **changes: Any) -> m.AuditOrder:
        positions = changes.get("positions", played.positions())
        fields: dict[str, Any] = {
            "comparison": "tolerance",
            "output_digest": played.output_digest(self.stage, positions),
            "tolerance_ppm": 10,
        }
        return self.order(played, **(fields | changes))

    def seal(self, order: m.AuditOrder, signer: NodeKey = ORCHESTRATOR, **changes: Any) -> bytes:
        fields: dict[str, Any] = {"sequence": 1, "now_ms": self.clock.unix_ms(), "audience": order.auditor}
        return seal(signer, m.ORDER, m.OrderBody(body=order), **(fields | changes))

    def keep(self, played: Played, *, encoded: bool = True) -> None:
        """Both neighbours keep what an honest one keeps."""
        self.upstream.keep(played, self.stage, "input", encoded=encoded)
        if self.stage + 1 < len(played.frames):
            self.downstream.keep(played, self.stage, "output", encoded=encoded)

    async def audit(self, order: m.AuditOrder, raw: bytes | None = None) -> m.AuditReport:
        """Let the auditor carry out ``order``, and hear its report."""
        self.recorder.arrived = trio.Event()
        await self.auditor.take(order, raw or self.seal(order))
        with trio.fail_after(1000):
            await self.recorder.arrived.wait()
        return self.recorder.reports[-1]


@asynccontextmanager
async def audit_world(
    clock: VirtualClock,
    stage: int,
    *,
    load: Loader = toy_engine,
    ranges: Sequence[LayerRange] = RANGES,
    recipe: str = RECIPE,
    inline: bool = True,
    serves: int | None = None,
) -> AsyncIterator[AuditWorld]:
    """Run it under ``clock``. The auditor serves the same layers as stage ``stage``, or those of ``serves`` and may load others."""
    own = ranges[stage if serves is None else serves]
    fabric, date = MemoryFabric(random.Random(1), clock, constant_latency(0.02)), SimulatedClock(clock)
    up = STAGES[stage - 1] if stage else ENTRY
    down = STAGES[stage + 1] if stage + 1 < len(ranges) else ENTRY
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(MemoryNetwork.open(fabric, AUDITOR.peer_id))
        neighbours = {
            key.peer_id: _neighbour(await stack.enter_async_context(MemoryNetwork.open(fabric, key.peer_id)), date, key)
            for key in {up.peer_id: up, down.peer_id: down}.values()
        }
        nursery = await stack.enter_async_context(trio.open_nursery())
        for neighbour in neighbours.values():
            await nursery.start(neighbour.server.run)
        service = StageService(load(own), inline=inline)
        await nursery.start(service.run)
        links = HopLinks(network)
        grammars = Grammars(GRAMMARS, in_place)
        context = StageContext(network, AUDITOR, date, ClockSequencer(), links, _NoProofs(), grammars=grammars)
        identity = StageIdentity(
            peer_id=AUDITOR.peer_id,
            manifest_root=ROOT,
            recipe=recipe,
            layers=own,
            total_layers=ranges[-1].end,
            max_positions=service.engine.max_positions,
            pins=frozenset({ORCHESTRATOR.peer_id}),
            lease=b"lease",
        )
        serving: list[tuple[StageService, StageIdentity] | None] = [(service, identity)]
        recorder = Recorder(network, date)

        async def load_guest(layers: LayerRange) -> StageService:
            await trio.sleep(1.0)
            return StageService(load(layers), inline=inline)

        guests = None if serves is None else GuestStage(load_guest)
        if guests is not None:
            await nursery.start(guests.run)
        auditor = Auditor(context, recorder, lambda: serving[0], random.Random(3).randbytes, guests)
        nursery.start_soon(auditor.run)
        yield AuditWorld(
            stage,
            date,
            fabric,
            auditor,
            service,
            context,
            recorder,
            neighbours[up.peer_id],
            neighbours[down.peer_id],
            nursery,
            identity,
            serving,
            guests,
        )
        nursery.cancel_scope.cancel()


def _neighbour(network: MemoryNetwork, date: SimulatedClock, key: NodeKey) -> Neighbour:
    history = History()
    server = HistoryServer(network, key, date, ClockSequencer(), history, frozenset({ORCHESTRATOR.peer_id}))
    return Neighbour(key, network, history, server)


class _NoProofs:
    """Where an auditor writes nothing."""

    async def checkpoint(self, opening: Any, meter: Any) -> None:
        raise AssertionError("an audit proves nothing")

    async def prove(self, opening: Any, meter: Any) -> None:
        raise AssertionError("an audit proves nothing")


def relabelled(played: Played, **changes: Any) -> Played:
    """The same rows under another chain-open of the same entry, for the same session."""
    body = played.body.model_copy(update=changes)
    return replace(played, body=body, opened=seal(ENTRY, m.CHAIN_OPEN, body, sequence=2, now_ms=1))
