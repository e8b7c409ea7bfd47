"""A whole mesh in one process in real time, with a toy for a model and the node's own HTTP server in front of its entry.

Everything but three things is what a daemon runs: the network between the nodes is in memory, the engine is a toy whose turns take as
long as they are told to, and the ledgers do not wait for the disk. The entry is a node of its own, behind `create_app` and `serve`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import trio
from starlette.types import ASGIApp

from simulations.mesh import MeshShape, SimulatedMesh, node_key, simulate
from simulations.toy_model import MODEL_ID, RECIPE, ROOT, ToyCodec
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.bridge.app import create_app
from tessella_p2p.entry.finding import ServedModel
from tessella_p2p.entry.service import EntryService
from tessella_p2p.ledger.blocking import in_place
from tessella_p2p.ledger.proof_log import ProofLog
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork, constant_latency
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.node.assembly import NodePlan, NodeRoles, Surroundings
from tessella_p2p.node.view import LiveNodeView, NodeFacts
from tessella_p2p.orchestrator.grants import GrantTerms
from tessella_p2p.stages.engine import Sampled, SessionKey, StageEngine, StepAnswer, StepInput
from tessella_p2p.stages.service import StageService
from tessella_p2p.stages.toy import HIDDEN_SIZE, ToyEngine
from tessella_p2p.wire.envelope import ClockSequencer

MODEL = MODEL_ID
BARE_CHUNK = b"f0\r\ndata: " + b"x" * 230 + b"\r\n\r\n"
"""As large as a chunk of a chat, for the bare sockets beside it."""
SESSIONS = 256
_MAX_POSITIONS = 2048
_LAYERS = 2
_GRANTS = 10_000
"""At once and a second: no figure is the orchestrator's bound on one entry."""
_MAP_BYTES = 64 << 20
_LISTED_S = 60.0


class LoopTime(VirtualClock):
    """The time of the running trio loop for a `MemoryFabric`: what it sends arrives as the loop gets to it. Make it in that loop."""

    def __init__(self) -> None:
        super().__init__()
        self._began = trio.current_time()
        self._token = trio.lowlevel.current_trio_token()

    @property
    def now(self) -> float:
        """Seconds since it was made."""
        return trio.current_time() - self._began

    def call_at(self, time_s: float, callback: Callable[..., object], *args: object) -> None:
        """Call ``callback(*args)`` at ``time_s``, or soon when that is past; equal times keep their order."""
        if time_s <= self.now:
            self._token.run_sync_soon(callback, *args)
        else:
            trio.lowlevel.spawn_system_task(self._call_later, time_s, callback, args)

    async def _call_later(self, time_s: float, callback: Callable[..., object], args: Sequence[object]) -> None:
        await trio.sleep_until(self._began + time_s)
        callback(*args)


class ToyChat(ToyCodec):
    """A toy that chats: its template is the contents of the messages, one token a character."""

    async def encode_chat(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] = ()
    ) -> list[int]:
        """The characters of all contents."""
        return await self.encode_prompt("".join(str(message["content"]) for message in messages))


class Draws:
    """When each token of each prompt was drawn, in seconds of the machine's monotonic clock, which all its processes share."""

    def __init__(self) -> None:
        self.of_prompt: defaultdict[str, list[float]] = defaultdict(list)
        self._prompts: dict[SessionKey, str] = {}

    def engine(self, engine: ToyEngine) -> StageEngine:
        """An engine like ``engine`` whose draws are noted, and that has places for `SESSIONS`."""
        return _DrawingEngine(engine, self)

    def note(self, step: StepInput) -> None:
        """A token of this step's session was drawn now."""
        if step.position == 0:
            body = bytes(step.body)
            codes = [int.from_bytes(body[at : at + 4], "little") for at in range(0, len(body), 4)]
            self._prompts[step.session] = "".join(map(chr, codes))
        self.of_prompt[self._prompts[step.session]].append(time.monotonic())

    def forget(self) -> None:
        """Begin anew."""
        self.of_prompt.clear()

    def closed(self, key: SessionKey) -> None:
        """A session is over."""
        self._prompts.pop(key, None)


class _DrawingEngine(ToyEngine):
    def __init__(self, engine: ToyEngine, draws: Draws) -> None:
        super().__init__(
            engine.model,
            engine.layers,
            max_sessions=SESSIONS,
            max_positions=_MAX_POSITIONS,
            now=trio.current_time,
        )
        self._draws = draws

    def forward(self, batch: Sequence[StepInput]) -> list[StepAnswer]:
        answers = super().forward(batch)
        for step, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Sampled):
                self._draws.note(step)
        return answers

    def close_session(self, key: SessionKey) -> None:
        super().close_session(key)
        self._draws.closed(key)


@dataclass(frozen=True, slots=True)
class World:
    """What runs."""

    mesh: SimulatedMesh
    entry: EntryService
    app: ASGIApp
    draws: Draws = field(default_factory=Draws)


@asynccontextmanager
async def world(folder: Path, beat_s: float) -> AsyncIterator[World]:
    """A running mesh of one stage with places for `SESSIONS`, and an entry that lists it.

    Args:
        folder: an empty one.
        beat_s: turns end at multiples of it, whatever their rows; 0: at once. A session has every second beat, since what a turn draws
            comes back while the next one runs.
    """
    clock = LoopTime()
    fabric = MemoryFabric(Random(0), clock, constant_latency(0.0))
    draws = Draws()
    shape = MeshShape(
        grant_terms=GrantTerms(rate_per_s=_GRANTS, burst=_GRANTS),
        layers=_LAYERS,
        min_stages=1,
        turn_s=partial(_until_beat_s, beat_s),
        prove_routes=True,
    )
    async with simulate(shape, seed=0, folder=folder, clock=clock, fabric=fabric) as mesh:
        node = mesh.add_node()
        node.engine = draws.engine
        await mesh.start_node(node)
        await mesh.wait_listed(node, _LISTED_S)
        async with _entry(mesh, folder / "entry") as (entry, app):
            yield World(mesh, entry, app, draws)


def _until_beat_s(beat_s: float, rows: int) -> float:
    return beat_s - trio.current_time() % beat_s if beat_s else 0.0


@asynccontextmanager
async def _entry(mesh: SimulatedMesh, folder: Path) -> AsyncIterator[tuple[EntryService, ASGIApp]]:
    """A node that is an entry alone, and its HTTP surface."""
    key, codec, clock = node_key(mesh.seed, "entry", 0), ToyChat(mesh.model), mesh.date()
    rng = Random(0)
    with ExitStack() as stack:
        proof_log = stack.enter_context(closing(ProofLog(folder, _MAP_BYTES, sync=False)))
        async with MemoryNetwork.open(mesh.fabric, key.peer_id) as network, trio.open_nursery() as nursery:
            plan = NodePlan(
                model=ServedModel(MODEL_ID, codec, ROOT, (RECIPE,), HIDDEN_SIZE),
                orchestrator=mesh.orchestrator_key.peer_id,
                orchestrator_address=mesh.orchestrator_address,
                offer=None,
                bootstrap=tuple(mesh.bootstrap_addresses),
            )
            around = Surroundings(
                network=network,
                key=key,
                clock=clock,
                sequencer=ClockSequencer(proof_log.sequence_floor()),
                rng=rng,
                random_bytes=rng.randbytes,
                run_blocking=in_place,
                proof_log=proof_log,
                load=_no_layers,
            )
            roles = NodeRoles(plan, around)
            await nursery.start(roles.run)
            facts = NodeFacts(
                key.peer_id, MODEL_ID, RECIPE, HIDDEN_SIZE, _MAX_POSITIONS, "cpu", plan.orchestrator, 10.0, None, {}
            )
            view = LiveNodeView(facts, roles, clock, proof_log, in_place)
            nursery.start_soon(view.run)
            with trio.fail_after(_LISTED_S):
                while not roles.entry.has_route():  # noqa: ASYNC110 - stages also fade with time alone
                    await trio.sleep(0.05)
                await roles.entry.check_ready()
            yield roles.entry, create_app(roles.entry, view)
            nursery.cancel_scope.cancel()


async def _no_layers(layers: LayerRange) -> StageService:
    raise AssertionError(f"an entry is asked to load {layers}")
