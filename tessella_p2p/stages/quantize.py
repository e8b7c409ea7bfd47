"""The form in which the native engine keeps a matrix (pure): as stored, converted by name, or quantised at load.

`KEPT` are the forms that its kernels read. A matrix in another one is decoded exactly and kept in the form that `CONVERSIONS` names:

- Q5_0 and IQ4_NL become Q8_0, which holds the same numbers: one float16 scale times an integer of at most 8 bits;
- Q5_1, the K types and IQ4_XS become float16, which moves a weight by at most 2⁻¹¹ of itself. With every matrix of SmolLM2-135M rounded
  so, its logits move by 0.004 in the mean and 0.04 at most, and none of the reference's 490 tokens is lost. Float32 would be exact at
  twice the memory, and a step's time is its bytes.

Recipes ``q8_0`` and ``q4_0`` quantise what would take more memory than theirs, with the rounding of ggml's reference
(`quantize_row_q8_0_ref`, `quantize_row_q4_0_ref`). What is as small already is kept: to quantise Q4_1 again as Q4_0 saves nothing here
and costs a fourth of the reference's tokens. Under ``q4_0`` the vocabulary's two matrices (embedding, output) are kept in 8 bits: an
error there goes straight into the logits, and llama.cpp keeps them finer as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from tessella_p2p.base.errors import NotCertified
from tessella_p2p.base.limits import QUANTIZE_CHUNK_BYTES
from tessella_p2p.model.config import EMBEDDING, OUTPUT
from tessella_p2p.model.gguf import GgmlType, TensorInfo
from tessella_p2p.model.recipe import Recipe
from tessella_p2p.stages.dequantize import dequantize, eight_bit_parts
from tessella_p2p.stages.k_quants import Bytes, Floats

KEPT: Final = frozenset({GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q8_0, GgmlType.F16, GgmlType.BF16, GgmlType.F32})
"""What the native kernels read."""
CONVERSIONS: Final[Mapping[GgmlType, GgmlType]] = MappingProxyType(
    {
        GgmlType.Q5_0: GgmlType.Q8_0,
        GgmlType.IQ4_NL: GgmlType.Q8_0,
        GgmlType.Q5_1: GgmlType.F16,
        GgmlType.Q2_K: GgmlType.F16,
        GgmlType.Q3_K: GgmlType.F16,
        GgmlType.Q4_K: GgmlType.F16,
        GgmlType.Q5_K: GgmlType.F16,
        GgmlType.Q6_K: GgmlType.F16,
        GgmlType.IQ4_XS: GgmlType.F16,
    }
)
"""What the other types of a file are kept as."""
_BLOCK: Final = 32
_QUANTIZED: Final[Mapping[str, GgmlType]] = MappingProxyType({"q8_0": GgmlType.Q8_0, "q4_0": GgmlType.Q4_0})
_F16_MAX: Final = 65504.0


def kept_kind(kind: GgmlType, columns: int, recipe: Recipe, *, is_vocabulary: bool = False) -> GgmlType:
    """The form that a stage keeps a matrix in.

    Args:
        kind: how the artifact stores it.
        columns: of the matrix; one whose rows are no whole blocks of 32 is not quantised.
        recipe: of the native engine.
        is_vocabulary: whether it is the embedding or the output matrix.
    """
    stays = kind if kind in KEPT else CONVERSIONS[kind]
    wanted = _QUANTIZED.get(recipe.weight)
    if wanted is None or columns % _BLOCK:
        return stays
    if is_vocabulary:
        wanted = GgmlType.Q8_0
    return stays if block_bytes(stays) <= block_bytes(wanted) else wanted


def block_bytes(kind: GgmlType) -> int:
    """What 32 weights take in the native engine's memory. It keeps Q4_0 in the layout of Q4_1."""
    stored = GgmlType.Q4_1 if kind is GgmlType.Q4_0 else kind
    return _BLOCK // stored.block_elements * stored.block_bytes


def stored_form(raw: Bytes, kind: GgmlType, recipe: Recipe, *, is_vocabulary: bool = False) -> tuple[Bytes, GgmlType]:
    """A matrix as a stage keeps it. Blocks while it converts: seconds for a large matrix.

    Args:
        raw: [rows, bytes of a row] uint8, as the artifact stores it.
        kind: its type.
        recipe: of the native engine.
        is_vocabulary: whether it is the embedding or the output matrix.

    Returns:
        [rows, bytes of a row] uint8 and its type, one of `KEPT`: ``raw`` itself where nothing is to be done, else a new array.

    Raises:
        NotCertified: a number that the wanted form cannot hold.
    """
    columns = raw.shape[1] // kind.block_bytes * kind.block_elements
    wanted = kept_kind(kind, columns, recipe, is_vocabulary=is_vocabulary)
    if wanted is kind:
        return raw, kind
    out = np.empty((raw.shape[0], columns // wanted.block_elements * wanted.block_bytes), np.uint8)
    for rows in _row_chunks(raw.shape[0], columns):
        out[rows] = _converted(raw[rows], kind, wanted)
    return out, wanted


def _converted(raw: Bytes, kind: GgmlType, wanted: GgmlType) -> Bytes:
    parts = eight_bit_parts(raw, kind) if wanted is GgmlType.Q8_0 else None
    if parts is not None:
        return _blocks(raw.shape[0], *parts)
    return _ENCODERS[wanted](dequantize(raw, kind))


def conversions(tensors: Iterable[TensorInfo], recipe: Recipe) -> dict[str, str]:
    """What becomes of an artifact's matrices that are not kept as they are, for people: ``{"Q6_K": "F16"}``.

    Args:
        tensors: of the artifact; what is no matrix is left out.
        recipe: of any engine.
    """
    forms: dict[str, set[str]] = {}
    for tensor in tensors:
        if len(tensor.shape) == 2:
            forms.setdefault(tensor.kind.name, set()).add(_form_name(tensor, recipe))
    return {kind: ", ".join(sorted(kept)) for kind, kept in sorted(forms.items()) if kept != {kind}}


def _form_name(tensor: TensorInfo, recipe: Recipe) -> str:
    if recipe.engine == "native":
        is_vocabulary = tensor.name in (EMBEDDING, OUTPUT)
        return kept_kind(tensor.kind, tensor.shape[1], recipe, is_vocabulary=is_vocabulary).name
    if recipe.weight == "int4":
        return tensor.kind.name if tensor.kind in (GgmlType.Q4_0, GgmlType.Q4_1) else "int8"
    return recipe.weight.upper()


def _row_chunks(num_rows: int, columns: int) -> Iterator[slice]:
    step = max(1, QUANTIZE_CHUNK_BYTES // (4 * columns))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def quantize_q8_0(numbers: Floats) -> Bytes:
    """[rows, columns] float32 → [rows, columns / 32 · 34] uint8: a float16 scale and 32 int8 for every 32 numbers.

    Raises:
        NotCertified: a number that is not finite, or too large for a float16 scale.
    """
    blocks = numbers.reshape(-1, _BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scale)
    # roundf: halves go away from zero.
    magnitude = np.abs(scaled)
    whole = np.floor(magnitude)
    whole += np.floor(2 * (magnitude - whole))
    q = np.copysign(whole, scaled).astype(np.int8)
    return _blocks(numbers.shape[0], _scale_bytes(scale), q.view(np.uint8))


def quantize_q4_0(numbers: Floats) -> Bytes:
    """[rows, columns] float32 → [rows, columns / 32 · 18] uint8: a float16 scale and 32 four-bit numbers for every 32 numbers.

    The number of the largest magnitude (the first of equals) becomes −8 steps.

    Raises:
        NotCertified: a number that is not finite, or too large for a float16 scale.
    """
    blocks = numbers.reshape(-1, _BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-8)
    shifted = blocks * _inverse(scale) + np.float32(8.5)
    q = np.minimum(np.trunc(shifted), 15).astype(np.uint8)
    half = _BLOCK // 2
    return _blocks(numbers.shape[0], _scale_bytes(scale), q[:, :half] | (q[:, half:] << 4))


def _inverse(scale: Floats) -> Floats:
    """1 / scale, and 0 for 0. A scale that is not finite is refused here, before anything is cast."""
    if not np.isfinite(scale).all():
        raise NotCertified("a weight is not finite")
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    # A block of subnormal numbers: its scale is 0 in float16 anyway.
    inverse[~np.isfinite(inverse)] = 0
    return inverse


def _scale_bytes(scale: Floats) -> Bytes:
    if np.abs(scale).max(initial=0.0) > _F16_MAX:
        raise NotCertified("a weight is too large for a float16 scale")
    return scale.astype("<f2").view(np.uint8)


def _blocks(num_rows: int, scales: Bytes, numbers: Bytes) -> Bytes:
    return np.concatenate([scales, numbers], axis=1).reshape(num_rows, -1)


def _f16(numbers: Floats) -> Bytes:
    if not np.abs(numbers).max(initial=0.0) <= _F16_MAX:
        raise NotCertified("a weight is too large for float16, or not finite")
    return numbers.astype("<f2").view(np.uint8)


_ENCODERS: Final[Mapping[GgmlType, Callable[[Floats], Bytes]]] = {
    GgmlType.F16: _f16,
    GgmlType.Q8_0: quantize_q8_0,
    GgmlType.Q4_0: quantize_q4_0,
}
