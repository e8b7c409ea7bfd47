"""Packets of the encrypted session: whole, in order, or an error."""

from __future__ import annotations

import contextlib

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import RemoteProtocolError, StreamReset
from tessella_p2p.net.noise_session import (
    LENGTH_BYTES,
    MAX_PACKET_BYTES,
    MAX_PLAINTEXT_BYTES,
    NoisePackets,
    NoiseSession,
)

ONE, TWO = b"\x01" * 32, b"\x02" * 32


def pair() -> tuple[NoisePackets, NoisePackets]:
    return NoisePackets(ONE, TWO), NoisePackets(TWO, ONE)


def feed(packets: NoisePackets, wire: bytes) -> list[bytes]:
    """Receive all of ``wire``, as a socket would give it; the packets that came out."""
    out: list[bytes] = []
    while wire:
        with packets.free_space() as space:
            size = min(len(space), len(wire))
            space[:size] = wire[:size]
        packets.received(size)
        wire = wire[size:]
        while (packet := packets.next_packet()) is not None:
            out.append(packet)
    return out


@given(st.lists(st.binary(max_size=300), max_size=20), st.integers(1, 700))
def test_packets_come_out_as_they_went_in_however_they_are_cut(pieces: list[bytes], cut: int) -> None:
    sender, receiver = pair()
    wire = bytes(sender.seal(pieces))
    out: list[bytes] = []
    for at in range(0, len(wire), cut):
        out += feed(receiver, wire[at : at + cut])
    assert out == pieces


def test_full_packets_wrap_around_the_buffer() -> None:
    sender, receiver = pair()
    pieces = [bytes([number]) * MAX_PLAINTEXT_BYTES for number in range(20)]
    wire = bytes(sender.seal(pieces))
    assert len(wire) == 20 * (LENGTH_BYTES + MAX_PACKET_BYTES)
    out: list[bytes] = []
    for at in range(0, len(wire), 100_001):
        out += feed(receiver, wire[at : at + 100_001])
    assert out == pieces


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_changed_packet_is_refused(where: int, change: int) -> None:
    sender, receiver = pair()
    wire = sender.seal([b"a packet"])
    where = LENGTH_BYTES + where % (len(wire) - LENGTH_BYTES)
    wire[where] ^= change
    with pytest.raises(RemoteProtocolError):
        feed(receiver, bytes(wire))


def test_repeated_and_reordered_packets_are_refused() -> None:
    sender, receiver = pair()
    first, second = bytes(sender.seal([b"first"])), bytes(sender.seal([b"second"]))
    with pytest.raises(RemoteProtocolError):
        feed(pair()[1], second + first)
    with pytest.raises(RemoteProtocolError):
        feed(receiver, first + first)


@given(st.binary(max_size=2000))
def test_any_bytes_give_packets_or_a_typed_error(wire: bytes) -> None:
    receiver = pair()[1]
    with contextlib.suppress(RemoteProtocolError):
        assert feed(receiver, wire) == []


async def test_a_read_from_a_socket_that_is_closed_is_a_typed_error() -> None:
    near, far = trio.socket.socketpair()
    session = NoiseSession.__new__(NoiseSession)  # as after a handshake, which this is not about
    session._packets, session._tcp = NoisePackets(ONE, TWO), trio.SocketStream(near)
    near.close()
    far.close()
    with pytest.raises(StreamReset):
        await session.receive_packet()
