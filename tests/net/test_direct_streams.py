"""What crosses without a task in between: the same bytes in the same order as by the long way, whatever else happens."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import trio
import trio.testing

from tessella_p2p.base.errors import StreamReset
from tessella_p2p.base.limits import PIPE_WINDOW_BYTES, STREAM_WINDOW_BYTES
from tessella_p2p.net.network import DirectStream, Network
from tessella_p2p.net.pipe import open_pipe
from tessella_p2p.net.yamux_frames import FRAMES_PER_SEND, MAX_FRAME_DATA_BYTES
from tests.net.networks import BOB, contract, pattern, read_to_end, take


def keep(pieces: bytearray, at_most: Callable[[int], int] = lambda size: size) -> Callable[[memoryview], int]:
    """A taker that keeps what it is offered, or part of it."""

    def taker(piece: memoryview) -> int:
        taken = at_most(len(piece))
        pieces.extend(piece[:taken])
        return taken

    return taker


@contract("memory", "libp2p")
async def test_bytes_sent_and_taken_directly_arrive_in_order(a: Network, b: Network) -> None:
    received = bytearray()
    ended = trio.Event()

    async def served(stream: object) -> None:
        assert isinstance(stream, DirectStream)
        rng = random.Random(3)
        stream.offer_to(keep(received, lambda size: rng.choice([0, size // 2, size])))
        while part := await stream.receive_some(1 << 16):  # type: ignore[attr-defined]
            received.extend(part)
        ended.set()

    b.serve("/tessella/direct/1", served)
    stream = await a.open_stream(b.peer_id, "/tessella/direct/1")
    assert isinstance(stream, DirectStream)
    sent = pattern(3_000_000)
    at = 0
    for size in (1, 12, 60_000, 5, 130_000, 200, 1_000_000, 40):
        part = sent[at : at + size]
        if not stream.send_nowait(part):
            await stream.send_all(part)
        at += size
    await stream.send_all(sent[at:])
    await stream.send_eof()
    await ended.wait()
    assert received == sent


@contract("libp2p")
async def test_nothing_is_sent_that_would_have_to_wait(a: Network, b: Network) -> None:
    async def stuck(stream: object) -> None:
        await trio.sleep_forever()

    b.serve("/tessella/stuck/1", stuck)
    stream = await a.open_stream(b.peer_id, "/tessella/stuck/1")
    assert isinstance(stream, DirectStream)
    assert not stream.send_nowait(bytes(FRAMES_PER_SEND * MAX_FRAME_DATA_BYTES + 1))
    sent = 0
    while stream.send_nowait(bytes(1000)):
        sent += 1000
        await trio.lowlevel.checkpoint()
    assert sent <= STREAM_WINDOW_BYTES
    await stream.reset()
    with pytest.raises(StreamReset):
        stream.send_nowait(b"x")


@contract("memory", "libp2p")
async def test_a_stream_that_its_taker_resets_takes_nothing_more(a: Network, b: Network) -> None:
    offered: list[int] = []
    over = trio.Event()

    async def served(stream: object) -> None:
        def taker(piece: memoryview) -> int:
            offered.append(len(piece))
            over.set()
            return 0

        assert isinstance(stream, DirectStream)
        stream.offer_to(taker)
        await over.wait()
        stream.offer_to(None)
        await stream.reset()  # type: ignore[attr-defined]

    b.serve("/tessella/direct/1", served)
    stream = await a.open_stream(b.peer_id, "/tessella/direct/1")
    await stream.send_all(b"one")
    with pytest.raises(StreamReset):
        await read_to_end(stream)
    assert offered == [3]


async def test_a_taker_is_asked_only_while_nothing_waits() -> None:
    near, far = open_pipe(BOB.peer_id)
    taken = bytearray()
    assert near.send_nowait(b"before")
    far.offer_to(keep(taken))
    assert near.send_nowait(b"behind")
    assert not taken
    assert await take(far, 12) == b"beforebehind"
    assert near.send_nowait(b"direct")
    assert taken == b"direct"


async def test_what_is_taken_directly_gives_its_window_back() -> None:
    near, far = open_pipe(BOB.peer_id)
    taken = bytearray()
    far.offer_to(keep(taken))
    for _ in range(8):
        assert near.send_nowait(bytes(PIPE_WINDOW_BYTES // 2))
    assert len(taken) == 4 * PIPE_WINDOW_BYTES
