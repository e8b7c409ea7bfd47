"""The kernels' shared library, as Python sees it. ``kernels.c`` has the types and says what the functions want;
nothing is checked here.

The library is built with the package (``setup.py``) and loaded with ctypes, which lets go of the interpreter's lock for every call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tessella_p2p.base.errors import NotCertified
from tessella_p2p.model.gguf import GgmlType

PANEL: Final = 16
"""Outputs of one panel: the last one of a matrix is filled up with zeros."""
QUERY_ROWS: Final = 24
"""Query heads of one KV head, at most."""
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.uint32]

SEGMENT: Final = np.dtype([("position", np.int32), ("rows", np.int32), ("pages", np.uint64)], align=True)
"""Consecutive rows of one session: ``pages`` is the address of its int32 page numbers."""
_KINDS: Final = {GgmlType.F32: 0, GgmlType.F16: 1, GgmlType.BF16: 2, GgmlType.Q4_1: 3, GgmlType.Q8_0: 4}


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("data", ctypes.c_void_p),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", ctypes.c_void_p),
        ("ffn_norm", ctypes.c_void_p),
        *((name, _Matrix) for name in ("q", "k", "v", "attention_output", "gate", "up", "down")),
    )


class _Stage(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")),
        ("eps", ctypes.c_float),
        ("layers", ctypes.POINTER(_Layer)),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("embedding", _Matrix),
        ("output_norm", ctypes.c_void_p),
        ("output", _Matrix),
    )


@cache
def _library() -> ctypes.CDLL:
    """Load the library.

    Raises:
        NotCertified: it was not built, because there was no C compiler when the package was installed.
    """
    folder = Path(__file__).parent
    found = [path for suffix in EXTENSION_SUFFIXES if (path := folder / f"_kernels{suffix}").exists()]
    if not found:
        raise NotCertified(
            "the native kernels are not built: install a C compiler and tessella-p2p again, or choose a torch recipe "
            '(recipe = "torch-f32")'
        )
    library = ctypes.CDLL(str(found[0]))
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    for name, result, arguments in (
        ("packed_bytes", ctypes.c_int64, [number] * 3),
        ("pack", None, [number] * 3 + [pointer] * 2),
        ("new", pointer, [ctypes.POINTER(_Stage)] + [number] * 4),
        ("free", None, [pointer]),
        ("embed", None, [pointer, pointer, number, pointer]),
        ("forward", number, [pointer, pointer, pointer, number, pointer]),
        ("logits", None, [pointer, pointer, number, pointer]),
        ("normed", None, [pointer, pointer, number, pointer]),
        ("instructions", ctypes.c_char_p, [number]),
    ):
        function = getattr(library, f"tessella_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def instructions() -> str:
    """The instruction set that the kernels use on this machine."""
    return str(_library().tessella_instructions(0).decode())


class Packed:
    """A matrix in the kernels' own order; as many bytes as in the artifact, but for Q4_0, which takes 20 for 18.

    Args:
        raw: [outputs, bytes of a row] uint8.
        kind: F32, F16, BF16, Q4_1 or Q8_0; of the last two a row is whole blocks.
    """

    def __init__(self, raw: Bytes, kind: GgmlType) -> None:
        library, number = _library(), _KINDS[kind]
        outputs, columns = raw.shape[0], raw.shape[1] // kind.block_bytes * kind.block_elements
        self.outputs = outputs
        self.columns = columns
        rows = np.ascontiguousarray(raw)
        self._data = np.empty(library.tessella_packed_bytes(number, outputs, columns), np.uint8)
        library.tessella_pack(number, outputs, columns, rows.ctypes.data, self._data.ctypes.data)
        self.matrix = _Matrix(number, outputs, columns, self._data.ctypes.data)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._data.nbytes


class LayerArrays:
    """The arrays of one layer."""

    def __init__(self, attention_norm: Floats, ffn_norm: Floats, matrices: Sequence[Packed]) -> None:
        self.attention_norm = attention_norm
        self.ffn_norm = ffn_norm
        self.matrices = tuple(matrices)
        """q, k, v, attention output, gate, up, down."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.attention_norm.nbytes + self.ffn_norm.nbytes + sum(matrix.nbytes for matrix in self.matrices)


class Kernels:
    """A stage's arrays and the buffers to compute with them. One call at a time, none after `close`, and none in a forked child.

    Args:
        shape: hidden, heads, kv_heads, head_dim, ffn.
        layers: in order.
        rotations: cosines and sines, each [positions, head_dim / 2] float32.
        embedding: of a head.
        output: the norm's weight and the matrix of a tail.
        threads: that compute, the caller's included.
        max_rows: rows of one `forward` or `logits`.
        portable: use plain C, whatever the CPU has.

    Raises:
        MemoryError: no memory, or no threads.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        eps: float,
        layers: Sequence[LayerArrays],
        rotations: tuple[Floats, Floats],
        *,
        embedding: Packed | None,
        output: tuple[Floats, Packed] | None,
        threads: int,
        max_rows: int,
        portable: bool = False,
    ) -> None:
        self._library = _library()
        self._alive = (layers, rotations, embedding, output)  # C has their addresses
        self._layers = (_Layer * len(layers))(
            *(
                _Layer(a.attention_norm.ctypes.data, a.ffn_norm.ctypes.data, *(m.matrix for m in a.matrices))
                for a in layers
            )
        )
        stage = _Stage(len(layers), *shape, eps, self._layers, rotations[0].ctypes.data, rotations[1].ctypes.data)
        if embedding is not None:
            stage.embedding = embedding.matrix
        if output is not None:
            stage.output_norm, stage.output = output[0].ctypes.data, output[1].matrix
        self._hidden = shape[0]
        self._padded_outputs = -(-output[1].outputs // PANEL) * PANEL if output is not None else 0
        self._engine = self._library.tessella_new(
            ctypes.byref(stage), threads, max_rows, rotations[0].shape[0], portable
        )
        if not self._engine:
            raise MemoryError("no memory or threads for the kernels of a stage")

    def close(self) -> None:
        """Free the buffers and end the threads; idempotent."""
        engine, self._engine = self._engine, None
        self._library.tessella_free(engine)

    def __del__(self) -> None:
        if getattr(self, "_engine", None):
            self.close()

    def embed(self, token_ids: Ids) -> Floats:
        """[rows, hidden] for token ids inside of the vocabulary."""
        out = np.empty((token_ids.size, self._hidden), np.float32)
        self._library.tessella_embed(self._engine, token_ids.ctypes.data, token_ids.size, out.ctypes.data)
        return out

    def forward(self, x: Floats, segments: npt.NDArray[np.void], kv: Floats) -> None:
        """Run all layers over ``x`` [rows, hidden], C-contiguous, in place.

        Args:
            segments: of dtype `SEGMENT`, in the order of the rows.
            kv: the arena, [pages, floats of a page].

        Raises:
            MemoryError: nothing was computed.
        """
        addresses = x.ctypes.data, segments.ctypes.data, len(segments), kv.ctypes.data
        if self._library.tessella_forward(self._engine, *addresses):
            raise MemoryError("no memory for a turn of a stage")

    def normed(self, hidden: Floats) -> Floats:
        """[rows, hidden] behind a tail's last norm, for hidden states [rows, hidden], however many."""
        rows = np.ascontiguousarray(hidden)
        out = np.empty_like(rows)
        self._library.tessella_normed(self._engine, rows.ctypes.data, rows.shape[0], out.ctypes.data)
        return out

    def logits(self, hidden: Floats, vocabulary: int) -> Floats:
        """[rows, vocabulary] for hidden states [rows, hidden]."""
        rows = np.ascontiguousarray(hidden)
        out = np.empty((rows.shape[0], self._padded_outputs), np.float32)
        self._library.tessella_logits(self._engine, rows.ctypes.data, rows.shape[0], out.ctypes.data)
        return out[:, :vocabulary]
