"""From an artifact to a loaded engine. Importing this module is cheap; an engine's libraries are imported when it is asked for."""

from __future__ import annotations

from pathlib import Path

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import DEFAULT_MAX_POSITIONS, DEFAULT_MAX_SESSIONS, MAX_SESSIONS_PER_STAGE
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
    kv_bytes: int | None = None,
    device: str = "cpu",
) -> StageEngine:
    """Load a range of layers. Blocks for seconds: call it in a thread.

    Args:
        path: a GGUF file; only the tensors of ``layers`` are read from it.
        layers: the range.
        recipe: the arithmetic.
        threads: compute threads. Several engines on one machine share its cores: give each its part.
        max_sessions: sessions that may be open at once.
        max_positions: positions of one session; the model's context length bounds it.
        kv_bytes: what KV may take, where the engine keeps it in pages (native); None leaves room for every session at its longest.
        device: where a torch recipe computes: ``cpu``, ``cuda``, ``cuda:1``, ``mps``, or ``auto`` for the best that is there.

    Raises:
        ArtifactError: the file is damaged, or has no such layers.
        NotCertified: what the file holds, or the recipe, has no test, or the recipe cannot be computed on ``device``.
        ConfigurationError: a number out of range, or a device that is not there.
    """
    if threads < 1 or not 1 <= max_sessions <= MAX_SESSIONS_PER_STAGE or max_positions < 1:
        raise ConfigurationError(
            f"a stage of {threads} threads, {max_sessions} sessions and {max_positions} positions; at least 1 of each "
            f"and at most {MAX_SESSIONS_PER_STAGE} sessions are accepted"
        )
    if recipe.engine == "native":
        from tessella_p2p.stages.native_engine import NativeEngine

        recipe.check_device(device)
        return NativeEngine.load(
            path,
            layers,
            recipe,
            threads=threads,
            max_sessions=max_sessions,
            max_positions=max_positions,
            kv_bytes=kv_bytes,
        )
    from tessella_p2p.stages.torch_engine import TorchEngine

    return TorchEngine.load(
        path,
        layers,
        recipe,
        device=device,
        threads=threads,
        max_sessions=max_sessions,
        max_positions=max_positions,
    )


def published_name(recipe: Recipe, device: str = "cpu") -> str:
    """The name under which this machine may serve ``recipe``. Its engine is tried first: call it in a thread.

    Raises:
        NotCertified: the recipe cannot be computed on ``device``; the native kernels are not built, or give other bits here.
        ConfigurationError: ``device`` is not there.
    """
    if recipe.has_one_class:
        from tessella_p2p.stages.native_proof import prove_kernels

        recipe.check_device(device)
        prove_kernels()
        return recipe.name
    from tessella_p2p.stages.torch_device import drift_class

    return recipe.published(drift_class(recipe, device))
