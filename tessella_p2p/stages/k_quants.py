"""Exact decoding of ggml's 256-element super-blocks (pure). Layouts: ggml's ``ggml-common.h``; tests compare with gguf-py.

Each function takes ``[blocks, bytes of a block]`` uint8 and gives ``[blocks, 256]`` float32, rounded as ggml rounds: first a run's
scale (and minimum) to float32, then its product with each number.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

IQ4_VALUES: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""What the 4-bit codes of the IQ4 types stand for."""
_TWO_BITS: Final = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
_NIBBLES: Final = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
_EIGHT_BITS: Final = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1)


def half(raw: Bytes) -> Floats:
    """Little-endian float16 pairs of bytes as float32."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def q2_k(blocks: Bytes) -> Floats:
    """16 runs of 16: 4-bit scales and minima, two bits a number."""
    scales, packed = blocks[:, :16], blocks[:, 16:80]
    scale = half(blocks[:, 80:82]) * (scales & 15).astype(np.float32)
    minimum = half(blocks[:, 82:84]) * (scales >> 4).astype(np.float32)
    q = ((packed.reshape(-1, 2, 1, 32) >> _TWO_BITS) & 3).reshape(-1, 16, 16).astype(np.float32)
    return (scale[..., None] * q - minimum[..., None]).reshape(-1, 256)


def q3_k(blocks: Bytes) -> Floats:
    """16 runs of 16: 6-bit scales, two bits a number and one in a mask, where 0 stands for minus four."""
    mask, packed, scales = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    low = (scales[:, None, :8] >> np.array([0, 4], np.uint8).reshape(1, 2, 1)).reshape(-1, 16) & 15
    high = (scales[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)).reshape(-1, 16) & 3
    scale = half(blocks[:, 108:110]) * ((low | (high << 4)).astype(np.int8) - np.int8(32)).astype(np.float32)
    q = ((packed.reshape(-1, 2, 1, 32) >> _TWO_BITS) & 3).reshape(-1, 16, 16).astype(np.int8)
    is_zero = ((mask.reshape(-1, 1, 1, 32) >> _EIGHT_BITS) & 1 ^ 1).reshape(-1, 16, 16).astype(np.int8)
    return (scale[..., None] * (q - 4 * is_zero).astype(np.float32)).reshape(-1, 256)


def q4_k(blocks: Bytes) -> Floats:
    """8 runs of 32: 6-bit scales and minima, four bits a number."""
    scale, minimum = _scales_and_minima(blocks)
    q = ((blocks[:, 16:].reshape(-1, 4, 1, 32) >> _NIBBLES) & 15).reshape(-1, 8, 32).astype(np.float32)
    return (scale * q - minimum).reshape(-1, 256)


def q5_k(blocks: Bytes) -> Floats:
    """As `q4_k`, with a fifth bit of each number in front."""
    scale, minimum = _scales_and_minima(blocks)
    low = ((blocks[:, 48:].reshape(-1, 4, 1, 32) >> _NIBBLES) & 15).reshape(-1, 8, 32)
    high = ((blocks[:, 16:48].reshape(-1, 1, 1, 32) >> _EIGHT_BITS) & 1).reshape(-1, 8, 32)
    return (scale * (low | (high << 4)).astype(np.float32) - minimum).reshape(-1, 256)


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """[blocks, 8, 1] each, of Q4_K and Q5_K: 12 bytes hold eight 6-bit scales and eight 6-bit minima."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    scale = half(blocks[:, 0:2]) * scales.astype(np.float32)
    minimum = half(blocks[:, 2:4]) * minima.astype(np.float32)
    return scale[..., None], minimum[..., None]


def q6_k(blocks: Bytes) -> Floats:
    """Two halves of four runs of 32: six bits each, four in ``ql`` and two in ``qh``; a scale for every 16."""
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    scales = blocks[:, 192:208].view(np.int8).reshape(-1, 2, 4, 2).astype(np.float32)
    low = np.concatenate([low & 15, low >> 4], axis=2)
    pairs = (high >> _TWO_BITS) & 3
    q = (low | (pairs << 4)).astype(np.int8) - np.int8(32)
    scale = np.repeat(half(blocks[:, 208:210]).reshape(-1, 1, 1, 1) * scales, 16, axis=-1)
    numbers: Floats = scale * q.astype(np.float32)
    return numbers.reshape(-1, 256)


def iq4_xs(blocks: Bytes) -> Floats:
    """8 runs of 32: 6-bit scales, and four bits a number that index `IQ4_VALUES`."""
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8)).reshape(-1, 8)
    scales = ((low & 15) | ((high.astype(np.uint8) & 3) << 4)).astype(np.int8) - np.int8(32)
    scale = half(blocks[:, 0:2]) * scales.astype(np.float32)
    codes = ((blocks[:, 8:].reshape(-1, 8, 1, 16) >> _NIBBLES) & 15).reshape(-1, 8, 32)
    numbers: Floats = scale[..., None] * IQ4_VALUES[codes]
    return numbers.reshape(-1, 256)
