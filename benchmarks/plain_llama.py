"""A llama as one writes it down with torch: float32, ``F.linear`` and SDPA, the whole batch at once.

Its bits depend on the batch, the chunk and the threads. It is what the price of bit-identity is measured against.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tessella_p2p.model.config import EMBEDDING, OUTPUT_NORM, ModelConfig
from tessella_p2p.model.gguf import GgufFile
from tessella_p2p.stages.dequantize import dequantize


class PlainLlama:
    """The whole model; weights expanded to float32, which is exact.

    Args:
        path: a GGUF file of a llama.
    """

    def __init__(self, path: Path) -> None:
        with GgufFile.open(path) as file:
            self.config = config = ModelConfig.from_gguf(file)
            self._weights = {name: _tensor(file, name) for name in config.tensor_shapes(config.all_layers)}
        for layer in config.all_layers:
            for matrix in ("attn_q", "attn_k"):
                name = f"blk.{layer}.{matrix}.weight"
                self._weights[name] = _halves(self._weights[name], config.head_dim)
        self._kv = torch.empty(0)
        self._filled = 0

    def start(self, sequences: int, positions: int) -> None:
        """Forget everything, and make room for so many sequences of so many positions."""
        config = self.config
        self._kv = torch.zeros(config.layers, 2, sequences, config.kv_heads, positions, config.head_dim)
        self._filled = 0

    @torch.inference_mode()
    def forward(self, token_ids: Tensor) -> Tensor:
        """The next positions of every sequence.

        Args:
            token_ids: [sequences, rows] int64.

        Returns:
            The logits behind the last row, [sequences, vocabulary] float32.
        """
        config, weights = self.config, self._weights
        rows = token_ids.shape[1]
        x = weights[EMBEDDING][token_ids]
        turns = self._turns(rows)
        for layer in config.all_layers:
            prefix = f"blk.{layer}"
            h = self._norm(x, f"{prefix}.attn_norm.weight")
            x = x + functional.linear(self._attention(h, layer, turns), weights[f"{prefix}.attn_output.weight"])
            h = self._norm(x, f"{prefix}.ffn_norm.weight")
            gate = functional.linear(h, weights[f"{prefix}.ffn_gate.weight"])
            up = functional.linear(h, weights[f"{prefix}.ffn_up.weight"])
            x = x + functional.linear(functional.silu(gate) * up, weights[f"{prefix}.ffn_down.weight"])
        self._filled += rows
        return functional.linear(self._norm(x[:, -1], OUTPUT_NORM), weights[config.output_name])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self._weights[name], self.config.rms_eps)

    def _attention(self, h: Tensor, layer: int, turns: tuple[Tensor, Tensor]) -> Tensor:
        config = self.config
        sequences, rows, _ = h.shape

        def heads(matrix: str, count: int) -> Tensor:
            out = functional.linear(h, self._weights[f"blk.{layer}.{matrix}.weight"])
            return out.view(sequences, rows, count, config.head_dim).transpose(1, 2)

        start, end = self._filled, self._filled + rows
        keys, values = self._kv[layer]
        keys[:, :, start:end] = _turned(heads("attn_k", config.kv_heads), turns)
        values[:, :, start:end] = heads("attn_v", config.kv_heads)
        queries = _turned(heads("attn_q", config.heads), turns)
        # A single row sees everything; a first prompt is causal. Nothing else is asked of it.
        assert rows == 1 or start == 0
        out = functional.scaled_dot_product_attention(
            queries, keys[:, :, :end], values[:, :, :end], is_causal=rows > 1, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(sequences, rows, -1)

    def _turns(self, rows: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [rows, head_dim]."""
        width = self.config.head_dim
        frequencies = self.config.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.outer(torch.arange(self._filled, self._filled + rows, dtype=torch.float64), frequencies)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().float(), angles.sin().float()


def _turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * turns[0] + torch.cat([-second, first], -1) * turns[1]


def _tensor(file: GgufFile, name: str) -> Tensor:
    info = file.tensors[name]
    raw = np.frombuffer(file.read(name), np.uint8)
    rows = info.shape[0] if len(info.shape) == 2 else 1
    return torch.from_numpy(dequantize(raw.reshape(rows, -1), info.kind)).view(info.shape)


def _halves(matrix: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k from llama.cpp's order (adjacent pairs rotate) to the one in which halves rotate."""
    rows, columns = matrix.shape
    return matrix.view(-1, head_dim // 2, 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()
