"""Audits where every range is held once, in virtual time: workers with room load what they audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from simulations.mesh import MeshShape, SimulatedMesh, SimulatedNode, simulate
from tessella_p2p.audits.judging import FALSE_REPORT
from tessella_p2p.base.limits import GUEST_KEPT_S
from tessella_p2p.ledger.changes import VerdictReached
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import open_envelope
from tests.mesh.test_audits_in_mesh import (
    EVERYTHING,
    PROMPT,
    LyingEngine,
    audits,
    innocents_are_whole,
    layers_of,
    verdicts,
    verdicts_on,
)
from tests.mesh.test_simulated_mesh import all_settled, balance, eventually


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@asynccontextmanager
async def chain_of(
    num_workers: int,
    folder: Path,
    clock: VirtualClock,
    prepare: Callable[[list[SimulatedNode]], None] = lambda _: None,
) -> AsyncIterator[SimulatedMesh]:
    """So many workers, each with a range of its own."""
    shape = MeshShape(min_stages=num_workers, audits=EVERYTHING)
    async with simulate(shape, seed=1, folder=folder, clock=clock) as mesh:
        nodes = [mesh.add_node() for _ in range(num_workers)]
        prepare(nodes)
        for node in nodes:
            await mesh.start_node(node)
        for node in nodes:
            await mesh.wait_listed(node)
        assert len({layers_of(node) for node in nodes}) == num_workers
        yield mesh
        assert mesh.store.total() == 0


def guest_loads(mesh: SimulatedMesh) -> int:
    return sum(node.roles.guests.loads for node in mesh.nodes if node.roles is not None and node.roles.guests)


async def ask_and_settle(mesh: SimulatedMesh, entry: SimulatedNode, first_token: int = 0) -> None:
    before = audits(mesh)
    finished = await mesh.ask(entry, [first_token, *PROMPT], 20)
    assert finished.token_ids == mesh.expected([first_token, *PROMPT], 20)
    await eventually(lambda: all_settled(mesh) and audits(mesh) >= before + len(mesh.nodes), 600.0)


@pytest.mark.parametrize("num_workers", [3, 5])
async def test_an_honest_mesh_is_audited_and_has_no_verdict_against_anybody(
    tmp_path: Path, clock: VirtualClock, num_workers: int
) -> None:
    async with chain_of(num_workers, tmp_path, clock) as mesh:
        for number, node in enumerate(mesh.nodes):
            await ask_and_settle(mesh, node, number)
        found = verdicts(mesh)
        assert Counter(each.verdict for each in found) == {"passed": num_workers**2}
        assert all(each.auditor not in (None, each.peer) for each in found)
        assert mesh.orchestrator is not None
        assert mesh.orchestrator.outcomes["audit:no_auditor"] == 0
        assert innocents_are_whole(mesh)
        assert guest_loads(mesh) > 0
        await eventually(lambda: all(guest_of(node) is None for node in mesh.nodes), 2 * GUEST_KEPT_S)


def guest_of(node: SimulatedNode) -> object:
    assert node.roles is not None
    assert node.roles.guests is not None
    return node.roles.guests.layers


@pytest.mark.parametrize(("num_workers", "stage", "lie_share"), [(4, 1, 1.0), (5, 0, 0.5), (5, 2, 0.1), (5, 4, 0.5)])
async def test_a_liar_is_slashed_and_excluded_and_the_evidence_is_kept(
    tmp_path: Path, clock: VirtualClock, num_workers: int, stage: int, lie_share: float
) -> None:
    def prepare(nodes: list[SimulatedNode]) -> None:
        nodes[stage].engine = lambda engine: LyingEngine(engine, lie_share)  # as an auditor it is as wrong

    async with chain_of(num_workers, tmp_path, clock, prepare) as mesh:
        liar, entry = mesh.nodes[stage], mesh.nodes[(stage + 2) % num_workers]
        asked = 0
        while not mesh.store.is_blacklisted(liar.peer_id):
            before = audits(mesh)
            await mesh.ask(entry, [asked, *PROMPT], 10)
            asked += 1
            assert asked < 50, verdicts_on(mesh, liar)
            await eventually(lambda: audits(mesh) >= before + num_workers, 600.0)  # noqa: B023 - of this round
        assert balance(mesh, liar) < 0
        assert innocents_are_whole(mesh, liar)
        failed = [
            (entry.change, mesh.store.audit_evidence(sequence))
            for sequence, entry in mesh.store.journal(0, 10_000)
            if isinstance(entry.change, VerdictReached) and entry.change.verdict == "failed"
        ]
        assert len(failed) >= 2
        for verdict, kept in failed:
            assert verdict.peer == liar.peer_id
            assert kept is not None
            own = mesh.orchestrator_key.peer_id
            reports = [open_envelope(raw, m.REQUEST, now_ms=None, audience=own) for raw in kept.reports]
            assert all(isinstance(each.message(m.RequestBody).body, m.AuditReport) for each in reports)
            signers = {each.signer for each in reports}
            assert {verdict.auditor, verdict.adjudicator} - {None} <= signers
            proof = open_envelope(kept.proof, m.PROOF, now_ms=None, audience=own)
            assert verdict.code == FALSE_REPORT or proof.signer == liar.peer_id


async def test_of_three_workers_a_liar_is_one_word_against_another(tmp_path: Path, clock: VirtualClock) -> None:
    """Beside the worker and its downstream peer there is one auditor: nobody is punished on one word, and it is kept."""

    def prepare(nodes: list[SimulatedNode]) -> None:
        nodes[1].engine = LyingEngine

    async with chain_of(3, tmp_path, clock, prepare) as mesh:
        liar = mesh.nodes[1]
        before = audits(mesh)
        await mesh.ask(mesh.nodes[0], PROMPT, 10)
        await eventually(lambda: all_settled(mesh) and audits(mesh) >= before + 3, 600.0)
        assert verdicts_on(mesh, liar) == {"inconclusive": 1}
        assert innocents_are_whole(mesh)
        (evidence,) = [
            mesh.store.audit_evidence(sequence)
            for sequence, entry in mesh.store.journal()
            if isinstance(entry.change, VerdictReached) and entry.change.peer == liar.peer_id
        ]
        assert evidence is not None
        assert len(evidence.reports) == 1


async def test_audits_under_way_survive_a_crash_of_the_orchestrator(tmp_path: Path, clock: VirtualClock) -> None:
    async with chain_of(4, tmp_path, clock) as mesh:
        await mesh.ask(mesh.nodes[0], PROMPT, 20)
        await eventually(lambda: len(mesh.store.open_audits()) == 4, 600.0)
        mesh.crash_orchestrator()
        with trio.move_on_after(30):
            await trio.Event().wait()
        assert not verdicts(mesh)
        await mesh.start_orchestrator()
        await eventually(lambda: not mesh.store.open_audits(), 600.0)
        assert Counter(each.verdict for each in verdicts(mesh)) == {"passed": 4}
        assert innocents_are_whole(mesh)
