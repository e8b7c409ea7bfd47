"""The contract of `net.network`, against every implementation."""

from __future__ import annotations

import itertools

import pytest
import trio

from tessella_p2p.base.errors import ConfigurationError, DialError, StreamReset, VersionMismatch
from tessella_p2p.base.limits import MIB
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.network import Network, NetworkEvent, PeerConnected, PeerDisconnected, Stream
from tests.net.networks import BOB, CAROL, ECHO, FULL, contract, echo, pattern, read_to_end, take


@contract()
async def test_bytes_arrive_in_order_in_both_directions(a: Network, b: Network) -> None:
    b.serve(ECHO, echo)
    stream = await a.open_stream(b.peer_id, ECHO)
    assert stream.peer == b.peer_id
    for size in (1, 100, 70_000):
        sent = pattern(size)
        await stream.send_all(sent)
        assert await take(stream, size) == sent
    await stream.aclose()


@contract()
async def test_the_handler_learns_who_opened_the_stream(a: Network, b: Network) -> None:
    async def name(stream: Stream) -> None:
        await send_message(stream, stream.peer.encode())

    b.serve(ECHO, name)
    stream = await a.open_stream(b.peer_id, ECHO)
    assert await receive_message(stream) == a.peer_id.encode()


@contract()
async def test_half_closed_stream_still_receives(a: Network, b: Network) -> None:
    async def count(stream: Stream) -> None:
        received = await read_to_end(stream)
        await send_message(stream, str(len(received)).encode())

    b.serve(ECHO, count)
    stream = await a.open_stream(b.peer_id, ECHO)
    await stream.send_all(bytes(1000))
    await stream.send_eof()
    assert await receive_message(stream) == b"1000"
    assert await stream.receive_some(10) == b""
    assert await stream.receive_some(10) == b""
    with pytest.raises(StreamReset):
        await stream.send_all(b"more")


@contract()
async def test_stream_ends_when_its_handler_returns(a: Network, b: Network) -> None:
    async def greet(stream: Stream) -> None:
        await stream.send_all(b"hello")

    b.serve(ECHO, greet)
    stream = await a.open_stream(b.peer_id, ECHO)
    assert await read_to_end(stream) == b"hello"
    await stream.aclose()
    await stream.aclose()


@contract()
async def test_end_inside_a_message_is_a_failure(a: Network, b: Network) -> None:
    async def stop_short(stream: Stream) -> None:
        await stream.send_all(b"\x00\x00\x00\x09half")

    b.serve(ECHO, stop_short)
    stream = await a.open_stream(b.peer_id, ECHO)
    with pytest.raises(StreamReset, match="inside a message"):
        await receive_message(stream)


@contract()
async def test_reset_reaches_the_other_end(a: Network, b: Network) -> None:
    seen = trio.Event()

    async def wait(stream: Stream) -> None:
        with pytest.raises(StreamReset):
            await read_to_end(stream)
        seen.set()

    b.serve(ECHO, wait)
    stream = await a.open_stream(b.peer_id, ECHO)
    await stream.send_all(b"x")
    await stream.reset()
    await seen.wait()
    with pytest.raises(StreamReset):
        await stream.receive_some(1)
    with pytest.raises(StreamReset):
        await stream.send_all(b"x")


@contract()
async def test_handler_exception_resets_its_stream_and_nothing_else(a: Network, b: Network) -> None:
    async def fail(stream: Stream) -> None:
        async with trio.open_nursery():  # an exception group, as handlers with nurseries raise
            raise RuntimeError("the handler is broken")

    b.serve("/tessella/broken/1", fail)
    b.serve(ECHO, echo)
    healthy = await a.open_stream(b.peer_id, ECHO)
    with pytest.raises(StreamReset):  # in the opening or after it: a reset may overtake the answer
        await (await a.open_stream(b.peer_id, "/tessella/broken/1")).receive_some(1)
    await healthy.send_all(b"on")
    assert await take(healthy, 2) == b"on"
    again = await a.open_stream(b.peer_id, ECHO)
    await again.send_all(b"and on")
    assert await take(again, 6) == b"and on"


@contract()
async def test_handler_that_misses_a_reset_leaves_the_connection_usable(a: Network, b: Network) -> None:
    entered = trio.Event()

    async def unaware(stream: Stream) -> None:
        entered.set()
        await take(stream, 1000)

    b.serve("/tessella/unaware/1", unaware)
    b.serve(ECHO, echo)
    for _ in range(3):
        stream = await a.open_stream(b.peer_id, "/tessella/unaware/1")
        await stream.send_all(b"x")
        await entered.wait()
        await stream.reset()
    again = await a.open_stream(b.peer_id, ECHO)
    await again.send_all(b"still here")
    assert await take(again, 10) == b"still here"


@contract()
async def test_message_of_nine_mebibytes_arrives_whole(a: Network, b: Network) -> None:
    sent = pattern(9 * MIB)
    b.serve(ECHO, echo)
    stream = await a.open_stream(b.peer_id, ECHO)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_message, stream, sent)
        assert await receive_message(stream, 16 * MIB) == sent


@contract(*FULL)
async def test_many_streams_at_once_do_not_mix(a: Network, b: Network) -> None:
    b.serve(ECHO, echo)

    async def one(number: int) -> None:
        sent = pattern(20_000 + number)
        stream = await a.open_stream(b.peer_id, ECHO)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, sent)
            assert await take(stream, len(sent)) == sent
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(one, number)


@contract(*FULL)
async def test_sender_waits_for_a_slow_reader(a: Network, b: Network) -> None:
    go, done = trio.Event(), trio.Event()
    received = 0

    async def slow(stream: Stream) -> None:
        nonlocal received
        await go.wait()
        received = len(await read_to_end(stream))
        done.set()

    b.serve(ECHO, slow)
    stream = await a.open_stream(b.peer_id, ECHO)
    sent = bytes(16 * MIB)
    with trio.move_on_after(0.3) as impatient:
        await stream.send_all(sent)
    assert impatient.cancelled_caught
    go.set()
    await stream.send_eof()
    await done.wait()
    assert 0 < received < len(sent)


@contract(*FULL)
async def test_cancelled_reads_lose_no_bytes(a: Network, b: Network) -> None:
    sent = pattern(50_000)

    async def dribble(stream: Stream) -> None:
        for at in range(0, len(sent), 1000):
            await take(stream, 1)
            await stream.send_all(sent[at : at + 1000])

    b.serve(ECHO, dribble)
    stream = await a.open_stream(b.peer_id, ECHO)
    patience_s = itertools.cycle([0, 0.0001, 0.0003, 0.001, 0.05])  # before, around and after the answer's arrival
    received = bytearray()
    cancelled = 0
    while len(received) < len(sent):
        if len(received) % 1000 == 0:
            await stream.send_all(b"?")
            goal = len(received) + 1000
        while len(received) < goal:
            with trio.move_on_after(next(patience_s)) as scope:
                received += await stream.receive_some(777)
            cancelled += scope.cancelled_caught
    assert received == sent
    assert cancelled


@contract(*FULL)
async def test_cancelled_send_leaves_the_connection_whole(a: Network, b: Network) -> None:
    stuck = trio.Event()

    async def never_read(stream: Stream) -> None:
        await stuck.wait()

    b.serve("/tessella/stuck/1", never_read)
    b.serve(ECHO, echo)
    before = await a.open_stream(b.peer_id, ECHO)
    for _ in range(3):
        stream = await a.open_stream(b.peer_id, "/tessella/stuck/1")
        with trio.move_on_after(0.05):
            await stream.send_all(bytes(32 * MIB))
        await stream.reset()
    sent = pattern(3 * MIB)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(before.send_all, sent)
        assert await take(before, len(sent)) == sent
    stuck.set()


@contract("libp2p-stock")
async def test_cancelled_read_on_the_stock_muxer_ends_the_connection(a: Network, b: Network) -> None:
    b.serve(ECHO, echo)
    stream = await a.open_stream(b.peer_id, ECHO)
    with trio.move_on_after(0.05):
        await stream.receive_some(1)
    with pytest.raises(StreamReset):
        await stream.receive_some(1)
    again = await a.open_stream(b.peer_id, ECHO)
    await again.send_all(b"a new connection")
    assert await take(again, 16) == b"a new connection"


@contract(*FULL)
async def test_closing_with_bytes_unread_frees_a_waiting_sender(a: Network, b: Network) -> None:
    async def hang_up(stream: Stream) -> None:
        await send_message(stream, b"no more, please")

    b.serve(ECHO, hang_up)
    stream = await a.open_stream(b.peer_id, ECHO)
    with pytest.raises(StreamReset):
        await stream.send_all(bytes(64 * MIB))
    assert await receive_message(stream) == b"no more, please"


@contract()
async def test_unserved_protocol_is_refused_by_name(a: Network, b: Network) -> None:
    b.serve(ECHO, echo)
    with pytest.raises(VersionMismatch, match=r"/tessella/echo/2.*serves /tessella/echo/1"):
        await a.open_stream(b.peer_id, "/tessella/echo/2")
    with pytest.raises(VersionMismatch, match="/tessella/unheard-of/1"):
        await a.open_stream(b.peer_id, "/tessella/unheard-of/1")
    stream = await a.open_stream(b.peer_id, ECHO)
    await stream.aclose()


@contract()
async def test_stream_to_oneself_needs_no_connection(a: Network, b: Network) -> None:
    a.serve(ECHO, echo)
    stream = await a.open_stream(a.peer_id, ECHO)
    assert stream.peer == a.peer_id
    sent = pattern(MIB)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, sent)
        assert await take(stream, len(sent)) == sent
    assert a.connected_peers() == ()
    with pytest.raises(VersionMismatch, match="this node"):
        await a.open_stream(a.peer_id, "/tessella/unheard-of/1")


@contract()
async def test_events_tell_of_peers_that_come_and_go(a: Network, b: Network) -> None:
    at_a, at_b = a.events(), b.events()
    assert await a.connect(f"{b.addresses[0]}/p2p/{b.peer_id}") == b.peer_id
    expected: NetworkEvent = PeerConnected(b.peer_id)
    assert await at_a.receive() == expected
    assert await at_b.receive() == PeerConnected(a.peer_id)
    assert a.connected_peers() == (b.peer_id,)
    assert b.connected_peers() == (a.peer_id,)
    await a.disconnect(b.peer_id)
    assert await at_a.receive() == PeerDisconnected(b.peer_id)
    assert await at_b.receive() == PeerDisconnected(a.peer_id)
    assert a.connected_peers() == ()


@contract()
async def test_disconnecting_breaks_the_streams_at_both_ends(a: Network, b: Network) -> None:
    broken = trio.Event()

    async def wait(stream: Stream) -> None:
        with pytest.raises(StreamReset):
            await read_to_end(stream)
        broken.set()

    b.serve(ECHO, wait)
    stream = await a.open_stream(b.peer_id, ECHO)
    await stream.send_all(b"x")
    await a.disconnect(b.peer_id)
    with pytest.raises(StreamReset):
        await stream.receive_some(1)
    await broken.wait()


@contract(*FULL)
async def test_dials_at_the_same_time_share_a_connection(a: Network, b: Network) -> None:
    b.serve(ECHO, echo)
    events = a.events()
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(a.open_stream, b.peer_id, ECHO)
    assert await events.receive() == PeerConnected(b.peer_id)
    await a.connect(f"{b.addresses[0]}/p2p/{b.peer_id}")
    with pytest.raises(trio.WouldBlock):
        events.receive_nowait()


@contract()
async def test_somebody_else_at_the_address_is_refused(a: Network, b: Network) -> None:
    with pytest.raises(DialError, match=CAROL.peer_id):
        await a.connect(f"{b.addresses[0]}/p2p/{CAROL.peer_id}")
    assert a.connected_peers() == ()
    b.serve(ECHO, echo)
    stream = await a.open_stream(b.peer_id, ECHO)
    await stream.aclose()


@contract(*FULL)
async def test_unknown_and_unreachable_peers_are_dial_errors(a: Network, b: Network) -> None:
    with pytest.raises(DialError, match="no address"):
        await a.open_stream(CAROL.peer_id, ECHO)
    a.add_addresses(CAROL.peer_id, ["/ip4/127.0.0.1/tcp/1", "not a multiaddr"])
    with pytest.raises(DialError, match="tcp/1"):
        await a.open_stream(CAROL.peer_id, ECHO)


@contract("memory", "libp2p")
async def test_an_address_without_a_pin_is_a_configuration_error(a: Network, b: Network) -> None:
    for address in (b.addresses[0], "nonsense", f"nonsense/p2p/{BOB.peer_id}", f"{b.addresses[0]}/p2p/nobody", ""):
        with pytest.raises(ConfigurationError):
            await a.connect(address)
