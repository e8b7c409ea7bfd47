"""The native kernels against float64 numpy, function by function; and against themselves in plain C, bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch

from tessella_p2p.base.errors import NotCertified
from tessella_p2p.model.gguf import GgmlType
from tessella_p2p.stages import native_proof
from tessella_p2p.stages.dequantize import dequantize
from tessella_p2p.stages.k_quants import Bytes
from tessella_p2p.stages.native.binding import Floats, Packed
from tessella_p2p.stages.native_weights import with_offsets
from tests.stages.native_kernels import Doubles, OneLayer, f32, tail, unit_rows

KINDS = [GgmlType.F32, GgmlType.F16, GgmlType.BF16, GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q8_0]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 16, 17, 70]
"""Each height of a tile, and both ways of decoding."""


def stored(kind: GgmlType, outputs: int, columns: int, seed: int) -> Bytes:
    """Random weights of a type, [outputs, bytes of a row]."""
    rng = np.random.default_rng(seed)
    if kind is GgmlType.F32:
        return rng.standard_normal((outputs, columns)).astype("<f4").view(np.uint8)
    if kind is GgmlType.F16:
        return rng.standard_normal((outputs, columns)).astype("<f2").view(np.uint8)
    if kind is GgmlType.BF16:
        high = rng.standard_normal((outputs, columns)).astype("<f4").view("<u4") >> np.uint32(16)
        return high.astype("<u2").view(np.uint8)
    blocks = outputs * columns // 32
    scales = 1 + (kind is GgmlType.Q4_1)
    heads = rng.uniform(-0.1, 0.1, (blocks, scales)).astype("<f2").view(np.uint8)
    body = rng.integers(0, 256, (blocks, kind.block_bytes - 2 * scales), np.uint8)
    return np.concatenate([heads, body], axis=1).reshape(outputs, -1)


def packed(raw: Bytes, kind: GgmlType) -> Packed:
    return Packed(with_offsets(raw), GgmlType.Q4_1) if kind is GgmlType.Q4_0 else Packed(raw, kind)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_a_product_is_numpys_within_float32_and_the_same_bits_in_plain_c(kind: GgmlType) -> None:
    for outputs, columns in ((1, 32), (40, 288), (97, 64)):
        raw = stored(kind, outputs, columns, seed=outputs)
        matrix, numbers = packed(raw, kind), dequantize(raw, kind).astype(np.float64)
        x = unit_rows(np.random.default_rng(3), max(ROWS), columns)
        bound = columns * 2.0**-24 * np.abs(numbers).sum(axis=1)
        whole = tail(matrix).logits(x, outputs)
        assert (np.abs(whole - x.astype(np.float64) @ numbers.T) <= bound).all()
        plain = tail(matrix, portable=True, threads=2)
        assert plain.logits(x[:17], outputs).tobytes() == np.ascontiguousarray(whole[:17]).tobytes()
        for rows in ROWS:
            alone = tail(matrix, threads=rows % 3 + 1).logits(x[:rows], outputs)
            assert np.array_equal(alone.view(np.uint32), whole[:rows].view(np.uint32))


@pytest.mark.parametrize("kind", [GgmlType.F32, GgmlType.F16, GgmlType.BF16])
def test_plain_numbers_need_no_whole_blocks(kind: GgmlType) -> None:
    raw = stored(kind, 5, 304, seed=1)
    x = unit_rows(np.random.default_rng(0), 3, 304)
    expected = x.astype(np.float64) @ dequantize(raw, kind).T.astype(np.float64)
    assert np.abs(tail(Packed(raw, kind)).logits(x, 5) - expected).max() < 1e-3


@pytest.mark.parametrize("portable", [False, True])
def test_every_float16_is_decoded_exactly(portable: bool) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    halves = every[np.isfinite(every.view(np.float16))].reshape(-1, 16)
    kernels = tail(Packed(halves.view(np.uint8), GgmlType.F16), portable=portable)
    x = 4 * np.eye(16, dtype=np.float32)  # normalised: the same
    assert np.array_equal(kernels.logits(x, len(halves)), 4 * halves.view(np.float16).T.astype(np.float32))


def test_subnormal_numbers_count_even_in_a_thread_that_flushes_them() -> None:
    """A library built with fast arithmetic may switch that on in whichever thread loads it."""
    matrix, x = f32(np.full((40, 32), 1e-40)), np.ones((20, 32), np.float32)
    expected = tail(matrix).logits(x, 40).tobytes()
    smallest = np.full(1, 1e-40, np.float32)
    assert expected != bytes(len(expected))
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush")
    try:
        got = tail(matrix, threads=3).logits(x, 40).tobytes()
        flushed = (smallest * np.float32(1)).tobytes()
    finally:
        torch.set_flush_denormal(False)
    assert flushed == bytes(4)  # the thread still did
    assert got == expected


# ---- rows ----

SIZE = 64
ROW = np.array([2.0] * 16 + [0.0] * 48, np.float32)
"""Normalised, it is the same; and where it is 0, a layer's output is what it adds."""
FREE = slice(16, SIZE)


def place(rows: slice, column: int, numbers: npt.ArrayLike) -> Doubles:
    """[SIZE, SIZE] zeros, but for one column's rows."""
    matrix = np.zeros((SIZE, SIZE))
    matrix[rows, column] = numbers
    return matrix


def silu(gates: Floats, *, portable: bool = False) -> Floats:
    """Of 48 numbers."""
    matrices = {"gate": place(FREE, 0, gates / 2), "up": place(FREE, 0, 0.5), "down": np.eye(SIZE)}
    return OneLayer(SIZE, 1, matrices=matrices, portable=portable).forward(ROW[None])[0, FREE]


def test_silu_and_the_exponential_are_numpys_over_their_whole_range() -> None:
    edges = np.array([-87.9, -87.01, -87, -86.99, 86.99, 87, 88, 88.5], np.float32)
    for gates in (
        np.linspace(-87, 87, 48, dtype=np.float32),
        np.linspace(-3, 3, 48, dtype=np.float32),
        np.concatenate([edges, np.float32(2.0) ** -np.arange(40, dtype=np.float32)]),
    ):
        got, exact = silu(gates), gates.astype(np.float64)
        expected = exact / (1 + np.exp(-exact))
        assert (np.abs(got - expected) <= 5 * 2.0**-24 * np.abs(expected)).all()
        assert silu(gates, portable=True).tobytes() == got.tobytes()
    beyond = silu(np.full(48, -1000, np.float32))
    assert (np.abs(beyond) < 1e-35).all()


def lower_share(score: float | np.float32, *, portable: bool = False) -> np.float32:
    """softmax([score, 0])[0] for a score below 0, by attention over two positions with the values 1 and 0."""
    value = np.zeros((SIZE, SIZE))
    value[0, :2] = 0.25
    matrices = {
        "q": place(slice(0, 1), 0, np.sqrt(SIZE) / 2),
        "k": place(slice(0, 1), 0, score / 4) + place(slice(0, 1), 1, score / 4),
        "v": value,
        "attention_output": place(FREE, 0, 1.0),
    }
    layer = OneLayer(SIZE, 2, matrices=matrices, portable=portable)
    other = ROW.copy()
    other[1] = -2
    got: Floats = layer.forward(np.stack([ROW, other]))[1, FREE]
    assert (got == got[0]).all()
    return np.float32(got[0])


def test_softmax_is_numpys_down_to_where_weights_become_zero() -> None:
    for score in np.concatenate([-np.linspace(0.125, 86.875, 30), -(2.0 ** -np.arange(1, 20, 3))]).astype(np.float32):
        weight = np.exp(np.float64(score))
        got = lower_share(score)
        assert abs(got / (weight / (1 + weight)) - 1) < 5 * 2.0**-24
        assert lower_share(score, portable=True) == got
    assert lower_share(-88.0) == 0


def test_the_root_mean_square_is_numpys() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((9, 96)) * 10.0 ** rng.integers(-9, 9, (9, 1))).astype(np.float32)
    exact = x.astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5)
    got = tail(f32(np.eye(96)), eps=1e-5).logits(x, 96)
    assert (np.abs(got - expected) <= 1e-6 * np.abs(expected)).all()


def test_a_zeros_sign_does_not_tell_what_ran_beside_it() -> None:
    """A chain whose products underflow stands at −0, which a weight of 0 times a later position's value would turn into +0.

    Each matrix here only keeps that sign alive up to the layer's output.
    """
    tiny = 1e-30  # its square underflows
    rows = np.tile(ROW, (3, 1))
    rows[:, 16] = -0.0
    rows[1, 1] = -2
    rows[0, 62] = rows[1, 63] = rows[1, 60] = -tiny
    rows[2, 61] = 1
    value, out, down = (np.zeros((SIZE, SIZE)) for _ in range(3))
    value[0, 60] = value[1, 61] = value[1, 62] = 1
    value[1, 63] = tiny
    out[16] = down[16] = -0.0
    out[16, 0] = down[16, 0] = tiny
    out[16, 1] = 1
    matrices = {
        "q": place(slice(0, 1), 0, np.sqrt(SIZE) / 2),
        "k": place(slice(0, 1), 0, -20.0) + place(slice(0, 1), 1, -20.0),
        "v": value,
        "attention_output": out,
        "gate": place(slice(0, 1), 0, 1.0),
        "up": place(slice(0, 1), 0, -tiny),
        "down": down,
    }
    together = OneLayer(SIZE, 3, matrices=matrices).forward(rows)
    steps = OneLayer(SIZE, 3, matrices=matrices)
    apart = np.concatenate([steps.forward(rows[i : i + 1], i) for i in range(3)])
    assert together.tobytes() == apart.tobytes()


# ---- the known answer ----


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_known_answer_is_given_by_any_instructions_and_threads(portable: bool, threads: int) -> None:
    assert native_proof.answer(portable=portable, threads=threads) == native_proof.KNOWN_ANSWER


def test_a_machine_with_another_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    native_proof.prove_kernels.cache_clear()
    monkeypatch.setattr(native_proof, "KNOWN_ANSWER", "00" * 16)
    with pytest.raises(NotCertified, match="other bits"):
        native_proof.prove_kernels()
    monkeypatch.undo()
    native_proof.prove_kernels()


# ---- packing and life ----


def test_a_q4_0_scale_whose_offset_no_float16_holds_is_refused() -> None:
    block = np.zeros((1, 18), np.uint8)
    for scale, holds in ((8188.0, True), (8192.0, False), (-8192.0, False)):
        block[0, :2] = np.array([scale], "<f2").view(np.uint8)
        if holds:
            assert np.array_equal(dequantize(with_offsets(block), GgmlType.Q4_1), dequantize(block, GgmlType.Q4_0))
        else:
            with pytest.raises(NotCertified, match="8,188"):
                with_offsets(block)


def test_kernels_may_be_closed_twice_or_dropped() -> None:
    kernels = tail(f32(np.eye(32)), threads=3)
    kernels.close()
    kernels.close()
    before = threading_count()
    for _ in range(3):
        tail(f32(np.eye(32)), threads=3).logits(np.ones((2, 32), np.float32), 32)
    assert threading_count() == before


def threading_count() -> int:
    count: int = psutil.Process().num_threads()
    return count


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="no signal masks")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
def test_threads_of_the_kernels_take_no_signals() -> None:
    """A signal that they took would not wake Python's main thread out of a system call."""
    tasks = Path("/proc/self/task")
    before = {task.name for task in tasks.iterdir()}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    kernels = tail(f32(np.eye(32)), threads=3)
    kernels.logits(np.ones((2, 32), np.float32), 32)  # they have begun
    new = [task for task in tasks.iterdir() if task.name not in before]
    assert len(new) == 2
    for task in new:
        blocked = next(line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk:"))
        bits = int(blocked.split()[1], 16)
        assert all(bits >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD))
        assert not bits >> (signal.SIGSEGV - 1) & 1
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    kernels.close()
