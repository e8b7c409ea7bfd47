"""The roles of one node, wired together over any network and clock: daemons and simulations run this same code (shell)."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import CHECKPOINT_S, HOP_TIMEOUT_S, OUTAGE_GRACE_S
from tessella_p2p.dht.service import Discovery
from tessella_p2p.entry.finding import ServedModel
from tessella_p2p.entry.plan import EntryContext
from tessella_p2p.entry.service import EntryService
from tessella_p2p.ledger.blocking import RunBlocking
from tessella_p2p.ledger.client import OrchestratorClient
from tessella_p2p.ledger.failover import FailoverClient
from tessella_p2p.ledger.failure_reports import FailureReports
from tessella_p2p.ledger.proof_log import ProofLog
from tessella_p2p.model.grammar import GrammarCompiler
from tessella_p2p.net.network import Network
from tessella_p2p.node.watchdog import LoopWatchdog
from tessella_p2p.stages.history import History
from tessella_p2p.stages.hop_links import HopLinks
from tessella_p2p.stages.service import StageService
from tessella_p2p.wire.envelope import Sequencer
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.worker.auditing import Auditor
from tessella_p2p.worker.context import StageContext
from tessella_p2p.worker.grammars import Grammars
from tessella_p2p.worker.guest_stage import GuestStage
from tessella_p2p.worker.history_server import HistoryServer
from tessella_p2p.worker.open_journal import OpenJournal
from tessella_p2p.worker.proofs import ProofWriter
from tessella_p2p.worker.registration import Offer
from tessella_p2p.worker.service import Worker


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a node finds outside itself; a daemon and a simulation differ in nothing else.

    Attributes:
        rng: decisions that need no secrecy (gossip fan-out, refresh).
        random_bytes: secrets: session ids and digest keys.
        run_blocking: how the disk is waited for.
        load: loads a range of layers, to serve it or to audit others; it must not block the event loop.
        opens: remembers over restarts which sessions were opened.
        grammars: compiles what answers have to follow; None refuses every grammar.
        watchdog: watches the event loop; None under virtual time, where nothing is late.
    """

    network: Network
    key: NodeKey
    clock: WallClock
    sequencer: Sequencer
    rng: random.Random
    random_bytes: Callable[[int], bytes]
    run_blocking: RunBlocking
    proof_log: ProofLog
    load: Callable[[LayerRange], Awaitable[StageService]]
    opens: OpenJournal | None = None
    grammars: GrammarCompiler | None = None
    watchdog: LoopWatchdog | None = None


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What a node is to be. ``offer`` is None for a node that is an entry only; ``max_input_tokens`` bounds a prompt."""

    model: ServedModel
    orchestrator: PeerId | None
    orchestrator_address: str | None
    offer: Offer | None
    bootstrap: Sequence[str] = ()
    kademlia_enabled: bool = True
    hop_timeout_s: float = HOP_TIMEOUT_S
    checkpoint_s: float = CHECKPOINT_S
    max_input_tokens: int | None = None
    outage_grace_s: float = OUTAGE_GRACE_S
    standbys: Sequence[tuple[PeerId, str | None]] = ()
    """Other orchestrators of the same federation, with their addresses, in order of preference."""
    prove_routes: bool = True
    """A route has to have answered lately to be offered."""


class NodeRoles:
    """Discovery, entry and worker of one node."""

    def __init__(self, plan: NodePlan, around: Surroundings) -> None:
        self._network = around.network
        self.watchdog = around.watchdog
        self.client = _client(plan, around)
        pins = frozenset(self.client.orchestrators if self.client is not None else ())
        self.discovery = Discovery(
            around.network,
            around.clock,
            around.rng,
            pins=pins,
            bootstrap=plan.bootstrap,
            kademlia_enabled=plan.kademlia_enabled,
            outage_grace_s=plan.outage_grace_s,
        )
        self._history = History()
        self._history_server = HistoryServer(
            around.network, around.key, around.clock, around.sequencer, self._history, pins
        )
        self._links = HopLinks(around.network, plan.hop_timeout_s)
        self._reports = FailureReports(self.client) if self.client is not None else None
        self.entry = EntryService(
            EntryContext(
                network=around.network,
                key=around.key,
                clock=around.clock,
                sequencer=around.sequencer,
                links=self._links,
                random_bytes=around.random_bytes,
                hop_timeout_s=plan.hop_timeout_s,
                checkpoint_s=plan.checkpoint_s,
                history=self._history,
            ),
            plan.model,
            self.discovery,
            self.client,
            max_input_tokens=plan.max_input_tokens,
            reports=self._reports,
            outage_grace_s=plan.outage_grace_s,
            prove_routes=plan.prove_routes,
        )
        self.proofs = ProofWriter(
            around.key, around.clock, around.sequencer, around.proof_log, self.client, around.run_blocking
        )
        self.worker: Worker | None = None
        self.auditor: Auditor | None = None
        self.guests: GuestStage | None = None
        if plan.offer is not None and self.client is not None:
            context = StageContext(
                network=around.network,
                key=around.key,
                clock=around.clock,
                sequencer=around.sequencer,
                links=self._links,
                proofs=self.proofs,
                is_known=lambda peer: self.discovery.view.stage_of(peer, around.clock.unix_ms()) is not None,
                hop_timeout_s=plan.hop_timeout_s,
                checkpoint_s=plan.checkpoint_s,
                reports=self._reports,
                history=self._history,
                opens=around.opens,
                grammars=Grammars(around.grammars, around.run_blocking),
            )
            guests = GuestStage(around.load, self._has_room)
            self.worker = Worker(
                context,
                plan.offer,
                self.client,
                self.discovery,
                self.proofs,
                guests.load_own,
                instance=around.random_bytes(16),
            )

            if plan.offer.canary == "off":  # a canary's engine is wrong on purpose
                hops = self.worker.hops
                self.guests = guests
                self.auditor = Auditor(context, self.client, lambda: hops.serving, around.random_bytes, guests)
                self.worker.orders.on_audit = self.auditor.take

    def _has_room(self) -> bool:
        return self.worker is not None and not self.worker.has_layers_beside

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where this node says it can be dialled."""
        return self._network.addresses

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run every role until cancelled. Started means: serving; it does not wait for a peer or the orchestrator.

        Cancelled, the roles end first, with their proofs written and the mesh told; what they need for that ends after them.
        """
        async with trio.open_nursery() as nursery:
            ground = await nursery.start(self._run_ground)
            try:
                async with trio.open_nursery() as roles:
                    if self._reports is not None:
                        roles.start_soon(self._reports.run)
                    await roles.start(self.entry.run)
                    if self.worker is not None:
                        await roles.start(self.worker.run)
                    if self.auditor is not None and self.guests is not None:
                        await roles.start(self.guests.run)
                        roles.start_soon(self.auditor.run)
                    task_status.started()
            finally:
                ground.cancel()

    async def _run_ground(self, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope(shield=True) as scope:
            async with trio.open_nursery() as nursery:
                if self.watchdog is not None:
                    nursery.start_soon(self.watchdog.run)
                await nursery.start(self.discovery.run)
                await nursery.start(self._links.run)
                await nursery.start(self._history_server.run)
                if self.client is not None:
                    nursery.start_soon(self.client.run)
                task_status.started(scope)


def _client(plan: NodePlan, around: Surroundings) -> FailoverClient | None:
    """What asks the orchestrators of a plan; None where it names none."""
    if plan.orchestrator is None:
        return None
    asked = ((plan.orchestrator, plan.orchestrator_address), *plan.standbys)
    return FailoverClient(
        [
            OrchestratorClient(around.network, around.key, around.clock, around.sequencer, orchestrator, address)
            for orchestrator, address in asked
        ]
    )
