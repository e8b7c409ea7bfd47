"""A GGUF writer by the specification, for files that are small, odd or damaged."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tessella_p2p.model.gguf import GgmlType

METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
}
VOCABULARY = 96


@dataclass(frozen=True)
class Stored:
    """A tensor to write: row-major shape, type and bytes."""

    shape: tuple[int, ...]
    kind: int
    raw: bytes


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(item: object) -> bytes:
    """The type number and the bytes of a metadata value."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    assert isinstance(item, tuple)
    elements = [value(element) for element in item]
    kind = elements[0][:4] if elements else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(item)) + b"".join(e[4:] for e in elements)


def build(
    metadata: Mapping[str, object], tensors: Mapping[str, Stored], *, version: int = 3, alignment: int = 32
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        data += bytes(-len(data) % alignment)
        head += string(name) + struct.pack("<I", len(tensor.shape))
        head += b"".join(struct.pack("<Q", size) for size in tensor.shape[::-1])
        head += struct.pack("<IQ", tensor.kind, len(data))
        data += tensor.raw
    return head + bytes(-len(head) % alignment) + data


def floats(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Stored:
    return Stored(values.shape, GgmlType.F32, values.astype("<f4").tobytes())


def q4_1(rng: np.random.Generator, shape: tuple[int, int], spread: float) -> Stored:
    """Random four-bit blocks: f16 scale, f16 minimum, 16 bytes of nibbles."""
    count = shape[0] * shape[1] // 32
    scales = (rng.uniform(0.5, 1.0, (count, 1)) * spread / 7.5).astype("<f2")
    minima = (-7.5 * scales.astype(np.float32)).astype("<f2")
    nibbles = rng.integers(0, 256, (count, 16), np.uint8)
    blocks = np.concatenate([scales.view(np.uint8), minima.view(np.uint8), nibbles], axis=1)
    return Stored(shape, GgmlType.Q4_1, blocks.tobytes())


def tiny_llama(
    *,
    matrices: GgmlType = GgmlType.F32,
    metadata: Mapping[str, object] | None = None,
    tied: bool = False,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
) -> tuple[dict[str, object], dict[str, Stored]]:
    """A llama of 3 layers with random weights: metadata and tensors, to be changed and built."""
    rng = np.random.default_rng(seed)
    merged = {**METADATA, **(metadata or {})}
    hidden, ffn, layers = 64, 96, 3
    q_rows, kv_rows = 64, 32

    def norm() -> Stored:
        return floats(rng.uniform(0.5, 1.5, hidden).astype(np.float32))

    def matrix(rows: int, columns: int) -> Stored:
        if matrices is GgmlType.Q4_1:
            return q4_1(rng, (rows, columns), 3.0 * columns**-0.5)
        return floats((rng.standard_normal((rows, columns)) * 1.5 * columns**-0.5).astype(np.float32))

    tensors: dict[str, Stored] = {"token_embd.weight": matrix(vocabulary, hidden)}
    for layer in range(layers):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.attn_q.weight": matrix(q_rows, hidden),
            f"blk.{layer}.attn_k.weight": matrix(kv_rows, hidden),
            f"blk.{layer}.attn_v.weight": matrix(kv_rows, hidden),
            f"blk.{layer}.attn_output.weight": matrix(hidden, q_rows),
            f"blk.{layer}.ffn_norm.weight": norm(),
            f"blk.{layer}.ffn_gate.weight": matrix(ffn, hidden),
            f"blk.{layer}.ffn_up.weight": matrix(ffn, hidden),
            f"blk.{layer}.ffn_down.weight": matrix(hidden, ffn),
        }
    tensors["output_norm.weight"] = norm()
    if not tied:
        tensors["output.weight"] = matrix(vocabulary, hidden)
    return merged, tensors


def write_tiny_llama(folder: Path, **kwargs: object) -> Path:
    """`tiny_llama` in a file."""
    path = folder / "tiny.gguf"
    path.write_bytes(build(*tiny_llama(**kwargs)))  # type: ignore[arg-type]
    return path
