"""Whether the native kernels give, on this machine, the bits that they give everywhere: a small stage with a known answer.

The stage has matrices in every form that the kernels read, more positions than a page, and rows alone and together. It takes
milliseconds, and runs before a node serves a recipe whose drift class says "every machine".
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Final

import numpy as np

from tessella_p2p.base.errors import NotCertified
from tessella_p2p.model.gguf import GgmlType
from tessella_p2p.stages.native.binding import SEGMENT, Bytes, Floats, Kernels, LayerArrays, Packed, instructions

KNOWN_ANSWER: Final = "f88f276f9905872023764f5d2acc7de6"
"""BLAKE2b over the bits of the small stage's hidden states and logits."""

_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _FFN, _VOCABULARY = 64, 4, 2, 16, 96, 40
_CHUNKS = (5, 1, 63, 2, 13, 1)


@cache
def prove_kernels() -> None:
    """Compute the small stage and compare.

    Raises:
        NotCertified: other bits, or no kernels. A node must not serve a native recipe then.
    """
    if answer() != KNOWN_ANSWER:
        raise NotCertified(
            f"the native kernels ({instructions()}) give other bits on this machine than everywhere else, so that it must not "
            "share a route: please report it, and choose a torch recipe meanwhile"
        )


def answer(*, portable: bool = False, threads: int = 1) -> str:
    """The digest of what the kernels of this machine compute."""
    kernels = _small_stage(portable=portable, threads=threads)
    arena: Floats = np.zeros((3, 2 * _KV_HEADS * 2 * _HEAD_DIM * 64), np.float32)
    pages = np.array([2, 0], np.int32)
    token_ids = (np.arange(sum(_CHUNKS), dtype=np.uint32) * 7) % _VOCABULARY
    digest = hashlib.blake2b(digest_size=16)
    position = 0
    for rows in _CHUNKS:
        x = kernels.embed(token_ids[position : position + rows])
        kernels.forward(x, np.array([(position, rows, pages.ctypes.data)], SEGMENT), arena)
        digest.update(x.astype("<f4").tobytes())
        digest.update(np.ascontiguousarray(kernels.logits(x[-1:], _VOCABULARY)).astype("<f4").tobytes())
        position += rows
    kernels.close()
    return digest.hexdigest()


def _small_stage(*, portable: bool, threads: int) -> Kernels:
    width, kv_width = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    shapes: list[tuple[int, int]] = [(width, _HIDDEN), (kv_width, _HIDDEN), (kv_width, _HIDDEN), (_HIDDEN, width)]
    shapes += [(_FFN, _HIDDEN), (_FFN, _HIDDEN), (_HIDDEN, _FFN)]
    kinds = (
        ["Q4_1", "Q8_0", "F16", "Q4_1", "BF16", "Q4_1", "Q8_0"],
        ["F32", "Q4_1", "BF16", "Q8_0", "Q4_1", "F32", "F16"],
    )
    layers = [
        LayerArrays(
            _vector(f"attention norm {i}", _HIDDEN),
            _vector(f"ffn norm {i}", _HIDDEN),
            [
                Packed(_matrix(f"{i} {j}", kind, *shape), GgmlType[kind])
                for j, (kind, shape) in enumerate(zip(names, shapes, strict=True))
            ],
        )
        for i, names in enumerate(kinds)
    ]
    angles = _numbers("angles", sum(_CHUNKS) * _HEAD_DIM // 2).reshape(-1, _HEAD_DIM // 2)
    embedding = Packed(_matrix("embedding", "Q8_0", _VOCABULARY, _HIDDEN), GgmlType.Q8_0)
    return Kernels(
        (_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _FFN),
        1e-5,
        layers,
        (angles, np.ascontiguousarray(angles[::-1])),
        embedding=embedding,
        output=(_vector("output norm", _HIDDEN), embedding),
        threads=threads,
        max_rows=max(_CHUNKS),
        portable=portable,
    )


def _stream(name: str, size: int) -> bytes:
    return hashlib.shake_256(f"tessella kernels {name}".encode()).digest(size)


def _numbers(name: str, count: int) -> Floats:
    """From −1 to 127 / 128."""
    return np.frombuffer(_stream(name, count), np.int8).astype(np.float32) / np.float32(128)


def _vector(name: str, count: int) -> Floats:
    """From 0 to 2."""
    return _numbers(name, count) + np.float32(1)


def _matrix(name: str, kind: str, rows: int, columns: int) -> Bytes:
    """[rows, bytes of a row] of a type."""
    if kind == "F32":
        return _numbers(name, rows * columns).astype("<f4").view(np.uint8).reshape(rows, -1)
    if kind == "F16":
        return (_numbers(name, rows * columns) / 3).astype("<f2").view(np.uint8).reshape(rows, -1)
    if kind == "BF16":
        bits = (_numbers(name, rows * columns) / 5).astype("<f4").view("<u4") >> 16
        return bits.astype("<u2").view(np.uint8).reshape(rows, -1)
    blocks = rows * columns // 32
    scales = (_numbers(f"{name} scales", 2 * blocks) / 16).astype("<f2").reshape(blocks, 2)
    if kind == "Q4_1":
        parts = [scales.view(np.uint8), np.frombuffer(_stream(name, 16 * blocks), np.uint8).reshape(blocks, 16)]
    else:
        parts = [
            scales[:, :1].copy().view(np.uint8),
            np.frombuffer(_stream(name, 32 * blocks), np.uint8).reshape(blocks, 32),
        ]
    return np.concatenate(parts, axis=1).reshape(rows, -1)
