"""What an artifact costs under a recipe (pure): the data that the orchestrator's allocator works from."""

from __future__ import annotations

from tessella_p2p.base.limits import MIB, MIN_CLAIM_MB
from tessella_p2p.model.config import ModelConfig
from tessella_p2p.model.manifest import StageCosts
from tessella_p2p.model.recipe import Recipe
from tessella_p2p.orchestrator.terms import ModelTerms
from tessella_p2p.wire.frames import DType

_F32_BYTES = DType.F32.size
_MILLI = 1000


def _mb(size_bytes: float) -> int:
    return -int(-size_bytes // MIB)


def model_terms(
    config: ModelConfig, costs: StageCosts, recipe: Recipe, *, num_sessions: int, max_positions: int
) -> ModelTerms:
    """Sizes and relative costs of a model's parts.

    A recipe that keeps the stored quantisation needs the bytes of the file; one that expands needs four bytes a parameter. A decode
    step reads every weight once, so the bytes it reads are the measure of its time.

    Args:
        num_sessions: sessions whose KV a stage may hold.
        max_positions: of one session.
    """
    layer_parameters = _layer_parameters(config)
    head_parameters = config.vocabulary * config.hidden
    if recipe.quantization == "none":
        layer_bytes, head_bytes = layer_parameters * _F32_BYTES, head_parameters * _F32_BYTES
        embedding_bytes = head_bytes
    else:
        layer_bytes = max(costs.layer_bytes)
        embedding_bytes, head_bytes = costs.embedding_bytes, head_parameters  # the head is one byte a weight
    kv_bytes = 2 * config.kv_heads * config.head_dim * recipe.kv.size * num_sessions * max_positions
    return ModelTerms(
        total_layers=config.layers,
        layer_mb=_mb(layer_bytes),
        kv_mb=_mb(kv_bytes),
        embedding_mb=_mb(embedding_bytes),
        head_mb=_mb(head_bytes),
        min_mb=MIN_CLAIM_MB,
        layer_cost=_MILLI,
        head_cost=int(_MILLI * head_bytes / layer_bytes),
    )


def _layer_parameters(config: ModelConfig) -> int:
    query = config.heads * config.head_dim
    key_value = 2 * config.kv_heads * config.head_dim
    return config.hidden * (2 * query + key_value + 3 * config.ffn)
