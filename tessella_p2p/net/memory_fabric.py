"""What lies between the nodes of a simulation: latencies, losses, partitions, freezes and crashes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import PING_INTERVAL_S, PING_TIMEOUT_S
from tessella_p2p.net.virtual_clock import VirtualClock

if TYPE_CHECKING:
    from tessella_p2p.net.memory import MemoryNetwork, MemoryStream

Latency = Callable[[random.Random], float]

RETRANSMIT_S = 0.2
"""What one loss costs."""
NOTICE_S = PING_INTERVAL_S + PING_TIMEOUT_S
"""How long a silent connection lasts."""


def constant_latency(one_way_s: float) -> Latency:
    """Every pair is ``one_way_s`` apart."""
    return lambda rng: one_way_s


def log_normal_latency(median_s: float = 0.05, sigma: float = 0.5) -> Latency:
    """One-way latencies of the Internet's shape: many near the median, some far out."""
    return lambda rng: median_s * math.exp(rng.gauss(0.0, sigma))


class MemoryFabric:
    """What lies between the nodes of a simulation.

    Args:
        rng: seeded; every draw of the network comes from it.
        clock: the clock that trio runs under.
        latency: draws the one-way latency of a pair, once.
        loss: probability in [0, 1) that a message is lost and sent again `RETRANSMIT_S` later.
    """

    def __init__(
        self, rng: random.Random, clock: VirtualClock, latency: Latency | None = None, loss: float = 0.0
    ) -> None:
        if not 0.0 <= loss < 1.0:
            raise ConfigurationError(f"a loss of {loss} is no probability below 1")
        self.clock = clock
        self._rng = rng
        self._latency = latency or log_normal_latency()
        self._loss = loss
        self._latencies: dict[tuple[PeerId, PeerId], float] = {}
        self._nodes: dict[PeerId, MemoryNetwork] = {}
        self._by_address: dict[str, MemoryNetwork] = {}
        self._groups: Mapping[PeerId, int] = {}
        self._frozen: dict[PeerId, None] = {}
        self._num_joined = 0
        self.num_messages = 0
        """Messages delivered so far."""

    # ---- Faults

    def partition(self, groups: Mapping[PeerId, int]) -> None:
        """Cut the network: peers of different groups (0 where none is named) do not hear each other until `heal`."""
        self._groups = dict(groups)
        self._expect_silence()

    def heal(self) -> None:
        """End the partition; what was sent meanwhile on connections that live arrives now."""
        self._groups = {}
        self._release()

    def freeze(self, peer: PeerId) -> None:
        """Nothing leaves ``peer`` or reaches it until `thaw`; its connections stay open until the others notice."""
        self._frozen[peer] = None
        self._expect_silence()

    def thaw(self, peer: PeerId) -> None:
        """End a freeze."""
        self._frozen.pop(peer, None)
        self._release()

    def crash(self, peer: PeerId) -> None:
        """The process of ``peer`` dies: its streams break at once, the other ends of them one latency later.

        Its `MemoryNetwork` is dead from here; open another one with the same peer id for the restart.
        """
        node = self._nodes.get(peer)
        if node is not None:
            self._leave(node)

    def silent(self, a: PeerId, b: PeerId) -> bool:
        """Whether nothing passes between the two."""
        if a in self._frozen or b in self._frozen:
            return True
        return bool(self._groups) and self._groups.get(a, 0) != self._groups.get(b, 0)

    def _expect_silence(self) -> None:
        for connection in self._connections():
            if self.silent(connection.near.peer_id, connection.far.peer_id) and not connection.doomed:
                connection.doomed = True
                self.clock.call_at(self.clock.now + NOTICE_S, self._notice, connection)

    def _notice(self, connection: Connection) -> None:
        connection.doomed = False
        if self.silent(connection.near.peer_id, connection.far.peer_id):
            connection.break_off()

    def _release(self) -> None:
        for connection in self._connections():
            if not self.silent(connection.near.peer_id, connection.far.peer_id):
                for stream in list(connection.streams):
                    stream.resume()

    def _connections(self) -> list[Connection]:
        return [each for node in self._nodes.values() for each in node.connections.values() if each.near is node]

    # ---- Nodes and messages

    def join(self, node: MemoryNetwork, address: str | None) -> str:
        """Put a node on the network; its address."""
        self._num_joined += 1
        host = 0x0A000000 + self._num_joined  # 10.0.0.1 and on
        where = address or f"/ip4/{'.'.join(str(host >> shift & 255) for shift in (24, 16, 8, 0))}/tcp/4001"
        self._nodes[node.peer_id] = self._by_address[where] = node
        return where

    def _leave(self, node: MemoryNetwork) -> None:
        if self._nodes.get(node.peer_id) is node:
            del self._nodes[node.peer_id]
            for address in [address for address, other in self._by_address.items() if other is node]:
                del self._by_address[address]
        node.die()

    def has(self, peer: PeerId) -> bool:
        """Whether a node of that identity is on the network."""
        return peer in self._nodes

    def at(self, address: str) -> MemoryNetwork | None:
        """The node that listens at an address."""
        return self._by_address.get(address)

    def one_way_s(self, a: PeerId, b: PeerId) -> float:
        """The latency between two peers."""
        pair = (a, b) if a < b else (b, a)
        latency = self._latencies.get(pair)
        if latency is None:
            latency = self._latencies[pair] = self._latency(self._rng)
        return latency

    def arrival_s(self, latency: float) -> float:
        """When a message that leaves now arrives."""
        time_s = self.clock.now + latency
        if self._loss:
            while self._rng.random() < self._loss:
                time_s += RETRANSMIT_S
        return time_s


class Connection:
    """Two connected nodes, and the streams between them."""

    __slots__ = ("alive", "doomed", "far", "latency", "near", "streams")

    def __init__(self, near: MemoryNetwork, far: MemoryNetwork, latency: float) -> None:
        self.near = near
        self.far = far
        self.latency = latency
        self.streams: dict[MemoryStream, None] = {}
        self.alive = True
        self.doomed = False

    def break_off(self, only: MemoryNetwork | None = None) -> None:
        """End it, for both nodes or for one of them."""
        self.alive = False
        for stream in [stream for stream in self.streams if only is None or stream.node is only]:
            stream.break_off()
        for node in (self.near, self.far):
            if only is None or node is only:
                node.forget(self)
