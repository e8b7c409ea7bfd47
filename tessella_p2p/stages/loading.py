"""From an artifact to a loaded engine. Importing this module is cheap; torch is imported when an engine is loaded."""

from __future__ import annotations

from pathlib import Path

from tessella_p2p.base.errors import NotCertified
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import DEFAULT_MAX_POSITIONS, DEFAULT_MAX_SESSIONS
from tessella_p2p.model.recipe import Recipe
from tessella_p2p.stages.engine import StageEngine


def load_engine(
    path: Path,
    layers: LayerRange,
    recipe: Recipe,
    *,
    threads: int = 1,
    max_sessions: int = DEFAULT_MAX_SESSIONS,
    max_positions: int = DEFAULT_MAX_POSITIONS,
) -> StageEngine:
    """Load a range of layers. Blocks for seconds: call it in a thread.

    Args:
        path: a GGUF file; only the tensors of ``layers`` are read from it.
        layers: the range.
        recipe: the arithmetic.
        threads: compute threads. Several engines on one machine share its cores: give each its part.
        max_sessions: sessions that may be open at once.
        max_positions: positions of one session; the model's context length bounds it.

    Raises:
        ArtifactError: the file is damaged, or has no such layers.
        NotCertified: what the file holds, or the recipe, has no test.
        ConfigurationError: a number out of range.
    """
    if recipe.engine != "torch":
        raise NotCertified(f"there is no engine {recipe.engine!r} here; certified: torch")
    from tessella_p2p.stages.torch_engine import TorchEngine

    return TorchEngine.load(
        path, layers, recipe, threads=threads, max_sessions=max_sessions, max_positions=max_positions
    )
