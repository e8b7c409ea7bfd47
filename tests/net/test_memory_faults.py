"""The faults that a simulation asks of the in-memory network."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from tessella_p2p.base.errors import ConfigurationError, DialError, StreamReset, VersionMismatch
from tessella_p2p.base.limits import DIAL_TIMEOUT_S
from tessella_p2p.net.memory import MemoryNetwork
from tessella_p2p.net.memory_fabric import NOTICE_S, RETRANSMIT_S, MemoryFabric, constant_latency, log_normal_latency
from tessella_p2p.net.network import PeerConnected, PeerDisconnected, Stream
from tessella_p2p.net.virtual_clock import VirtualClock, run_deterministic
from tests.net.networks import ALICE, BOB, CAROL, ECHO, echo, pattern, take

ONE_WAY_S = 0.05


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(strict=True)


@asynccontextmanager
async def pair(
    clock: VirtualClock, loss: float = 0.0
) -> AsyncIterator[tuple[MemoryFabric, MemoryNetwork, MemoryNetwork]]:
    fabric = MemoryFabric(random.Random(3), clock, latency=constant_latency(ONE_WAY_S), loss=loss)
    async with MemoryNetwork.open(fabric, ALICE.peer_id) as a, MemoryNetwork.open(fabric, BOB.peer_id) as b:
        b.serve(ECHO, echo)
        a.add_addresses(b.peer_id, b.addresses)
        yield fabric, a, b


async def test_a_message_takes_the_latency_of_its_pair(clock: VirtualClock) -> None:
    async with pair(clock) as (_, a, b):
        stream = await a.open_stream(b.peer_id, ECHO)
        assert clock.now == pytest.approx(4 * ONE_WAY_S)  # a dial and a settled protocol: a round trip each
        assert a.round_trip_s(b.peer_id) == pytest.approx(2 * ONE_WAY_S)
        started = clock.now
        await stream.send_all(b"ping")
        assert await take(stream, 4) == b"ping"
        assert clock.now - started == pytest.approx(2 * ONE_WAY_S)


async def test_loss_costs_time_and_neither_bytes_nor_order(clock: VirtualClock) -> None:
    async with pair(clock, loss=0.3) as (_, a, b):
        stream = await a.open_stream(b.peer_id, ECHO)
        sent = pattern(5000)
        started = clock.now
        for at in range(0, len(sent), 50):
            await stream.send_all(sent[at : at + 50])
        assert await take(stream, len(sent)) == sent
        assert clock.now - started > 2 * ONE_WAY_S + RETRANSMIT_S


async def test_a_short_partition_delays_and_loses_nothing(clock: VirtualClock) -> None:
    async with pair(clock) as (fabric, a, b):
        stream = await a.open_stream(b.peer_id, ECHO)
        await stream.send_all(b"before ")
        fabric.partition({ALICE.peer_id: 1})
        await stream.send_all(b"during ")
        clock.call_at(clock.now + 1.0, fabric.heal)
        started = clock.now
        await trio.sleep(0.99)
        await stream.send_all(b"late")
        assert await take(stream, 18) == b"before during late"
        assert clock.now - started >= 1.0 + 2 * ONE_WAY_S - 1e-9


async def test_a_long_partition_is_noticed_at_both_ends(clock: VirtualClock) -> None:
    async with pair(clock) as (fabric, a, b):
        stream = await a.open_stream(b.peer_id, ECHO)
        at_a, at_b = a.events(), b.events()
        fabric.partition({ALICE.peer_id: 1})
        started = clock.now
        with pytest.raises(StreamReset):
            await stream.receive_some(1)
        assert clock.now - started == pytest.approx(NOTICE_S)
        assert await at_a.receive() == PeerDisconnected(b.peer_id)
        assert await at_b.receive() == PeerDisconnected(a.peer_id)
        started = clock.now
        with pytest.raises(DialError, match="no answer"):
            await a.open_stream(b.peer_id, ECHO)
        assert clock.now - started == pytest.approx(DIAL_TIMEOUT_S)
        fabric.heal()
        stream = await a.open_stream(b.peer_id, ECHO)
        await stream.send_all(b"again")
        assert await take(stream, 5) == b"again"


async def test_peers_of_one_group_hear_each_other_through_a_partition(clock: VirtualClock) -> None:
    async with pair(clock) as (fabric, a, b), MemoryNetwork.open(fabric, CAROL.peer_id) as c:
        fabric.partition({CAROL.peer_id: 1})
        stream = await a.open_stream(b.peer_id, ECHO)
        await stream.send_all(b"on")
        assert await take(stream, 2) == b"on"
        with pytest.raises(DialError):
            await c.connect(f"{b.addresses[0]}/p2p/{b.peer_id}")


async def test_a_dial_into_a_partition_succeeds_when_it_heals_in_time(clock: VirtualClock) -> None:
    async with pair(clock) as (fabric, a, b):
        fabric.partition({ALICE.peer_id: 1})
        clock.call_at(3.0, fabric.heal)
        await a.connect(f"{b.addresses[0]}/p2p/{b.peer_id}")
        assert 3.0 < clock.now < 5.0


async def test_a_frozen_peer_is_noticed_and_a_thawed_one_found_again(clock: VirtualClock) -> None:
    async with pair(clock) as (fabric, a, b):
        stream = await a.open_stream(b.peer_id, ECHO)
        fabric.freeze(b.peer_id)
        await stream.send_all(b"anybody?")
        with pytest.raises(StreamReset):
            await stream.receive_some(1)
        assert a.connected_peers() == ()
        fabric.thaw(b.peer_id)
        stream = await a.open_stream(b.peer_id, ECHO)
        await stream.send_all(b"hello")
        assert await take(stream, 5) == b"hello"


async def test_a_short_freeze_is_only_slow(clock: VirtualClock) -> None:
    async with pair(clock) as (fabric, a, b):
        stream = await a.open_stream(b.peer_id, ECHO)
        fabric.freeze(b.peer_id)
        await stream.send_all(b"hello")
        clock.call_at(clock.now + 2.0, fabric.thaw, b.peer_id)
        assert await take(stream, 5) == b"hello"


async def test_a_crash_ends_the_node_and_resets_the_other_ends_one_latency_later(clock: VirtualClock) -> None:
    async with pair(clock) as (fabric, a, _):
        ended: list[float] = []
        served = trio.Event()

        async def node() -> None:
            async with MemoryNetwork.open(fabric, CAROL.peer_id, "/ip4/10.9.9.9/tcp/4001") as c:
                c.serve(ECHO, echo)
                served.set()
                await trio.sleep_forever()
            ended.append(clock.now)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(node)
            await served.wait()
            a.add_addresses(CAROL.peer_id, ["/ip4/10.9.9.9/tcp/4001"])
            stream = await a.open_stream(CAROL.peer_id, ECHO)
            crashed_at = clock.now
            fabric.crash(CAROL.peer_id)
            with pytest.raises(StreamReset):
                await stream.receive_some(1)
            assert clock.now - crashed_at == pytest.approx(ONE_WAY_S)
        assert ended == [pytest.approx(crashed_at)]
        with pytest.raises(DialError, match="refused"):
            await a.open_stream(CAROL.peer_id, ECHO)
        async with MemoryNetwork.open(fabric, CAROL.peer_id, "/ip4/10.9.9.9/tcp/4001") as c:
            c.serve(ECHO, echo)
            stream = await a.open_stream(CAROL.peer_id, ECHO)
            await stream.send_all(b"back")
            assert await take(stream, 4) == b"back"


async def test_crossing_dials_meet_in_one_connection(clock: VirtualClock) -> None:
    async with pair(clock) as (_, a, b):
        at_a, at_b = a.events(), b.events()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.connect, f"{b.addresses[0]}/p2p/{b.peer_id}")
            nursery.start_soon(b.connect, f"{a.addresses[0]}/p2p/{a.peer_id}")
        assert a.connections[b.peer_id] is b.connections[a.peer_id]
        assert at_a.receive_nowait() == PeerConnected(b.peer_id)
        assert at_b.receive_nowait() == PeerConnected(a.peer_id)
        for events in (at_a, at_b):
            with pytest.raises(trio.WouldBlock):
                events.receive_nowait()


async def test_streams_leave_nothing_behind(clock: VirtualClock) -> None:
    async with pair(clock) as (_, a, b):

        async def refuse(stream: Stream) -> None:
            await stream.reset()

        b.serve("/tessella/refuse/1", refuse)
        for _ in range(3):
            stream = await a.open_stream(b.peer_id, ECHO)
            await stream.send_eof()
            assert await stream.receive_some(1) == b""
            await stream.aclose()
            with pytest.raises(StreamReset):
                await (await a.open_stream(b.peer_id, "/tessella/refuse/1")).receive_some(1)
            with pytest.raises(VersionMismatch):
                await a.open_stream(b.peer_id, "/tessella/unheard-of/1")
            with trio.move_on_after(ONE_WAY_S):
                await a.open_stream(b.peer_id, ECHO)
        await trio.sleep(1)
        assert a.connections[b.peer_id].streams == {}


async def test_a_peer_joins_once_and_a_loss_of_one_is_no_probability(clock: VirtualClock) -> None:
    async with pair(clock) as (fabric, a, _):
        with pytest.raises(ConfigurationError):
            async with MemoryNetwork.open(fabric, a.peer_id):
                pass
    with pytest.raises(ConfigurationError):
        MemoryFabric(random.Random(0), clock, loss=1.0)


def _trace(seed: int) -> tuple[list[tuple[float, int]], int]:
    clock = VirtualClock(strict=True)
    fabric = MemoryFabric(random.Random(seed), clock, latency=log_normal_latency(), loss=0.05)
    trace: list[tuple[float, int]] = []
    keys = [ALICE, BOB, CAROL]

    async def node(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        async with MemoryNetwork.open(fabric, keys[number].peer_id, f"/ip4/10.1.0.{number}/tcp/1") as network:
            network.serve(ECHO, echo)
            await trio.sleep(1)
            for _ in range(20):
                other = rng.randrange(3)
                network.add_addresses(keys[other].peer_id, [f"/ip4/10.1.0.{other}/tcp/1"])
                stream = await network.open_stream(keys[other].peer_id, ECHO)
                await stream.send_all(b"hello")
                await take(stream, 5)
                await stream.aclose()
                trace.append((clock.now, number))
                await trio.sleep(rng.random())
            await trio.sleep(60)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(node, number)

    run_deterministic(main, seed, clock=clock)
    return trace, fabric.num_messages


def test_the_same_seed_gives_the_same_run() -> None:
    assert _trace(1) == _trace(1)
    assert _trace(1) != _trace(2)
