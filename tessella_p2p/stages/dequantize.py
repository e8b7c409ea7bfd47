"""Exact decoding of ggml's stored blocks to float32 (pure). Layouts: ggml's ``ggml-common.h``; tests compare with gguf-py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from tessella_p2p.base.errors import NotCertified
from tessella_p2p.model.gguf import GgmlType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def dequantize(raw: Bytes, kind: GgmlType) -> Floats:
    """The numbers in ``raw``.

    Args:
        raw: [rows, bytes of a row] uint8; whole blocks of ``kind``.
        kind: how they are stored.

    Returns:
        [rows, columns] float32, a new array.

    Raises:
        NotCertified: no test certifies ``kind``.
    """
    decode = _DECODERS.get(kind)
    if decode is None:
        raise NotCertified(f"no test certifies tensors of type {kind.name}")
    blocks = raw.reshape(-1, kind.block_bytes)
    return decode(blocks).reshape(raw.shape[0], -1)


def q4_parts(raw: Bytes, kind: GgmlType) -> tuple[Bytes, Floats, Floats]:
    """A Q4_0 or Q4_1 matrix as ``(q − 8) · scale + zero``.

    Returns:
        q: [rows, columns] uint8 in 0..15.
        scale, zero: [rows, columns / 32] float32.
    """
    blocks = raw.reshape(raw.shape[0], -1, kind.block_bytes)
    scale = _half(blocks[..., 0:2])[..., 0]
    if kind is GgmlType.Q4_1:
        zero, packed = _half(blocks[..., 2:4])[..., 0] + np.float32(8) * scale, blocks[..., 4:]
    else:
        zero, packed = np.zeros_like(scale), blocks[..., 2:]
    return _nibbles(packed).reshape(raw.shape[0], -1), scale, zero


def _half(raw: Bytes) -> Floats:
    """Little-endian float16 pairs of bytes as float32."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """16 bytes → 32 numbers: the low halves, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return (_nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8)) * _half(blocks[:, 0:2])


def _q4_1(blocks: Bytes) -> Floats:
    return _nibbles(blocks[:, 4:]).astype(np.float32) * _half(blocks[:, 0:2]) + _half(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks[:, 0:2])


def _q6_k(blocks: Bytes) -> Floats:
    """256 numbers: two halves of four runs of 32; six bits each, four in ``ql`` and two in ``qh``; a scale for every 16."""
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    scales = blocks[:, 192:208].view(np.int8).reshape(-1, 2, 4, 2).astype(np.float32)
    low = np.concatenate([low & 15, low >> 4], axis=2)
    pairs = (high >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)) & 3
    q = (low | (pairs << 4)).astype(np.int8) - np.int8(32)
    scale = np.repeat(_half(blocks[:, 208:210]).reshape(-1, 1, 1, 1) * scales, 16, axis=-1)
    return scale * q.astype(np.float32)


_DECODERS: Final[Mapping[GgmlType, Callable[[Bytes], Floats]]] = {
    GgmlType.F32: _f32,
    GgmlType.F16: _half,
    GgmlType.BF16: _bf16,
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q6_K: _q6_k,
}
