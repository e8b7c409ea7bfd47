"""The angles of rotary position embedding (Su et al., "RoFormer"), as every engine uses them (pure)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tessella_p2p.model.config import ModelConfig

Floats = npt.NDArray[np.float32]


def rotations(config: ModelConfig, num_positions: int) -> tuple[Floats, Floats]:
    """Cosines and sines [positions, head_dim / 2] float32.

    Angles are rounded to float32 as the reference implementations do; their sines are taken in float64 and rounded, so that every
    machine gets the same table.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = (1.0 / config.rope_theta**exponents).astype(np.float32)
    angles = np.outer(np.arange(num_positions, dtype=np.float32), frequencies).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def order_of_halves(num_rows: int, head_dim: int) -> npt.NDArray[np.int64]:
    """The order in which to take the rows of a query or key matrix: llama.cpp stores them for rotation of adjacent pairs, and here
    halves rotate.
    """
    return np.arange(num_rows).reshape(-1, head_dim // 2, 2).transpose(0, 2, 1).reshape(-1)
