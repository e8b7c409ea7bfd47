"""Places of an entry: at once while there are some, by tier when there are none, and never beyond the bounds."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tessella_p2p.base.errors import Overloaded
from tessella_p2p.entry.admission import Admission
from tessella_p2p.wire.messages import Tier


class Requests:
    """Requests that come one after the other; each stays until it is told to leave."""

    def __init__(self, admission: Admission, nursery: trio.Nursery) -> None:
        self.admission = admission
        self.nursery = nursery
        self.inside: list[str] = []
        self.waited: dict[str, bool] = {}

    async def come(self, name: str, tier: Tier) -> trio.CancelScope:
        scope = trio.CancelScope()

        async def enter() -> None:
            with scope:
                self.waited[name] = await self.admission.enter(tier)
                self.inside.append(name)

        self.nursery.start_soon(enter)
        await trio.testing.wait_all_tasks_blocked()
        return scope

    async def leave(self, name: str) -> None:
        self.inside.remove(name)
        self.admission.leave()
        await trio.testing.wait_all_tasks_blocked()


async def test_while_there_are_places_nobody_waits_whatever_the_tier() -> None:
    admission = Admission(places=3)
    assert [await admission.enter(tier) for tier in ("Leech", "Leech", "VIP")] == [False] * 3
    assert (admission.num_open, admission.num_waiting) == (3, 0)


async def test_at_capacity_requests_get_in_in_the_order_of_their_tiers() -> None:
    async with trio.open_nursery() as nursery:
        requests = Requests(Admission(places=1), nursery)
        await requests.come("first", "Leech")
        await requests.come("leech", "Leech")
        await requests.come("standard", "Standard")
        await requests.come("vip", "VIP")
        for expected in ("first", "vip", "standard", "leech"):
            assert requests.inside == [expected]
            await requests.leave(expected)
        assert requests.waited == {"first": False, "leech": True, "standard": True, "vip": True}
        assert (requests.admission.num_open, requests.admission.num_waiting) == (0, 0)


async def test_a_stream_of_vips_does_not_starve_a_leech() -> None:
    async with trio.open_nursery() as nursery:
        requests = Requests(Admission(places=1), nursery)
        await requests.come("vip 0", "VIP")
        await requests.come("leech", "Leech")
        number = 0
        while "leech" not in requests.inside:
            number += 1
            assert number < 50
            await requests.come(f"vip {number}", "VIP")
            await requests.leave(requests.inside[0])
        nursery.cancel_scope.cancel()


async def test_who_waits_too_long_is_told_and_takes_no_place(autojump_clock: trio.testing.MockClock) -> None:
    admission = Admission(places=1, patience_s=5.0)
    await admission.enter("VIP")
    began = trio.current_time()
    with pytest.raises(Overloaded, match="none ended in time") as caught:
        await admission.enter("VIP")
    assert trio.current_time() - began == 5.0
    assert caught.value.http_status == 503
    admission.leave()
    assert (admission.num_open, admission.num_waiting) == (0, 0)


async def test_beyond_the_bound_of_its_tier_a_request_is_refused_at_once() -> None:
    async with trio.open_nursery() as nursery:
        requests = Requests(Admission(places=1, max_waiting=2), nursery)
        for name in ("inside", "waits", "waits too"):
            await requests.come(name, "Leech")
        with pytest.raises(Overloaded, match="1 requests open already; 2 of tier Leech wait"):
            await requests.admission.enter("Leech")
        await requests.come("vip", "VIP")
        await requests.leave("inside")
        assert requests.inside == ["vip"]
        nursery.cancel_scope.cancel()


async def test_who_leaves_the_queue_costs_nobody_a_place() -> None:
    async with trio.open_nursery() as nursery:
        requests = Requests(Admission(places=1), nursery)
        await requests.come("inside", "Leech")
        leaving = await requests.come("leaves", "VIP")
        await requests.come("next", "Leech")
        leaving.cancel()
        await trio.testing.wait_all_tasks_blocked()
        await requests.leave("inside")
        assert requests.inside == ["next"]


async def test_a_place_that_was_given_to_a_request_as_it_left_goes_to_the_next() -> None:
    async with trio.open_nursery() as nursery:
        requests = Requests(Admission(places=1), nursery)
        await requests.come("inside", "Leech")
        leaving = await requests.come("leaves", "VIP")
        await requests.come("next", "Leech")
        requests.inside.clear()
        requests.admission.leave()
        leaving.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert requests.inside in (["next"], ["leaves"])
        await requests.leave(requests.inside[0])
        assert requests.admission.num_open == len(requests.inside)
