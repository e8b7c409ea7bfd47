"""A stage's weights for the native kernels, read from a GGUF file: its own tensors and no others, packed one after another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessella_p2p.base.errors import NotCertified
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import MAX_MODEL_WIDTH
from tessella_p2p.model.config import EMBEDDING, OUTPUT_NORM, ModelConfig
from tessella_p2p.model.gguf import GgmlType, GgufFile
from tessella_p2p.model.recipe import Recipe
from tessella_p2p.stages.dequantize import dequantize
from tessella_p2p.stages.native.binding import PANEL, QUERY_ROWS, Bytes, Floats, LayerArrays, Packed
from tessella_p2p.stages.quantize import stored_form
from tessella_p2p.stages.rotations import order_of_halves

_ROTATED = ("attn_q", "attn_k")
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """All of a stage. A stage that is head and tail of a model with a tied embedding holds that matrix once."""

    layers: tuple[LayerArrays, ...]
    embedding: Packed | None
    output: tuple[Floats, Packed] | None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        vocabulary = {id(m): m.nbytes for m in (self.embedding, self.output and self.output[1]) if m is not None}
        norm = self.output[0].nbytes if self.output is not None else 0
        return sum(layer.nbytes for layer in self.layers) + sum(vocabulary.values()) + norm


def check_shape(config: ModelConfig) -> None:
    """Refuse a model whose widths the kernels do not have.

    Raises:
        NotCertified: says which.
    """
    group = config.heads // config.kv_heads
    for name, value, multiple in (
        ("hidden size", config.hidden, 32),
        ("feed-forward width", config.ffn, 32),
        ("head size", config.head_dim, PANEL),
    ):
        if value % multiple:
            raise NotCertified(
                f"the native kernels need a {name} that is a multiple of {multiple}; this model has {value}"
            )
    if config.heads * config.head_dim > MAX_MODEL_WIDTH:
        raise NotCertified(f"{config.heads} heads of {config.head_dim} are over {MAX_MODEL_WIDTH} wide")
    if group > QUERY_ROWS:
        raise NotCertified(
            f"the native kernels take up to {QUERY_ROWS} query heads per KV head; this model has {group}"
        )


def load_weights(file: GgufFile, config: ModelConfig, layers: LayerRange, recipe: Recipe) -> NativeWeights:
    """Read what ``layers`` needs. One matrix at a time is in memory twice.

    Raises:
        ArtifactError: ``layers`` is not a range of the model, or the file is damaged.
        NotCertified: a shape or a tensor that the kernels do not take.
    """
    config.tensor_shapes(layers)
    check_shape(config)
    reader = _Reader(file, config, recipe)
    blocks = tuple(reader.layer(layer) for layer in layers)
    embedding = reader.vocabulary(EMBEDDING) if config.is_head(layers) else None
    output = None
    if config.is_tail(layers):
        is_shared = embedding is not None and config.tied_embedding
        matrix = embedding if is_shared else None
        output = (reader.norm(OUTPUT_NORM), matrix or reader.vocabulary(config.output_name))
    return NativeWeights(blocks, embedding, output)


class _Reader:
    def __init__(self, file: GgufFile, config: ModelConfig, recipe: Recipe) -> None:
        self._file = file
        self._config = config
        self._recipe = recipe

    def layer(self, layer: int) -> LayerArrays:
        prefix = f"blk.{layer}"
        return LayerArrays(
            self.norm(f"{prefix}.attn_norm.weight"),
            self.norm(f"{prefix}.ffn_norm.weight"),
            [self._matrix(f"{prefix}.{name}.weight", is_rotated=name in _ROTATED) for name in _MATRICES],
        )

    def vocabulary(self, name: str) -> Packed:
        return self._matrix(name, is_vocabulary=True)

    def norm(self, name: str) -> Floats:
        info = self._file.tensors[name]
        weight: Floats = dequantize(np.frombuffer(self._file.read(name), np.uint8).reshape(1, -1), info.kind)[0]
        return weight

    def _matrix(self, name: str, *, is_rotated: bool = False, is_vocabulary: bool = False) -> Packed:
        info = self._file.tensors[name]
        raw = np.frombuffer(self._file.read(name), np.uint8).reshape(info.shape[0], -1)
        if is_rotated:
            raw = raw[order_of_halves(info.shape[0], self._config.head_dim)]
        form, kind = stored_form(raw, info.kind, self._recipe, is_vocabulary=is_vocabulary)
        if kind is GgmlType.Q4_0:
            form, kind = with_offsets(form), GgmlType.Q4_1
        return Packed(form, kind)


def with_offsets(raw: Bytes) -> Bytes:
    """Q4_0 as Q4_1: ``(q − 8) · d`` is ``q · d + m`` with ``m = −8 · d``, which float16 holds exactly.

    Args:
        raw: [rows, bytes of a row] uint8, whole blocks of Q4_0.

    Raises:
        NotCertified: a scale so large that eight times of it is not.
    """
    blocks = raw.reshape(raw.shape[0], -1, GgmlType.Q4_0.block_bytes)
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")
    with np.errstate(over="ignore"):
        offsets = (scales * np.float16(-8)).astype("<f2")
    if not np.isfinite(offsets).all():
        raise NotCertified("a Q4_0 matrix with a scale beyond 8,188")
    return np.concatenate([blocks[..., :2], offsets.view(np.uint8), blocks[..., 2:]], axis=-1).reshape(raw.shape[0], -1)
