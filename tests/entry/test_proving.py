"""A real entry sees for itself that tokens come back, before it offers a model, and only when that is in question."""

from __future__ import annotations

import pytest
import trio

from simulations.toy_model import MODEL_ID
from tessella_p2p.base.errors import HopTimeout, NoRoute
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import PROBE_RETRY_S, READY_S
from tessella_p2p.net.virtual_clock import VirtualClock
from tests.entry.entry_world import PROMPT, WHOLE, EntryWorld, RawSession, RawStage, entry_world
from tests.worker.raw_peer import error_frame

FIRST, SECOND = LayerRange(0, 3), LayerRange(3, 6)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def pass_time(seconds: float) -> None:
    """Let virtual time go by."""
    await trio.sleep(seconds)


async def answer(session: RawSession, tail: RawStage | None = None) -> None:
    """Give one token, and see the session closed."""
    known = await session.known()
    as_tail = RawSession(tail or session.stage, session.hop, session.opened, session.body)
    await session.answer(await as_tail.open_tokens(), len(known), [7])
    await session.closed()


async def refused(world: EntryWorld) -> NoRoute:
    with pytest.raises(NoRoute) as caught:
        await world.entry.check_ready()
    return caught.value


async def test_a_model_is_listed_once_its_stages_have_answered_a_token_that_nobody_is_paid_for(
    clock: VirtualClock,
) -> None:
    async with entry_world(clock, [FIRST, SECOND], prove_routes=True) as world:
        head, tail = world.stages
        session = await head.session()
        assert world.entry.model_ids() == ()
        assert world.entry.readiness().state == "unproven"
        assert session.body.max_positions == 2
        assert session.body.ticket is None
        await answer(session, tail)
        assert world.entry.model_ids() == (MODEL_ID,)
        assert world.entry.requests.num_begun == 0, "it is nobody's request"


async def test_an_idle_node_asks_for_nothing_and_proves_anew_when_somebody_asks(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE], prove_routes=True) as world:
        (stage,) = world.stages
        session = await stage.session()
        await answer(session)
        await pass_time(READY_S + 60.0)
        assert world.entry.readiness().state == "old"
        assert world.entry.model_ids() == ()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.entry.check_ready)
            nursery.start_soon(world.entry.check_ready)  # one token is enough for both
            await answer(await stage.session(session.hop))
        assert world.entry.model_ids() == (MODEL_ID,)


async def test_each_answered_request_is_a_proof(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE], prove_routes=True) as world:
        (stage,) = world.stages
        session = await stage.session()
        await answer(session)
        await pass_time(READY_S + 1.0)
        asked = world.ask(1)
        session = await stage.session(session.hop)
        assert session.body.max_positions == len(PROMPT) + 1, "what answered at some time gets the request itself"
        await answer(session)
        await asked.done.wait()
        assert world.entry.model_ids() == (MODEL_ID,)


async def test_a_frozen_stage_is_told_with_its_layers_and_not_asked_again_at_once(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE], prove_routes=True) as world:
        (stage,) = world.stages
        session = await stage.session()
        assert await session.known() == [0]
        error = await refused(world)
        assert error.missing == (WHOLE.as_tuple(),)
        assert error.retry_after_s == PROBE_RETRY_S
        began = trio.current_time()
        asked = world.ask(1)
        await asked.done.wait()
        assert isinstance(asked.error, NoRoute)
        assert asked.error.missing == (WHOLE.as_tuple(),)
        assert trio.current_time() == began, "the client does not wait for a route that failed just now"
        assert world.entry.model_ids() == ()
        (record,) = world.entry.requests.recent()
        assert (record.end, record.request_id) == ("no_route", asked.error.request_id)


async def test_a_request_never_is_the_first_to_try_stages_that_answered_nobody(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE], prove_routes=True) as world:
        (stage,) = world.stages
        asked = world.ask(1)
        session = await stage.session()
        assert session.body.max_positions == 2
        await answer(session)
        await answer(await stage.session(session.hop))
        await asked.done.wait()
        assert asked.token_ids == [7]


async def test_a_route_that_failed_gets_another_chance_after_a_moment(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE], prove_routes=True) as world:
        (stage,) = world.stages
        session = await stage.session()
        await refused(world)
        await pass_time(PROBE_RETRY_S)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.entry.check_ready)
            await answer(await stage.session(session.hop))
        assert world.entry.model_ids() == (MODEL_ID,)


async def test_another_replica_is_tried_before_anybody_is_refused(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE, WHOLE], prove_routes=True) as world:
        bad, good = world.stages
        session = await bad.session()
        await session.hop.send(error_frame(session.body, "cache_miss", bad.peer.peer_id, bad.peer.peer_id))
        await answer(await good.session())
        assert world.entry.model_ids() == (MODEL_ID,)


async def test_a_stage_that_is_full_is_at_work(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE], prove_routes=True) as world:
        (stage,) = world.stages
        session = await stage.session()
        await session.hop.send(error_frame(session.body, "too_many_hop_bodies", stage.peer.peer_id, stage.peer.peer_id))
        await session.closed()
        assert world.entry.model_ids() == (MODEL_ID,)
        assert not world.failures()


async def test_a_stage_that_fails_a_request_is_listed_again_only_after_a_new_proof(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE], prove_routes=True) as world:
        (stage,) = world.stages
        session = await stage.session()
        await answer(session)
        world.entry.punish(HopTimeout("late").blame(stage.peer.peer_id), (stage.peer.peer_id,))
        assert world.entry.model_ids() == ()
        await answer(await stage.session(session.hop))
        assert world.entry.model_ids() == (MODEL_ID,)


async def test_a_new_stage_in_place_of_an_old_one_is_proven_before_anybody_asks(clock: VirtualClock) -> None:
    async with entry_world(clock, [FIRST, SECOND, SECOND], prove_routes=True) as world:
        head, tail, other = world.stages
        world.stated.pop(other.peer.peer_id)
        session = await head.session()
        await answer(session, tail)
        world.fabric.crash(tail.peer.peer_id)
        session = await head.session(session.hop)
        assert session.body.route[-1].peer_id == other.peer.peer_id
        await answer(session, other)
        assert world.entry.model_ids() == (MODEL_ID,)


async def test_without_stages_the_missing_layers_are_named_at_once(clock: VirtualClock) -> None:
    async with entry_world(clock, [FIRST], prove_routes=True) as world:
        error = await refused(world)
        assert error.missing == (SECOND.as_tuple(),)
        assert world.entry.readiness().state == "no_route"


async def test_a_newcomer_beside_proven_stages_may_be_met_by_a_request_which_goes_on_over_the_others(
    clock: VirtualClock,
) -> None:
    async with entry_world(clock, [WHOLE, WHOLE], prove_routes=True) as world:
        proven, newcomer = world.stages
        first = await proven.session()
        await answer(first)
        world.announce(proven, queue_depth=9)
        world.announce(newcomer, queue_depth=0)
        asked = world.ask(1)
        await (await newcomer.session()).known()  # and is silent
        await answer(await proven.session(first.hop))
        await asked.done.wait()
        assert (asked.token_ids, asked.error) == ([7], None)
        assert world.entry.model_ids() == (MODEL_ID,)
