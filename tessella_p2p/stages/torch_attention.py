"""Attention with KV per session, in one canonical order of additions (torch, float32).

What makes a row's bits independent of its batch on the CPU:

- a row attends over its own session's KV, padded to whole blocks of `KV_BLOCK` positions; what lies behind the row is masked, and its
  weight is an exact zero;
- ``P · V`` is summed block by block, each product over exactly `KV_BLOCK` positions, because a product over a longer or shorter inner
  dimension may be added up in another order;
- products have at least `MIN_ROWS` rows: with fewer, other kernels run. The query heads that share a KV head are rows of one product.

Slots that nobody uses hold zeros: a stale NaN times a weight of zero would be a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tessella_p2p.model.config import ModelConfig
from tessella_p2p.stages.rotations import rotations

KV_BLOCK = 128
QUERY_BLOCK = 64
"""Query positions of one prefill product."""
MIN_ROWS = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one session: ``rows`` positions from ``position`` on, with their KV in ``slot``."""

    slot: int
    position: int
    rows: int


class KvArena:
    """KV of all sessions of a stage: [layers, K|V, slots, kv_heads, positions, head_dim] float32.

    On the CPU zeros come from the allocator, so memory is committed as positions are written; elsewhere it is all taken at once.
    """

    def __init__(
        self, config: ModelConfig, num_layers: int, slots: int, max_positions: int, device: torch.device
    ) -> None:
        capacity = -(-max_positions // KV_BLOCK) * KV_BLOCK
        self.shape = (num_layers, 2, slots, config.kv_heads, capacity, config.head_dim)
        if device.type == "cpu":
            self._all = torch.from_numpy(np.zeros(self.shape, np.float32))
        else:
            self._all = torch.zeros(self.shape, device=device)
        self.layers: list[Tensor] = list(self._all)

    @property
    def memory_bytes(self) -> int:
        """Bytes once every slot is full."""
        return self._all.nbytes

    @torch.inference_mode()
    def clear(self, slot: int, start: int, end: int) -> None:
        """Set positions ``[start, end)`` of a slot back to zero."""
        self._all[:, :, slot, :, start:end] = 0.0


@dataclass(frozen=True, slots=True)
class _DecodeRun:
    """Single rows whose slots are neighbours in the arena."""

    rows: Tensor
    slots: slice
    num_positions: int
    mask: Tensor
    queries: Tensor


@dataclass(frozen=True, slots=True)
class _PrefillBlock:
    """Up to `QUERY_BLOCK` consecutive rows of one session."""

    rows: slice
    slot: int
    num_positions: int
    mask: Tensor


class Attention:
    """What all layers of one forward share: where rows are, their rotations and their masks.

    Args:
        config: the model.
        rope: cosines and sines, each [positions, head_dim], on the device that computes.
        segments: in the order of the rows.
    """

    def __init__(self, config: ModelConfig, rope: tuple[Tensor, Tensor], segments: Sequence[Segment]) -> None:
        self._config = config
        self._group = config.heads // config.kv_heads
        self._segments = segments
        self._device = rope[0].device
        slots = [s.slot for s in segments for _ in range(s.rows)]
        positions = [position for s in segments for position in range(s.position, s.position + s.rows)]
        self._slots = torch.tensor(slots, device=self._device)
        self._positions = torch.tensor(positions, device=self._device)
        self._cos, self._sin = self._rotations(rope)
        self._decodes: list[_DecodeRun] = []
        self._prefills: list[_PrefillBlock] = []
        self._place()

    def _rotations(self, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[rows, heads + 2·kv_heads, head_dim]: the softmax scale rides on the queries' table, values pass unrotated."""
        config = self._config
        cos, sin = (table[self._positions][:, None] for table in rope)
        scale = torch.ones(1, config.heads + 2 * config.kv_heads, 1, device=self._device)
        scale[:, : config.heads] = config.head_dim**-0.5
        cos, sin = cos * scale, sin * scale
        cos[:, -config.kv_heads :], sin[:, -config.kv_heads :] = 1.0, 0.0
        return cos, sin

    def _place(self) -> None:
        singles: list[tuple[Segment, int]] = []
        row = 0
        for segment in self._segments:
            if segment.rows == 1:
                singles.append((segment, row))
            else:
                for start in range(0, segment.rows, QUERY_BLOCK):
                    self._prefills.append(self._prefill(segment, row, start))
            row += segment.rows
        singles.sort(key=lambda single: single[0].slot)
        first = 0
        for index in range(1, len(singles) + 1):
            if index == len(singles) or singles[index][0].slot != singles[index - 1][0].slot + 1:
                self._decodes.append(self._decode(singles[first:index]))
                first = index

    def _decode(self, singles: Sequence[tuple[Segment, int]]) -> _DecodeRun:
        kv_heads, count = self._config.kv_heads, len(singles)
        positions = [segment.position for segment, _ in singles]
        num_positions = _whole_blocks(max(positions) + 1)
        mask = _causal_mask(torch.tensor(positions, device=self._device), num_positions)
        mask = mask[:, None].expand(count, kv_heads, num_positions).reshape(count * kv_heads, 1, num_positions)
        slot = singles[0][0].slot
        shape = (count * kv_heads, max(MIN_ROWS, self._group), self._config.head_dim)
        queries = torch.zeros(shape, device=self._device)
        rows = torch.tensor([row for _, row in singles], device=self._device)
        return _DecodeRun(rows, slice(slot, slot + count), num_positions, mask, queries)

    def _prefill(self, segment: Segment, first_row: int, start: int) -> _PrefillBlock:
        count = min(QUERY_BLOCK, segment.rows - start)
        position = segment.position + start
        num_positions = _whole_blocks(position + count)
        own = torch.arange(position, position + count, device=self._device)
        mask = _causal_mask(own, num_positions).repeat(self._group, 1)
        missing = MIN_ROWS - mask.shape[0]
        if missing > 0:
            mask = functional.pad(mask, (0, 0, 0, missing))
        rows = slice(first_row + start, first_row + start + count)
        return _PrefillBlock(rows, segment.slot, num_positions, mask[None])

    def apply(self, qkv: Tensor, kv: Tensor) -> Tensor:
        """Write this forward's keys and values of one layer into its KV, and attend.

        Args:
            qkv: [rows, (heads + 2·kv_heads) · head_dim], any float dtype.
            kv: the arena's layer.

        Returns:
            [rows, heads · head_dim] float32.
        """
        config = self._config
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        wide = qkv.float().view(-1, heads + 2 * kv_heads, head_dim)
        turned = torch.roll(wide, head_dim // 2, -1).mul_(self._sin)
        rotated = (wide * self._cos).add_(turned)
        self._write(rotated[:, heads:].view(-1, 2, kv_heads, head_dim), kv)
        out = torch.empty(rotated.shape[0], heads, head_dim, device=self._device)
        for run in self._decodes:
            out[run.rows] = self._attend_decodes(run, rotated, kv)
        for block in self._prefills:
            out[block.rows] = self._attend_prefill(block, rotated, kv)
        return out.view(-1, heads * head_dim)

    def _write(self, new: Tensor, kv: Tensor) -> None:
        """Put [rows, K|V, kv_heads, head_dim] at its slots and positions."""
        if len(self._segments) == 1:
            segment = self._segments[0]
            kv[:, segment.slot, :, segment.position : segment.position + segment.rows] = new.permute(1, 2, 0, 3)
        else:
            kv[:, self._slots, :, self._positions] = new

    def _attend_decodes(self, run: _DecodeRun, rotated: Tensor, kv: Tensor) -> Tensor:
        config, group = self._config, self._group
        count, head_dim = run.rows.shape[0], config.head_dim
        queries = rotated[run.rows, : config.heads].view(count * config.kv_heads, group, head_dim)
        run.queries[:, :group] = queries
        keys, values = (
            kv[index, run.slots].view(count * config.kv_heads, -1, head_dim)[:, : run.num_positions] for index in (0, 1)
        )
        return attend(run.queries, keys, values, run.mask)[:, :group].reshape(count, config.heads, head_dim)

    def _attend_prefill(self, block: _PrefillBlock, rotated: Tensor, kv: Tensor) -> Tensor:
        config, group = self._config, self._group
        count, head_dim = block.rows.stop - block.rows.start, config.head_dim
        queries = rotated[block.rows, : config.heads].reshape(count, config.kv_heads, group, head_dim)
        queries = queries.permute(1, 2, 0, 3).reshape(config.kv_heads, group * count, head_dim)
        missing = MIN_ROWS - group * count
        if missing > 0:
            queries = functional.pad(queries, (0, 0, 0, missing))
        keys, values = (kv[index, block.slot, :, : block.num_positions] for index in (0, 1))
        out = attend(queries, keys, values, block.mask)[:, : group * count]
        return out.view(config.kv_heads, group, count, head_dim).permute(2, 0, 1, 3).reshape(count, -1, head_dim)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """softmax(Q · Kᵀ + mask) · V for ``queries [b, rows, d]`` and ``keys, values [b, n, d]``; n is whole blocks."""
    weights = torch.softmax(torch.bmm(queries, keys.transpose(1, 2)).add_(mask), -1)
    total = torch.bmm(weights[:, :, :KV_BLOCK], values[:, :KV_BLOCK])
    for start in range(KV_BLOCK, keys.shape[1], KV_BLOCK):
        total += torch.bmm(weights[:, :, start : start + KV_BLOCK], values[:, start : start + KV_BLOCK])
    return total


def _whole_blocks(positions: int) -> int:
    return -(-positions // KV_BLOCK) * KV_BLOCK


def _causal_mask(positions: Tensor, num_positions: int) -> Tensor:
    """[len(positions), num_positions]: 0 up to a row's own position, −inf behind it."""
    behind = torch.arange(num_positions, device=positions.device)[None] > positions[:, None]
    return torch.zeros(behind.shape, device=positions.device).masked_fill_(behind, float("-inf"))


def rope_tables(config: ModelConfig, num_positions: int) -> tuple[Tensor, Tensor]:
    """`rotations` as whole rows: cosines and signed sines [positions, head_dim] for rotation in halves, float32."""
    cos, sin = (torch.from_numpy(table) for table in rotations(config, num_positions))
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
