"""Exact decoding of ggml's stored blocks to float32 (pure). Layouts: ggml's ``ggml-common.h``; tests compare with gguf-py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from tessella_p2p.model.gguf import GgmlType
from tessella_p2p.stages import k_quants
from tessella_p2p.stages.k_quants import IQ4_VALUES, Bytes, Floats, half


def dequantize(raw: Bytes, kind: GgmlType) -> Floats:
    """The numbers in ``raw``.

    Args:
        raw: [rows, bytes of a row] uint8; whole blocks of ``kind``.
        kind: how they are stored.

    Returns:
        [rows, columns] float32, a new array.
    """
    blocks = raw.reshape(-1, kind.block_bytes)
    return _DECODERS[kind](blocks).reshape(raw.shape[0], -1)


def q4_parts(raw: Bytes, kind: GgmlType) -> tuple[Bytes, Floats, Floats]:
    """A Q4_0 or Q4_1 matrix as ``(q − 8) · scale + zero``.

    Returns:
        q: [rows, columns] uint8 in 0..15.
        scale, zero: [rows, columns / 32] float32.
    """
    blocks = raw.reshape(raw.shape[0], -1, kind.block_bytes)
    scale = half(blocks[..., 0:2])[..., 0]
    if kind is GgmlType.Q4_1:
        zero, packed = half(blocks[..., 2:4])[..., 0] + np.float32(8) * scale, blocks[..., 4:]
    else:
        zero, packed = np.zeros_like(scale), blocks[..., 2:]
    return _nibbles(packed).reshape(raw.shape[0], -1), scale, zero


def eight_bit_parts(raw: Bytes, kind: GgmlType) -> tuple[Bytes, Bytes] | None:
    """A matrix as float16 scales and integers of at most 8 bits, which is what its type is; None where it is something else.

    Returns:
        scales: [blocks of 32, 2] uint8, little-endian float16.
        numbers: [blocks of 32, 32] uint8, int8 by their bits.
    """
    blocks = raw.reshape(-1, kind.block_bytes)
    if kind is GgmlType.Q5_0:
        numbers = _five_bits(blocks[:, 2:6], blocks[:, 6:]) - np.uint8(16)  # wraps, as int8 does
    elif kind is GgmlType.IQ4_NL:
        numbers = IQ4_VALUES.astype(np.int8).view(np.uint8)[_nibbles(blocks[:, 2:])]
    else:
        return None
    return blocks[:, :2], numbers


def _nibbles(packed: Bytes) -> Bytes:
    """16 bytes → 32 numbers: the low halves, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return (_nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8)) * half(blocks[:, 0:2])


def _q4_1(blocks: Bytes) -> Floats:
    return _nibbles(blocks[:, 4:]).astype(np.float32) * half(blocks[:, 0:2]) + half(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * half(blocks[:, 0:2])


def _q5_0(blocks: Bytes) -> Floats:
    q = _five_bits(blocks[:, 2:6], blocks[:, 6:]).astype(np.int8) - np.int8(16)
    return q.astype(np.float32) * half(blocks[:, 0:2])


def _q5_1(blocks: Bytes) -> Floats:
    return _five_bits(blocks[:, 4:8], blocks[:, 8:]).astype(np.float32) * half(blocks[:, 0:2]) + half(blocks[:, 2:4])


def _five_bits(high: Bytes, packed: Bytes) -> Bytes:
    """32 numbers: the fifth bit of number i is bit i of ``high``."""
    fifth: Bytes = np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return _nibbles(packed) | fifth


def _iq4_nl(blocks: Bytes) -> Floats:
    return IQ4_VALUES[_nibbles(blocks[:, 2:])] * half(blocks[:, 0:2])


_DECODERS: Final[Mapping[GgmlType, Callable[[Bytes], Floats]]] = {
    GgmlType.F32: _f32,
    GgmlType.F16: half,
    GgmlType.BF16: _bf16,
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q2_K: k_quants.q2_k,
    GgmlType.Q3_K: k_quants.q3_k,
    GgmlType.Q4_K: k_quants.q4_k,
    GgmlType.Q5_K: k_quants.q5_k,
    GgmlType.Q6_K: k_quants.q6_k,
    GgmlType.IQ4_NL: _iq4_nl,
    GgmlType.IQ4_XS: k_quants.iq4_xs,
}
