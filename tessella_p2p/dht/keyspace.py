"""The key space of the DHT: 256-bit numbers, and the XOR metric over them.

Source: P. Maymounkov, D. Mazières, "Kademlia: A Peer-to-Peer Information System Based on the XOR Metric", 2002, section 2.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache

from tessella_p2p.base.ids import PeerId

KEY_BITS = 256
KEY_BYTES = KEY_BITS // 8


@lru_cache(maxsize=8192)
def key_of_peer(peer: PeerId) -> int:
    """Where a peer stands: the SHA-256 of its peer id."""
    return int.from_bytes(hashlib.sha256(peer.encode()).digest(), "big")


def record_key(manifest_root: bytes) -> bytes:
    """Where a model's stage records stand: the SHA-256 of its manifest root; 32 bytes."""
    return hashlib.sha256(manifest_root).digest()


@dataclass(frozen=True, slots=True)
class Contact:
    """A peer and where it may be dialled (multiaddrs without ``/p2p``); ``key`` is where it stands in the key space."""

    peer_id: PeerId
    addresses: tuple[str, ...]
    key: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", key_of_peer(self.peer_id))
