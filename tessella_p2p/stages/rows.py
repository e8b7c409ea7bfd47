"""Rows of hidden states as numbers, whatever their wire dtype (pure): what audits compute with."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from tessella_p2p.stages.engine import Buffer
from tessella_p2p.wire.frames import DType

Floats = npt.NDArray[np.float32]

MAX_PPM: Final = 1_000_000_000
"""A deviation that is as large as this, or is no number at all."""


def floats_of(body: Buffer, dtype: DType) -> Floats:
    """The numbers of ``body``, exactly; flat."""
    if dtype is DType.F32:
        return np.frombuffer(body, "<f4")
    if dtype is DType.F16:
        return np.frombuffer(body, "<f2").astype(np.float32)
    if dtype is DType.BF16:
        return (np.frombuffer(body, "<u2").astype(np.uint32) << 16).view(np.float32)
    raise ValueError(f"{dtype.name} is no dtype of hidden states")


def body_of(values: Floats, dtype: DType) -> bytes:
    """Finite ``values`` as little-endian ``dtype``, each rounded to the nearest, of two to the even one."""
    if dtype is DType.F32:
        return values.astype("<f4").tobytes()
    if dtype is DType.F16:
        with np.errstate(over="ignore"):
            return values.astype("<f2").tobytes()
    if dtype is DType.BF16:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    raise ValueError(f"{dtype.name} is no dtype of hidden states")


def cast(body: Buffer, dtype: DType, to: DType) -> Buffer:
    """``body`` in another dtype; as it is where that is its own."""
    return body if dtype is to else body_of(floats_of(body, dtype), to)


def deviation_ppm(true: Floats, got: Floats, rows: int) -> int:
    """How far ``got`` is from ``true``: the worst row's largest difference, in millionths of that row's largest magnitude, rounded up.

    By row, because a model's first positions may be a thousand times larger than the others, which would hide everything.

    Args:
        true, got: ``[rows · width]``, equally long.
        rows: at least 1.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        wide = true.reshape(rows, -1).astype(np.float64)
        off = np.abs(got.reshape(rows, -1).astype(np.float64) - wide).max(axis=1)
        largest = np.abs(wide).max(axis=1)
        shares = np.where(off == 0.0, 0.0, off / np.maximum(largest, np.finfo(np.float64).tiny))
    worst = float(shares.max())
    return MAX_PPM if not worst * 1e6 < MAX_PPM else math.ceil(worst * 1e6)
