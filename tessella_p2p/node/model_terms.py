"""What an artifact costs under a recipe (pure): the data that the orchestrator's allocator works from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Final

from tessella_p2p.base.limits import MIB, MIN_CLAIM_MB
from tessella_p2p.model.config import EMBEDDING, OUTPUT_NORM, ModelConfig
from tessella_p2p.model.gguf import GgmlType, TensorInfo
from tessella_p2p.model.recipe import Recipe
from tessella_p2p.orchestrator.terms import ANY_DEVICE, ModelTerms
from tessella_p2p.stages.quantize import block_bytes, kept_kind
from tessella_p2p.wire.frames import DType

OVERHEAD_MB: Final[Mapping[str, int]] = {"native": 160, "torch": 384}
"""Resident memory of a worker beside weights and KV, by engine, as measured: interpreter, libraries, tokenizer, one turn's buffers."""
_FOUR_BITS: Final = frozenset({GgmlType.Q4_0, GgmlType.Q4_1})
_INT4_BYTES_PER_32: Final = 20
_MILLI = 1000


def _mb(size_bytes: float) -> int:
    return -int(-size_bytes // MIB)


def model_terms(
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo],
    recipe: Recipe,
    *,
    num_sessions: int,
    max_positions: int,
    device: str = ANY_DEVICE,
) -> ModelTerms:
    """Sizes and relative costs of a model's parts.

    What a part costs is the time of a turn with several rows. The native kernels' is that of the multiplications, whatever the form
    of the weights (four rows of 4-bit or of 8-bit ones take the same time, to a tenth); torch's is that of the bytes that it reads.

    Args:
        config: the model.
        tensors: its tensor table.
        recipe: decides how many bytes a stored weight takes in memory.
        num_sessions: sessions whose KV a stage may hold.
        max_positions: of one session.
        device: where the stage computes.
    """

    def size_of(names: Iterable[str]) -> int:
        return sum(kept_bytes(tensors[name], recipe, config, device) for name in names)

    layer_bytes = max(size_of(config.layer_shapes(layer)) for layer in config.all_layers)
    head_bytes = size_of((OUTPUT_NORM, config.output_name))
    head_time, layer_time = head_bytes, layer_bytes
    if recipe.engine == "native":
        head_time = _weights(tensors, [config.output_name])
        layer_time = max(_weights(tensors, config.layer_shapes(layer)) for layer in config.all_layers)
    # Torch looks tokens up in the stored embedding.
    embedding_bytes = size_of((EMBEDDING,)) if recipe.engine == "native" else tensors[EMBEDDING].size_bytes
    kv_bytes = 2 * config.kv_heads * config.head_dim * recipe.kv.size * num_sessions * max_positions
    cached_bytes = 0  # what the prefix cache keeps beside the KV: the rows that a stage sent on
    if recipe.engine == "native":
        cached_bytes = config.hidden * recipe.activation.size * num_sessions * max_positions
    return ModelTerms(
        total_layers=config.layers,
        layer_mb=_mb(layer_bytes),
        kv_mb=_mb(kv_bytes),
        embedding_mb=_mb(embedding_bytes),
        head_mb=_mb(head_bytes),
        overhead_mb=OVERHEAD_MB[recipe.engine] + _mb(cached_bytes),
        min_mb=MIN_CLAIM_MB,
        layer_cost=_MILLI,
        head_cost=int(_MILLI * head_time / layer_time),
    )


def _weights(tensors: Mapping[str, TensorInfo], names: Iterable[str]) -> int:
    return sum(prod(tensors[name].shape) for name in names)


def kept_bytes(tensor: TensorInfo, recipe: Recipe, config: ModelConfig, device: str = ANY_DEVICE) -> int:
    """What a tensor takes in a stage's memory. Norms are a few numbers, and counted as float32.

    Torch on the CPU multiplies float32: under ``torch-f16`` and ``torch-bf16`` it keeps the rounded weights that wide.
    """
    columns = tensor.shape[-1]
    elements = tensor.shape[0] * columns if len(tensor.shape) == 2 else columns
    if len(tensor.shape) != 2:
        return elements * DType.F32.size
    if recipe.engine == "native":
        kind = kept_kind(tensor.kind, columns, recipe, is_vocabulary=tensor.name in (EMBEDDING, config.output_name))
        return elements * block_bytes(kind) // 32
    if recipe.weight == "int4":
        return elements // 32 * _INT4_BYTES_PER_32 if tensor.kind in _FOUR_BITS else elements
    is_narrow = recipe.weight in ("f16", "bf16") and device not in (ANY_DEVICE, "cpu")
    return elements * (2 if is_narrow else DType.F32.size)
