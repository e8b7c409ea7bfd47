"""A simulated mesh: bootstrap nodes, one orchestrator and any number of nodes, each with the roles that a daemon has.

What differs from a daemon: the network is in memory, time is virtual, the engine is a toy, and the disk is not waited for. Every
random choice comes from one seeded generator per node, so a seed gives one run.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import trio

from simulations.observations import START_MS
from simulations.recording import RecordingNetwork
from simulations.toy_model import CONTRACT, MODEL_ID, RECIPE, ROOT, ToyCodec, toy_grammars, whole_model_tokens
from simulations.watching import Watch, WatchedLedger, WatchedOrchestrator
from tessella_p2p.base.errors import StorageError
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import MICRO_PER_CREDIT, OUTAGE_GRACE_S
from tessella_p2p.dht.service import Discovery
from tessella_p2p.entry.api import Finished, GenerateRequest
from tessella_p2p.entry.finding import ServedModel
from tessella_p2p.ledger.blocking import in_place
from tessella_p2p.ledger.mirrors import Mirrors
from tessella_p2p.ledger.proof_log import ProofLog
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork
from tessella_p2p.net.network import Network
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.node.assembly import NodePlan, NodeRoles, Surroundings
from tessella_p2p.orchestrator.auditing import AuditPolicy
from tessella_p2p.orchestrator.grants import GrantTerms
from tessella_p2p.orchestrator.service import Orchestrator
from tessella_p2p.orchestrator.terms import ANY_DEVICE, ModelTerms
from tessella_p2p.orchestrator.terms import ServedModel as OrchestratedModel
from tessella_p2p.stages.engine import StageEngine
from tessella_p2p.stages.service import StageService
from tessella_p2p.stages.toy import HIDDEN_SIZE, ToyEngine, ToyModel
from tessella_p2p.wire.envelope import ClockSequencer
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import CanaryMode
from tessella_p2p.worker.open_journal import OpenJournal
from tessella_p2p.worker.registration import Offer

T = TypeVar("T")

DEAD = "the process is dead"
"""What a task of a killed process hears when it writes; it may log it, and nobody minds."""
CLAIM_MB = 1024
TRUST_LIMIT = 1_000 * MICRO_PER_CREDIT
"""Micro-credits that either orchestrator counts of what the other one says."""
_MAP_BYTES = 64 << 20
_ROW_S = 0.002
"""Virtual seconds of compute for a turn's first row."""


class SimulatedClock:
    """The date under virtual time; a node's clock may be off by ``skew_ms``."""

    def __init__(self, clock: VirtualClock, skew_ms: int = 0) -> None:
        self._clock = clock
        self.skew_ms = skew_ms

    def unix_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return START_MS + int(self._clock.now * 1000) + self.skew_ms


@dataclass(frozen=True, slots=True)
class MeshShape:
    """What is simulated.

    Attributes:
        layers: of the toy model.
        min_stages: how many stages the model is split into at least.
        bootstraps: bootstrap nodes.
        dead_bootstraps: bootstrap addresses at which nobody answers; they stand before the others in every list.
        compute_s: virtual seconds of a turn's first row on every stage.
        turn_s: seconds of a turn of so many rows, where it is not ``compute_s`` and a tenth of it for each further row.
        kv_pages: of each stage's engine; None for as many as its sessions may need.
    """

    layers: int = 12
    min_stages: int = 3
    bootstraps: int = 1
    dead_bootstraps: int = 0
    compute_s: float = _ROW_S
    turn_s: Callable[[int], float] | None = None
    checkpoint_s: float = 5.0
    hop_timeout_s: float = 10.0
    kv_pages: int | None = None
    outage_grace_s: float = OUTAGE_GRACE_S
    record: bool = False
    """Keep what the orchestrator receives."""
    prove_routes: bool = False
    """Whether entries see for themselves that a route answers; else what stages say is enough, and no session is but a request's."""
    grant_terms: GrantTerms | None = None
    """Bounds on tickets; None for those that orchestrators have."""
    audits: AuditPolicy | None = None
    """How much of the settled work is recomputed; None audits nothing."""
    standby: bool = False
    """Whether there is a second orchestrator, federated with the first, that every node turns to where the first does not answer."""


def _honest(engine: ToyEngine) -> StageEngine:
    return engine


@dataclass(slots=True)
class SimulatedNode:
    """One node. ``roles``, ``proof_log`` and ``network`` are None while it is down; key and folder outlive its restarts."""

    index: int
    key: NodeKey
    folder: Path
    rng: random.Random
    roles: NodeRoles | None = None
    proof_log: ProofLog | None = None
    network: MemoryNetwork | None = None
    scope: trio.CancelScope | None = None
    starts: int = 0
    dead: bool = False
    """Its process was killed: nothing more of it is written."""
    engine: Callable[[ToyEngine], StageEngine] = _honest
    """What its stages really run; an honest node runs what it is given."""
    canary: CanaryMode = "off"
    clients: dict[trio.CancelScope, None] = field(default_factory=dict)
    """Who waits for answers of this process; they lose it with the process."""
    down: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.down.set()

    @property
    def peer_id(self) -> PeerId:
        """Its identity."""
        return self.key.peer_id


@dataclass(slots=True)
class SimulatedMesh:
    """A running simulation. Make it with `simulate`."""

    shape: MeshShape
    seed: int
    folder: Path
    clock: VirtualClock
    fabric: MemoryFabric
    nursery: trio.Nursery
    model: ToyModel
    store: LedgerStore
    orchestrator_key: NodeKey
    orchestrator: Orchestrator | None = None
    orchestrator_scope: trio.CancelScope | None = None
    standby_store: LedgerStore | None = None
    standby: Orchestrator | None = None
    orchestrator_received: list[bytes] = field(default_factory=list)
    """Every byte that the orchestrator received, where ``shape.record`` asks for it."""
    bootstrap_addresses: list[str] = field(default_factory=list)
    watch: Watch | None = None
    nodes: list[SimulatedNode] = field(default_factory=list)

    @property
    def orchestrator_address(self) -> str:
        """Where the orchestrator always is."""
        return "/ip4/10.255.0.1/tcp/9090"

    @property
    def standby_key(self) -> NodeKey:
        """The second orchestrator's identity."""
        return node_key(self.seed, "orchestrator", 1)

    @property
    def standby_address(self) -> str:
        """Where the second orchestrator always is."""
        return "/ip4/10.255.0.2/tcp/9090"

    def date(self) -> SimulatedClock:
        """A clock that is right."""
        return SimulatedClock(self.clock)

    # ---- starting and stopping ----

    async def start_bootstrap(self, index: int) -> None:
        """Start a bootstrap node."""
        key = node_key(self.seed, "bootstrap", index)
        address = f"/ip4/10.254.0.{index + 1}/tcp/9070"
        self.bootstrap_addresses.append(f"{address}/p2p/{key.peer_id}")
        await self.nursery.start(self._run_bootstrap, key, address, random.Random(f"{self.seed} bootstrap {index}"))

    async def _run_bootstrap(
        self, key: NodeKey, address: str, rng: random.Random, task_status: trio.TaskStatus[None]
    ) -> None:
        async with MemoryNetwork.open(self.fabric, key.peer_id, address) as network:
            discovery = Discovery(network, self.date(), rng, pins=frozenset())
            await discovery.run(task_status=task_status)

    async def start_orchestrator(self) -> None:
        """Start the orchestrator, or start it again on its ledger."""
        await self.nursery.start(self._run_orchestrator)

    async def _run_orchestrator(self, task_status: trio.TaskStatus[None]) -> None:
        key = self.orchestrator_key
        with trio.CancelScope() as scope:
            self.orchestrator_scope = scope
            async with MemoryNetwork.open(self.fabric, key.peer_id, self.orchestrator_address) as network:
                seen = RecordingNetwork(network, self.orchestrator_received) if self.shape.record else network
                other = (self.standby_key.peer_id, self.standby_address) if self.shape.standby else None
                mirrors = self._mirrors("federation", other)
                self.orchestrator = self._new_orchestrator(seen, key, self.store, mirrors, other)
                self.orchestrator.watch = self.watch
                try:
                    await self.orchestrator.run(task_status=task_status)
                finally:
                    if self.watch is not None:
                        self.watch.count(self.orchestrator.outcomes)
                    self.orchestrator = None
                    mirrors.close()

    async def start_standby(self) -> None:
        """Start the second orchestrator; it runs as long as the mesh."""
        await self.nursery.start(self._run_standby)

    async def _run_standby(self, task_status: trio.TaskStatus[None]) -> None:
        assert self.standby_store is not None
        key = self.standby_key
        async with MemoryNetwork.open(self.fabric, key.peer_id, self.standby_address) as network:
            other = (self.orchestrator_key.peer_id, self.orchestrator_address)
            mirrors = self._mirrors("standby federation", other)
            self.standby = self._new_orchestrator(network, key, self.standby_store, mirrors, other)
            try:
                await self.standby.run(task_status=task_status)
            finally:
                self.standby = None
                mirrors.close()

    def _mirrors(self, name: str, other: tuple[PeerId, str] | None) -> Mirrors:
        issuers = [] if other is None else [other[0]]
        return Mirrors(self.folder / name, issuers, TRUST_LIMIT, map_size_bytes=_MAP_BYTES, sync=False)

    def _new_orchestrator(
        self, network: Network, key: NodeKey, store: LedgerStore, mirrors: Mirrors, other: tuple[PeerId, str] | None
    ) -> WatchedOrchestrator:
        terms = ModelTerms(total_layers=self.shape.layers, layer_mb=8, kv_mb=2, embedding_mb=8, head_mb=8)
        served = OrchestratedModel(MODEL_ID, ROOT, CONTRACT, self.shape.layers, {(RECIPE, ANY_DEVICE): terms})
        return WatchedOrchestrator(
            network,
            key,
            self.date(),
            store,
            models=[served],
            recipe=RECIPE,
            sequencer=ClockSequencer(store.sequence_floor()),
            min_stages=self.shape.min_stages,
            grant_terms=self.shape.grant_terms,
            audits=self.shape.audits,
            rng=random.Random(f"{self.seed} audits"),
            mirrors=mirrors,
            federation={} if other is None else {other[0]: other[1]},
            run_blocking=in_place,
        )

    def crash_orchestrator(self) -> None:
        """End the orchestrator's process at once; its ledger stays."""
        self.fabric.crash(self.orchestrator_key.peer_id)
        if self.orchestrator_scope is not None:
            self.orchestrator_scope.cancel()

    def add_node(self) -> SimulatedNode:
        """One more node, not started yet."""
        index = len(self.nodes)
        node = SimulatedNode(
            index,
            node_key(self.seed, "node", index),
            self.folder / f"node-{index}",
            random.Random(f"{self.seed} node {index}"),
        )
        self.nodes.append(node)
        return node

    async def start_node(self, node: SimulatedNode) -> None:
        """Start a node, or start it again once its crashed process is gone."""
        await node.down.wait()
        await self.nursery.start(self._run_node, node)

    async def _run_node(self, node: SimulatedNode, task_status: trio.TaskStatus[None]) -> None:
        node.starts += 1
        node.dead, node.down = False, trio.Event()
        try:
            with (
                closing(ProofLog(node.folder / "proofs", _MAP_BYTES, sync=False)) as proof_log,
                closing(OpenJournal(node.folder)) as opens,
            ):
                async with MemoryNetwork.open(self.fabric, node.peer_id) as network:
                    with trio.CancelScope() as scope:  # as in a daemon, the network outlives the roles
                        node.scope, node.proof_log, node.network = scope, proof_log, network
                        node.roles = NodeRoles(self._plan(node), self._surroundings(node, network, proof_log, opens))
                        await node.roles.run(task_status=task_status)
        finally:
            node.roles = node.proof_log = node.network = None
        node.down.set()

    def crash_node(self, node: SimulatedNode) -> None:
        """End a node's process at once: nothing more is sent or written."""
        if node.scope is not None:
            node.dead = True
            self.fabric.crash(node.peer_id)
            self.stop_node(node)

    def stop_node(self, node: SimulatedNode) -> None:
        """Ask a node's process to end, as a daemon does when it is told to: it writes its proofs and says good-bye."""
        for client in node.clients:
            client.cancel()
        if node.scope is not None:
            node.scope.cancel()

    def _surroundings(
        self, node: SimulatedNode, network: MemoryNetwork, proof_log: ProofLog, opens: OpenJournal | None = None
    ) -> Surroundings:
        start = node.starts

        async def load(layers: LayerRange) -> StageService:
            def load_engine() -> StageEngine:
                engine = ToyEngine(self.model, layers, num_pages=self.shape.kv_pages, now=trio.current_time)
                watched = engine if self.watch is None else self.watch.engine(engine, node.peer_id, start)
                return node.engine(watched)

            await trio.sleep(1.0 + node.rng.random())
            first_s = self.shape.compute_s
            return StageService(
                load_engine(),
                load=load_engine,
                inline=True,
                compute_s=self.shape.turn_s or (lambda rows: first_s * (1 + (rows - 1) / 10)),
            )

        async def write(function: Callable[[], T], /) -> T:
            if node.dead:
                raise StorageError(DEAD)  # what its tasks still do after the kill leaves no trace
            return await in_place(function)

        return Surroundings(
            network=network if self.watch is None else self.watch.network(network),
            key=node.key,
            clock=self.date(),
            sequencer=ClockSequencer(proof_log.sequence_floor()),
            rng=node.rng,
            random_bytes=node.rng.randbytes,
            run_blocking=write,
            proof_log=proof_log,
            load=load,
            opens=opens,
            grammars=toy_grammars(self.model.vocabulary),
        )

    def _plan(self, node: SimulatedNode) -> NodePlan:
        return NodePlan(
            model=ServedModel(MODEL_ID, ToyCodec(self.model), ROOT, (RECIPE,), HIDDEN_SIZE),
            orchestrator=self.orchestrator_key.peer_id,
            orchestrator_address=self.orchestrator_address,
            standbys=((self.standby_key.peer_id, self.standby_address),) if self.shape.standby else (),
            offer=Offer(MODEL_ID, ROOT, CONTRACT, self.shape.layers, RECIPE, CLAIM_MB, "cpu", canary=node.canary),
            bootstrap=tuple(self.bootstrap_addresses),
            hop_timeout_s=self.shape.hop_timeout_s,
            checkpoint_s=self.shape.checkpoint_s,
            outage_grace_s=self.shape.outage_grace_s,
            prove_routes=self.shape.prove_routes,
        )

    # ---- use ----

    async def wait_listed(self, node: SimulatedNode, timeout_s: float = 120.0) -> None:
        """Wait until ``node``, as an entry, has a complete route. Raises `trio.TooSlowError`."""
        with trio.fail_after(timeout_s):
            while node.roles is None or not node.roles.entry.model_ids():  # noqa: ASYNC110 - stages also fade with time alone
                await trio.sleep(0.25)

    async def ask(self, node: SimulatedNode, prompt: Sequence[int], max_tokens: int) -> Finished:
        """One request through ``node``.

        Raises:
            TessellaError: as the entry raises it.
        """
        assert node.roles is not None
        request = GenerateRequest(model=MODEL_ID, prompt_ids=prompt, max_tokens=max_tokens)
        finished: Finished | None = None
        async with node.roles.entry.generate(request) as generation, aclosing(generation.events()) as events:
            async for event in events:
                if isinstance(event, Finished):
                    finished = event
        assert finished is not None, "a generation ends with Finished"
        return finished

    def expected(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """What the whole toy in one piece answers: the truth that every route has to give."""
        return whole_model_tokens(self.model, prompt, max_tokens)


def node_key(seed: int, role: str, index: int) -> NodeKey:
    """The key that the ``index``-th node of a role has under a seed."""
    return NodeKey(hashlib.sha256(f"{seed} {role} {index}".encode()).digest())


@asynccontextmanager
async def simulate(
    shape: MeshShape,
    seed: int,
    folder: Path,
    clock: VirtualClock,
    fabric: MemoryFabric | None = None,
    watch: Watch | None = None,
) -> AsyncIterator[SimulatedMesh]:
    """A mesh with its bootstrap nodes and orchestrator running, and no node yet. Run it under ``clock``.

    Args:
        folder: an empty folder for ledgers and proof logs.
        fabric: what lies between the nodes; log-normal latencies with a median of 50 ms by default.
        watch: looks into the mesh.
    """
    fabric = fabric or MemoryFabric(random.Random(f"{seed} network"), clock)
    with ExitStack() as stack:
        store = stack.enter_context(closing(WatchedLedger(folder / "ledger", _MAP_BYTES, sync=False)))
        store.watch = watch
        async with trio.open_nursery() as nursery:
            mesh = SimulatedMesh(
                shape=shape,
                seed=seed,
                folder=folder,
                clock=clock,
                fabric=fabric,
                nursery=nursery,
                model=ToyModel(shape.layers),
                store=store,
                orchestrator_key=node_key(seed, "orchestrator", 0),
                watch=watch,
            )
            for index in range(shape.dead_bootstraps):
                mesh.bootstrap_addresses.append(
                    f"/ip4/10.253.0.{index + 1}/tcp/9070/p2p/{node_key(seed, 'dead', index).peer_id}"
                )
            for index in range(shape.bootstraps):
                await mesh.start_bootstrap(index)
            await mesh.start_orchestrator()
            if shape.standby:
                mesh.standby_store = stack.enter_context(
                    closing(LedgerStore(folder / "standby ledger", _MAP_BYTES, sync=False))
                )
                await mesh.start_standby()
            yield mesh
            nursery.cancel_scope.cancel()
