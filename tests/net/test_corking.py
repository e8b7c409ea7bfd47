"""Corked sends: one packet for what leaves in one moment, with nothing lost, doubled or out of order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import StreamReset
from tessella_p2p.net.corking import corked, hold_back
from tessella_p2p.net.yamux import YamuxConnection
from tessella_p2p.net.yamux_frames import DATA, HEADER, MAX_FRAME_DATA_BYTES, PING, RST, SYN, WINDOW_UPDATE, Buffer
from tessella_p2p.net.yamux_stream import YamuxStream
from tests.net.test_direct_streams import keep
from tests.net.test_yamux import frame, responder


def opened(connection: YamuxConnection, *stream_ids: int) -> list[YamuxStream]:
    for stream_id in stream_ids:
        connection.receive(frame(WINDOW_UPDATE, SYN, stream_id))
    return [connection._streams[stream_id] for stream_id in stream_ids]


def data_of(packet: bytes) -> list[tuple[int, bytes]]:
    """(stream, data) of each DATA frame of a packet."""
    frames: list[tuple[int, bytes]] = []
    at = 0
    while at < len(packet):
        _, kind, _, stream_id, length = HEADER.unpack_from(packet, at)
        at += HEADER.size
        if kind == DATA:
            frames.append((stream_id, packet[at : at + length]))
            at += length
    return frames


def test_what_is_sent_within_a_block_leaves_in_one_packet_at_its_end() -> None:
    connection, channel = responder()
    one, two = opened(connection, 1, 3)
    channel.sent.clear()
    with corked():
        assert one.send_nowait(b"first")
        with corked():
            assert two.send_nowait(b"second")
        connection.receive(frame(PING, SYN, 0, length=7))
        assert one.send_nowait(b"third")
        assert channel.sent == []
    (packet,) = channel.sent
    assert data_of(packet) == [(1, b"first"), (3, b"second"), (1, b"third")]
    assert one.send_nowait(b"alone")
    assert len(channel.sent) == 2


def test_the_other_end_takes_all_frames_of_a_packet() -> None:
    connection, _ = responder()
    opened(connection, 1, 3)
    taken: dict[int, bytes] = {1: b"", 3: b""}
    for stream_id in taken:

        def taker(piece: memoryview, stream_id: int = stream_id) -> int:
            taken[stream_id] += bytes(piece)
            return len(piece)

        connection._streams[stream_id].offer_to(taker)
    frames = [frame(DATA, 0, 1, data=b"a"), frame(DATA, 0, 3, data=b"bc"), frame(DATA, 0, 1, data=b"d")]
    connection.receive(b"".join(frames))
    assert taken == {1: b"ad", 3: b"bc"}


@given(st.lists(st.tuples(st.sampled_from([1, 3, 5]), st.integers(1, 40_000)), min_size=1, max_size=12))
def test_packets_are_as_few_as_frames_fit_into_and_keep_their_order(sends: list[tuple[int, int]]) -> None:
    connection, channel = responder()
    opened(connection, 1, 3, 5)
    channel.sent.clear()
    sent: list[tuple[int, bytes]] = []
    streams = connection._streams
    packets: list[bytes] = []

    def seal(pieces: Sequence[Buffer]) -> bytearray:
        packets.extend(map(bytes, pieces))
        return bytearray()

    channel.seal = seal  # type: ignore[method-assign]
    with corked():
        for number, (stream_id, size_bytes) in enumerate(sends):
            data = bytes([number]) * size_bytes
            if streams[stream_id].send_nowait(data):
                sent.append((stream_id, data))
    assert [each for packet in packets for each in data_of(packet)] == sent
    assert all(len(packet) <= HEADER.size + MAX_FRAME_DATA_BYTES for packet in packets)
    sizes = [len(packet) for packet in packets]
    firsts = [HEADER.size + len(data_of(packet)[0][1]) for packet in packets]
    assert all(
        size + first > HEADER.size + MAX_FRAME_DATA_BYTES for size, first in zip(sizes, firsts[1:], strict=False)
    )


def test_a_frame_of_another_kind_ends_the_quick_way_and_loses_nothing() -> None:
    connection, _ = responder()
    one, _ = opened(connection, 1, 3)
    received = bytearray()
    one.offer_to(keep(received))
    connection.receive(
        frame(DATA, 0, 1, data=b"before") + frame(WINDOW_UPDATE, RST, 3) + frame(DATA, 0, 1, data=b"behind")
    )
    assert received == b"beforebehind"
    assert 3 not in connection._streams


def test_a_frame_that_is_cut_off_goes_on_in_the_next_packet() -> None:
    connection, _ = responder()
    (one,) = opened(connection, 1)
    received = bytearray()
    one.offer_to(keep(received))
    whole = frame(DATA, 0, 1, data=b"one") + frame(DATA, 0, 1, data=b"twothree")
    connection.receive(whole[:-5])
    connection.receive(whole[-5:] + frame(DATA, 0, 1, data=b"four"))
    assert received == b"onetwothreefour"


def test_a_connection_that_is_gone_within_the_block_sends_nothing() -> None:
    connection, channel = responder()
    (one,) = opened(connection, 1)
    channel.sent.clear()
    with corked():
        assert one.send_nowait(b"late")
        connection.abort("gone")
    assert channel.sent == []
    with pytest.raises(StreamReset):
        one.send_nowait(b"later")


def test_a_bug_of_one_connection_keeps_nothing_from_another() -> None:
    (broken, channel), (sound, other) = responder(), responder()
    (one,), (two,) = opened(broken, 1), opened(sound, 1)
    other.sent.clear()

    def seal(pieces: Sequence[Buffer]) -> bytearray:
        raise ZeroDivisionError

    channel.seal = seal  # type: ignore[method-assign]
    with corked():
        assert one.send_nowait(b"lost")
        assert two.send_nowait(b"arrives")
    assert broken.closed.is_set()
    assert [data_of(packet) for packet in other.sent] == [[(1, b"arrives")]]


def test_a_block_that_raises_flushes_what_it_was_given() -> None:
    flushed: list[str] = []

    def fail() -> None:
        with corked():
            assert hold_back(lambda: flushed.append("one"))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert flushed == ["one"]
    assert not hold_back(lambda: flushed.append("never"))
