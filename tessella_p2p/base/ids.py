"""Names of things: peers, sessions and ranges of layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NewType

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58 (``12D3KooW…``)."""

SessionId = NewType("SessionId", bytes)
"""16 random bytes that name one session on every stage of its route."""

RequestId = NewType("RequestId", str)
"""The name of one request, chosen by the entry; a ticket is bound to it."""


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """A contiguous, half-open, non-empty range of layers ``[start, end)``.

    Raises:
        ValueError: unless ``0 <= start < end``.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"layers [{self.start}, {self.end}) are no range: 0 <= start < end is needed")

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __str__(self) -> str:
        return f"{self.start}–{self.end}"

    def contains(self, other: LayerRange) -> bool:
        """Whether every layer of ``other`` is in this range."""
        return self.start <= other.start and other.end <= self.end

    def overlaps(self, other: LayerRange) -> bool:
        """Whether the two ranges share a layer."""
        return self.start < other.end and other.start < self.end

    def as_tuple(self) -> tuple[int, int]:
        """``(start, end)``, as it stands in messages."""
        return (self.start, self.end)
