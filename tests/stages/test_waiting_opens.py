"""Opens at a full stage: who waits, who does not, and who gets the place that becomes free."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from tessella_p2p.base.errors import Overloaded, TooManyHopBodies
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import KV_IDLE_S, MAX_WAITING_OPENS
from tessella_p2p.stages.engine import Sampled
from tessella_p2p.stages.service import StageService
from tessella_p2p.stages.sessions import PAGE_POSITIONS
from tessella_p2p.stages.tier_queue import SHARES
from tessella_p2p.stages.toy import ToyEngine, ToyModel
from tessella_p2p.wire.messages import Tier
from tests.stages.stage_runs import GREEDY, first_step, key_of

WHOLE = LayerRange(0, 4)
WAIT_S = 100.0


@asynccontextmanager
async def full_stage(places: int, *, num_pages: int | None = None) -> AsyncIterator[StageService]:
    """A stage whose sessions 0, 1, … have every place."""
    engine = ToyEngine(ToyModel(4), WHOLE, max_sessions=places, num_pages=num_pages, now=trio.current_time)
    service = StageService(engine, inline=True)
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        for session in range(places if num_pages is None else num_pages):
            await service.open(key_of(session), PAGE_POSITIONS)
        yield service
        nursery.cancel_scope.cancel()


class Arrivals:
    """Opens that wait, and in which order they got in."""

    def __init__(self, service: StageService, nursery: trio.Nursery) -> None:
        self.service = service
        self.nursery = nursery
        self.got_in: list[int] = []
        self.refused: list[int] = []

    async def come(self, session: int, tier: Tier, wait_s: float = WAIT_S) -> None:
        async def wait() -> None:
            try:
                await self.service.open(key_of(session), PAGE_POSITIONS, tier=tier, wait_s=wait_s)
                self.got_in.append(session)
            except TooManyHopBodies:
                self.refused.append(session)

        self.nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()

    async def leave(self, *sessions: int) -> None:
        """Sessions are closed, one after the other, and whoever gets their places is in."""
        for session in sessions:
            await self.service.close(key_of(session))
            await trio.testing.wait_all_tasks_blocked()


async def test_a_full_stage_refuses_at_once_who_does_not_want_to_wait(autojump_clock: trio.testing.MockClock) -> None:
    async with full_stage(2) as service:
        began = trio.current_time()
        with pytest.raises(TooManyHopBodies, match="2 sessions of 2"):
            await service.open(key_of(7), PAGE_POSITIONS, tier="VIP")
        assert trio.current_time() == began
        await service.close(key_of(0))
        await service.open(key_of(7), PAGE_POSITIONS)
        assert service.num_sessions == 2


async def test_a_place_that_becomes_free_goes_to_the_higher_tier_and_then_in_order(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with full_stage(2) as service, trio.open_nursery() as nursery:
        arrivals = Arrivals(service, nursery)
        for session, tier in ((10, "Leech"), (11, "Standard"), (12, "VIP"), (13, "VIP")):
            await arrivals.come(session, tier)  # type: ignore[arg-type]
        assert service.num_waiting_opens == service.queue_depth == 4
        await arrivals.leave(0, 1)
        assert arrivals.got_in == [12, 13]
        await arrivals.leave(12, 13)
        assert arrivals.got_in == [12, 13, 11, 10]
        assert not service.num_waiting_opens


async def test_a_stream_of_higher_tiers_does_not_starve_a_leech(autojump_clock: trio.testing.MockClock) -> None:
    async with full_stage(1) as service, trio.open_nursery() as nursery:
        arrivals = Arrivals(service, nursery)
        await arrivals.come(1, "VIP")
        await arrivals.come(2, "Leech")
        holder, number = 0, 100
        while 2 not in arrivals.got_in:
            await arrivals.come(number, "VIP")
            await arrivals.come(number + 1, "Standard")
            number += 2
            await arrivals.leave(holder)
            holder = arrivals.got_in[-1]
        assert len(arrivals.got_in) <= 2 * sum(SHARES.values())
        nursery.cancel_scope.cancel()


async def test_who_waited_long_enough_is_told_that_it_is_full_and_leaves_nothing_behind(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with full_stage(1) as service:
        began = trio.current_time()
        with pytest.raises(TooManyHopBodies, match="full for 30 s"):
            await service.open(key_of(5), PAGE_POSITIONS, wait_s=30.0)
        assert trio.current_time() - began == 30.0
        await service.close(key_of(0))
        assert (service.num_sessions, service.num_waiting_opens) == (0, 0)


async def test_who_stops_waiting_makes_room_for_the_next(autojump_clock: trio.testing.MockClock) -> None:
    async with full_stage(1) as service, trio.open_nursery() as nursery:
        arrivals = Arrivals(service, nursery)
        with trio.CancelScope() as leaving:
            async with trio.open_nursery() as inner:
                inner.start_soon(service.open, key_of(1), 8, 1, "VIP")
                leaving.cancel()
        await arrivals.come(2, "Leech")
        await arrivals.leave(0)
        assert arrivals.got_in == [2]
        assert service.num_sessions == 1


async def test_nobody_without_patience_gets_before_those_who_wait(autojump_clock: trio.testing.MockClock) -> None:
    async with full_stage(1) as service, trio.open_nursery() as nursery:
        arrivals = Arrivals(service, nursery)
        await arrivals.come(1, "Leech")
        nursery.start_soon(service.close, key_of(0))
        await arrivals.come(2, "Leech", wait_s=0.0)
        assert (arrivals.got_in, arrivals.refused) == ([1], [2])


async def test_a_crowd_of_leeches_fills_their_line_and_no_other(autojump_clock: trio.testing.MockClock) -> None:
    async with full_stage(1) as service, trio.open_nursery() as nursery:
        arrivals = Arrivals(service, nursery)
        for number in range(MAX_WAITING_OPENS):
            await arrivals.come(100 + number, "Leech")
        with pytest.raises(Overloaded, match=f"{MAX_WAITING_OPENS} of tier Leech"):
            await service.open(key_of(1), 8, wait_s=WAIT_S)
        await arrivals.come(2, "Standard")
        await arrivals.leave(0)
        assert arrivals.got_in == [2]
        nursery.cancel_scope.cancel()


async def test_an_open_that_finds_a_place_but_no_pages_waits_until_the_others_are_idle(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with full_stage(4, num_pages=2) as service, trio.open_nursery() as nursery:
        arrivals = Arrivals(service, nursery)
        began = trio.current_time()
        await arrivals.come(10, "Leech")
        await arrivals.come(11, "VIP", wait_s=0.0)
        assert arrivals.refused == [11], "whoever is next is not overtaken"
        while not arrivals.got_in:
            with trio.move_on_after(1.0):
                await trio.Event().wait()
        assert KV_IDLE_S <= trio.current_time() - began <= KV_IDLE_S + 3.0
        result = await service.step(first_step(10, [1, 2, 3], sample=GREEDY))
        assert isinstance(result.output, Sampled)


async def test_a_higher_tier_that_fits_does_not_wait_behind_a_lower_one_that_does_not(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with full_stage(8, num_pages=3) as service, trio.open_nursery() as nursery:
        arrivals = Arrivals(service, nursery)

        async def come_large() -> None:
            await service.open(key_of(20), 2 * PAGE_POSITIONS, tier="Leech", wait_s=WAIT_S)
            arrivals.got_in.append(20)

        nursery.start_soon(come_large)
        await trio.testing.wait_all_tasks_blocked()
        await arrivals.leave(0)
        assert not arrivals.got_in, "one page is not enough for it"
        await arrivals.come(21, "Leech", wait_s=0.0)
        assert arrivals.refused == [21], "of its own tier, nobody gets before it"
        await arrivals.come(22, "VIP", wait_s=0.0)
        assert arrivals.got_in == [22]
        await arrivals.leave(1, 22)
        assert arrivals.got_in == [22, 20]


async def test_pages_that_become_free_go_to_those_who_wait_in_their_order(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with full_stage(4, num_pages=2) as service, trio.open_nursery() as nursery:
        arrivals = Arrivals(service, nursery)
        for session in (10, 11, 12):
            await arrivals.come(session, "Standard")
        await arrivals.leave(0, 1)
        assert arrivals.got_in == [10, 11]
        await arrivals.leave(10)
        assert arrivals.got_in == [10, 11, 12]


async def test_a_stage_that_stops_tells_those_who_wait(autojump_clock: trio.testing.MockClock) -> None:
    errors: list[Exception] = []

    async def wait(service: StageService) -> None:
        try:
            await service.open(key_of(9), 8, wait_s=WAIT_S)
        except Overloaded as error:
            errors.append(error)

    async with trio.open_nursery() as nursery, full_stage(1) as service:
        nursery.start_soon(wait, service)
        await trio.testing.wait_all_tasks_blocked()
    assert [str(error) for error in errors] == ["this stage has stopped"]
