"""Many Kademlia machines on one event heap: seeded latency, dead and frozen peers, no network and no trio."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import KAD_QUORUM
from tessella_p2p.dht.events import (
    Effect,
    Event,
    Get,
    Join,
    Put,
    QueryFinished,
    ReplyReceived,
    RequestFailed,
    RequestReceived,
    SendReply,
    SendRequest,
    TimerFired,
)
from tessella_p2p.dht.kademlia import Kademlia
from tessella_p2p.dht.keyspace import Contact
from tessella_p2p.dht.requests import Reply, Request
from tessella_p2p.wire.envelope import seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import LEASE, STAGE_RECORD, Lease, StageRecord

START_MS = 1_700_000_000_000
ROOT = b"\x07" * 32


def node_key(number: int) -> NodeKey:
    return NodeKey(number.to_bytes(32, "big"))


ORCHESTRATOR = node_key(10**9)


def make_lease(
    peer: PeerId,
    *,
    by: NodeKey = ORCHESTRATOR,
    serial: int = 1,
    layers: tuple[int, int] = (0, 10),
    root: bytes = ROOT,
    recipe: str = "f32",
    now_ms: int = START_MS,
    ttl_ms: int = 600_000,
    canary: bool = False,
) -> bytes:
    lease = Lease(
        serial=serial, peer_id=peer, model_id="m", manifest_root=root, recipe=recipe, layers=layers, canary=canary
    )
    return seal(by, LEASE, lease, sequence=serial, now_ms=now_ms, ttl_ms=ttl_ms)


def make_record(
    key: NodeKey,
    *,
    sequence: int = 1,
    now_ms: int = START_MS,
    ttl_ms: int = 60_000,
    layers: LayerRange | tuple[int, int] = (0, 10),
    total_layers: int = 30,
    root: bytes = ROOT,
    recipe: str = "f32",
    lease: bytes | None = None,
    serial: int = 1,
    state: str = "ready",
    addresses: tuple[str, ...] = ("/ip4/10.0.0.1/tcp/1",),
    canary: bool = False,
) -> bytes:
    """A stage record of ``key``, by default with a right lease of `ORCHESTRATOR`."""
    span = layers.as_tuple() if isinstance(layers, LayerRange) else layers
    if lease is None:
        lease = make_lease(
            key.peer_id, layers=span, root=root, recipe=recipe, now_ms=now_ms, serial=serial, canary=canary
        )
    record = StageRecord(
        addresses=addresses,
        model_id="m",
        manifest_root=root,
        recipe=recipe,
        layers=span,
        total_layers=total_layers,
        lease=lease,
        state="draining" if state == "draining" else "ready",
        max_positions=2048,
        canary=canary,
    )
    return seal(key, STAGE_RECORD, record, sequence=sequence, now_ms=now_ms, ttl_ms=ttl_ms)


def tampered(raw: bytes) -> bytes:
    """The same envelope with one bit of its signature changed."""
    return raw[:-1] + bytes([raw[-1] ^ 1])


@dataclass
class KadNode:
    number: int
    key: NodeKey
    machine: Kademlia
    dead: bool = False
    frozen: bool = False
    lie: Callable[[Request, Reply], Reply] | None = None
    outcomes: dict[int, tuple[float, QueryFinished]] = field(default_factory=dict)

    @property
    def contact(self) -> Contact:
        return Contact(self.key.peer_id, (f"/mem/{self.number}",))


class KadMesh:
    """The driver. Times are virtual seconds; one-way latency is log-normal with a median of 50 ms."""

    def __init__(self, size: int, seed: int = 1, sigma: float = 0.5) -> None:
        self.now = 0.0
        self.num_messages = 0
        self.rng = random.Random(seed)
        self.trace: list[tuple[float, int, int, int]] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._latency = [self.rng.lognormvariate(math.log(0.05), sigma) for _ in range(4096)]
        self._queries = itertools.count(1)
        self._armed = [math.inf] * size
        self.nodes: list[KadNode] = []
        self._by_peer: dict[PeerId, KadNode] = {}
        for number in range(size):
            key = node_key(seed * 1_000_003 + number + 1)
            machine = Kademlia(key.peer_id, (f"/mem/{number}",), random.Random(seed * 7919 + number))
            self.nodes.append(KadNode(number, key, machine))
            self._by_peer[key.peer_id] = self.nodes[-1]

    @property
    def now_ms(self) -> int:
        return START_MS + round(self.now * 1000)

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), action))

    def run_until(self, when: float) -> None:
        while self._heap and self._heap[0][0] <= when:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = when

    def start(self, node: KadNode, make: Callable[[int], Event]) -> int:
        query = next(self._queries)
        self._drive(node, make(query))
        return query

    def join(self, node: KadNode, *seeds: KadNode) -> int:
        return self.start(node, lambda query: Join(query, tuple(seed.contact for seed in seeds)))

    def get(self, node: KadNode, key: bytes, quorum: int = KAD_QUORUM) -> int:
        return self.start(node, lambda query: Get(query, key, quorum))

    def put(self, node: KadNode, key: bytes, value: bytes) -> int:
        return self.start(node, lambda query: Put(query, key, value))

    def run_query(self, node: KadNode, query: int) -> QueryFinished:
        """Run until a query is over, 30 s at most."""
        deadline = self.now + 30.0
        while query not in node.outcomes and self.now < deadline:
            self.run_until(self.now + 0.1)
        return node.outcomes[query][1]

    def join_all(self, over_s: float = 60.0) -> list[float]:
        """Everybody joins through two of the first ten; returns how long each took."""
        begun: dict[int, tuple[float, KadNode]] = {}

        def join(node: KadNode) -> None:
            first = self.rng.randrange(min(node.number, 10))
            second = self.rng.randrange(min(node.number, 10))
            begun[self.join(node, self.nodes[first], self.nodes[second])] = (self.now, node)

        for node in self.nodes[1:]:
            self.at(self.now + node.number * over_s / len(self.nodes), lambda node=node: join(node))  # type: ignore[misc]
        self.run_until(self.now + over_s + 30.0)
        return [node.outcomes[query][0] - at for query, (at, node) in begun.items()]

    def _drive(self, node: KadNode, event: Event) -> Reply | None:
        reply: Reply | None = None
        for effect in node.machine.handle(event, self.now, self.now_ms):
            reply = self._act(node, effect) or reply
        self._arm(node)
        return reply

    def _act(self, node: KadNode, effect: Effect) -> Reply | None:
        match effect:
            case SendReply():
                return effect.reply
            case QueryFinished():
                node.outcomes[effect.query] = (self.now, effect)
            case SendRequest():
                target = self._by_peer.get(effect.contact.peer_id)
                wrong = target is None or effect.contact.addresses[0] != f"/mem/{target.number}"
                delay = self._delay(node, target or node)
                if target is None or wrong:
                    self.at(self.now + 2 * delay, lambda: self._fail(node, effect.request.id))
                else:
                    self.at(self.now + delay, lambda: self._request(node, target, effect.request))
        return None

    def _arm(self, node: KadNode) -> None:
        deadline = node.machine.next_deadline()
        if deadline < self._armed[node.number]:
            self._armed[node.number] = deadline
            self.at(deadline, lambda: self._fire(node, deadline))

    def _fire(self, node: KadNode, deadline: float) -> None:
        if self._armed[node.number] != deadline:
            return
        self._armed[node.number] = math.inf
        if not node.dead and not node.frozen:
            self._drive(node, TimerFired())
            assert node.machine.next_deadline() > self.now

    def _delay(self, a: KadNode, b: KadNode) -> float:
        low, high = sorted((a.number, b.number))
        return self._latency[(low * 2654435761 ^ high * 40503) % len(self._latency)]

    def _request(self, source: KadNode, target: KadNode, request: Request) -> None:
        self.num_messages += 1
        self.trace.append((self.now, source.number, target.number, request.id))
        delay = self._delay(source, target)
        if target.frozen:
            return
        if target.dead:
            self.at(self.now + delay, lambda: self._fail(source, request.id))
            return
        reply = self._drive(target, RequestReceived(source.key.peer_id, request))
        assert reply is not None
        answer = target.lie(request, reply) if target.lie else reply
        self.at(self.now + delay, lambda: self._reply(target, source, answer))

    def _reply(self, source: KadNode, target: KadNode, reply: Reply) -> None:
        self.num_messages += 1
        if not target.dead and not target.frozen:
            self._drive(target, ReplyReceived(source.key.peer_id, reply))

    def _fail(self, node: KadNode, request_id: int) -> None:
        if not node.dead and not node.frozen:
            self._drive(node, RequestFailed(request_id))
