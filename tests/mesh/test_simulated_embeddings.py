"""Vectors in a whole mesh, in virtual time: the same over any split and reroute, paid like any work, and audited."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from simulations.mesh import SimulatedMesh, SimulatedNode
from simulations.toy_model import MODEL_ID, whole_model_vector
from tessella_p2p.base.errors import InvalidRequest, PromptTooLong, TessellaError, UnknownModel
from tessella_p2p.base.limits import MAX_EMBEDDING_INPUTS, MAX_EMBEDDINGS_AT_ONCE, MICRO_PER_LAYER_POSITION
from tessella_p2p.entry.api import Embedded, EmbedRequest
from tessella_p2p.net.virtual_clock import VirtualClock
from tests.mesh.test_audits_in_mesh import STAGES, LyingEngine, audited_mesh, audits, innocents_are_whole, verdicts
from tests.mesh.test_simulated_mesh import (
    PROMPT,
    all_settled,
    balance,
    eventually,
    held_sessions,
    is_tail,
    layers_of,
    ready_peers,
    running_mesh,
)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def embed(node: SimulatedNode, *inputs: str | list[int]) -> tuple[Embedded, ...]:
    assert node.roles is not None
    return await node.roles.entry.embed(EmbedRequest(MODEL_ID, inputs))


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
async def test_a_vector_is_that_of_the_whole_model_over_any_number_of_stages(
    tmp_path: Path, clock: VirtualClock, num_nodes: int
) -> None:
    async with running_mesh(tmp_path, clock, num_nodes, min_stages=num_nodes) as mesh:
        long = [token % mesh.model.vocabulary for token in range(300)]  # three chunks
        found = await embed(mesh.nodes[-1], PROMPT, long, "text")
        for each, ids in zip(found, (PROMPT, long, list(map(ord, "text"))), strict=True):
            assert each.vector == whole_model_vector(mesh.model, ids)
            assert each.num_tokens == len(ids)
            assert len(each.route) == num_nodes
        assert len({each.request_id for each in found}) == 3
        await eventually(lambda: held_sessions(mesh) == 0)


async def test_what_was_sent_before_changes_no_vector(tmp_path: Path, clock: VirtualClock) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        ids = [7] * 200  # more than a page, so that the first stages' caches have it the second time
        (first,) = await embed(mesh.nodes[0], ids)
        await mesh.ask(mesh.nodes[0], ids, 3)
        (again,) = await embed(mesh.nodes[0], ids)
        assert first.vector == again.vector == whole_model_vector(mesh.model, ids)


async def test_many_inputs_keep_their_order_and_a_bound(tmp_path: Path, clock: VirtualClock) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        inputs = [[index, *PROMPT[: 1 + index % 5]] for index in range(3 * MAX_EMBEDDINGS_AT_ONCE)]
        roles = mesh.nodes[0].roles
        assert roles is not None
        found: list[Embedded] = []
        most = 0

        async def ask() -> None:
            found.extend(await embed(mesh.nodes[0], *inputs))
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while True:
                most = max(most, len(roles.entry.requests.in_flight()))
                with trio.move_on_after(0.01):
                    await trio.Event().wait()
        assert [each.vector for each in found] == [whole_model_vector(mesh.model, ids) for ids in inputs]
        assert most == MAX_EMBEDDINGS_AT_ONCE


async def test_each_position_of_a_vector_is_paid_once(tmp_path: Path, clock: VirtualClock) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        await embed(mesh.nodes[0], PROMPT)
        await eventually(lambda: all_settled(mesh) and all(balance(mesh, node) for node in mesh.nodes))
        for node in mesh.nodes:
            assert balance(mesh, node) == layers_of(mesh, node) * len(PROMPT) * MICRO_PER_LAYER_POSITION
        assert mesh.store.total() == 0


async def test_a_stage_that_dies_is_replaced_and_the_vector_is_the_same(tmp_path: Path, clock: VirtualClock) -> None:
    async with running_mesh(tmp_path, clock, num_nodes=6) as mesh:
        await eventually(lambda: len(ready_peers(mesh)) == 6)
        entry, long = mesh.nodes[0], [5] * 1000
        found: list[Embedded] = []

        async def ask() -> None:
            found.extend(await embed(entry, long))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await eventually(lambda: any(busy(mesh, entry)))
            victim = next(iter(busy(mesh, entry)))
            mesh.crash_node(victim)
        assert found[0].vector == whole_model_vector(mesh.model, long)
        assert victim.peer_id not in {hop.peer_id for hop in found[0].route}


def busy(mesh: SimulatedMesh, entry: SimulatedNode) -> list[SimulatedNode]:
    return [
        node
        for node in mesh.nodes
        if node is not entry and node.roles and node.roles.worker and node.roles.worker.hops.open_sessions
    ]


async def test_a_client_that_leaves_frees_every_session(tmp_path: Path, clock: VirtualClock) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(embed, mesh.nodes[0], *([[index] * 200 for index in range(8)]))
            await eventually(lambda: held_sessions(mesh) > 0)
            nursery.cancel_scope.cancel()
        await eventually(lambda: held_sessions(mesh) == 0)


@pytest.mark.parametrize(
    ("inputs", "error", "param"),
    [
        ((), InvalidRequest, "input"),
        (([],), InvalidRequest, "input"),
        (("",), InvalidRequest, "input"),
        (("fine", [-1]), InvalidRequest, "input"),
        (([1 << 20],), InvalidRequest, "input"),
        ((("x",) * (MAX_EMBEDDING_INPUTS + 1)), InvalidRequest, "input"),
        (([1] * 100_000,), PromptTooLong, None),
    ],
)
async def test_bad_inputs_are_refused_before_any_peer_works(
    tmp_path: Path,
    clock: VirtualClock,
    inputs: tuple[str | list[int], ...],
    error: type[TessellaError],
    param: str | None,
) -> None:
    async with running_mesh(tmp_path, clock) as mesh:
        with pytest.raises(error) as caught:
            await embed(mesh.nodes[0], *inputs)
        assert getattr(caught.value, "param", None) == param
        assert held_sessions(mesh) == 0
        roles = mesh.nodes[0].roles
        assert roles is not None
        with pytest.raises(UnknownModel):
            await roles.entry.embed(EmbedRequest("another", ["x"]))


async def test_auditors_come_to_the_same_vector(tmp_path: Path, clock: VirtualClock) -> None:
    async with audited_mesh(tmp_path, clock, 2) as mesh:
        await embed(mesh.nodes[0], PROMPT, [3] * 300)
        await eventually(lambda: all_settled(mesh) and audits(mesh) >= 2 * STAGES, 600.0)
        assert {each.verdict for each in verdicts(mesh)} == {"passed"}
        assert innocents_are_whole(mesh)


async def test_a_tail_that_sends_false_vectors_is_slashed_and_excluded(tmp_path: Path, clock: VirtualClock) -> None:
    def prepare(_: SimulatedMesh, nodes: list[SimulatedNode]) -> None:
        nodes[STAGES - 1].engine = LyingEngine

    async with audited_mesh(tmp_path, clock, 3, prepare) as mesh:
        liar, entry = mesh.nodes[STAGES - 1], mesh.nodes[0]
        assert is_tail(mesh, liar)
        for number in range(100):
            if mesh.store.is_blacklisted(liar.peer_id):
                break
            await embed(entry, [number, *PROMPT])
            with trio.move_on_after(5):  # for proofs and audits
                await trio.Event().wait()
        assert mesh.store.is_blacklisted(liar.peer_id)
        assert innocents_are_whole(mesh, liar)
