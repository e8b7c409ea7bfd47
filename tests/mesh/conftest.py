"""One mesh of real processes for all the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tessella_p2p.cli.demo_mesh import MeshPlan
from tests.mesh.mesh_thread import CHECKPOINT_S, MeshThread


@pytest.fixture(scope="session")
def f32_mesh(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[MeshThread]:
    """Three workers with the exact recipe; checkpoints every quarter of a second."""
    plan = MeshPlan(
        home=tmp_path_factory.mktemp("mesh"),
        model=str(smollm2_path),
        workers=3,
        recipe="f32",
        extra=("--wal-checkpoint-interval-secs", str(CHECKPOINT_S)),
    )
    with MeshThread(plan) as mesh:
        yield mesh
