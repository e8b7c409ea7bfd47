"""Matrix products of the torch engine; on the CPU their rows do not depend on how many rows there are.

Ordinary products choose their kernel, and so the order in which they add, by the number of rows: a token's bits then depend on who
else was in the batch. These do not:

- float32: oneDNN with packed weights, the inner dimension cut into fixed blocks of at most `MAX_BLOCK` that are added in order;
- float16 and bfloat16: weights and rows rounded to them, multiplied as float32 (a CPU's own kernels for them are not invariant, or not
  there), the result rounded again. The weights take four bytes each;
- int4: ``(q − 8) · scale + zero`` in groups of 32, as stored, on bfloat16 rows;
- int8: one scale per output, on bfloat16 rows, for what is not stored in four bits.

``tests/stages/test_bit_identity.py`` checks them on the machine that runs it. On other devices products are the library's own: nothing
is promised of their bits but that they add in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tessella_p2p.base.errors import NotCertified
from tessella_p2p.model.gguf import GgmlType
from tessella_p2p.model.recipe import Recipe
from tessella_p2p.stages.dequantize import dequantize, q4_parts
from tessella_p2p.stages.k_quants import Bytes

MAX_BLOCK = 768
_BLOCK_MULTIPLE = 64
_GROUP = 32
_INT4_ROWS_MULTIPLE = 16
_CPU = torch.device("cpu")
_FOUR_BITS = frozenset({GgmlType.Q4_0, GgmlType.Q4_1})


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix as it stands in the artifact: ``raw`` is [rows, bytes of a row] uint8."""

    name: str
    kind: GgmlType
    raw: Bytes

    @property
    def num_rows(self) -> int:
        """Rows, which are the product's outputs."""
        return int(self.raw.shape[0])

    def dense(self) -> Tensor:
        """[rows, columns] float32."""
        return torch.from_numpy(dequantize(self.raw, self.kind))


@dataclass(frozen=True, slots=True)
class Linear:
    """``x [rows, in] → x · Wᵀ [rows, out]``, in the recipe's activation dtype."""

    apply: Callable[[Tensor], Tensor]
    memory_bytes: int


_DENSE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def build_linear(matrices: Sequence[StoredMatrix], recipe: Recipe, device: torch.device = _CPU) -> Linear:
    """The product with ``matrices`` below one another, in the arithmetic of ``recipe``.

    Raises:
        NotCertified: this build of torch lacks the kernels, or a weight is too large for the recipe.
    """
    dtype = _DENSE.get(recipe.weight)
    if dtype is not None:
        weight = torch.cat([matrix.dense() for matrix in matrices]).to(dtype)
        if not bool(torch.isfinite(weight).all()):
            raise NotCertified(f"{matrices[0].name}: a weight is not finite in {recipe.weight}")
        return _dense_on_cpu(weight) if device.type == "cpu" else _dense_on(weight, device)
    parts: list[Linear] = []
    for matrix_group in _same_form(matrices):
        parts.append(_int4(matrix_group) if _fits_int4(matrix_group) else _int8(matrix_group))
    if len(parts) == 1:
        return parts[0]
    applies = [part.apply for part in parts]
    return Linear(lambda x: torch.cat([apply(x) for apply in applies], -1), sum(part.memory_bytes for part in parts))


def _same_form(matrices: Sequence[StoredMatrix]) -> list[list[StoredMatrix]]:
    """Neighbours that may share one product."""
    groups: list[list[StoredMatrix]] = []
    for matrix in matrices:
        if groups and (groups[-1][-1].kind in _FOUR_BITS) == (matrix.kind in _FOUR_BITS):
            groups[-1].append(matrix)
        else:
            groups.append([matrix])
    return groups


def _fits_int4(matrices: Sequence[StoredMatrix]) -> bool:
    rows = sum(matrix.num_rows for matrix in matrices)
    return all(matrix.kind in _FOUR_BITS for matrix in matrices) and rows % _INT4_ROWS_MULTIPLE == 0


def _dense_on(weight: Tensor, device: torch.device) -> Linear:
    there = weight.to(device)
    return Linear(lambda x: functional.linear(x, there), there.nbytes)


def _dense_on_cpu(weight: Tensor) -> Linear:
    dtype, wide = weight.dtype, _packed_f32(weight.float())
    if dtype is torch.float32:
        return wide
    return Linear(lambda x: wide.apply(x.float()).to(dtype), wide.memory_bytes)


def _packed_f32(weight: Tensor) -> Linear:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise NotCertified("a dense recipe of torch needs, on the CPU, a build of torch with oneDNN")
    columns = weight.shape[1]
    num_blocks = -(-columns // MAX_BLOCK)
    width = -(-columns // (num_blocks * _BLOCK_MULTIPLE)) * _BLOCK_MULTIPLE
    product = torch.ops.mkldnn._linear_pointwise
    pack = torch.ops.mkldnn._reorder_linear_weight
    cuts = [(start, min(start + width, columns)) for start in range(0, columns, width)]
    blocks = [pack(weight[:, start:end].contiguous(), None) for start, end in cuts]
    memory_bytes = weight.numel() * weight.element_size()
    if len(blocks) == 1:
        only = blocks[0]
        return Linear(lambda x: product(x, only, None, "none", [], ""), memory_bytes)

    def apply(x: Tensor) -> Tensor:
        total: Tensor | None = None
        for (start, end), block in zip(cuts, blocks, strict=True):
            part = product(x[:, start:end].contiguous(), block, None, "none", [], "")
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    return Linear(apply, memory_bytes)


def _int4(matrices: Sequence[StoredMatrix]) -> Linear:
    parts = [q4_parts(matrix.raw, matrix.kind) for matrix in matrices]
    q = torch.from_numpy(np.concatenate([part[0] for part in parts]).astype(np.int32))
    scale, zero = (torch.from_numpy(np.concatenate([part[index] for part in parts])) for index in (1, 2))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    # [groups, out, 2]; the kernel wants the scales in the dtype of the rows.
    scales = torch.stack([scale, zero], -1).transpose(0, 1).contiguous().to(torch.bfloat16)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    return Linear(lambda x: product(x, packed, _GROUP, scales), packed.nbytes + scales.nbytes)


def _int8(matrices: Sequence[StoredMatrix]) -> Linear:
    weight = torch.cat([matrix.dense() for matrix in matrices])
    # The scale is rounded before it divides, so that its rounding does not add to the weights' own.
    scale = (weight.abs().amax(1) / 127).clamp_min(1e-20).to(torch.bfloat16)
    q = torch.round(weight / scale.float()[:, None]).clamp_(-127, 127).to(torch.int8).contiguous()
    product = torch.ops.aten._weight_int8pack_mm
    return Linear(lambda x: product(x, q, scale), q.nbytes + scale.nbytes)
