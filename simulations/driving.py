"""What is done to a running mesh (shell): nodes join, clients ask, faults strike, samples are taken, all by a plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count

import trio

from simulations.mesh import SimulatedMesh, SimulatedNode
from simulations.observations import (
    Absence,
    Asked,
    CoverageSample,
    LookedUp,
    NodeEnd,
    Observations,
    Outcome,
    Separation,
)
from simulations.plan import Fault, FaultKind, PlannedRequest
from simulations.toy_model import MODEL_ID, ROOT
from tessella_p2p.base.errors import TessellaError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.dht.keyspace import record_key
from tessella_p2p.entry.api import Delta, Finished, GenerateRequest
from tessella_p2p.model.coverage import Health

SAMPLE_S = 5.0
"""How often coverage is looked at."""
_VIEW_EVERY = 3
_HEALTHY: Health = "healthy"


@dataclass(slots=True)
class Driver:
    """Drives one mesh and notes what clients see and which faults were inflicted."""

    mesh: SimulatedMesh
    seen: Observations
    frozen: dict[int, None] = field(default_factory=dict)
    started: dict[int, None] = field(default_factory=dict)
    waiting: int = 0
    """Requests without an answer yet."""

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.mesh.clock.now

    def reachable(self) -> list[SimulatedNode]:
        """The nodes that a client could ask now."""
        return [
            node
            for node in self.mesh.nodes
            if node.index in self.started and node.roles is not None and node.index not in self.frozen
        ]

    # ---- Nodes and faults

    async def join(self, times: Sequence[float]) -> None:
        """Start every node at its time."""
        for at_s in times:
            await trio.sleep_until(at_s)
            await self._start(self.mesh.add_node())

    async def _start(self, node: SimulatedNode) -> None:
        await self.mesh.start_node(node)
        self.started[node.index] = None

    async def inflict(self, faults: Sequence[Fault]) -> None:
        """Let every fault happen at its time. A node that returns is waited for in a task of its own."""
        async with trio.open_nursery() as returns:
            for fault in faults:
                await trio.sleep_until(fault.at_s)
                nodes = [self.mesh.nodes[index] for index in fault.nodes]
                match fault.kind:
                    case FaultKind.CRASH:
                        for node in nodes:
                            self.seen.absences.append(Absence(node.peer_id, self.now))
                            self._take_down(node, self.mesh.crash_node)
                    case FaultKind.LEAVE:
                        for node in nodes:
                            self._take_down(node, self.mesh.stop_node)
                            returns.start_soon(self._note_end, node)
                    case FaultKind.RETURN:
                        for node in nodes:
                            returns.start_soon(self._return, node)
                    case _:
                        await self._inflict_on_network(fault, nodes)

    def _take_down(self, node: SimulatedNode, end: Callable[[SimulatedNode], None]) -> None:
        self.started.pop(node.index, None)
        end(node)

    async def _note_end(self, node: SimulatedNode) -> None:
        await node.down.wait()
        self.seen.absences.append(Absence(node.peer_id, self.now))

    async def _return(self, node: SimulatedNode) -> None:
        await node.down.wait()
        self._end_absence(node.peer_id)
        await self._start(node)

    def _end_absence(self, peer: PeerId) -> None:
        absences = self.seen.absences
        for index, absence in enumerate(absences):
            if absence.peer == peer and absence.until_s > self.now:
                absences[index] = replace(absence, until_s=self.now)

    async def _inflict_on_network(self, fault: Fault, nodes: Sequence[SimulatedNode]) -> None:
        fabric, seen, peers = self.mesh.fabric, self.seen, [node.peer_id for node in nodes]
        match fault.kind:
            case FaultKind.FREEZE:
                for node in nodes:
                    self.frozen[node.index] = None
                    seen.absences.append(Absence(node.peer_id, self.now))
                    fabric.freeze(node.peer_id)
            case FaultKind.THAW:
                for node in nodes:
                    self.frozen.pop(node.index, None)
                    self._end_absence(node.peer_id)
                    fabric.thaw(node.peer_id)
            case FaultKind.CUT:
                seen.separations.append(Separation(frozenset(peers), self.now))
                fabric.partition(dict.fromkeys(peers, 1))
            case FaultKind.HEAL:
                seen.separations[-1] = replace(seen.separations[-1], until_s=self.now)
                fabric.heal()
            case FaultKind.ORCHESTRATOR_DOWN:
                seen.outages.append(Absence(seen.orchestrator, self.now))
                self.mesh.crash_orchestrator()
            case FaultKind.ORCHESTRATOR_UP:
                await self.mesh.start_orchestrator()
                seen.outages[-1] = replace(seen.outages[-1], until_s=self.now)

    # ---- Clients

    async def ask(self, requests: Sequence[PlannedRequest]) -> None:
        """Ask everything at its time; every request has a client of its own."""
        async with trio.open_nursery() as clients:
            for planned in requests:
                await trio.sleep_until(planned.at_s)
                nodes = self.reachable()
                if nodes:
                    clients.start_soon(self._client, planned, nodes[int(planned.entry_draw * len(nodes))])

    async def _client(self, planned: PlannedRequest, node: SimulatedNode) -> None:
        self.waiting += 1
        client = _Client(planned, node)
        try:
            with trio.CancelScope() as connection:
                node.clients[connection] = None
                await client.run()
        finally:
            self.waiting -= 1
            node.clients.pop(connection, None)
        outcome: Outcome = "entry lost" if connection.cancelled_caught else client.outcome
        finished = client.finished
        self.seen.asked.append(
            Asked(
                number=planned.number,
                at_s=planned.at_s,
                entry=node.peer_id,
                prompt=planned.prompt,
                max_tokens=planned.max_tokens,
                temperature=planned.temperature,
                seed=planned.seed,
                outcome=outcome,
                tokens=tuple(client.tokens),
                done_s=self.now,
                code=client.code,
                token_at_s=tuple(client.token_at_s),
                paid=finished is not None and finished.paid,
            )
        )

    # ---- Looking

    async def look_up(self, per_s: float, rng: random.Random) -> None:
        """Look the model's records up in the DHT, from a random node each time, for ever."""
        async with trio.open_nursery() as lookups:
            while per_s:
                await trio.sleep(rng.expovariate(per_s))
                nodes = self.reachable()
                if nodes:
                    lookups.start_soon(self._look_up, rng.choice(nodes))

    async def _look_up(self, node: SimulatedNode) -> None:
        assert node.roles is not None
        kad = node.roles.discovery.kad
        assert kad is not None, "simulated nodes have a Kademlia"
        began_s = self.now
        with trio.CancelScope() as connection:
            node.clients[connection] = None
            outcome = await kad.get(record_key(ROOT))
            self.seen.lookups.append(
                LookedUp(began_s, node.peer_id, len(outcome.values), outcome.hops, self.now - began_s)
            )
        node.clients.pop(connection, None)

    async def sample(self) -> None:
        """Note coverage every few seconds, and views less often, for ever."""
        for number in count():
            await trio.sleep(SAMPLE_S)
            self.sample_coverage()
            if number % _VIEW_EVERY == 0:
                self.sample_views()

    def sample_coverage(self) -> None:
        """Who has a route now."""
        orchestrator = self.mesh.orchestrator
        whole = None if orchestrator is None else orchestrator.membership.coverage(ROOT).health == _HEALTHY
        entries = [(node.peer_id, node.roles.entry) for node in self.reachable() if node.roles is not None]
        without = tuple(peer for peer, entry in entries if not entry.model_ids())
        self.seen.coverage.append(CoverageSample(self.now, whole, len(entries), without))

    def sample_views(self) -> None:
        """Whom the nodes hold for usable now."""
        now_ms = self.mesh.date().unix_ms()
        for node in self.reachable():
            assert node.roles is not None
            usable = self.seen.views.setdefault(node.peer_id, {})
            for stage in node.roles.discovery.view.stages(ROOT, None, now_ms):
                usable[stage.peer_id] = None

    def note_end(self) -> None:
        """What everybody still holds."""
        for node in self.mesh.nodes:
            worker = node.roles.worker if node.roles is not None else None
            stage = worker.stage if worker is not None else None
            self.seen.ends.append(
                NodeEnd(
                    peer=node.peer_id,
                    up=worker is not None,
                    kv_sessions=stage.num_sessions if stage is not None else 0,
                    hop_sessions=worker.hops.open_sessions if worker is not None else 0,
                    proofs=node.proof_log.counts() if node.proof_log is not None else None,
                )
            )
        since = 0
        while page := self.mesh.store.journal(since):
            self.seen.journal += [entry for _, entry in page]
            since = page[-1][0]
        after = ""
        while accounts := self.mesh.store.accounts(after):
            self.seen.accounts += accounts
            after = accounts[-1].name
        self.seen.counts["messages"] = self.mesh.fabric.num_messages


class _Client:
    """One client of one request: asks, reads, perhaps leaves."""

    def __init__(self, planned: PlannedRequest, node: SimulatedNode) -> None:
        self._planned = planned
        self._node = node
        self.tokens: list[int] = []
        self.token_at_s: list[float] = []
        self.finished: Finished | None = None
        self.code = ""
        self.outcome: Outcome = "abandoned"

    async def run(self) -> None:
        """Ask and read to the end; never raises a `TessellaError`."""
        planned, roles = self._planned, self._node.roles
        assert roles is not None
        request = GenerateRequest(
            model=MODEL_ID,
            prompt_ids=planned.prompt,
            max_tokens=planned.max_tokens,
            temperature=planned.temperature,
            seed=planned.seed,
        )
        try:
            async with roles.entry.generate(request) as generation, aclosing(generation.events()) as events:
                if planned.leaves_after == 0:
                    return
                async for event in events:
                    if isinstance(event, Delta):
                        self.tokens += event.token_ids
                        self.token_at_s += [trio.current_time()] * len(event.token_ids)
                        if planned.leaves_after is not None and len(self.tokens) >= planned.leaves_after:
                            return
                    else:
                        self.finished, self.outcome = event, "answered"
        except TessellaError as error:
            self.outcome, self.code = "refused", error.code
