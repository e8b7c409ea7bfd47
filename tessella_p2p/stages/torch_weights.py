"""A stage's weights, read from a GGUF file: its own tensors and no others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tessella_p2p.base.ids import LayerRange
from tessella_p2p.model.config import EMBEDDING, OUTPUT_NORM, ModelConfig
from tessella_p2p.model.gguf import GgufFile
from tessella_p2p.model.recipe import Recipe
from tessella_p2p.stages.dequantize import dequantize
from tessella_p2p.stages.rotations import order_of_halves
from tessella_p2p.stages.torch_linear import Linear, StoredMatrix, build_linear
from tessella_p2p.wire.frames import DType

TORCH_DTYPES = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer block. Norms are [hidden]; q, k and v, and gate and up, share one product."""

    attention_norm: Tensor
    qkv: Linear
    attention_output: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class TailWeights:
    """What turns the last hidden state into logits."""

    norm: Tensor
    output: Linear


@dataclass(frozen=True, slots=True)
class StageWeights:
    """All of a stage; ``embedding`` stays in its stored form and is decoded row by row."""

    layers: tuple[LayerWeights, ...]
    embedding: StoredMatrix | None
    tail: TailWeights | None
    memory_bytes: int


def load_weights(
    file: GgufFile, config: ModelConfig, layers: LayerRange, recipe: Recipe, device: torch.device
) -> StageWeights:
    """Read what ``layers`` needs, and pack it on ``device``.

    Raises:
        ArtifactError: ``layers`` is not a range of the model.
        NotCertified: a tensor that the recipe cannot compute with.
    """
    config.tensor_shapes(layers)
    reader = _Reader(file, config, recipe, device)
    blocks = tuple(reader.layer(layer) for layer in layers)
    embedding = reader.matrix(EMBEDDING) if config.is_head(layers) else None
    tail = None
    if config.is_tail(layers):
        tail = TailWeights(reader.norm(OUTPUT_NORM), reader.linear(config.output_name))
    memory_bytes = reader.memory_bytes + (embedding.raw.nbytes if embedding is not None else 0)
    return StageWeights(blocks, embedding, tail, memory_bytes)


def embed(
    embedding: StoredMatrix, token_ids: np.ndarray[tuple[int], np.dtype[np.uint32]], dtype: torch.dtype
) -> Tensor:
    """[rows, hidden] of ``dtype``, on the CPU, for token ids that were checked."""
    return torch.from_numpy(dequantize(embedding.raw[token_ids], embedding.kind)).to(dtype)


class _Reader:
    """Reads tensors in the form that the arithmetic wants, and adds up what they take."""

    def __init__(self, file: GgufFile, config: ModelConfig, recipe: Recipe, device: torch.device) -> None:
        self._file = file
        self._config = config
        self._recipe = recipe
        self._device = device
        self._dtype = TORCH_DTYPES[recipe.activation]
        self.memory_bytes = 0

    def layer(self, layer: int) -> LayerWeights:
        prefix = f"blk.{layer}"
        q, k = (self._rotating(f"{prefix}.attn_{name}.weight") for name in "qk")
        return LayerWeights(
            attention_norm=self.norm(f"{prefix}.attn_norm.weight"),
            qkv=self._build(q, k, self.matrix(f"{prefix}.attn_v.weight")),
            attention_output=self.linear(f"{prefix}.attn_output.weight"),
            ffn_norm=self.norm(f"{prefix}.ffn_norm.weight"),
            gate_up=self._build(
                self.matrix(f"{prefix}.ffn_gate.weight"),
                self.matrix(f"{prefix}.ffn_up.weight"),
            ),
            down=self.linear(f"{prefix}.ffn_down.weight"),
        )

    def matrix(self, name: str) -> StoredMatrix:
        """A copy of the stored bytes: a file that is cut short or replaced later cannot fault a running stage."""
        info = self._file.tensors[name]
        raw = np.frombuffer(self._file.read(name), np.uint8).reshape(info.shape[0], -1).copy()
        return StoredMatrix(name, info.kind, raw)

    def norm(self, name: str) -> Tensor:
        info = self._file.tensors[name]
        raw = np.frombuffer(self._file.read(name), np.uint8).reshape(1, -1)
        weight = torch.from_numpy(dequantize(raw, info.kind)[0]).to(self._device, self._dtype)
        self.memory_bytes += weight.nbytes
        return weight

    def linear(self, name: str) -> Linear:
        return self._build(self.matrix(name))

    def _build(self, *matrices: StoredMatrix) -> Linear:
        linear = build_linear(matrices, self._recipe, self._device)
        self.memory_bytes += linear.memory_bytes
        return linear

    def _rotating(self, name: str) -> StoredMatrix:
        """Rows of q or k."""
        matrix = self.matrix(name)
        return StoredMatrix(name, matrix.kind, matrix.raw[order_of_halves(matrix.num_rows, self._config.head_dim)])
