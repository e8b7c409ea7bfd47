"""A llama in float64 numpy, straight from the papers: one position after the other, no cache, rotation of adjacent pairs.

It shares no code with the engine, and neither its order of operations nor its layout of rotations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tessella_p2p.model.gguf import GgmlType
from tests.model.tiny_gguf import Stored

Array = npt.NDArray[np.float64]


def dense(stored: Stored) -> Array:
    """The numbers of an F32 or Q4_1 tensor."""
    if stored.kind == GgmlType.F32:
        return np.frombuffer(stored.raw, "<f4").reshape(stored.shape).astype(np.float64)
    rows = []
    for start in range(0, len(stored.raw), 20):
        scale, minimum = np.frombuffer(stored.raw[start : start + 4], "<f2").astype(np.float64)
        packed = stored.raw[start + 4 : start + 20]
        rows.append(
            [scale * (byte & 15) + minimum for byte in packed] + [scale * (byte >> 4) + minimum for byte in packed]
        )
    return np.array(rows).reshape(stored.shape)


class ReferenceLlama:
    """The whole model."""

    def __init__(self, metadata: Mapping[str, object], tensors: Mapping[str, Stored]) -> None:
        self._weights = {name: dense(stored) for name, stored in tensors.items()}

        def number(key: str) -> float:
            value = metadata[f"llama.{key}"]
            assert isinstance(value, (int, float))
            return value

        self._layers = int(number("block_count"))
        self._heads, self._kv_heads = int(number("attention.head_count")), int(number("attention.head_count_kv"))
        self._eps, self._theta = number("attention.layer_norm_rms_epsilon"), number("rope.freq_base")

    def hidden(self, token_ids: Sequence[int], num_layers: int | None = None) -> Array:
        """[positions, hidden] behind the first ``num_layers`` layers."""
        weights = self._weights
        x = weights["token_embd.weight"][list(token_ids)]
        for layer in range(self._layers if num_layers is None else num_layers):
            w = {name: weights[f"blk.{layer}.{name}.weight"] for name in
                 ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")}  # fmt: skip
            h = self._norm(x, w["attn_norm"])
            x = x + self._attention(h @ w["attn_q"].T, h @ w["attn_k"].T, h @ w["attn_v"].T) @ w["attn_output"].T
            h = self._norm(x, w["ffn_norm"])
            gate = h @ w["ffn_gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
        return x

    def logits(self, token_ids: Sequence[int]) -> Array:
        """[positions, vocabulary]."""
        output = self._weights.get("output.weight", self._weights["token_embd.weight"])
        return self.normed(token_ids) @ output.T

    def normed(self, token_ids: Sequence[int]) -> Array:
        """[positions, hidden] behind the last norm."""
        return self._norm(self.hidden(token_ids), self._weights["output_norm.weight"])

    def _norm(self, x: Array, weight: Array) -> Array:
        scale: Array = np.sqrt((x**2).mean(-1, keepdims=True) + self._eps)
        return x / scale * weight

    def _rotate(self, x: Array) -> Array:
        """[positions, heads, head_dim], pairs (2i, 2i + 1) turned by position · theta^(−2i / head_dim)."""
        positions, _, width = x.shape
        angles = np.outer(np.arange(positions), self._theta ** (-np.arange(0, width, 2) / width))[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = np.empty_like(x)
        turned[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
        turned[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
        return turned

    def _attention(self, q: Array, k: Array, v: Array) -> Array:
        positions, group = q.shape[0], self._heads // self._kv_heads
        queries = self._rotate(q.reshape(positions, self._heads, -1))
        keys = self._rotate(k.reshape(positions, self._kv_heads, -1))
        values = v.reshape(positions, self._kv_heads, -1)
        out = np.empty_like(queries)
        for position in range(positions):
            for head in range(self._heads):
                scores = keys[: position + 1, head // group] @ queries[position, head] / np.sqrt(queries.shape[-1])
                weights = np.exp(scores - scores.max())
                out[position, head] = weights / weights.sum() @ values[: position + 1, head // group]
        return out.reshape(positions, -1)
