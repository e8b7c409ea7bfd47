"""The native kernels' functions by themselves, for tests: one product, one head's attention, one exponential."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tessella_p2p.model.gguf import GgmlType
from tessella_p2p.stages.native.binding import SEGMENT, Floats, Kernels, LayerArrays, Packed

Doubles = npt.NDArray[np.float64]


def f32(numbers: npt.ArrayLike) -> Packed:
    """A matrix of plain numbers."""
    rows = np.ascontiguousarray(numbers, dtype="<f4")
    return Packed(rows.view(np.uint8), GgmlType.F32)


def ones(count: int) -> Floats:
    return np.ones(count, np.float32)


def tail(
    matrix: Packed, *, eps: float = 1e-30, threads: int = 1, portable: bool = False, max_rows: int = 80
) -> Kernels:
    """A stage of no layers: logits are ``matrix`` times the normalised row."""
    turns = np.zeros((1, 8), np.float32)
    return Kernels(
        (matrix.columns, 1, 1, 16, 32),
        eps,
        [],
        (turns, turns),
        embedding=None,
        output=(ones(matrix.columns), matrix),
        threads=threads,
        max_rows=max_rows,
        portable=portable,
    )


def unit_rows(rng: np.random.Generator, rows: int, columns: int) -> Floats:
    """[rows, columns] of ±1: their norm is 1, so that normalising leaves them as they are."""
    return rng.choice(np.array([-1, 1], np.float32), (rows, columns))


class OneLayer:
    """A layer with one KV head whose matrices a test chooses; those that it leaves out are zero. Values: head_dim = hidden = ffn."""

    def __init__(
        self, size: int, positions: int, *, matrices: Mapping[str, Doubles], portable: bool = False, threads: int = 1
    ) -> None:
        zero = np.zeros((size, size))
        names = ("q", "k", "v", "attention_output", "gate", "up", "down")
        layer = LayerArrays(ones(size), ones(size), [f32(matrices.get(name, zero)) for name in names])
        still = np.ones((positions, size // 2), np.float32), np.zeros((positions, size // 2), np.float32)
        self._kernels = Kernels(
            (size, 1, 1, size, size),
            1e-30,
            [layer],
            still,
            embedding=None,
            output=None,
            threads=threads,
            max_rows=positions,
            portable=portable,
        )
        self._pages = np.arange(-(-positions // 64), dtype=np.int32)[::-1].copy()
        self.arena: Floats = np.full((len(self._pages), 2 * size * 64), np.nan, np.float32)

    def forward(self, rows: Floats, position: int = 0) -> Floats:
        """[rows, size] behind the layer."""
        x = np.array(rows, np.float32, order="C")
        segments = np.array([(position, len(x), self._pages.ctypes.data)], SEGMENT)
        self._kernels.forward(x, segments, self.arena)
        return x
