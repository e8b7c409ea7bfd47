"""A stage that does its work and has an accomplice, who served nothing, sign for more: in a whole mesh."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulations.mesh import MeshShape, SimulatedMesh, SimulatedNode, simulate
from tessella_p2p.base.limits import MICRO_PER_LAYER_POSITION
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.opening import Opening
from tessella_p2p.stages.work import WorkMeter
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import open_envelope, seal
from tessella_p2p.wire.keys import NodeKey
from tests.mesh.test_audits_in_mesh import layers_of
from tests.mesh.test_simulated_mesh import all_settled, balance
from tests.worker.hostile_mesh import pass_time

PROMPT = list(range(40))
ACCOMPLICE = NodeKey(b"accomplice".ljust(32))
DIGEST = b"d" * 32


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def boast(node: SimulatedNode, *, forge_route: bool) -> None:
    """Let a worker prove as many positions as the ticket has, by the accomplice's receipt."""
    assert node.roles is not None
    proofs = node.roles.proofs
    honest = proofs._seal

    def lie(opening: Opening, meter: WorkMeter) -> bytes:
        assert opening.ticket is not None
        assert opening.orchestrator is not None
        envelope = open_envelope(honest(opening, meter), m.PROOF, now_ms=None, audience=opening.orchestrator)
        proof = envelope.message(m.Proof)
        most, now_ms = opening.ticket.max_positions, envelope.issued_at
        receipt = m.ReceiptBody(
            request_id=proof.request_id,
            session=proof.session,
            epoch=proof.epoch,
            sender=node.peer_id,
            positions=most,
            digest=DIGEST,
        )
        sealed = seal(ACCOMPLICE, m.RECEIPT, receipt, sequence=1, now_ms=now_ms, audience=node.peer_id)
        changes: dict[str, object] = {"positions": most, "output_digest": DIGEST, "marks": (), "receipt": sealed}
        if forge_route:
            total = opening.body.route[-1].layers[1]
            start, end = proof.layers
            stages = (
                *((stage.peer_id, stage.layers) for stage in opening.body.route[: opening.index]),
                (node.peer_id, (start, end)),
                (ACCOMPLICE.peer_id, (end, total)),
            )
            statement = m.RouteStatement(
                request_id=proof.request_id, session=proof.session, epoch=proof.epoch, stages=stages
            )
            changes["route"] = seal(node.key, m.ROUTE, statement, sequence=1, now_ms=now_ms)
        return seal(
            node.key,
            m.PROOF,
            proof.model_copy(update=changes),
            sequence=envelope.sequence,
            now_ms=now_ms,
            audience=opening.orchestrator,
            ttl_ms=envelope.expires_at - now_ms,
        )

    proofs._seal = lie  # type: ignore[method-assign]


def by_layers(mesh: SimulatedMesh) -> list[SimulatedNode]:
    return sorted(mesh.nodes, key=lambda node: layers_of(node).start)


@pytest.mark.parametrize("forge_route", [False, True])
async def test_a_stage_with_an_accomplice_is_paid_nothing_and_its_neighbours_all_of_theirs(
    tmp_path: Path, clock: VirtualClock, forge_route: bool
) -> None:
    async with simulate(MeshShape(min_stages=3), seed=1, folder=tmp_path, clock=clock) as mesh:
        nodes = [mesh.add_node() for _ in range(3)]
        for node in nodes:
            await mesh.start_node(node)
        for node in nodes:
            await mesh.wait_listed(node)
        head, middle, tail = by_layers(mesh)
        boast(middle, forge_route=forge_route)
        finished = await mesh.ask(tail, PROMPT, 8)
        positions = len(PROMPT) + len(finished.token_ids) - 1  # the last token is drawn, and goes into no stage
        await pass_time(10.0)  # for proofs
        assert all_settled(mesh)
        for honest in (head, tail):
            assert balance(mesh, honest) == len(layers_of(honest)) * positions * MICRO_PER_LAYER_POSITION
        assert balance(mesh, middle) == 0
