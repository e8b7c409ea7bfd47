"""Frames over a stream: in order, within bounds, without one session or peer holding up another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import (
    HopTimeout,
    InvalidStep,
    MalformedMessage,
    RemoteProtocolError,
    StreamReset,
    TessellaError,
    VersionMismatch,
)
from tessella_p2p.base.ids import SessionId
from tessella_p2p.base.limits import KIB, MAX_QUEUED_BYTES, MAX_QUEUED_CONTROL, MAX_QUEUED_FRAMES, MIB
from tessella_p2p.net.pipe import PipeStream, open_pipe
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.frame_link import FrameLink, FrameReader, Unread
from tessella_p2p.wire.frames import DType, Frame, Header, Kind, encode_frame, parse_header
from tests.stages.openings import STRANGER

A, B = SessionId(b"a" * 16), SessionId(b"b" * 16)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def step(session: SessionId, position: int, size_bytes: int = 4) -> Frame:
    return Frame(Kind.STEP, session, 0, 0, position, 1, DType.U32, body=bytes(size_bytes))


def receipt(session: SessionId, body: bytes = b"signed") -> Frame:
    return Frame(Kind.RECEIPT, session, 0, body=body)


@dataclass
class Collected:
    """A handler that keeps what it gets."""

    wanted: Callable[[Header], bool] = lambda header: True
    frames: list[Frame] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    arrived: trio.Event = field(default_factory=trio.Event)
    wait_for: int = 1

    def wants(self, header: Header) -> bool:
        return self.wanted(header)

    def take(self, frame: Frame) -> None:
        self.frames.append(
            Frame(frame.kind, frame.session, frame.epoch, position=frame.position, body=bytes(frame.body))
        )
        self._note()

    def skipped(self, unread: Unread) -> None:
        self.unread.append(unread)
        self._note()

    def _note(self) -> None:
        if len(self.frames) + len(self.unread) >= self.wait_for:
            self.arrived.set()


@asynccontextmanager
async def linked(near: FrameLink, far: FrameLink, at_far: Collected) -> AsyncIterator[dict[str, TessellaError]]:
    """Both ends running; what each `run` raised, by end."""
    errors: dict[str, TessellaError] = {}

    async def run(name: str, link: FrameLink, handler: Collected) -> None:
        try:
            await link.run(handler)
        except TessellaError as error:
            errors[name] = error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, "near", near, Collected())
        nursery.start_soon(run, "far", far, at_far)
        yield errors
        nursery.cancel_scope.cancel()


def pair() -> tuple[PipeStream, PipeStream]:
    return open_pipe(STRANGER.peer_id)


async def read_all(data: bytes, cuts: list[int], wanted: Callable[[Header], bool]) -> list[Frame | Unread]:
    """What a reader makes of ``data`` when it arrives in pieces, each of them after a cancelled read."""
    near, far = pair()
    reader = FrameReader(far, wanted)
    found: list[Frame | Unread] = []

    async def receive() -> None:
        while (item := await reader.receive()) is not None:
            found.append(item)

    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in pairwise(edges):
        await near.send_all(data[start:end])
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
    await near.send_eof()
    await receive()
    return found


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=8), st.lists(st.integers(0, 4000), max_size=6))
def test_frames_arrive_whole_however_they_are_cut_and_whatever_read_is_cancelled(
    frames: list[tuple[int, bool]], cuts: list[int]
) -> None:
    sent = [receipt(A if wanted else B, bytes(size)) for size, wanted in frames]
    data = b"".join(encode_frame(frame) for frame in sent)
    found = trio.run(read_all, data, cuts, lambda header: header.session == A)
    assert [item.body if isinstance(item, Frame) else item.header.payload_bytes for item in found] == [
        frame.body if frame.session == A else len(frame.body) for frame in sent
    ]


@given(st.binary(max_size=200))
def test_any_bytes_give_frames_or_a_typed_error(data: bytes) -> None:
    try:
        found = trio.run(read_all, data, [], lambda header: True)
    except (MalformedMessage, VersionMismatch, StreamReset):
        return
    assert all(isinstance(item, Frame | Unread) for item in found)


async def test_an_unwanted_payload_is_read_past_and_never_stored() -> None:
    near, far = pair()
    header = encode_frame(step(A, 0, 32 * MIB))[:48]
    reader = FrameReader(far, lambda _: False)

    async def send() -> None:
        await near.send_all(header)
        for _ in range(32):
            await near.send_all(bytes(MIB))
        await near.send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        item = await reader.receive()
        assert isinstance(item, Unread)
        assert not item.damaged
        assert len(reader._buffer) == 0
        assert reader._buffer.__sizeof__() < MIB


async def test_a_damaged_payload_is_reported_and_the_next_frame_is_read() -> None:
    near, far = pair()
    damaged = bytearray(encode_frame(step(A, 3)))
    damaged[-1] ^= 1
    await near.send_all(bytes(damaged) + encode_frame(step(A, 4)))
    reader = FrameReader(far, lambda _: True)
    first, second = await reader.receive(), await reader.receive()
    assert first == Unread(parse_header(damaged[:48]), damaged=True)
    assert isinstance(second, Frame)
    assert second.position == 4


async def test_a_peer_that_sends_much_at_once_leaves_others_their_turn() -> None:
    near, far = pair()
    await near.send_all(encode_frame(receipt(A)) * 1000)
    await near.send_eof()
    reader, turns, read = FrameReader(far, lambda _: True), 0, 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        while await reader.receive() is not None:
            read += 1
        nursery.cancel_scope.cancel()
    assert read == 1000
    assert turns >= 50


async def test_receipts_errors_and_closes_overtake_rows_that_wait() -> None:
    near, far = map(FrameLink, pair())
    got = Collected(wait_for=12)
    for position in range(10):
        await near.send(step(A, position, 60 * KIB), 1.0)
    near.post(receipt(B))
    near.post(receipt(A))
    async with linked(near, far, got):
        await got.arrived.wait()
    assert [frame.kind for frame in got.frames] == [Kind.RECEIPT] * 2 + [Kind.STEP] * 10
    assert [frame.position for frame in got.frames[2:]] == list(range(10))


async def test_closing_a_session_drops_its_rows_alone_and_closes_ahead_of_the_rest() -> None:
    near, far = map(FrameLink, pair())
    got = Collected(wait_for=4)
    await near.send(step(A, 0), 1.0)
    for position in range(3):
        await near.send(step(B, position), 1.0)
        await near.send(step(A, position + 1), 1.0)
    near.close_session((A, 0))
    async with linked(near, far, got):
        await got.arrived.wait()
    assert [(frame.kind, frame.session) for frame in got.frames] == [(Kind.CLOSE, A), *[(Kind.STEP, B)] * 3]


async def test_a_session_that_is_closed_before_its_open_left_is_never_heard_of() -> None:
    near, far = map(FrameLink, pair())
    got = Collected()
    await near.send(Frame(Kind.OPEN, A, 0, body=b"open"), 1.0)
    await near.send(step(A, 0), 1.0)
    near.close_session((A, 0))
    near.post(receipt(B))
    async with linked(near, far, got):
        await got.arrived.wait()
        await trio.testing.wait_all_tasks_blocked()
    assert [frame.kind for frame in got.frames] == [Kind.RECEIPT]


@pytest.mark.parametrize("size_bytes", [4, 256 * KIB])
async def test_a_sender_waits_for_room_and_times_out(clock: VirtualClock, size_bytes: int) -> None:
    near, _ = map(FrameLink, pair())
    room = min(MAX_QUEUED_FRAMES, MAX_QUEUED_BYTES // size_bytes)
    sent = 0

    async def send_all() -> None:
        nonlocal sent
        while True:
            await near.send(step(A, sent, size_bytes), 5.0)
            sent += 1

    with pytest.raises(HopTimeout):
        await send_all()
    assert room - 1 <= sent <= room
    assert trio.current_time() == pytest.approx(5.0)


async def test_one_frame_may_be_longer_than_the_queue(clock: VirtualClock) -> None:
    near, far = map(FrameLink, pair())
    got = Collected()
    async with linked(near, far, got):
        await near.send(step(A, 0, 2 * MAX_QUEUED_BYTES), 1.0)
        await got.arrived.wait()
    assert len(got.frames[0].body) == 2 * MAX_QUEUED_BYTES


async def test_everybody_who_waits_for_room_gets_it(clock: VirtualClock) -> None:
    near, far = map(FrameLink, pair())
    got = Collected(wait_for=MAX_QUEUED_FRAMES + 5)
    for position in range(MAX_QUEUED_FRAMES):
        await near.send(step(B, position), 1.0)
    async with trio.open_nursery() as nursery:
        for position in range(5):
            nursery.start_soon(near.send, step(A, position), 5.0)
            await trio.testing.wait_all_tasks_blocked()
        async with linked(near, far, got):
            await got.arrived.wait()
    assert sorted(frame.position for frame in got.frames if frame.session == A) == list(range(5))


async def test_a_cancelled_sender_sends_nothing() -> None:
    near, far = map(FrameLink, pair())
    for position in range(MAX_QUEUED_FRAMES):
        await near.send(step(B, position), 1.0)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.send, step(A, 0), 5.0)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    got = Collected(wait_for=MAX_QUEUED_FRAMES)
    async with linked(near, far, got):
        await got.arrived.wait()
    assert all(frame.session == B for frame in got.frames)


async def test_a_peer_that_takes_nothing_loses_the_link_and_every_sender_hears_of_it(clock: VirtualClock) -> None:
    stream, _ = pair()
    near = FrameLink(stream, stall_s=10.0)
    outcomes: list[str] = []

    async def send(session: SessionId) -> None:
        position = 0
        try:
            while True:
                await near.send(step(session, position, 64 * KIB), 60.0)
                position += 1
        except TessellaError as error:
            outcomes.append(error.code)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, A)
        nursery.start_soon(send, B)
        with pytest.raises(HopTimeout):
            await near.run(Collected())
    assert near.lost
    assert outcomes == ["stream_reset"] * 2
    assert trio.current_time() == pytest.approx(10.0, abs=1.5)


async def test_a_peer_that_reads_no_receipts_loses_the_link(clock: VirtualClock) -> None:
    near, _ = map(FrameLink, pair())
    posted = 0
    while near.post(receipt(A)):
        posted += 1
    assert posted == MAX_QUEUED_CONTROL
    with pytest.raises(HopTimeout):
        await near.run(Collected())
    assert not near.post(receipt(A))


async def test_what_waits_is_sent_before_the_end_and_both_ends_end_well() -> None:
    near, far = map(FrameLink, pair())
    got = Collected(wait_for=3)
    async with linked(near, far, got) as errors:
        await near.send(step(A, 0), 1.0)
        await near.send(step(A, 1), 1.0)
        near.post(receipt(A))
        near.end()
        await got.arrived.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert not errors
        assert near.lost
        assert far.lost
    with pytest.raises(StreamReset):
        await near.send(step(A, 2), 1.0)
    assert not near.post(receipt(A))


@pytest.mark.parametrize("raised", [InvalidStep("no"), ValueError("a bug")], ids=["rule", "bug"])
async def test_what_a_handler_raises_ends_the_link_as_it_is(raised: Exception) -> None:
    near, far = map(FrameLink, pair())

    def refuse(_: Header) -> bool:
        raise raised

    near.post(receipt(A))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.testing.wait_all_tasks_blocked)

        async def run_near() -> None:
            with pytest.raises(StreamReset):
                await near.run(Collected())

        nursery.start_soon(run_near)
        with pytest.raises(type(raised)) as caught:
            await far.run(Collected(refuse))
        assert caught.value is raised


async def test_a_stream_that_ends_inside_a_frame_is_broken() -> None:
    stream, far_stream = pair()
    await stream.send_all(encode_frame(receipt(A))[:50])
    await stream.send_eof()
    with pytest.raises(StreamReset):
        await FrameLink(far_stream).run(Collected())


async def test_an_abort_gives_its_reason_and_works_before_the_link_runs() -> None:
    near, _ = map(FrameLink, pair())
    near.abort(RemoteProtocolError("enough"))
    with pytest.raises(RemoteProtocolError, match="enough"):
        await near.run(Collected())
