"""Peers that lie in the DHT and in gossip: they withhold, answer garbage, and spread records that must never be used.

A hostile peer joins as everybody does, so that it stands in routing tables, and learns the honest records; what it answers is its
own. It has no lease, so whatever names it as a stage is a lie.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import trio

from simulations.mesh import SimulatedMesh, node_key
from simulations.scenario import Lie
from simulations.toy_model import ROOT
from tessella_p2p.base.errors import TessellaError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import GOSSIP_MAX_BATCH, LEASE_TTL_S, MAX_ENVELOPE_BYTES, RECORD_TTL_S
from tessella_p2p.dht.messages import HeartbeatBatch
from tessella_p2p.dht.requests import Find, Found, Reply, Stored, decode_request, encode_reply
from tessella_p2p.dht.service import Discovery
from tessella_p2p.dht.stage_records import signed_stage
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.memory import MemoryNetwork
from tessella_p2p.net.network import Stream
from tessella_p2p.wire import cbor, protocols
from tessella_p2p.wire.envelope import encode_message, seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import LEASE, STAGE_RECORD, Lease

_SPREAD_S = 3.0
_VICTIMS = 6
"""Peers that one round of lies goes to."""
_REMEMBERED = 64
_TTL_MS = int(RECORD_TTL_S * 1000)
_LEASE_MS = int(LEASE_TTL_S * 1000)


def lying_records(key: NodeKey, honest: bytes, now_ms: int, sequence: int) -> dict[str, bytes]:
    """Records that nobody may use, made from an honest one, by what is wrong with them.

    Args:
        key: the liar's.
        honest: the envelope of somebody's valid record.
        now_ms: the time.
        sequence: for those that the liar signs itself.
    """
    record = signed_stage(honest).record
    sign = partial(seal, key, STAGE_RECORD, sequence=sequence, ttl_ms=_TTL_MS)
    own_lease = Lease(
        serial=2**40,
        peer_id=key.peer_id,
        model_id=record.model_id,
        manifest_root=record.manifest_root,
        recipe=record.recipe,
        layers=record.layers,
    )
    unleased = record.model_copy(
        update={"lease": seal(key, LEASE, own_lease, sequence=sequence, now_ms=now_ms, ttl_ms=_LEASE_MS)}
    )
    wider = record.model_copy(update={"layers": (0, record.total_layers)})
    return {
        "stolen lease": sign(record, now_ms=now_ms),
        "lease of nobody": sign(unleased, now_ms=now_ms),
        "wider than its lease": sign(wider, now_ms=now_ms),
        "expired": sign(record, now_ms=now_ms - 2 * _TTL_MS),
        "of the future": sign(record, now_ms=now_ms + 24 * 3600 * 1000),
        "valid for a day": seal(key, STAGE_RECORD, record, sequence=sequence, now_ms=now_ms, ttl_ms=24 * 3600 * 1000),
        "forged": _forged(honest, key, sequence),
        "cut": honest[:-1],
    }


def _forged(honest: bytes, key: NodeKey, sequence: int) -> bytes:
    """The honest peer's record with a sequence of tomorrow, signed by somebody else."""
    fields = cbor.decode(honest)
    assert isinstance(fields, list)
    return cbor.encode([*fields[:4], fields[4] + sequence, *fields[5:8], key.sign(honest)])


@dataclass(slots=True, eq=False)
class HostilePeer:
    """One liar in a mesh."""

    mesh: SimulatedMesh
    key: NodeKey
    kind: Lie
    rng: random.Random
    _honest: dict[bytes, None]
    _sequence: int = 0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Lie until cancelled."""
        mesh = self.mesh
        async with (
            MemoryNetwork.open(mesh.fabric, self.key.peer_id) as network,
            trio.open_nursery() as nursery,
        ):
            pins = frozenset({mesh.orchestrator_key.peer_id})
            discovery = Discovery(network, mesh.date(), self.rng, pins=pins, bootstrap=mesh.bootstrap_addresses)
            discovery.watch(ROOT)
            await nursery.start(discovery.run)
            network.serve(protocols.KAD, self._answer)
            task_status.started()
            while True:
                await trio.sleep(_SPREAD_S * self.rng.uniform(0.5, 1.5))
                self._learn(discovery)
                if self.kind == "records":
                    peers = sorted(network.connected_peers())
                    for peer in self.rng.sample(peers, min(_VICTIMS, len(peers))):
                        nursery.start_soon(self._spread, network, peer)

    def _learn(self, discovery: Discovery) -> None:
        """Keep honest records, to lie with and to replay when they are old."""
        for stage in discovery.view.stages(ROOT, None, self.mesh.date().unix_ms()):
            self._honest[stage.raw] = None
        while len(self._honest) > _REMEMBERED:
            del self._honest[next(iter(self._honest))]

    def _lies(self) -> tuple[bytes, ...]:
        if not self._honest:
            return ()
        honest = self.rng.choice(list(self._honest))
        self._sequence += 1
        now_ms = self.mesh.date().unix_ms()
        made = lying_records(self.key, honest, now_ms, now_ms * 1000 + self._sequence)
        return (*made.values(), *list(self._honest)[: GOSSIP_MAX_BATCH // 2])

    async def _answer(self, stream: Stream) -> None:
        """Answer DHT requests with lies."""
        while (message := await receive_message(stream, MAX_ENVELOPE_BYTES)) is not None:
            request = decode_request(message)
            if self.kind == "garbage":
                await send_message(stream, self.rng.randbytes(self.rng.randint(1, 256)))
                continue
            body: Found | Stored = Stored()
            if isinstance(request.body, Find):
                lies = self._lies() if self.kind == "records" and request.body.values else ()
                body = Found((), lies)
            await send_message(stream, encode_reply(Reply(request.id, body)))

    async def _spread(self, network: MemoryNetwork, peer: PeerId) -> None:
        """Gossip lies to one peer."""
        lies = self._lies()
        if not lies:
            return
        try:
            stream = await network.open_stream(peer, protocols.GOSSIP)
            await send_message(stream, encode_message(HeartbeatBatch(records=lies)))
            await stream.aclose()
        except TessellaError:
            return  # it left, or does not listen to us any more


def hostile_peers(mesh: SimulatedMesh, count: int, kinds: Sequence[Lie]) -> tuple[HostilePeer, ...]:
    """So many liars, with the kinds in turn; run them."""
    return tuple(
        HostilePeer(
            mesh,
            node_key(mesh.seed, "hostile", index),
            kinds[index % len(kinds)],
            random.Random(f"{mesh.seed} hostile {index}"),
            {},
        )
        for index in range(count)
    )
