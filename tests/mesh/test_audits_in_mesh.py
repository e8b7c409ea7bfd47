"""Audits in a whole mesh, in virtual time: the daemons' own roles, with workers, auditors and neighbours that lie."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from simulations.mesh import MeshShape, SimulatedMesh, SimulatedNode, simulate
from simulations.toy_model import ROOT
from tessella_p2p.audits.judging import FALSE_REPORT, HISTORY_WITHHELD
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import LEASE_TTL_S
from tessella_p2p.dht.stage_records import signed_stage
from tessella_p2p.ledger.changes import VerdictReached
from tessella_p2p.net.network import Stream
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.orchestrator.auditing import AuditPolicy
from tessella_p2p.stages.canary import CanaryEngine
from tessella_p2p.stages.engine import Sampled, StepAnswer, StepInput, StepOutput
from tessella_p2p.stages.toy import ToyEngine
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import seal
from tests.mesh.test_simulated_mesh import all_settled, balance, eventually, leaks, toy_rows

EVERYTHING = AuditPolicy(share=1.0)
PROMPT = list(range(40))
STAGES = 3


class LyingEngine(ToyEngine):
    """Changes one byte of an answer in so many of its steps."""

    def __init__(self, engine: ToyEngine, lie_share: float = 1.0, seed: int = 1) -> None:
        super().__init__(engine.model, engine.layers, max_positions=engine.max_positions)
        self._lie_share = lie_share
        self._rng = random.Random(seed)

    def forward(self, batch: Sequence[StepInput]) -> list[StepAnswer]:
        return [self._changed(answer) for answer in super().forward(batch)]

    def _changed(self, answer: StepAnswer) -> StepAnswer:
        if self._rng.random() >= self._lie_share:
            return answer
        if isinstance(answer, Sampled):
            return Sampled((answer.token_id + 1) % self.vocabulary, answer.logprob, answer.top)
        if isinstance(answer, StepOutput):
            body = bytearray(answer.body)
            body[-1] ^= 1
            return StepOutput(bytes(body), answer.dtype)
        return answer


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def layers_of(node: SimulatedNode) -> LayerRange:
    assert node.roles is not None
    assert node.roles.worker is not None
    assert node.roles.worker.assignment is not None
    return node.roles.worker.assignment.layers


@asynccontextmanager
async def audited_mesh(
    folder: Path,
    clock: VirtualClock,
    num_replicas: int,
    prepare: Callable[[SimulatedMesh, list[SimulatedNode]], None] = lambda _, __: None,
    *,
    record: bool = False,
) -> AsyncIterator[SimulatedMesh]:
    """Three stages of so many replicas, and an entry that serves one of them too: ``nodes[0]``."""
    shape = MeshShape(min_stages=STAGES, audits=EVERYTHING, record=record)
    async with simulate(shape, seed=1, folder=folder, clock=clock) as mesh:
        nodes = [mesh.add_node() for _ in range(STAGES * num_replicas)]
        prepare(mesh, nodes)
        for node in nodes:
            await mesh.start_node(node)
        for node in nodes:
            await mesh.wait_listed(node)
        yield mesh
        assert mesh.store.total() == 0


def verdicts(mesh: SimulatedMesh) -> list[VerdictReached]:
    changes, since = [], 0
    while page := mesh.store.journal(since):
        changes += [entry.change for _, entry in page]
        since = page[-1][0]
    return [change for change in changes if isinstance(change, VerdictReached)]


def verdicts_on(mesh: SimulatedMesh, node: SimulatedNode) -> Counter[str]:
    return Counter(each.verdict for each in verdicts(mesh) if each.peer == node.peer_id)


def audits(mesh: SimulatedMesh) -> int:
    assert mesh.orchestrator is not None
    outcomes = mesh.orchestrator.outcomes
    return sum(outcomes[f"audit:{word}"] for word in ("passed", "failed", "copied", "inconclusive"))


async def ask_and_settle(mesh: SimulatedMesh, *entries: SimulatedNode, max_tokens: int = 20) -> None:
    """One request through each, until every proof of them is settled and audited."""
    before = audits(mesh)
    for number, entry in enumerate(entries):
        await mesh.ask(entry, [number, *PROMPT], max_tokens)
    await eventually(lambda: all_settled(mesh) and audits(mesh) >= before + STAGES * len(entries), 600.0)


async def until_blacklisted(mesh: SimulatedMesh, node: SimulatedNode, entry: SimulatedNode) -> None:
    for number in range(200):
        if mesh.store.is_blacklisted(node.peer_id):
            return
        await mesh.ask(entry, [number, *PROMPT], 10)
        with trio.move_on_after(5):  # for proofs and audits
            await trio.Event().wait()
    raise AssertionError(f"{node.peer_id} was not caught: {verdicts_on(mesh, node)}")


def innocents_are_whole(mesh: SimulatedMesh, *guilty: SimulatedNode) -> bool:
    now_ms = mesh.date().unix_ms()
    honest = [node for node in mesh.nodes if node not in guilty]
    reputations = [mesh.store.reputation(node.peer_id, now_ms) for node in honest]
    return (
        all(each.slashes == each.audits_failed == 0 for each in reputations)
        and not any(mesh.store.is_blacklisted(node.peer_id) for node in honest)
        and all(balance(mesh, node) >= 0 for node in honest)
    )


async def test_an_honest_mesh_has_no_verdict_against_anybody(tmp_path: Path, clock: VirtualClock) -> None:
    async with audited_mesh(tmp_path, clock, 3) as mesh:
        await ask_and_settle(mesh, *mesh.nodes)
        found = verdicts(mesh)
        assert Counter(each.verdict for each in found) == {"passed": STAGES * len(mesh.nodes)}
        assert innocents_are_whole(mesh)


@pytest.mark.parametrize(("stage", "lie_share"), [(0, 1.0), (1, 0.1), (2, 0.5)])
async def test_a_liar_is_slashed_and_excluded(
    tmp_path: Path, clock: VirtualClock, stage: int, lie_share: float
) -> None:
    def prepare(_: SimulatedMesh, nodes: list[SimulatedNode]) -> None:
        nodes[stage].engine = lambda engine: LyingEngine(engine, lie_share)

    async with audited_mesh(tmp_path, clock, 3, prepare) as mesh:
        liar = mesh.nodes[stage]
        entry = next(node for node in reversed(mesh.nodes) if node is not liar)
        await until_blacklisted(mesh, liar, entry)
        assert balance(mesh, liar) < 0
        assert verdicts_on(mesh, liar)["failed"] >= 2  # others may have been under way
        await eventually(lambda: liar.peer_id not in listed(mesh))
        assert innocents_are_whole(mesh, liar)


async def test_within_seconds_no_new_session_goes_to_a_liar_whatever_it_goes_on_saying(
    tmp_path: Path, clock: VirtualClock
) -> None:
    def prepare(_: SimulatedMesh, nodes: list[SimulatedNode]) -> None:
        nodes[1].engine = LyingEngine

    async with audited_mesh(tmp_path, clock, 3, prepare) as mesh:
        liar, entry = mesh.nodes[1], mesh.nodes[0]
        assert liar.roles is not None
        assert liar.roles.worker is not None
        (record,) = [raw for raw in records(mesh) if signed_stage(raw).envelope.signer == liar.peer_id]
        number = 0
        while not mesh.store.is_blacklisted(liar.peer_id):
            number += 1
            await mesh.ask(entry, [number, *PROMPT], 10)
        at = clock.now
        await eventually(lambda: not any(sees(mesh, node, liar) for node in mesh.nodes if node is not liar), 2.0)
        served = liar.roles.worker.hops.sessions_served + liar.roles.worker.hops.open_sessions
        for node in mesh.nodes:
            assert node.roles is not None
            node.roles.discovery.observe([stated_again(mesh, liar, record)], "gossip")
        for number in range(10):
            await mesh.ask(entry, [number, *PROMPT], 10)
        assert clock.now - at < LEASE_TTL_S / 2, "its lease is in force all the while"
        assert not any(sees(mesh, node, liar) for node in mesh.nodes if node is not liar)
        assert liar.roles.worker.hops.sessions_served + liar.roles.worker.hops.open_sessions == served
        assert innocents_are_whole(mesh, liar)


def sees(mesh: SimulatedMesh, node: SimulatedNode, other: SimulatedNode) -> bool:
    """Whether a node would choose the other one for a route."""
    assert node.roles is not None
    return node.roles.discovery.view.stage_of(other.peer_id, mesh.date().unix_ms()) is not None


def stated_again(mesh: SimulatedMesh, node: SimulatedNode, raw: bytes) -> bytes:
    """A worker's record, signed anew."""
    now_ms = mesh.date().unix_ms()
    return seal(node.key, m.STAGE_RECORD, signed_stage(raw).record, sequence=2**50, now_ms=now_ms, ttl_ms=60_000)


def records(mesh: SimulatedMesh) -> tuple[bytes, ...]:
    """What the orchestrator lists."""
    assert mesh.orchestrator is not None
    return mesh.orchestrator.membership.stages(ROOT).records


def listed(mesh: SimulatedMesh) -> set[str]:
    """Whom the orchestrator lists."""
    return {signed_stage(record).envelope.signer for record in records(mesh)}


async def test_a_lying_auditor_is_the_one_who_is_slashed(tmp_path: Path, clock: VirtualClock) -> None:
    async with audited_mesh(tmp_path, clock, 4) as mesh:
        liar = mesh.nodes[-1]
        lie_in_audits(mesh, liar)
        entry = mesh.nodes[0]
        await until_blacklisted(mesh, liar, entry)
        false = [each for each in verdicts(mesh) if each.code == FALSE_REPORT]
        assert {each.peer for each in false} == {liar.peer_id}
        assert all(liar.peer_id not in (each.auditor, each.adjudicator) for each in false)
        assert innocents_are_whole(mesh, liar)


def lie_in_audits(mesh: SimulatedMesh, node: SimulatedNode) -> None:
    """Let an honest worker answer every audit order with a digest that it made up."""
    assert node.roles is not None
    assert node.roles.worker is not None
    assert node.roles.client is not None
    client = node.roles.client

    async def report(order: m.AuditOrder) -> None:
        await client.call(
            m.AuditReport(audit_id=order.audit_id, outcome="computed", output_digest=node.rng.randbytes(32))
        )

    async def take(order: m.AuditOrder, _: bytes) -> None:
        mesh.nursery.start_soon(report, order)

    node.roles.worker.orders.on_audit = take


async def test_whoever_answers_as_a_scale_canary_does_has_copied(tmp_path: Path, clock: VirtualClock) -> None:
    async with audited_mesh(tmp_path, clock, 3) as mesh:
        canary = mesh.add_node()
        canary.canary = "scale"
        canary.engine = lambda engine: CanaryEngine(engine, "scale", canary.peer_id)
        await mesh.start_node(canary)
        await eventually(lambda: serves(canary))
        copier = next(node for node in mesh.nodes[1:] if layers_of(node) == layers_of(canary))
        mesh.stop_node(copier)
        copier.engine = lambda engine: CanaryEngine(engine, "scale", canary.peer_id)
        await mesh.start_node(copier)
        await eventually(lambda: serves(copier))
        assert layers_of(copier) == layers_of(canary)
        await until_blacklisted(mesh, copier, mesh.nodes[0])
        as_worker = [each for each in verdicts(mesh) if each.peer == copier.peer_id and each.code != FALSE_REPORT]
        assert {each.verdict for each in as_worker} == {"copied"}  # as an auditor it is as wrong, and that is no copy
        assert canary.peer_id in next(each.reason for each in verdicts(mesh) if each.verdict == "copied")
        assert balance(mesh, canary) == 0
        assert innocents_are_whole(mesh, copier)


def serves(node: SimulatedNode) -> bool:
    return node.roles is not None and node.roles.worker is not None and node.roles.worker.stage is not None


async def test_a_withholding_upstream_makes_it_inconclusive_and_is_counted(tmp_path: Path, clock: VirtualClock) -> None:
    async def refuse(stream: Stream) -> None:
        await stream.reset()

    async with audited_mesh(tmp_path, clock, 3) as mesh:
        heads = [node for node in mesh.nodes if layers_of(node).start == 0]
        middles = [node for node in mesh.nodes if layers_of(node).start == 4]
        tails = [node for node in mesh.nodes if layers_of(node).start == 8]
        for head in heads:
            assert head.network is not None
            head.network.serve(protocols.HISTORY, refuse)
        await ask_and_settle(mesh, tails[0], tails[1], middles[0])
        of_heads, of_middles, of_tails = (
            sum((verdicts_on(mesh, node) for node in nodes), Counter()) for nodes in (heads, middles, tails)
        )
        assert of_heads == {"passed": 3, "inconclusive": 3}  # the entries show what they sent
        assert of_middles == {"inconclusive": 3}
        assert of_tails == {"passed": 3}
        against = [each for each in verdicts(mesh) if each.code == HISTORY_WITHHELD]
        assert {each.peer for each in against} <= {head.peer_id for head in heads}
        assert innocents_are_whole(mesh)


async def test_with_audits_too_the_orchestrator_receives_no_token_no_tensor_and_no_unkeyed_digest(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with audited_mesh(tmp_path, clock, 2, record=True) as mesh:
        prompt = [977, 3, 641, 12, 809, 333, 54, 721] * 5
        finished = await mesh.ask(mesh.nodes[0], prompt, 20)
        await eventually(lambda: all_settled(mesh) and audits(mesh) >= STAGES, 600.0)
        assert {each.verdict for each in verdicts(mesh)} == {"passed"}
        received = b"".join(mesh.orchestrator_received)
        ids = [*prompt, *finished.token_ids]
        assert b"audit_report" in received
        assert not leaks(received, ids, toy_rows(mesh.shape.layers, ids))
