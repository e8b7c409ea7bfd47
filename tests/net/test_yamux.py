"""The muxer's rules, one connection at a time: what a peer may send, and what becomes of everything else."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import LocalProtocolError, Overloaded, RemoteProtocolError, StreamReset
from tessella_p2p.base.limits import (
    CONNECTION_EXTRA_WINDOW_BYTES,
    KIB,
    MAX_STREAMS_PER_DIRECTION,
    MAX_UNSENT_BYTES,
    MIB,
    STREAM_WINDOW_BYTES,
)
from tessella_p2p.net.framing import receive_exactly
from tessella_p2p.net.yamux import YamuxConnection
from tessella_p2p.net.yamux_frames import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    INITIAL_WINDOW_BYTES,
    MAX_FRAME_DATA_BYTES,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    Buffer,
    FrameHeader,
    FrameParser,
)
from tessella_p2p.net.yamux_stream import YamuxStream
from tests.net.networks import ALICE, BOB, pattern, take


class PlainChannel:
    """Packets without encryption over any trio stream: a length, then the bytes."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    def seal(self, pieces: Sequence[Buffer]) -> bytearray:
        return bytearray(b"".join(len(piece).to_bytes(4, "big") + bytes(piece) for piece in pieces))

    def write_nowait(self, wire: Buffer) -> int:
        return 0

    async def write_all(self, wire: Buffer) -> None:
        try:
            await self._stream.send_all(bytes(wire))
        except trio.BrokenResourceError as error:
            raise StreamReset("broken") from error

    async def receive_packet(self) -> bytes:
        while True:
            size = int.from_bytes(self._buffer[:4], "big") + 4 if len(self._buffer) >= 4 else 4
            if len(self._buffer) >= size > 4:
                packet = bytes(self._buffer[4:size])
                del self._buffer[:size]
                return packet
            data = await self._stream.receive_some()
            if not data:
                raise StreamReset("ended")
            self._buffer += data

    async def close(self) -> None:
        await self._stream.aclose()


class Recorder(PlainChannel):
    """A socket that takes everything at once and remembers it."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.full = False

    def seal(self, pieces: Sequence[Buffer]) -> bytearray:
        return bytearray(b"".join(map(bytes, pieces)))

    def write_nowait(self, wire: Buffer) -> int:
        if self.full:
            return 0
        self.sent.append(bytes(wire))
        return len(wire)

    def take(self) -> list[tuple[int, int, int, int]]:
        """(type, flags, stream, length) of each frame that was sent since the last call."""
        frames = [HEADER.unpack_from(wire)[1:] for wire in self.sent]
        self.sent.clear()
        return frames


def responder() -> tuple[YamuxConnection, Recorder]:
    channel = Recorder()
    return YamuxConnection(channel, ALICE.peer_id, is_initiator=False), channel


def frame(kind: int, flags: int = 0, stream_id: int = 1, length: int = 0, data: bytes = b"") -> bytes:
    return HEADER.pack(0, kind, flags, stream_id, length or len(data)) + data


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[YamuxConnection, YamuxConnection]]:
    near, far = trio.testing.memory_stream_pair()
    a = YamuxConnection(PlainChannel(near), BOB.peer_id, is_initiator=True)
    b = YamuxConnection(PlainChannel(far), ALICE.peer_id, is_initiator=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.run)
        nursery.start_soon(b.run)
        with trio.fail_after(20):
            yield a, b
        nursery.cancel_scope.cancel()


# ---- Frames


@given(st.lists(st.binary(max_size=100), max_size=10), st.integers(1, 40))
def test_frames_are_found_however_the_bytes_are_cut(payloads: list[bytes], cut: int) -> None:
    wire = b"".join(frame(DATA, 0, 1, data=payload) for payload in payloads)
    parser = FrameParser()
    out: list[bytearray] = []
    for at in range(0, len(wire), cut):
        for item in parser.feed(wire[at : at + cut]):
            if isinstance(item, FrameHeader):
                out.append(bytearray())
            else:
                out[-1] += item
    assert out == payloads


@given(st.binary(max_size=600))
def test_any_bytes_are_frames_or_a_typed_error(wire: bytes) -> None:
    connection, _ = responder()
    with suppress(RemoteProtocolError, StreamReset):
        connection.receive(wire)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 15), st.integers(0, 6), st.integers(0, 400)), max_size=30))
def test_any_frames_are_followed_or_a_typed_error(frames: list[tuple[int, int, int, int]]) -> None:
    connection, _ = responder()
    with suppress(RemoteProtocolError, StreamReset):
        for kind, flags, stream_id, length in frames:
            connection.receive(frame(kind, flags, stream_id, length) + (bytes(length) if kind == DATA else b""))
    assert connection.num_streams <= 3


@pytest.mark.parametrize(
    ("wire", "complaint"),
    [
        (HEADER.pack(1, DATA, 0, 1, 0), "version 1"),
        (HEADER.pack(0, 4, 0, 1, 0), "type 4"),
        (frame(DATA, SYN, 2), "not the peer's next"),
        (frame(DATA, SYN, 0), "not the peer's next"),
        (frame(DATA, SYN, 1) + frame(DATA, SYN, 1), "not the peer's next"),
        (frame(DATA, SYN, 3) + frame(DATA, SYN, 1), "not the peer's next"),
        (frame(DATA, 0, 9, length=STREAM_WINDOW_BYTES + 1), "not open"),
        (frame(DATA, SYN | FIN, 1) + frame(DATA, 0, 1, data=b"x"), "after the end"),
        (frame(WINDOW_UPDATE, SYN, 1, 0xFFFF_FFFF), "window"),
    ],
)
def test_broken_rules_are_named(wire: bytes, complaint: str) -> None:
    connection, _ = responder()
    with pytest.raises(RemoteProtocolError, match=complaint):
        connection.receive(wire)


def test_pings_are_answered_with_their_number() -> None:
    connection, channel = responder()
    connection.receive(frame(PING, SYN, 0, 77))
    assert channel.take() == [(PING, ACK, 0, 77)]
    connection.receive(frame(PING, ACK, 0, 78))
    assert channel.take() == []


def test_good_bye_of_the_peer_ends_the_connection() -> None:
    connection, _ = responder()
    with pytest.raises(StreamReset, match="good-bye"):
        connection.receive(frame(GO_AWAY, 0, 0, 1))


def test_peer_that_asks_and_never_reads_is_dropped() -> None:
    connection, channel = responder()
    channel.full = True
    with pytest.raises(RemoteProtocolError, match="faster than it takes"):
        connection.receive(frame(PING, SYN, 0, 1) * 100_000)
    assert connection._unsent_bytes < MIB


# ---- Windows


def test_window_is_enforced_to_the_byte() -> None:
    for size, allowed in ((STREAM_WINDOW_BYTES, True), (STREAM_WINDOW_BYTES + 1, False)):
        connection, channel = responder()
        connection.receive(frame(WINDOW_UPDATE, SYN, 1))
        assert channel.take() == [(WINDOW_UPDATE, ACK, 1, STREAM_WINDOW_BYTES - INITIAL_WINDOW_BYTES)]
        if allowed:
            connection.receive(frame(DATA, 0, 1, data=bytes(size)))
        else:
            with pytest.raises(RemoteProtocolError, match="overrun"):
                connection.receive(frame(DATA, 0, 1, data=bytes(size)))


async def test_window_is_returned_by_the_reader_half_at_a_time() -> None:
    connection, channel = responder()
    connection.receive(frame(WINDOW_UPDATE, SYN, 1))
    stream = await connection.accept_stream()
    connection.receive(frame(DATA, 0, 1, data=bytes(STREAM_WINDOW_BYTES)))
    channel.take()
    await receive_exactly(stream, STREAM_WINDOW_BYTES // 2 - 1)
    assert channel.take() == []
    await receive_exactly(stream, 1)
    assert channel.take() == [(WINDOW_UPDATE, 0, 1, STREAM_WINDOW_BYTES // 2)]


async def test_streams_of_one_connection_share_what_is_granted_beyond_the_initial_window() -> None:
    connection, channel = responder()
    for number in range(MAX_STREAMS_PER_DIRECTION):
        connection.receive(frame(WINDOW_UPDATE, SYN, 2 * number + 1))
    extra = sum(length for kind, flags, _, length in channel.take() if flags == ACK)
    assert extra == CONNECTION_EXTRA_WINDOW_BYTES
    await connection.accept_stream()
    connection.receive(frame(DATA, RST, 1))
    connection.receive(frame(WINDOW_UPDATE, SYN, 2 * MAX_STREAMS_PER_DIRECTION + 1))
    assert channel.take()[-1][3] == STREAM_WINDOW_BYTES - INITIAL_WINDOW_BYTES


async def test_small_frames_do_not_each_pin_their_packet() -> None:
    connection, _ = responder()
    connection.receive(frame(WINDOW_UPDATE, SYN, 1))
    stream = await connection.accept_stream()
    sent = pattern(40 * KIB)
    for at in range(0, len(sent), 8):
        connection.receive(frame(DATA, 0, 1, data=sent[at : at + 8]))
    assert len(stream._chunks) < 10
    assert await take(stream, len(sent)) == sent


# ---- Streams


def test_stream_beyond_the_peers_limit_is_reset_and_the_others_live() -> None:
    connection, channel = responder()
    for number in range(MAX_STREAMS_PER_DIRECTION + 1):
        connection.receive(frame(WINDOW_UPDATE, SYN, 2 * number + 1))
    assert channel.take()[-1] == (WINDOW_UPDATE, RST, 2 * MAX_STREAMS_PER_DIRECTION + 1, 0)
    assert connection.num_streams == MAX_STREAMS_PER_DIRECTION


def test_stream_beyond_ones_own_limit_is_overload() -> None:
    connection, _ = responder()
    streams = [connection.open_stream() for _ in range(MAX_STREAMS_PER_DIRECTION)]
    assert [stream.stream_id for stream in streams[:3]] == [2, 4, 6]
    with pytest.raises(Overloaded):
        connection.open_stream()


async def test_closed_stream_whose_peer_never_ends_holds_no_place() -> None:
    connection, channel = responder()
    for _ in range(3 * MAX_STREAMS_PER_DIRECTION):
        await connection.open_stream().aclose()
    assert connection.num_streams <= MAX_STREAMS_PER_DIRECTION
    assert (DATA, RST, 2, 0) in channel.take()


async def test_data_for_a_closed_stream_is_answered_with_a_reset() -> None:
    connection, channel = responder()
    connection.receive(frame(WINDOW_UPDATE, SYN, 1))
    stream = await connection.accept_stream()
    await stream.aclose()
    channel.take()
    connection.receive(frame(DATA, 0, 1, data=b"more"))
    assert channel.take() == [(DATA, RST, 1, 0)]
    connection.receive(frame(DATA, 0, 1, data=b"and more, sent before the reset arrived"))
    assert connection.num_streams == 0


async def test_closing_with_bytes_unread_frees_a_sender_that_waits_for_credit() -> None:
    connection, channel = responder()
    connection.receive(frame(WINDOW_UPDATE, SYN, 1))
    stream = await connection.accept_stream()
    connection.receive(frame(DATA, 0, 1, data=bytes(STREAM_WINDOW_BYTES)))
    channel.take()
    await stream.aclose()
    assert channel.take() == [(DATA, FIN, 1, 0), (DATA, RST, 1, 0)]


async def test_what_a_peer_finished_can_be_read_after_its_reset() -> None:
    connection, _ = responder()
    connection.receive(frame(WINDOW_UPDATE, SYN, 1))
    stream = await connection.accept_stream()
    connection.receive(frame(DATA, FIN, 1, data=b"the answer") + frame(DATA, RST, 1))
    assert await take(stream, 10) == b"the answer"
    assert await stream.receive_some(1) == b""
    with pytest.raises(StreamReset):
        await stream.send_all(b"x")


async def test_a_reset_discards_what_was_not_finished() -> None:
    connection, _ = responder()
    connection.receive(frame(WINDOW_UPDATE, SYN, 1))
    stream = await connection.accept_stream()
    connection.receive(frame(DATA, 0, 1, data=b"half of the ans") + frame(DATA, RST, 1))
    with pytest.raises(StreamReset):
        await stream.receive_some(1)


async def test_two_readers_of_one_stream_are_our_own_bug() -> None:
    async with connected() as (a, _), trio.open_nursery() as nursery:
        stream = a.open_stream()
        nursery.start_soon(stream.receive_some, 1)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(LocalProtocolError):
            await stream.receive_some(1)
        nursery.cancel_scope.cancel()


# ---- Two ends


async def test_frames_of_several_streams_interleave_and_arrive_whole() -> None:
    async with connected() as (a, b):
        sent = [pattern(2 * MIB + number) for number in range(4)]

        async def send(data: bytes) -> None:
            stream = a.open_stream()
            await stream.send_all(data)
            await stream.send_eof()

        async def receive(stream: YamuxStream) -> None:
            received = bytearray()
            while part := await stream.receive_some(MIB):
                received += part
            out.append(bytes(received))

        out: list[bytes] = []
        async with trio.open_nursery() as nursery:
            for data in sent:
                nursery.start_soon(send, data)
            for _ in sent:
                nursery.start_soon(receive, await b.accept_stream())
        assert sorted(out, key=len) == sent


async def test_randomly_cancelled_calls_lose_double_or_break_nothing() -> None:
    rng = random.Random(5)
    async with connected() as (a, b):
        stream = a.open_stream()
        other = await b.accept_stream()
        sent = pattern(3 * MIB)
        received = bytearray()

        async def read() -> None:
            while len(received) < len(sent):
                with trio.move_on_after(rng.choice([0, 0.00005, 0.001])):
                    received.extend(await other.receive_some(rng.randrange(1, 200_000)))

        async def vandal() -> None:
            while True:
                wasted = a.open_stream()
                with trio.move_on_after(rng.choice([0, 0.00005, 0.001])):
                    await wasted.send_all(bytes(6 * MIB))
                await wasted.reset()
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(vandal)
            async with trio.open_nursery() as transfer:
                transfer.start_soon(stream.send_all, sent)
                transfer.start_soon(read)
            nursery.cancel_scope.cancel()
        assert received == sent
        assert not a.closed.is_set()


async def test_sender_without_credit_waits_without_spinning_until_it_is_granted() -> None:
    async with connected() as (a, b):
        stream = a.open_stream()
        other = await b.accept_stream()
        finished = trio.Event()

        async def send() -> None:
            await stream.send_all(bytes(STREAM_WINDOW_BYTES + 1))
            finished.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.testing.wait_all_tasks_blocked()
            assert not finished.is_set()
            await receive_exactly(other, STREAM_WINDOW_BYTES)
            await finished.wait()


async def test_bytes_behind_a_full_socket_are_bounded() -> None:
    near, _ = trio.testing.lockstep_stream_pair()
    connection = YamuxConnection(PlainChannel(near), BOB.peer_id, is_initiator=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        for _ in range(8):
            stream = connection.open_stream()
            stream.add_credit(64 * MIB)
            nursery.start_soon(stream.send_all, bytes(8 * MIB))
        await trio.testing.wait_all_tasks_blocked()
        assert connection._unsent_bytes <= MAX_UNSENT_BYTES + 8 * 8 * (MAX_FRAME_DATA_BYTES + HEADER.size)
        nursery.cancel_scope.cancel()


async def test_closing_delivers_what_was_sent_and_breaks_every_stream() -> None:
    async with connected() as (a, b):
        stream = a.open_stream()
        other = await b.accept_stream()
        await stream.send_all(pattern(100_000))
        await stream.send_eof()
        await a.close()
        assert await take(other, 100_000) == pattern(100_000)
        await b.closed.wait()
        assert "good-bye" in b.reason
        with pytest.raises(StreamReset):
            await other.send_all(b"x")
        with pytest.raises(StreamReset):
            a.open_stream()
        with pytest.raises(StreamReset):
            await b.accept_stream()
