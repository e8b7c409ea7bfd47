"""One stream per neighbour for every session; what comes back reaches its session, and nothing but receipts and errors may."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio

from tessella_p2p.base.errors import (
    DialError,
    InvalidStep,
    MalformedMessage,
    Overloaded,
    StaleEpoch,
    StreamReset,
    TessellaError,
)
from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork, constant_latency
from tessella_p2p.net.network import Stream
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.frame_link import LinkKey
from tessella_p2p.stages.hop_links import HopLinks
from tessella_p2p.wire import protocols
from tessella_p2p.wire.frames import DType, Frame, Kind, encode_frame
from tests.stages.openings import key_of

A, B = SessionId(b"a" * 16), SessionId(b"b" * 16)
HERE = key_of("here").peer_id


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@dataclass
class Kept:
    """A receiver that keeps what reaches it."""

    frames: list[Frame] = field(default_factory=list)
    reasons: list[TessellaError] = field(default_factory=list)
    news: trio.Event = field(default_factory=trio.Event)

    def returned(self, frame: Frame) -> None:
        self.frames.append(frame)
        self.news.set()

    def lost(self, reason: TessellaError) -> None:
        self.reasons.append(reason)
        self.news.set()


@dataclass
class Neighbour:
    """A peer that accepts hop streams and does nothing by itself."""

    network: MemoryNetwork
    streams: list[Stream] = field(default_factory=list)

    async def serve(self, stream: Stream) -> None:
        self.streams.append(stream)
        await trio.sleep_forever()

    @property
    def peer_id(self) -> PeerId:
        return self.network.peer_id


@dataclass
class World:
    fabric: MemoryFabric
    links: HopLinks
    neighbours: list[Neighbour]

    def __getitem__(self, index: int) -> Neighbour:
        return self.neighbours[index]


@asynccontextmanager
async def world(clock: VirtualClock, num_neighbours: int = 1, max_links: int = 256) -> AsyncIterator[World]:
    fabric = MemoryFabric(random.Random(1), clock, constant_latency(0.05))
    async with trio.open_nursery() as nursery:
        started: list[Neighbour] = []

        async def run_neighbour(index: int, task_status: trio.TaskStatus[None]) -> None:
            async with MemoryNetwork.open(fabric, key_of(f"neighbour {index}").peer_id) as network:
                neighbour = Neighbour(network)
                network.serve(protocols.HOP, neighbour.serve)
                started.append(neighbour)
                task_status.started()
                await trio.sleep_forever()

        for index in range(num_neighbours):
            await nursery.start(run_neighbour, index)
        async with MemoryNetwork.open(fabric, HERE) as network:
            for neighbour in started:
                network.add_addresses(neighbour.peer_id, neighbour.network.addresses)
            links = HopLinks(network, 10.0, max_links=max_links)
            await nursery.start(links.run)
            yield World(fabric, links, started)
            nursery.cancel_scope.cancel()


def back(kind: Kind, session: SessionId, body: bytes = b"x") -> bytes:
    return encode_frame(Frame(kind, session, 0, body=body))


async def test_sessions_share_one_stream_and_each_gets_its_own_answers(clock: VirtualClock) -> None:
    async with world(clock) as mesh:
        a, b = Kept(), Kept()

        async def attach(session: SessionId, receiver: Kept) -> None:
            await mesh.links.attach(mesh[0].peer_id, (session, 0), receiver)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attach, A, a)
            nursery.start_soon(attach, B, b)
        assert len(mesh[0].streams) == 1
        stream = mesh[0].streams[0]
        await stream.send_all(
            back(Kind.RECEIPT, A, b"1") + back(Kind.ERROR, B, b"2") + back(Kind.RECEIPT, SessionId(b"c" * 16))
        )
        await b.news.wait()
        assert [(f.kind, bytes(f.body)) for f in a.frames] == [(Kind.RECEIPT, b"1")]
        assert [(f.kind, bytes(f.body)) for f in b.frames] == [(Kind.ERROR, b"2")]
        mesh.links.detach(mesh[0].peer_id, (A, 0), a)
        await stream.send_all(back(Kind.RECEIPT, A, b"3") + back(Kind.RECEIPT, B, b"4"))
        b.news = trio.Event()
        await b.news.wait()
        assert len(a.frames) == 1
        assert len(b.frames) == 2
        assert not mesh.links._dialling


@pytest.mark.parametrize("kind", [Kind.STEP, Kind.OPEN, Kind.CLOSE, Kind.TOKEN])
async def test_a_neighbour_that_sends_downstream_frames_upstream_loses_its_link(
    clock: VirtualClock, kind: Kind
) -> None:
    async with world(clock) as mesh:
        a = Kept()
        await mesh.links.attach(mesh[0].peer_id, (A, 0), a)
        is_rows = kind in (Kind.STEP, Kind.TOKEN)
        frame = Frame(kind, A, 0, rows=int(is_rows), dtype=DType.U32 if is_rows else DType.NONE, body=b"\0\0\0\0")
        await mesh[0].streams[0].send_all(encode_frame(frame))
        await a.news.wait()
        assert not a.frames
        assert isinstance(a.reasons[0], MalformedMessage)
        assert len(mesh.links) == 0


async def test_a_damaged_answer_ends_its_session_alone_and_names_the_neighbour(clock: VirtualClock) -> None:
    async with world(clock) as mesh:
        a, b = Kept(), Kept()
        await mesh.links.attach(mesh[0].peer_id, (A, 0), a)
        await mesh.links.attach(mesh[0].peer_id, (B, 0), b)
        damaged = bytearray(back(Kind.RECEIPT, A))
        damaged[-1] ^= 1
        await mesh[0].streams[0].send_all(bytes(damaged) + back(Kind.RECEIPT, B))
        await b.news.wait()
        assert isinstance(a.reasons[0], InvalidStep)
        assert a.reasons[0].peer == mesh[0].peer_id
        assert len(b.frames) == 1


async def test_a_lost_link_is_told_to_every_session_and_the_next_one_gets_a_new_link(clock: VirtualClock) -> None:
    async with world(clock) as mesh:
        a, b, c = Kept(), Kept(), Kept()
        first = await mesh.links.attach(mesh[0].peer_id, (A, 0), a)
        await mesh.links.attach(mesh[0].peer_id, (B, 0), b)
        await mesh[0].streams[0].reset()
        await a.news.wait()
        await b.news.wait()
        assert isinstance(a.reasons[0], StreamReset)
        second = await mesh.links.attach(mesh[0].peer_id, (A, 1), c)
        assert second is not first
        mesh.links.detach(mesh[0].peer_id, (A, 0), a)  # of the old link: nothing of the new one
        await mesh[0].streams[1].send_all(encode_frame(Frame(Kind.RECEIPT, A, 1, body=b"x")))
        await c.news.wait()
        assert len(c.frames) == 1


async def test_a_name_that_is_taken_is_refused_and_its_owner_keeps_it(clock: VirtualClock) -> None:
    async with world(clock) as mesh:
        owner, thief = Kept(), Kept()
        await mesh.links.attach(mesh[0].peer_id, (A, 0), owner)
        with pytest.raises(StaleEpoch):
            await mesh.links.attach(mesh[0].peer_id, (A, 0), thief)
        mesh.links.detach(mesh[0].peer_id, (A, 0), thief)
        await mesh[0].streams[0].send_all(back(Kind.RECEIPT, A))
        await owner.news.wait()
        assert not thief.frames


async def test_an_idle_link_makes_room_and_a_busy_one_does_not(clock: VirtualClock) -> None:
    async with world(clock, num_neighbours=4, max_links=2) as mesh:
        kept: dict[int, tuple[LinkKey, Kept]] = {i: ((A, i), Kept()) for i in range(4)}
        for index in (0, 1):
            await mesh.links.attach(mesh[index].peer_id, *kept[index])
        with pytest.raises(Overloaded):
            await mesh.links.attach(mesh[2].peer_id, *kept[2])
        mesh.links.detach(mesh[1].peer_id, *kept[1])
        await mesh.links.attach(mesh[2].peer_id, *kept[2])
        assert len(mesh.links) == 2
        assert await mesh[1].streams[0].receive_some(10) == b""
        with pytest.raises(Overloaded):
            await mesh.links.attach(mesh[3].peer_id, *kept[3])
        assert not mesh.links._dialling


async def test_a_neighbour_that_cannot_be_reached_leaves_nothing_behind(clock: VirtualClock) -> None:
    async with world(clock) as mesh:
        mesh.fabric.crash(mesh[0].peer_id)
        with pytest.raises(DialError):
            await mesh.links.attach(mesh[0].peer_id, (A, 0), Kept())
        with trio.move_on_after(0.01) as scope:
            await mesh.links.attach(mesh[0].peer_id, (A, 0), Kept())
        assert scope.cancelled_caught
        assert len(mesh.links) == 0
        assert not mesh.links._dialling
