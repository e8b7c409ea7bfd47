"""Quantising at load, against gguf-py (``tests/data/quantize_golden.json``), and the forms that the native engine keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tessella_p2p.base import limits
from tessella_p2p.base.errors import NotCertified
from tessella_p2p.model.config import CERTIFIED_KINDS
from tessella_p2p.model.gguf import GgmlType, TensorInfo
from tessella_p2p.model.recipe import RECIPES
from tessella_p2p.stages import quantize
from tessella_p2p.stages.dequantize import dequantize
from tessella_p2p.stages.k_quants import Bytes, Floats
from tessella_p2p.stages.quantize import (
    CONVERSIONS,
    KEPT,
    block_bytes,
    conversions,
    kept_kind,
    quantize_q4_0,
    quantize_q8_0,
    stored_form,
)

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "quantize_golden.json").read_text())
STORED = json.loads((DATA / "dequantize_golden.json").read_text())["cases"]
NUMBERS: Floats = np.frombuffer(bytes.fromhex(GOLDEN["float32_hex"]), "<f4").reshape(GOLDEN["shape"])
QUANTIZERS = {"Q8_0": quantize_q8_0, "Q4_0": quantize_q4_0}
NATIVE = [recipe for recipe in RECIPES.values() if recipe.engine == "native"]


def stored(kind: GgmlType, rows: int = 1) -> Bytes:
    raw = np.frombuffer(bytes.fromhex(STORED[kind.name]["raw"]), np.uint8)
    return np.tile(raw, (rows, 32 if kind.block_elements == 1 else 1))


@pytest.mark.parametrize("name", sorted(QUANTIZERS))
def test_bytes_are_those_of_gguf_py(name: str) -> None:
    assert QUANTIZERS[name](NUMBERS).tobytes().hex() == GOLDEN["raw"][name]


@given(arrays(np.float32, (2, 64), elements=st.floats(-1e4, 1e4, width=32)))
def test_a_number_moves_by_half_a_step_at_most(numbers: Floats) -> None:
    for kind, quantizer, steps in ((GgmlType.Q8_0, quantize_q8_0, 127.0), (GgmlType.Q4_0, quantize_q4_0, 8.0)):
        blocks = numbers.reshape(-1, 32)
        step = np.abs(blocks).max(axis=1, keepdims=True) / steps
        # Q4_0's codes end at 7 on the one side; a float16 scale is itself off by 2⁻¹¹, or 2⁻²⁴ where it is subnormal.
        bound = step * (1.0 if kind is GgmlType.Q4_0 else 0.5) + steps * (step * 2.0**-11 + 2.0**-24)
        error = np.abs(dequantize(quantizer(numbers), kind).reshape(-1, 32) - blocks)
        assert (error <= bound * 1.0001).all()


@pytest.mark.parametrize("name", sorted(QUANTIZERS))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_numbers_that_no_scale_holds_are_refused(name: str, bad: float) -> None:
    numbers = NUMBERS.copy()
    numbers[3, 7] = bad
    with pytest.raises(NotCertified):
        QUANTIZERS[name](numbers)


@pytest.mark.parametrize("kind", sorted(CERTIFIED_KINDS))
def test_every_certified_type_has_a_form_that_the_kernels_read(kind: GgmlType) -> None:
    for native in NATIVE:
        for is_vocabulary in (False, True):
            raw, kept = stored_form(stored(kind), kind, native, is_vocabulary=is_vocabulary)
            columns = stored(kind).shape[1] // kind.block_bytes * kind.block_elements
            assert kept in KEPT
            assert kept is kept_kind(kind, columns, native, is_vocabulary=is_vocabulary)
            assert raw.shape == (1, columns // kept.block_elements * kept.block_bytes)


@pytest.mark.parametrize("kind", sorted(KEPT))
def test_what_the_kernels_read_is_kept_without_a_copy(kind: GgmlType) -> None:
    raw = stored(kind)
    assert stored_form(raw, kind, RECIPES["f32"])[0] is raw


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("q8_0", GgmlType.Q8_0),
        ("q8_0", GgmlType.Q4_1),
        ("q8_0", GgmlType.Q4_0),
        ("q4_0", GgmlType.Q4_0),
        ("q4_0", GgmlType.Q4_1),
    ],
)
def test_a_matrix_that_is_as_small_already_is_kept_without_a_copy(name: str, kind: GgmlType) -> None:
    raw = stored(kind)
    for is_vocabulary in (False, True):
        assert stored_form(raw, kind, RECIPES[name], is_vocabulary=is_vocabulary)[0] is raw


@pytest.mark.parametrize("kind", sorted(CERTIFIED_KINDS))
def test_quantising_never_takes_more_memory(kind: GgmlType) -> None:
    sizes = [block_bytes(kept_kind(kind, 256, RECIPES[name])) for name in ("f32", "q8_0", "q4_0")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] <= 34
    assert sizes[2] <= 20


@pytest.mark.parametrize("kind", [GgmlType.Q5_0, GgmlType.IQ4_NL])
def test_eight_bits_hold_fewer_bits_and_iq4_exactly(kind: GgmlType) -> None:
    raw, kept = stored_form(stored(kind), kind, RECIPES["f32"])
    assert kept is GgmlType.Q8_0
    assert np.array_equal(dequantize(raw, kept), dequantize(stored(kind), kind))


@pytest.mark.parametrize("kind", sorted(kind for kind, kept in CONVERSIONS.items() if kept is GgmlType.F16))
def test_other_types_are_rounded_to_float16(kind: GgmlType) -> None:
    raw, kept = stored_form(stored(kind), kind, RECIPES["f32"])
    exact = dequantize(stored(kind), kind)
    assert kept is GgmlType.F16
    assert (np.abs(dequantize(raw, kept) - exact) <= np.abs(exact) * 2.0**-11 + 2.0**-25).all()


def test_the_vocabulary_keeps_eight_bits_where_layers_keep_four() -> None:
    recipe = RECIPES["q4_0"]
    assert kept_kind(GgmlType.F16, 64, recipe) is kept_kind(GgmlType.Q8_0, 64, recipe) is GgmlType.Q4_0
    assert kept_kind(GgmlType.Q8_0, 64, recipe, is_vocabulary=True) is GgmlType.Q8_0
    assert kept_kind(GgmlType.F16, 64, recipe, is_vocabulary=True) is GgmlType.Q8_0
    assert kept_kind(GgmlType.Q4_0, 64, recipe, is_vocabulary=True) is GgmlType.Q4_0


def test_rows_that_are_no_whole_blocks_are_not_quantised() -> None:
    assert kept_kind(GgmlType.F32, 48, RECIPES["q4_0"]) is GgmlType.F32


def test_a_matrix_is_converted_in_pieces_as_it_is_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.concatenate([stored(GgmlType.Q6_K, 5), stored(GgmlType.Q6_K, 5)[:, ::-1].copy()])
    raw[5:, 208:210] = raw[5:, 418:420] = raw[5:, 628:630] = 7  # a reversed scale may be NaN
    for recipe in NATIVE:
        whole = stored_form(raw, GgmlType.Q6_K, recipe)[0].tobytes()
        monkeypatch.setattr(quantize, "QUANTIZE_CHUNK_BYTES", 4 * 768 * 3)
        assert stored_form(raw, GgmlType.Q6_K, recipe)[0].tobytes() == whole
        monkeypatch.setattr(quantize, "QUANTIZE_CHUNK_BYTES", limits.QUANTIZE_CHUNK_BYTES)


def test_conversions_are_said_by_name() -> None:
    tensors = [
        TensorInfo("token_embd.weight", (64, 256), GgmlType.Q6_K, 0, 0),
        TensorInfo("blk.0.ffn_up.weight", (64, 256), GgmlType.Q6_K, 0, 0),
        TensorInfo("blk.0.ffn_down.weight", (64, 256), GgmlType.Q4_0, 0, 0),
        TensorInfo("blk.0.ffn_gate.weight", (64, 256), GgmlType.Q5_0, 0, 0),
        TensorInfo("blk.0.ffn_norm.weight", (64,), GgmlType.F32, 0, 0),
    ]
    assert conversions(tensors, RECIPES["f32"]) == {"Q5_0": "Q8_0", "Q6_K": "F16"}
    assert conversions(tensors, RECIPES["q8_0"]) == {"Q5_0": "Q8_0", "Q6_K": "Q8_0"}
    assert conversions(tensors, RECIPES["q4_0"]) == {"Q5_0": "Q4_0", "Q6_K": "Q4_0, Q8_0"}
    assert conversions(tensors, RECIPES["torch-int4"]) == {"Q5_0": "int8", "Q6_K": "int8"}
    assert conversions(tensors, RECIPES["torch-f16"]) == {"Q4_0": "F16", "Q5_0": "F16", "Q6_K": "F16"}
