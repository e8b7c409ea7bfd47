"""Other layers than its own: a worker loads them for an audit, keeps them a moment, and lets go of them for what it serves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio

from tessella_p2p.base.errors import Overloaded
from tessella_p2p.base.ids import LayerRange, SessionId
from tessella_p2p.base.limits import GUEST_KEPT_S
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.engine import SessionKey
from tessella_p2p.stages.service import StageService
from tessella_p2p.stages.toy import ToyEngine
from tessella_p2p.worker.guest_stage import GuestStage
from tests.worker.audit_world import TOY

HERE, THERE = LayerRange(0, 2), LayerRange(2, 4)
LOAD_S = 1.0


class ClosingEngine(ToyEngine):
    """Says when it is let go of."""

    def __init__(self, layers: LayerRange, alive: list[LayerRange]) -> None:
        super().__init__(TOY, layers)
        self._alive = alive
        alive.append(layers)

    def close(self) -> None:
        super().close()
        self._alive.remove(self.layers)


@dataclass
class Node:
    """A node's loader, and what is in its memory."""

    alive: list[LayerRange] = field(default_factory=list)
    most: int = 0
    loads: int = 0
    error: Exception | None = None
    has_room: bool = True

    async def load(self, layers: LayerRange) -> StageService:
        await trio.sleep(LOAD_S)
        if self.error is not None:
            raise self.error
        self.loads += 1
        service = StageService(ClosingEngine(layers, self.alive), inline=True)
        self.most = max(self.most, len(self.alive))
        return service


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@asynccontextmanager
async def guests_of(node: Node) -> AsyncIterator[GuestStage]:
    guests = GuestStage(node.load, lambda: node.has_room)
    async with trio.open_nursery() as nursery:
        await nursery.start(guests.run)
        yield guests
        nursery.cancel_scope.cancel()
    assert not node.alive, "nothing stays in memory"


async def pass_time(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.Event().wait()


async def test_a_range_is_loaded_kept_for_the_next_audit_and_let_go_of(clock: VirtualClock) -> None:
    node = Node()
    async with guests_of(node) as guests:
        for _ in range(3):
            async with guests.borrowed(THERE) as stage:
                assert stage.engine.layers == THERE
                await pass_time(2 * GUEST_KEPT_S)  # while somebody has it, it stays
                assert node.alive == [THERE]
            await pass_time(GUEST_KEPT_S / 2)
        assert node.loads == 1
        await pass_time(GUEST_KEPT_S)
        assert not node.alive
        assert guests.layers is None
        async with guests.borrowed(THERE):
            assert node.loads == 2


async def test_there_is_one_guest_at_a_time(clock: VirtualClock) -> None:
    node = Node()
    async with guests_of(node) as guests:
        for layers in (HERE, THERE, HERE):
            async with guests.borrowed(layers) as stage:
                assert stage.engine.layers == layers
        assert (node.loads, node.most) == (3, 1)


async def test_it_makes_room_for_what_the_node_serves_and_nobody_is_invited_meanwhile(clock: VirtualClock) -> None:
    node = Node()
    own: list[StageService] = []

    async def load_own() -> None:
        own.append(await guests.load_own(HERE))

    async with guests_of(node) as guests, trio.open_nursery() as nursery:
        async with guests.borrowed(THERE) as stage:
            nursery.start_soon(load_own)
            await pass_time(LOAD_S / 2)
            assert not node.alive, "in the middle of an audit too"
            with pytest.raises(Overloaded):
                await stage.open(session_key(), 4)
            with pytest.raises(Overloaded):
                async with guests.borrowed(THERE):
                    pass
        await pass_time(LOAD_S)
        assert node.alive == [HERE]
        async with guests.borrowed(THERE):
            assert sorted(map(str, node.alive)) == sorted(map(str, [HERE, THERE]))
        await nursery.start(own[0].run)
        await pass_time(2 * GUEST_KEPT_S)
        nursery.cancel_scope.cancel()


def session_key() -> SessionKey:
    return SessionKey(SessionId(b"s" * 16), 0)


async def test_a_guest_that_is_being_loaded_makes_room_too(clock: VirtualClock) -> None:
    node = Node()

    async def borrow() -> None:
        with pytest.raises(Overloaded):
            async with guests.borrowed(THERE):
                raise AssertionError("it had to leave")

    async with guests_of(node) as guests, trio.open_nursery() as nursery:
        nursery.start_soon(borrow)
        await pass_time(LOAD_S / 2)
        own = await guests.load_own(HERE)
        assert node.alive == [HERE]
        await nursery.start(own.run)
        nursery.cancel_scope.cancel()


async def test_without_room_nothing_is_loaded(clock: VirtualClock) -> None:
    node = Node(has_room=False)
    async with guests_of(node) as guests:
        with pytest.raises(Overloaded):
            async with guests.borrowed(THERE):
                pass
        assert node.loads == 0


async def test_a_load_that_fails_is_the_borrowers_trouble_and_the_next_one_may_succeed(clock: VirtualClock) -> None:
    node = Node(error=MemoryError("too large"))
    async with guests_of(node) as guests:
        with pytest.raises(MemoryError):
            async with guests.borrowed(THERE):
                pass
        node.error = None
        async with guests.borrowed(THERE) as stage:
            assert stage.engine.layers == THERE


async def test_a_borrower_that_is_cancelled_leaves_nothing_behind(clock: VirtualClock) -> None:
    node = Node()
    async with guests_of(node) as guests:
        for seconds in (LOAD_S / 2, 2 * LOAD_S):
            with trio.move_on_after(seconds):
                async with guests.borrowed(THERE):
                    await trio.Event().wait()
            await pass_time(2 * GUEST_KEPT_S)
            assert not node.alive
