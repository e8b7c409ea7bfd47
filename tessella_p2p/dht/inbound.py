"""How many inbound streams of one protocol there may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tessella_p2p.base.ids import PeerId


class InboundStreams:
    """Places for the inbound streams of one protocol.

    Args:
        per_peer: of one peer.
        total: of all peers together.
    """

    def __init__(self, per_peer: int, total: int) -> None:
        self._per_peer = per_peer
        self._total = total
        self._open: Counter[PeerId] = Counter()

    @contextmanager
    def place(self, peer: PeerId) -> Iterator[bool]:
        """A place for one stream of ``peer`` while the context lasts; False where there is none."""
        if self._open[peer] >= self._per_peer or self._open.total() >= self._total:
            yield False
            return
        self._open[peer] += 1
        try:
            yield True
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]
