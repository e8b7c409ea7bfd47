"""Each guard around py-libp2p, driven over real sockets: the test fails without the guard."""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest
import trio

from tessella_p2p.base.errors import ConfigurationError, DialError, PortInUseError, StreamReset
from tessella_p2p.base.limits import MAX_HALF_OPEN_PER_ADDRESS, MAX_HOP_BYTES, MIB
from tessella_p2p.net import libp2p_patches
from tessella_p2p.net.framing import send_message
from tessella_p2p.net.libp2p_host import Libp2pNetwork
from tessella_p2p.net.names import resolve
from tessella_p2p.net.network import PeerDisconnected, Stream
from tessella_p2p.net.yamux_stream import YamuxStream
from tessella_p2p.wire.keys import NodeKey
from tests.net.networks import ALICE, BOB, CAROL, ECHO, LOOPBACK, echo, pattern, take

Muxer = Literal["fast", "stock"]


@asynccontextmanager
async def pair(a_muxer: Muxer = "fast", b_muxer: Muxer = "fast") -> AsyncIterator[tuple[Libp2pNetwork, Libp2pNetwork]]:
    """Two nodes; a knows where b is, and b echoes."""
    async with (
        Libp2pNetwork.open(ALICE, LOOPBACK, muxer=a_muxer) as a,
        Libp2pNetwork.open(BOB, LOOPBACK, muxer=b_muxer) as b,
    ):
        a.add_addresses(b.peer_id, b.addresses)
        b.serve(ECHO, echo)
        with trio.fail_after(60):
            yield a, b


def port_of(network: Libp2pNetwork) -> int:
    return int(network.addresses[0].rpartition("/")[2])


async def assert_serves(network: Libp2pNetwork, key: NodeKey = CAROL) -> None:
    """A newcomer connects and is answered."""
    async with Libp2pNetwork.open(key, []) as visitor:
        await visitor.connect(f"{network.addresses[0]}/p2p/{network.peer_id}")
        stream = await visitor.open_stream(network.peer_id, ECHO)
        await stream.send_all(b"hello")
        assert await take(stream, 5) == b"hello"


@pytest.mark.parametrize(("a_muxer", "b_muxer"), [("fast", "stock"), ("stock", "fast")])
async def test_fast_and_stock_muxers_speak_the_same_bytes(a_muxer: Muxer, b_muxer: Muxer) -> None:
    async with pair(a_muxer, b_muxer) as (a, b):
        sent = pattern(9 * MIB)
        stream = await a.open_stream(b.peer_id, ECHO)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, sent)
            assert await take(stream, len(sent)) == sent
        await stream.send_eof()
        assert await stream.receive_some(1) == b""
        await stream.aclose()
        for number in range(50):
            small = await a.open_stream(b.peer_id, ECHO)
            await small.send_all(bytes([number]))
            assert await take(small, 1) == bytes([number])
            await small.aclose()
        stopped = await a.open_stream(b.peer_id, ECHO)
        await stopped.reset()
        again = await a.open_stream(b.peer_id, ECHO)
        await again.send_all(b"on")
        assert await take(again, 2) == b"on"


async def test_frame_of_the_hop_limit_arrives_whole() -> None:
    """py-libp2p's own exact read gives up after 100 pieces, which is 8 MiB."""
    async with pair() as (a, b):
        sent = pattern(MIB) * (MAX_HOP_BYTES // MIB)
        stream = await a.open_stream(b.peer_id, ECHO)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_message, stream, sent)
            assert await take(stream, 4) == len(sent).to_bytes(4, "big")
            assert await take(stream, len(sent)) == sent


async def test_visitors_give_their_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_patches, "MAX_CONNECTIONS", 3)
    async with Libp2pNetwork.open(BOB, LOOPBACK) as b:
        b.serve(ECHO, echo)
        with trio.fail_after(60):
            for _ in range(8):
                gone = b.events()
                await assert_serves(b)
                while not isinstance(await gone.receive(), PeerDisconnected):
                    pass
        assert b.connected_peers() == ()


async def test_connections_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_patches, "MAX_CONNECTIONS", 1)
    async with pair() as (a, b):
        await a.open_stream(b.peer_id, ECHO)
        with pytest.raises((DialError, StreamReset)):
            await assert_serves(b)
        assert b.connected_peers() == (a.peer_id,)


async def test_silent_sockets_do_not_keep_newcomers_out() -> None:
    async with Libp2pNetwork.open(BOB, LOOPBACK) as b:
        b.serve(ECHO, echo)
        silent = [await trio.open_tcp_stream("127.0.0.1", port_of(b)) for _ in range(2 * MAX_HALF_OPEN_PER_ADDRESS)]
        with trio.fail_after(8):  # less than the handshake timeout, which would end them too
            await assert_serves(b)
            greeting = await silent[0].receive_some(1)
            while greeting:  # the oldest one was told to go
                greeting = await silent[0].receive_some(1000)
        for each in silent:
            await each.aclose()


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, bytes(4096), b"\x13/multistream/1.0.0\n" * 40]
)
async def test_garbage_on_the_port_ends_that_connection_only(garbage: bytes) -> None:
    async with pair() as (a, b):
        healthy = await a.open_stream(b.peer_id, ECHO)
        async with await trio.open_tcp_stream("127.0.0.1", port_of(b)) as vandal:
            await vandal.send_all(garbage)
            await vandal.send_eof()
            try:
                while await vandal.receive_some(4096):
                    pass
            except trio.BrokenResourceError:
                pass  # reset is as good an end as any
        await healthy.send_all(b"on")
        assert await take(healthy, 2) == b"on"
        await assert_serves(b)


async def test_garbage_inside_the_encrypted_session_ends_that_connection_only() -> None:
    async with pair() as (a, b), Libp2pNetwork.open(CAROL, []) as vandal:
        healthy = await a.open_stream(b.peer_id, ECHO)
        vandal.add_addresses(b.peer_id, b.addresses)
        stream = await vandal.open_stream(b.peer_id, ECHO)
        assert isinstance(stream, YamuxStream)
        stream._connection.put([b"\xff" * 12])
        with pytest.raises(StreamReset):
            await stream.receive_some(1)
        await healthy.send_all(b"on")
        assert await take(healthy, 2) == b"on"


async def test_sender_that_overruns_the_window_is_dropped() -> None:
    async def never_read(stream: Stream) -> None:
        await trio.sleep_forever()

    async with pair() as (a, b):
        b.serve("/tessella/stuck/1", never_read)
        stream = await a.open_stream(b.peer_id, "/tessella/stuck/1")
        assert isinstance(stream, YamuxStream)
        stream._send_window = 1 << 30  # a peer that ignores what it was granted
        with pytest.raises(StreamReset):
            await stream.send_all(bytes(64 * MIB))
        await assert_serves(b)


async def test_frozen_peer_is_noticed_and_its_streams_break() -> None:
    """A peer behind a line that goes dead: TCP alone would not notice for minutes."""
    async with (
        Libp2pNetwork.open(ALICE, [], ping_interval_s=0.05, ping_timeout_s=0.2) as a,
        Libp2pNetwork.open(BOB, LOOPBACK) as b,
        trio.open_nursery() as nursery,
    ):
        b.serve(ECHO, echo)
        frozen = trio.Event()

        async def pump(source: trio.SocketStream, sink: trio.SocketStream) -> None:
            async for data in source:
                if frozen.is_set():
                    await trio.sleep_forever()
                await sink.send_all(data)

        async def relay(near: trio.SocketStream) -> None:
            async with await trio.open_tcp_stream("127.0.0.1", port_of(b)) as far, trio.open_nursery() as pumps:
                pumps.start_soon(pump, near, far)
                await pump(far, near)

        listeners = await nursery.start(trio.serve_tcp, relay, 0)
        port = listeners[0].socket.getsockname()[1]
        events = a.events()
        await a.connect(f"/ip4/127.0.0.1/tcp/{port}/p2p/{b.peer_id}")
        stream = await a.open_stream(b.peer_id, ECHO)
        await stream.send_all(b"on")
        assert await take(stream, 2) == b"on"
        frozen.set()
        with trio.fail_after(10), pytest.raises(StreamReset, match="ping"):
            await stream.receive_some(1)
        await events.receive()
        assert await events.receive() == PeerDisconnected(b.peer_id)
        nursery.cancel_scope.cancel()


async def test_pings_measure_the_round_trip() -> None:
    async with Libp2pNetwork.open(ALICE, [], ping_interval_s=0.01) as a, Libp2pNetwork.open(BOB, LOOPBACK) as b:
        await a.connect(f"{b.addresses[0]}/p2p/{b.peer_id}")
        with trio.fail_after(10):
            while a.round_trip_s(b.peer_id) is None:
                await trio.lowlevel.checkpoint()
        assert 0 < (a.round_trip_s(b.peer_id) or math.inf) < 5


async def test_closing_with_many_connections_takes_no_time_per_connection() -> None:
    """The library closes one after the other, at 0.1 to 0.2 s each."""
    visitors = [NodeKey(bytes([number]) * 32) for number in range(100, 120)]
    async with trio.open_nursery() as nursery:
        leave = trio.Event()

        async def visit(key: NodeKey, address: str, arrived: trio.Event) -> None:
            async with Libp2pNetwork.open(key, []) as visitor:
                await visitor.connect(address)
                arrived.set()
                await leave.wait()

        async with Libp2pNetwork.open(BOB, LOOPBACK) as b:
            for key in visitors:
                arrived = trio.Event()
                nursery.start_soon(visit, key, f"{b.addresses[0]}/p2p/{b.peer_id}", arrived)
                await arrived.wait()
            started = trio.current_time()
        assert trio.current_time() - started < 0.1 * len(visitors)
        leave.set()


async def test_port_in_use_is_named() -> None:
    async with Libp2pNetwork.open(BOB, LOOPBACK) as b:
        with pytest.raises(PortInUseError, match=f"/ip4/127.0.0.1/tcp/{port_of(b)}"):
            async with Libp2pNetwork.open(CAROL, [b.addresses[0]]):
                pass


@pytest.mark.parametrize(
    "address", ["/ip4/127.0.0.1/udp/1", "/ip4/203.0.113.7/tcp/0", "nonsense", "", "/dns4/localhost/tcp/1"]
)
async def test_address_that_cannot_be_listened_on_is_named(address: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be listened on"):
        async with Libp2pNetwork.open(BOB, [address]):
            pass


async def test_addresses_tell_the_real_port_and_what_is_announced() -> None:
    async with Libp2pNetwork.open(BOB, LOOPBACK) as b:
        assert b.addresses == (f"/ip4/127.0.0.1/tcp/{port_of(b)}",)
        assert port_of(b) != 0
        socket.create_connection(("127.0.0.1", port_of(b))).close()
    async with Libp2pNetwork.open(
        BOB, LOOPBACK, announce=["/ip4/203.0.113.7/tcp/0", "/dns4/node.example/tcp/443"]
    ) as b:
        first, second = b.addresses
        assert first.startswith("/ip4/203.0.113.7/tcp/")
        assert not first.endswith("/tcp/0")
        assert second == "/dns4/node.example/tcp/443"
    async with Libp2pNetwork.open(BOB, ["/ip4/0.0.0.0/tcp/0"]) as b:
        assert any(address.startswith("/ip4/127.0.0.1/") for address in b.addresses)
        assert not any("0.0.0.0" in address for address in b.addresses)


async def test_identity_is_the_nodes_key_over_restarts() -> None:
    for _ in range(2):
        async with Libp2pNetwork.open(BOB, LOOPBACK) as b:
            b.serve(ECHO, echo)
            assert b.peer_id == BOB.peer_id
            await assert_serves(b)


async def test_dead_addresses_do_not_hide_a_live_one() -> None:
    """The library dials one address of each kind and lets the rest be."""
    async with pair() as (a, b):
        a.add_addresses(b.peer_id, ["/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/2", "/ip4/127.0.0.1/tcp/3"])
        stream = await a.open_stream(b.peer_id, ECHO)
        await stream.send_all(b"found")
        assert await take(stream, 5) == b"found"


async def test_host_names_are_resolved_as_the_machine_resolves_them() -> None:
    """The library asks DNS servers, which do not know this machine's hosts file."""
    async with pair() as (a, b):
        await a.connect(f"/dns4/localhost/tcp/{port_of(b)}/p2p/{b.peer_id}")
        with pytest.raises(DialError, match="no address"):
            await resolve(f"/dns4/{'x' * 70}/tcp/1")  # no label may be that long
        assert await resolve("/ip4/127.0.0.1/tcp/1") == ("/ip4/127.0.0.1/tcp/1",)


async def test_a_failed_dial_is_not_remembered_against_the_peer() -> None:
    """The library refuses to dial a peer for a minute after a failure."""
    async with Libp2pNetwork.open(ALICE, []) as a:
        a.add_addresses(BOB.peer_id, ["/ip4/127.0.0.1/tcp/1"])
        with pytest.raises(DialError):
            await a.open_stream(BOB.peer_id, ECHO)
        async with Libp2pNetwork.open(BOB, LOOPBACK) as b:
            b.serve(ECHO, echo)
            a.add_addresses(b.peer_id, b.addresses)
            await (await a.open_stream(b.peer_id, ECHO)).aclose()


async def test_error_in_the_block_reaches_the_caller_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with Libp2pNetwork.open(BOB, LOOPBACK):
            raise ZeroDivisionError
