"""A thousand workers of one orchestrator, registered, announced and re-sharded: the command ``tessella-p2p sim thousand`` (shell).

Workers and orchestrator run the daemons' own code over the in-memory network in virtual time; engines are toys, and the DHT, gossip and
the entries are left out, so what is measured is the orchestrator's protocol. The report has the wall time of each part beside its
virtual time, which alone the seed decides.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import trio
from pydantic import SecretStr

from simulations.mesh import CLAIM_MB, SimulatedClock, node_key
from simulations.runner import calm_collector, quiet
from simulations.toy_model import CONTRACT, MODEL_ID, RECIPE, ROOT
from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.dht.service import Discovery
from tessella_p2p.ledger.blocking import in_place
from tessella_p2p.ledger.client import OrchestratorClient
from tessella_p2p.ledger.proof_log import ProofLog
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork
from tessella_p2p.net.virtual_clock import VirtualClock, run_deterministic
from tessella_p2p.orchestrator.member import MemberState
from tessella_p2p.orchestrator.service import Orchestrator
from tessella_p2p.orchestrator.terms import ANY_DEVICE, ModelTerms, ServedModel
from tessella_p2p.stages.hop_links import HopLinks
from tessella_p2p.stages.service import StageService
from tessella_p2p.stages.toy import ToyEngine, ToyModel
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import ClockSequencer
from tessella_p2p.worker.context import StageContext
from tessella_p2p.worker.proofs import ProofWriter
from tessella_p2p.worker.registration import Offer
from tessella_p2p.worker.service import Worker

LAYERS = 32
STAGES_BEFORE, STAGES_AFTER = 16, 32
"""Into how many stages the model is split: first, and after the operator asked for more and for a rebalance."""
MAX_WORKERS = 4000
_JOIN_S = 30.0
_ANNOUNCING_S = 60.0
_LOOK_S = 1.0
_DEADLINE_S = 6 * 3600.0
_MAP_BYTES = 64 << 20
_ADDRESS = "/ip4/10.255.0.1/tcp/9090"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the run: how long it took in virtual and in wall time, and what the orchestrator answered meanwhile, by kind."""

    name: str
    virtual_s: float
    wall_s: float
    answered: dict[str, int]


@dataclass(slots=True)
class ThousandReport:
    """What came of it.

    Attributes:
        workers, seed: of the run.
        parts: in their order.
        moves: ranges that the rebalance planned.
        moved: workers that serve another range afterwards.
        health: of the model, at the end.
        holes_s: virtual seconds in which a layer was without a healthy worker while ranges moved.
        failures: what a role logged as an error.
    """

    workers: int
    seed: int
    parts: list[Part] = field(default_factory=list)
    moves: int = 0
    moved: int = 0
    health: str = "incomplete"
    holes_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def content(self) -> bool:
        """Whether everybody was taken in, every planned move was made, and no layer was ever without a worker."""
        return self.health == "healthy" and self.moved == self.moves > 0 and not self.holes_s and not self.failures


def main(workers: int | None, seed: int | None, *, as_json: bool) -> int:
    """Run it, print the report, and give the exit status: 0 if everything came about.

    Raises:
        ConfigurationError: more workers than an orchestrator remembers, or fewer than there are stages.
    """
    report = run_thousand(
        1000 if workers is None else workers,
        1 if seed is None else seed,
        lambda part: print(line_of(part), file=sys.stderr, flush=True),  # noqa: T201 - a command's own output
    )
    if as_json:
        print(json.dumps({**asdict(report), "content": report.content}))  # noqa: T201 - a command's own output
        return 0 if report.content else 1
    lines = [f"{report.workers} workers of one orchestrator, seed {report.seed}", *map(line_of, report.parts)]
    lines.append(
        f"  {report.moved} of {report.moves} planned moves made; {report.holes_s:.0f} s with a hole; {report.health}"
    )
    lines += [f"  failure: {failure}" for failure in report.failures]
    print("\n".join(lines))  # noqa: T201 - a command's own output
    return 0 if report.content else 1


def line_of(part: Part) -> str:
    """A part, for people."""
    answered = ", ".join(f"{count} {kind}" for kind, count in sorted(part.answered.items()))
    return f"  {part.name}: {part.virtual_s:.0f} virtual s in {part.wall_s:.1f} wall s; answered: {answered}"


def _show_nothing(_part: Part) -> None:
    """The progress of a run that nobody watches."""


def run_thousand(workers: int, seed: int, show: Callable[[Part], None] = _show_nothing) -> ThousandReport:
    """Run it in virtual time.

    Args:
        show: called with each part once it is over.

    Raises:
        ConfigurationError: as `main`.
    """
    if not STAGES_AFTER <= workers <= MAX_WORKERS:
        raise ConfigurationError(f"--nodes {workers}: {STAGES_AFTER} to {MAX_WORKERS} workers are simulated here")
    clock = VirtualClock()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tessella-sim-") as folder, quiet(failures), calm_collector():
        fleet = _Fleet(workers, seed, Path(folder), clock, show)
        report = run_deterministic(fleet.run, seed, clock=clock)
    report.failures += failures
    return report


class _Fleet:
    """The workers and their orchestrator."""

    def __init__(
        self, workers: int, seed: int, folder: Path, clock: VirtualClock, show: Callable[[Part], None]
    ) -> None:
        self._show = show
        self._report = ThousandReport(workers, seed)
        self._folder = folder
        self._clock = clock
        self._fabric = MemoryFabric(random.Random(f"{seed} network"), clock)
        self._model = ToyModel(LAYERS)
        self._key = node_key(seed, "orchestrator", 0)
        self._token = str(node_key(seed, "operator", 0).peer_id)
        self._orchestrator: Orchestrator | None = None

    async def run(self) -> ThousandReport:
        """Every part, one after the other."""
        report = self._report
        with closing(LedgerStore(self._folder / "ledger", _MAP_BYTES, sync=False)) as store:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._serve, store)
                with self._part("registered"):
                    rng = random.Random(f"{report.seed} joins")
                    for index in range(report.workers):
                        nursery.start_soon(self._work, index, rng.uniform(0.0, _JOIN_S))
                    await self._until(lambda: self._healthy() == report.workers)
                with self._part("announced"):
                    await trio.sleep(_ANNOUNCING_S)
                before = self._ranges()
                with self._part("re-sharded"):
                    self._served().membership.core.min_stages = STAGES_AFTER  # as at a SIGHUP
                    plan = await self._rebalance()
                    after = before | {PeerId(move.peer_id): LayerRange(*move.after) for move in plan.moves}
                    await self._until(lambda: self._ranges() == after and self._healthy() == report.workers)
                report.moves = len(plan.moves)
                report.moved = sum(layers != before[peer] for peer, layers in self._ranges().items())
                report.health = self._served().membership.coverage(ROOT).health
                nursery.cancel_scope.cancel()
        return report

    # ---- The orchestrator ----

    async def _serve(self, store: LedgerStore, task_status: trio.TaskStatus[None]) -> None:
        terms = ModelTerms(total_layers=LAYERS, layer_mb=8, kv_mb=2, embedding_mb=8, head_mb=8)
        served = ServedModel(MODEL_ID, ROOT, CONTRACT, LAYERS, {(RECIPE, ANY_DEVICE): terms})
        async with MemoryNetwork.open(self._fabric, self._key.peer_id, _ADDRESS) as network:
            self._orchestrator = Orchestrator(
                network,
                self._key,
                SimulatedClock(self._clock),
                store,
                models=[served],
                recipe=RECIPE,
                sequencer=ClockSequencer(),
                min_stages=STAGES_BEFORE,
                run_blocking=in_place,
            )
            self._orchestrator.operating.admin_token = SecretStr(self._token)
            await self._orchestrator.run(task_status=task_status)

    def _served(self) -> Orchestrator:
        assert self._orchestrator is not None
        return self._orchestrator

    async def _rebalance(self) -> m.RebalancePlan:
        plan = await self._served().operate(self._token, m.Rebalance())
        assert isinstance(plan, m.RebalancePlan)
        return plan

    def _healthy(self) -> int:
        return self._served().membership.core.count()[MemberState.HEALTHY]

    def _ranges(self) -> dict[PeerId, LayerRange]:
        return {member.peer_id: member.layers for member in self._served().membership.members()}

    # ---- The workers ----

    async def _work(self, index: int, start_s: float) -> None:
        """One worker, from its start on."""
        await trio.sleep(start_s)
        seed, key = self._report.seed, node_key(self._report.seed, "node", index)
        rng = random.Random(f"{seed} node {index}")
        clock, orchestrator = SimulatedClock(self._clock), self._key.peer_id

        async def load(layers: LayerRange) -> StageService:
            await trio.sleep(1.0 + rng.random())
            return StageService(ToyEngine(self._model, layers, now=trio.current_time), inline=True)

        path = self._folder / f"node-{index}"
        with closing(ProofLog(path, _MAP_BYTES, sync=False)) as proof_log:
            async with MemoryNetwork.open(self._fabric, key.peer_id) as network, trio.open_nursery() as nursery:
                sequencer = ClockSequencer()
                client = OrchestratorClient(network, key, clock, sequencer, orchestrator, _ADDRESS)
                discovery = Discovery(network, clock, rng, pins=frozenset({orchestrator}), kademlia_enabled=False)
                links = HopLinks(network)
                proofs = ProofWriter(key, clock, sequencer, proof_log, client, in_place)
                offer = Offer(MODEL_ID, ROOT, CONTRACT, LAYERS, RECIPE, CLAIM_MB, "cpu")
                context = StageContext(network, key, clock, sequencer, links, proofs)
                await nursery.start(discovery.run)
                await nursery.start(links.run)
                await Worker(context, offer, client, discovery, proofs, load, rng.randbytes(16)).run()

    # ---- Time ----

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        virtual_s, wall_s = self._clock.now, time.perf_counter()
        outcomes = self._served().outcomes
        before = outcomes.copy()
        yield
        taken = Part(
            name=name,
            virtual_s=round(self._clock.now - virtual_s, 3),
            wall_s=round(time.perf_counter() - wall_s, 3),
            answered=dict(outcomes - before),
        )
        self._report.parts.append(taken)
        self._show(taken)

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Wait, looking once a virtual second; each second in which a layer is without a worker is noted, once there was none.

        Raises:
            trio.TooSlowError: it does not come about.
        """
        with trio.fail_after(_DEADLINE_S):
            while not reached():
                await trio.sleep(_LOOK_S)
                if self._report.parts and self._served().membership.coverage(ROOT).holes:
                    self._report.holes_s += _LOOK_S
