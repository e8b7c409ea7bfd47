"""Decoding stored blocks, against gguf-py's own decoder (``tests/data/dequantize_golden.json``)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tessella_p2p.model.config import CERTIFIED_KINDS
from tessella_p2p.model.gguf import GgmlType
from tessella_p2p.stages.dequantize import dequantize, q4_parts

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "dequantize_golden.json").read_text())["cases"]


def golden(
    kind: GgmlType,
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.uint8]], np.ndarray[tuple[int], np.dtype[np.float32]]]:
    case = GOLDEN[kind.name]
    raw = np.frombuffer(bytes.fromhex(case["raw"]), np.uint8).reshape(1, -1)
    return raw, np.frombuffer(bytes.fromhex(case["float32_hex"]), "<f4")


def test_every_certified_type_has_a_golden_case() -> None:
    assert {kind.name for kind in CERTIFIED_KINDS} == set(GOLDEN)


@pytest.mark.parametrize("kind", sorted(CERTIFIED_KINDS))
def test_numbers_are_those_of_gguf_py_bit_for_bit(kind: GgmlType) -> None:
    raw, expected = golden(kind)
    assert dequantize(raw, kind)[0].tobytes() == expected.tobytes()


def test_rows_decode_as_they_do_alone() -> None:
    raw, expected = golden(GgmlType.Q6_K)
    rows = np.concatenate([raw, raw[:, ::-1], raw])
    decoded = dequantize(rows, GgmlType.Q6_K)
    assert decoded.shape == (3, expected.size)
    assert decoded[0].tobytes() == decoded[2].tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", [GgmlType.Q4_0, GgmlType.Q4_1])
def test_four_bit_parts_are_the_same_numbers(kind: GgmlType) -> None:
    raw, expected = golden(kind)
    q, scale, zero = q4_parts(raw, kind)
    assert q.max() <= 15
    blocks = q.reshape(-1, 32).astype(np.float64) - 8
    numbers = blocks * scale.reshape(-1, 1).astype(np.float64) + zero.reshape(-1, 1).astype(np.float64)
    assert np.allclose(numbers.reshape(-1), expected, rtol=0, atol=1e-6)
