"""The daemons' own roles without their orchestrator, for hours: who is answered, from what, and what is paid in the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from simulations.mesh import MeshShape, SimulatedMesh, SimulatedNode, simulate
from simulations.toy_model import MODEL_ID
from tessella_p2p.base.errors import OrchestratorUnreachable
from tessella_p2p.base.limits import (
    GRANT_TIMEOUT_S,
    MAX_HELD_TICKETS,
    MICRO_PER_LAYER_POSITION,
    OUTAGE_GRACE_S,
    TICKET_CHECK_S,
    TICKET_OPEN_S,
    TOPOLOGY_SILENCE_S,
)
from tessella_p2p.entry.api import Finished, GenerateRequest
from tessella_p2p.entry.service import EntryService
from tessella_p2p.net.virtual_clock import VirtualClock

PROMPT = list(range(40))
HOUR_S = 3600.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@asynccontextmanager
async def running_mesh(
    folder: Path, clock: VirtualClock, num_nodes: int = 3, outage_grace_s: float = OUTAGE_GRACE_S
) -> AsyncIterator[SimulatedMesh]:
    """Some nodes; the first has answered a request, and holds its tickets."""
    shape = MeshShape(min_stages=num_nodes, bootstraps=0, outage_grace_s=outage_grace_s)
    async with simulate(shape, seed=1, folder=folder, clock=clock) as mesh:
        for _ in range(num_nodes):
            await mesh.start_node(mesh.add_node())
        for node in mesh.nodes:
            await mesh.wait_listed(node)
        await mesh.ask(mesh.nodes[0], PROMPT, 1)
        await eventually(lambda: entry_of(mesh.nodes[0]).tickets_held == MAX_HELD_TICKETS)
        yield mesh


def entry_of(node: SimulatedNode) -> EntryService:
    assert node.roles is not None
    return node.roles.entry


async def pass_time(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.Event().wait()


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = trio.current_time() + timeout_s
    while not condition():
        assert trio.current_time() < deadline, "it did not become true"
        await pass_time(0.1)


async def timed(mesh: SimulatedMesh, node: SimulatedNode, max_tokens: int = 5) -> tuple[Finished, float]:
    """An answer, which has to be the whole model's, and how long it took."""
    began = trio.current_time()
    finished = await mesh.ask(node, PROMPT, max_tokens)
    assert finished.token_ids == mesh.expected(PROMPT, max_tokens)
    return finished, trio.current_time() - began


def earned(mesh: SimulatedMesh) -> int:
    return sum(mesh.store.account(node.peer_id).micro_credits for node in mesh.nodes)


def pending(mesh: SimulatedMesh) -> int:
    logs = [node.proof_log.counts() for node in mesh.nodes if node.proof_log is not None]
    return sum(log.pending + log.open + log.held for log in logs)


def worth(mesh: SimulatedMesh, *token_counts: int) -> int:
    """What such answers bring their stages; the last token of each is not computed."""
    positions = sum(len(PROMPT) + tokens - 1 for tokens in token_counts)
    return positions * mesh.shape.layers * MICRO_PER_LAYER_POSITION


async def test_held_tickets_pay_for_the_first_requests_of_an_outage_and_nobody_waits_for_the_orchestrator(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        entry = mesh.nodes[0]
        _, usual_s = await timed(mesh, entry)
        mesh.crash_orchestrator()
        await pass_time(2.0)
        names = set()
        for left in reversed(range(MAX_HELD_TICKETS)):
            finished, took_s = await timed(mesh, entry)
            assert finished.paid
            assert took_s <= usual_s
            assert entry_of(entry).tickets_held == left
            names.add(finished.request_id)
        assert len(names) == MAX_HELD_TICKETS, "each ticket is spent once"
        unpaid, took_s = await timed(mesh, entry)
        assert not unpaid.paid
        assert unpaid.tier == "Leech"
        assert took_s <= usual_s
        await mesh.start_orchestrator()
        await eventually(lambda: pending(mesh) == 0, timeout_s=120.0)
        assert earned(mesh) == worth(mesh, 1, *[5] * (1 + MAX_HELD_TICKETS))
        assert mesh.store.total() == 0
        await eventually(lambda: entry_of(entry).tickets_held == MAX_HELD_TICKETS)
        paid, _ = await timed(mesh, entry)
        assert paid.paid


async def test_an_outage_of_hours_costs_no_answer_and_no_proof_and_nothing_is_paid_twice(
    tmp_path: Path, clock: VirtualClock
) -> None:
    hours = 2
    async with running_mesh(tmp_path, clock, 2) as mesh:  # more of them would take the test minutes
        entry = mesh.nodes[0]
        mesh.crash_orchestrator()
        paid = [5, 7, 9]
        for tokens in paid:
            finished, _ = await timed(mesh, entry, tokens)
            assert finished.paid
        await eventually(lambda: pending(mesh) >= 3 * len(mesh.nodes))
        for _ in range(hours):
            await pass_time(HOUR_S)
            finished, _ = await timed(mesh, entry)
            assert not finished.paid, "held tickets are for an hour"
        assert hours * HOUR_S <= entry_of(entry).outage_s <= hours * HOUR_S + 60.0
        victim = mesh.nodes[1]
        mesh.crash_node(victim)
        await mesh.start_node(victim)
        assert pending(mesh) >= 3 * len(mesh.nodes), "proofs outlive the process"
        await mesh.start_orchestrator()
        await eventually(lambda: pending(mesh) == 0, timeout_s=300.0)
        assert earned(mesh) == worth(mesh, 1, *paid)
        assert mesh.store.total() == 0
        await eventually(lambda: entry_of(entry).outage_s == 0.0)
        await mesh.wait_listed(entry)
        again, _ = await timed(mesh, entry)
        assert again.paid
        await eventually(lambda: earned(mesh) == worth(mesh, 1, *paid, 5))


async def test_an_orchestrator_that_is_silent_rather_than_gone_costs_one_request_a_moment_and_no_other(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        entry = mesh.nodes[0]
        _, usual_s = await timed(mesh, entry)
        mesh.fabric.freeze(mesh.orchestrator_key.peer_id)
        _, first_s = await timed(mesh, entry)
        assert first_s <= usual_s + GRANT_TIMEOUT_S + 0.5
        for _ in range(3):
            _, took_s = await timed(mesh, entry)
            assert took_s <= usual_s
        mesh.fabric.thaw(mesh.orchestrator_key.peer_id)
        await eventually(lambda: entry_of(entry).outage_s == 0.0)
        finished, _ = await timed(mesh, entry)
        assert finished.paid


async def test_an_outage_is_noticed_without_a_request(tmp_path: Path, clock: VirtualClock) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        entry = mesh.nodes[0]
        _, usual_s = await timed(mesh, entry)
        mesh.fabric.freeze(mesh.orchestrator_key.peer_id)
        await pass_time(2 * TOPOLOGY_SILENCE_S + 10.0)
        assert entry_of(entry).outage_s > 0.0
        _, took_s = await timed(mesh, entry)
        assert took_s <= usual_s


async def test_after_the_grace_requests_are_refused_with_the_reason_and_served_again_when_it_is_back(
    tmp_path: Path, clock: VirtualClock
) -> None:
    grace_s = 0.5 * HOUR_S
    async with running_mesh(tmp_path, clock, 1, grace_s) as mesh:
        entry = mesh.nodes[0]
        mesh.crash_orchestrator()
        await pass_time(grace_s - 60.0)
        await timed(mesh, entry)
        await pass_time(120.0)
        began = trio.current_time()
        with pytest.raises(OrchestratorUnreachable, match="outage_grace_secs = 1800") as caught:
            async with entry_of(entry).generate(GenerateRequest(model=MODEL_ID, prompt_ids=PROMPT, max_tokens=1)):
                pass
        assert caught.value.http_status == 503
        assert trio.current_time() == began
        await mesh.start_orchestrator()
        await eventually(lambda: entry_of(entry).outage_s == 0.0)
        await mesh.wait_listed(entry)
        finished, _ = await timed(mesh, entry)
        assert finished.paid


async def test_tickets_are_replaced_in_time_so_that_an_outage_finds_them_good(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with running_mesh(tmp_path, clock, 1) as mesh:
        entry = mesh.nodes[0]
        await pass_time(TICKET_OPEN_S + TICKET_CHECK_S)
        assert mesh.orchestrator is not None
        granted = mesh.orchestrator.outcomes["session_grant"]
        assert granted <= 1 + 3 * MAX_HELD_TICKETS, "tickets are asked for when they are needed"
        mesh.crash_orchestrator()
        await pass_time(0.4 * HOUR_S)
        finished, _ = await timed(mesh, entry)
        assert finished.paid


async def test_entries_are_told_of_changes_and_nobody_asks_for_the_list(tmp_path: Path, clock: VirtualClock) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        assert mesh.orchestrator is not None
        assert mesh.orchestrator.topology.num_streams == len(mesh.nodes)
        assert not mesh.orchestrator.outcomes["list_stages"]


async def test_where_no_topology_stream_is_to_be_had_the_list_is_asked_for(tmp_path: Path, clock: VirtualClock) -> None:
    async with simulate(MeshShape(), seed=1, folder=tmp_path, clock=clock) as mesh:
        assert mesh.orchestrator is not None
        mesh.orchestrator.topology.max_streams = 0
        for _ in range(3):
            await mesh.start_node(mesh.add_node())
        await mesh.wait_listed(mesh.nodes[0])
        assert mesh.orchestrator.topology.num_streams == 0
        assert mesh.orchestrator.outcomes["list_stages"] > 0
        finished, _ = await timed(mesh, mesh.nodes[0])
        assert finished.paid
