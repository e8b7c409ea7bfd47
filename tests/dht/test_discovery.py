"""The discovery shell on the in-memory network, in virtual time: everything but libp2p is what runs in a daemon."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from tessella_p2p.base.errors import ConfigurationError, StreamReset
from tessella_p2p.base.ids import PeerId
from tessella_p2p.dht.keyspace import record_key
from tessella_p2p.dht.messages import HeartbeatBatch
from tessella_p2p.dht.requests import Find, Request, encode_request
from tessella_p2p.dht.service import Discovery
from tessella_p2p.dht.swarm_view import Source
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork
from tessella_p2p.net.network import Stream
from tessella_p2p.net.virtual_clock import VirtualClock, run_deterministic
from tessella_p2p.wire.envelope import encode_message
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.protocols import GOSSIP, KAD
from tests.dht.kad_mesh import ORCHESTRATOR, ROOT, START_MS, make_lease, make_record, node_key, tampered

PINS = frozenset({ORCHESTRATOR.peer_id})


class VirtualDate:
    def unix_ms(self) -> int:
        return START_MS + round(trio.current_time() * 1000)


DATE = VirtualDate()


class Mesh:
    """Discovery on many nodes of one fabric."""

    def __init__(self, fabric: MemoryFabric, nursery: trio.Nursery) -> None:
        self.fabric = fabric
        self._nursery = nursery

    async def network(self, key: NodeKey, address: str | None = None) -> MemoryNetwork:
        async def hold(task_status: trio.TaskStatus[MemoryNetwork]) -> None:
            async with MemoryNetwork.open(self.fabric, key.peer_id, address) as network:
                task_status.started(network)
                await trio.sleep_forever()

        return await self._nursery.start(hold)  # type: ignore[no-any-return]

    async def node(
        self, number: int, bootstrap: Sequence[str] = (), *, pins: frozenset[PeerId] = PINS, kademlia: bool = True
    ) -> Discovery:
        network = await self.network(node_key(number), address_of(number))
        discovery = Discovery(
            network, DATE, random.Random(number), pins=pins, bootstrap=bootstrap, kademlia_enabled=kademlia
        )
        await self._nursery.start(discovery.run)
        return discovery


def address_of(number: int) -> str:
    return f"/ip4/10.1.{number >> 8}.{number & 255}/tcp/4001"


def bootstrap_of(number: int) -> str:
    return f"{address_of(number)}/p2p/{node_key(number).peer_id}"


def publisher(number: int, layers: tuple[int, int] = (0, 10)) -> Callable[[], bytes]:
    """Signs records with rising sequences, and a lease that is renewed each time."""
    sequence = 0

    def make() -> bytes:
        nonlocal sequence
        sequence += 1
        return make_record(node_key(number), sequence=sequence, now_ms=DATE.unix_ms(), layers=layers)

    return make


def simulate(scenario: Callable[[Mesh], Awaitable[None]], seed: int = 1) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await scenario(Mesh(MemoryFabric(random.Random(seed), clock), nursery))
            nursery.cancel_scope.cancel()

    clock = VirtualClock()
    run_deterministic(main, seed, clock=clock)


def test_a_node_joins_through_the_one_bootstrap_node_that_lives() -> None:
    async def scenario(mesh: Mesh) -> None:
        await mesh.node(1, pins=frozenset())
        dead = [bootstrap_of(901), bootstrap_of(902)]
        nodes = [await mesh.node(number, [*dead, bootstrap_of(1)]) for number in range(2, 8)]
        assert trio.current_time() < 1.0, "joining does not hold the start up"
        await trio.sleep(20)
        for node in nodes:
            assert node.kad is not None
            assert len(node.kad.machine.table) == 6

    simulate(scenario)


def test_a_node_keeps_trying_until_its_bootstrap_node_comes_up() -> None:
    async def scenario(mesh: Mesh) -> None:
        early = await mesh.node(2, [bootstrap_of(1)])
        await trio.sleep(100)
        await mesh.node(1)
        await trio.sleep(65)
        assert early.kad is not None
        assert len(early.kad.machine.table) == 1

    simulate(scenario)


def test_what_one_node_publishes_others_find_in_the_dht_alone() -> None:
    async def scenario(mesh: Mesh) -> None:
        await mesh.node(1, pins=frozenset())
        workers = [await mesh.node(number, [bootstrap_of(1)]) for number in range(2, 5)]
        await trio.sleep(5)
        for number, worker in enumerate(workers, start=2):
            worker.publish(publisher(number, ((number - 2) * 10, (number - 1) * 10)), ROOT)
            await worker.publish_now()
        late = await mesh.node(9, [bootstrap_of(1)])
        assert await late.find(ROOT) == ()
        await trio.sleep(1.5)
        found = await late.find(ROOT)
        assert [stage.layers.as_tuple() for stage in found] == [(0, 10), (10, 20), (20, 30)]
        assert late.view.coverage(ROOT, "f32", 30, DATE.unix_ms()).health == "healthy"

    simulate(scenario)


def test_heartbeats_keep_a_view_alive_and_their_end_empties_it() -> None:
    async def scenario(mesh: Mesh) -> None:
        await mesh.node(1, pins=frozenset())
        worker = await mesh.node(2, [bootstrap_of(1)])
        worker.publish(publisher(2), ROOT)
        entry = await mesh.node(3, [bootstrap_of(1)])
        entry.watch(ROOT)
        with trio.fail_after(30):
            while not entry.view.stages(ROOT, "f32", DATE.unix_ms()):
                await entry.changed()
        for _ in range(200):
            await trio.sleep(1)
            assert len(entry.view.stages(ROOT, "f32", DATE.unix_ms())) == 1
        mesh.fabric.crash(node_key(2).peer_id)
        await trio.sleep(13)
        assert entry.view.stages(ROOT, "f32", DATE.unix_ms()) == ()
        await trio.sleep(5)
        assert entry.view.liveness(node_key(2).peer_id, DATE.unix_ms()) == "offline"

    simulate(scenario)


def test_gossip_works_without_a_dht() -> None:
    async def scenario(mesh: Mesh) -> None:
        worker = await mesh.node(2, kademlia=False)
        entry_network = await mesh.network(node_key(3))
        entry = Discovery(entry_network, DATE, random.Random(3), pins=PINS, kademlia_enabled=False)
        async with trio.open_nursery() as nursery:
            await nursery.start(entry.run)
            await entry_network.connect(bootstrap_of(2))
            worker.publish(publisher(2), ROOT)
            with trio.fail_after(6):
                await entry.changed()
            nursery.cancel_scope.cancel()
        assert len(await entry.find(ROOT)) == 1

    simulate(scenario)


def test_records_that_may_not_be_used_are_used_from_no_source() -> None:
    async def scenario(mesh: Mesh) -> None:
        node = await mesh.node(1)
        key, other = node_key(2), node_key(3)
        now_ms = DATE.unix_ms()
        good = make_record(key, sequence=5, now_ms=now_ms)
        bad = {
            "forged": tampered(good),
            "expired": make_record(key, sequence=6, now_ms=now_ms - 61_000),
            "of another orchestrator": make_record(
                key, sequence=6, now_ms=now_ms, lease=make_lease(key.peer_id, by=other, now_ms=now_ms)
            ),
            "with another's lease": make_record(
                key, sequence=6, now_ms=now_ms, lease=make_lease(other.peer_id, now_ms=now_ms)
            ),
            "garbage": b"\x00" * 40,
        }
        sources: tuple[Source, ...] = ("dht", "gossip", "orchestrator")
        for source in sources:
            node.observe(bad.values(), source)
            assert node.view.stages(ROOT, None, now_ms) == ()
        node.observe([good, make_record(key, sequence=4, now_ms=now_ms, layers=(10, 20))], "dht")
        assert [stage.layers.as_tuple() for stage in node.view.stages(ROOT, None, now_ms)] == [(0, 10)]

    simulate(scenario)


def test_a_tenth_dead_and_a_tenth_frozen_hide_nothing() -> None:
    async def scenario(mesh: Mesh) -> None:
        nodes = {1: await mesh.node(1, pins=frozenset())}
        for number in range(2, 31):
            nodes[number] = await mesh.node(number, [bootstrap_of(1)])
            await trio.sleep(0.2)
        await trio.sleep(20)
        for number, layers in ((10, (0, 10)), (19, (10, 20)), (29, (20, 30))):
            nodes[number].publish(publisher(number, layers), ROOT)
            await nodes[number].publish_now()
        for number in (11, 12, 13):
            mesh.fabric.crash(node_key(number).peer_id)
        for number in (21, 22, 23):
            mesh.fabric.freeze(node_key(number).peer_id)
        took: list[float] = []
        for number in (2, 9, 15, 17, 25, 28, 30):
            before = trio.current_time()
            kad = nodes[number].kad
            assert kad is not None
            outcome = await kad.get(record_key(ROOT))
            took.append(trio.current_time() - before)
            nodes[number].observe(outcome.values, "dht")
            assert len(nodes[number].view.stages(ROOT, None, DATE.unix_ms())) == 3
        assert sorted(took)[len(took) // 2] < 1.0
        assert max(took) < 5.0

    simulate(scenario)


@asynccontextmanager
async def stream_of(network: MemoryNetwork, peer: PeerId, protocol: str) -> AsyncIterator[Stream]:
    stream = await network.open_stream(peer, protocol)
    try:
        yield stream
    finally:
        await stream.reset()


@pytest.mark.parametrize("protocol", [KAD, GOSSIP])
@pytest.mark.parametrize(
    "garbage", [b"\xff" * 10, (b"\x00\x00\x00\x05hello"), b"\x7f\xff\xff\xff", b"\x00\x00\x00\x01\xa0"]
)
def test_garbage_on_a_stream_ends_that_stream_and_nothing_else(protocol: str, garbage: bytes) -> None:
    async def scenario(mesh: Mesh) -> None:
        node = await mesh.node(1)
        hostile = await mesh.network(node_key(66))
        await hostile.connect(bootstrap_of(1))
        async with stream_of(hostile, node_key(1).peer_id, protocol) as stream:
            await stream.send_all(garbage)
            await stream.send_eof()
            with trio.fail_after(10):
                with suppress(StreamReset):  # a reset and an end are both fine here
                    assert await receive_message(stream) is None
        other = await mesh.node(2, [bootstrap_of(1)])
        await trio.sleep(10)
        assert other.kad is not None
        assert len(other.kad.machine.table) == 1
        assert len(node.view) == 0

    simulate(scenario)


def test_a_flood_of_heartbeats_is_bounded_and_honest_ones_still_pass() -> None:
    async def scenario(mesh: Mesh) -> None:
        node = await mesh.node(1)
        hostile = await mesh.network(node_key(66))
        await hostile.connect(bootstrap_of(1))
        async with stream_of(hostile, node_key(1).peer_id, GOSSIP) as stream:
            for start in range(0, 4096, 64):
                junk = tuple(b"junk%d" % i for i in range(start, start + 64))
                await send_message(stream, encode_message(HeartbeatBatch(records=junk)))
        worker = await mesh.node(2, [bootstrap_of(1)])
        worker.publish(publisher(2), ROOT)
        await trio.sleep(12)
        assert len(node.view.stages(ROOT, None, DATE.unix_ms())) == 1

    simulate(scenario)


def test_a_peer_that_floods_requests_is_cut_off() -> None:
    async def scenario(mesh: Mesh) -> None:
        node = await mesh.node(1)
        hostile = await mesh.network(node_key(66))
        await hostile.connect(bootstrap_of(1))

        async def flood(stream: Stream) -> None:
            for number in range(1000):
                await send_message(stream, encode_request(Request(number, (), Find(b"k" * 32, True))))
            while await receive_message(stream):
                pass

        async with stream_of(hostile, node_key(1).peer_id, KAD) as stream:
            with pytest.raises(StreamReset):
                await flood(stream)
        assert node.kad is not None
        assert len(node.kad.machine.table) == 0, "who cannot be dialled is no contact"

    simulate(scenario)


def test_the_same_seed_gives_the_same_run() -> None:
    def run() -> list[object]:
        seen: list[object] = []

        async def scenario(mesh: Mesh) -> None:
            nodes = [await mesh.node(number, [bootstrap_of(1)]) for number in range(1, 9)]
            nodes[3].publish(publisher(4), ROOT)
            nodes[7].watch(ROOT)
            for _ in range(30):
                await trio.sleep(1)
                seen.append((mesh.fabric.num_messages, nodes[7].view.statuses(DATE.unix_ms())))

        simulate(scenario, seed=5)
        return seen

    assert run() == run()


async def test_a_bootstrap_address_without_a_peer_id_is_refused() -> None:
    async with MemoryNetwork.open(MemoryFabric(random.Random(1), VirtualClock()), node_key(1).peer_id) as network:
        for address in ("/ip4/1.2.3.4/tcp/9", "/ip4/1.2.3.4/tcp/9/p2p/nobody", f"x/p2p/{node_key(2).peer_id}"):
            with pytest.raises(ConfigurationError, match="bootstrap address"):
                Discovery(network, DATE, random.Random(1), pins=PINS, bootstrap=[address])
