"""From the configured model to an open, hashed artifact (shell)."""

from __future__ import annotations

from pathlib import Path

import trio

from tessella_p2p.model.artifact import Artifact
from tessella_p2p.node.config import ModelRoleConfig
from tessella_p2p.weights.store import resolve


async def open_artifact(config: ModelRoleConfig, models_dir: Path) -> Artifact:
    """Map the configured model and hash it, on a thread."""

    def blocking() -> Artifact:
        path = resolve(config.default_model, models_dir)
        artifact = Artifact.open(path)
        artifact.hash()
        return artifact

    return await trio.to_thread.run_sync(blocking)
