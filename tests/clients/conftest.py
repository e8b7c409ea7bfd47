"""A mesh of real processes with the real model, for clients: one entry for everybody, and one that asks for API keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tessella_p2p.cli.demo_mesh import MeshPlan, Node
from tests.mesh.mesh_thread import MeshThread

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def client_mesh(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[MeshThread]:
    """Two workers that hold the model, and a third one whose HTTP port asks for keys."""
    plan = MeshPlan(home=tmp_path_factory.mktemp("clients"), model=str(smollm2_path), workers=2, recipe="f32")
    with MeshThread(plan) as mesh:
        keyed = mesh.call(mesh.mesh.add_worker, 2, ("--api-keys", "required"))
        mesh.call(mesh.mesh.wait_ready, keyed)
        yield mesh


@pytest.fixture(scope="session")
def told(client_mesh: MeshThread) -> Mapping[str, str]:
    """What clients are told, as variables of their environment."""
    keyed = client_mesh.mesh.workers[2]
    return {
        "CLIENT_URL": f"{client_mesh.mesh.entry_url}/v1",
        "CLIENT_MODEL": MODEL,
        "CLIENT_KEYED_URL": f"{keyed.api_url}/v1",
        "CLIENT_KEY": _new_key(keyed),
    }


def _new_key(node: Node) -> str:
    """A key with which one may ask once a minute."""
    command = [
        *(sys.executable, "-m", "tessella_p2p", "keys", "api"),
        *("--data-dir", str(node.home / "data"), "--keypair-path", str(node.home / "node.key")),
        *("add", "--label", "clients", "--requests-per-minute", "1", "--json"),
    ]
    environment = {**os.environ, "TESSELLA_CONFIG_DIR": str(node.home)}
    made = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return str(json.loads(made.stdout)["api_key"])
