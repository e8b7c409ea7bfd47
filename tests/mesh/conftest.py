"""One mesh of real processes for all the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tessella_p2p.cli.demo_mesh import MeshPlan
from tests.mesh.mesh_thread import CHECKPOINT_S, MeshThread
from tests.model.fim_artifact import write_fim_artifact


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


@pytest.fixture(scope="session")
def fim_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshThread]:
    """Two workers with the small artifact that fills gaps and is shown tools; its model id is `fim_artifact.MODEL_ID`."""
    home = tmp_path_factory.mktemp("fim")
    with MeshThread(MeshPlan(home / "mesh", str(write_fim_artifact(home)), workers=2, recipe="f32")) as mesh:
        yield mesh
