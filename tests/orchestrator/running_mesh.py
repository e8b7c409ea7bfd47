"""A simulated mesh as its orchestrator's tests look at it: who serves what, as the workers themselves see it."""

from __future__ import annotations

from simulations.mesh import SimulatedMesh, SimulatedNode
from tessella_p2p.orchestrator.service import Orchestrator
from tessella_p2p.worker.service import Worker


def worker_of(node: SimulatedNode) -> Worker:
    assert node.roles is not None
    assert node.roles.worker is not None
    return node.roles.worker


def orchestrator_of(mesh: SimulatedMesh) -> Orchestrator:
    assert mesh.orchestrator is not None
    return mesh.orchestrator


def held(mesh: SimulatedMesh) -> list[tuple[int, int]]:
    """What is served, as the workers themselves see it."""
    found = []
    for node in mesh.nodes:
        worker = worker_of(node)
        if worker.state == "ready" and worker.assignment is not None and worker.stage is not None:
            assert worker.stage.engine.layers == worker.assignment.layers
            found.append(worker.assignment.layers.as_tuple())
    return sorted(found)


def held_by(node: SimulatedNode) -> tuple[int, int]:
    """What one worker was assigned."""
    assignment = worker_of(node).assignment
    assert assignment is not None
    return assignment.layers.as_tuple()
