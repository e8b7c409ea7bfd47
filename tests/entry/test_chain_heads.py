"""What the stages of a route can tell an entry, and what the entry makes of it: another route, or an honest error."""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio

from tessella_p2p.base.errors import (
    HopBodyTooLarge,
    HopTimeout,
    NoRoute,
    Overloaded,
    PromptTooLong,
    RemoteProtocolError,
    TessellaError,
    TooManyHopBodies,
)
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import FULL_PATIENCE_S, MAX_ENTRY_SESSIONS, MAX_STAGES, PREFILL_CHUNK, SESSION_IDLE_S
from tessella_p2p.entry.api import GenerateRequest
from tessella_p2p.entry.chain import first_addresses
from tessella_p2p.entry.session import MAX_REROUTES
from tessella_p2p.ledger.failure_reports import FailureReports
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.wire.frames import DType, Frame, Kind
from tests.entry.entry_world import (
    ENTRY_KEY,
    PROMPT,
    WHOLE,
    EntryWorld,
    RawSession,
    RawStage,
    entry_world,
)
from tests.worker.raw_peer import error_frame, raw_peer

HERE = len(PROMPT)
FIRST, SECOND = LayerRange(0, 3), LayerRange(3, 6)
FULL = "too_many_hop_bodies"
STRANGER = PeerId("12D3KooWQQnKirL4V2nvfnvhJzicNpsznh9k1htRGcT177VpeD8M")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def finish(session: RawSession, tail: RawStage | None = None) -> None:
    """Answer one token honestly."""
    known = await session.known()
    as_tail = RawSession(tail or session.stage, session.hop, session.opened, session.body)
    await session.answer(await as_tail.open_tokens(), len(known), [7])


CODES = [
    "stale_epoch",
    "cache_miss",
    "hop_timeout",
    "invalid_step",
    "invalid_request",
    "not_authorized",
    "prompt_too_long",
    "model_not_found",
    "expired",
    "artifact_error",
    "proof_refused",
    "internal_error",
]


@pytest.mark.parametrize("code", CODES)
async def test_whatever_a_stage_has_against_a_session_another_route_is_tried(clock: VirtualClock, code: str) -> None:
    async with entry_world(clock, [WHOLE, WHOLE]) as world:
        asked = world.ask(1)
        refusing, other = world.stages
        session = await refusing.session()
        await session.hop.send(error_frame(session.body, code, refusing.peer.peer_id, refusing.peer.peer_id))
        await session.closed()
        await finish(await other.session())
        await asked.done.wait()
        assert asked.error is None
        assert asked.token_ids == [7]
        assert world.failures() == {refusing.peer.peer_id: 1}


@pytest.mark.parametrize(
    ("code", "error"),
    [("prompt_too_long", RemoteProtocolError), ("expired", RemoteProtocolError), ("overloaded", Overloaded)],
)
async def test_when_every_route_failed_the_client_is_not_told_that_it_was_its_own_mistake(
    clock: VirtualClock, code: str, error: type[TessellaError]
) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(1)
        stage = world.stages[0]
        session = await stage.session()
        for epoch in range(MAX_REROUTES + 1):
            assert session.body.epoch == epoch
            await session.hop.send(error_frame(session.body, code, stage.peer.peer_id, stage.peer.peer_id))
            if epoch < MAX_REROUTES:
                session = await stage.session(session.hop)
        await asked.done.wait()
        assert type(asked.error) is error
        assert asked.error.http_status in (502, 503)


async def test_an_overloaded_stage_without_an_alternative_is_asked_again_later_and_later(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(1)
        stage = world.stages[0]
        session, times = await stage.session(), [trio.current_time()]
        for _ in range(4):
            await session.hop.send(error_frame(session.body, "overloaded", stage.peer.peer_id, stage.peer.peer_id))
            session = await stage.session(session.hop)
            times.append(trio.current_time())
        await finish(session)
        await asked.done.wait()
        pauses = [later - earlier for earlier, later in pairwise(times)]
        assert pauses == sorted(pauses)
        assert pauses[0] < 0.6 < pauses[-1]


async def test_a_head_that_blames_an_honest_tail_is_not_chosen_again(clock: VirtualClock) -> None:
    async with entry_world(clock, [FIRST, FIRST, SECOND]) as world:
        liar, honest, tail = world.stages
        asked = world.ask(1)
        session = await liar.session()
        await session.hop.send(error_frame(session.body, "hop_timeout", liar.peer.peer_id, tail.peer.peer_id))
        await finish(await honest.session(), tail)
        await asked.done.wait()
        assert asked.token_ids == [7]


@pytest.mark.parametrize("accused", [STRANGER, ENTRY_KEY.peer_id])
async def test_a_peer_that_is_no_stage_of_the_route_is_not_remembered_as_failing(
    clock: VirtualClock, accused: PeerId
) -> None:
    async with entry_world(clock, [WHOLE, WHOLE]) as world:
        liar, other = world.stages
        asked = world.ask(1)
        session = await liar.session()
        await session.hop.send(error_frame(session.body, "hop_timeout", liar.peer.peer_id, accused))
        await finish(await other.session())
        await asked.done.wait()
        assert accused not in world.failures()
        assert asked.token_ids == [7]


async def test_a_tail_that_leaves_in_order_is_not_blamed_for_what_a_stage_then_explains(clock: VirtualClock) -> None:
    async with entry_world(clock, [FIRST, SECOND]) as world:
        head, tail = world.stages
        asked = world.ask(1)
        session = await head.session()
        await session.known()
        as_tail = RawSession(tail, session.hop, session.opened, session.body)
        tokens = await as_tail.open_tokens()
        await tokens.send(Frame(Kind.CLOSE, *session.key))
        assert await tokens.ended()
        await session.hop.send(error_frame(session.body, "cache_miss", head.peer.peer_id, head.peer.peer_id))
        await session.closed()
        asked.scope.cancel()
        await asked.done.wait()
        assert world.failures() == {head.peer.peer_id: 1}


async def test_a_tail_that_leaves_and_that_nobody_explains_is_at_fault(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE, WHOLE]) as world:
        asked = world.ask(1)
        session = await world.stages[0].session()
        await session.known()
        tokens = await session.open_tokens()
        await tokens.send(Frame(Kind.CLOSE, *session.key))
        await finish(await world.stages[1].session())
        await asked.done.wait()
        assert world.failures() == {world.stages[0].peer.peer_id: 1}


async def test_silence_ends_an_epoch_and_every_stage_is_suspected(clock: VirtualClock) -> None:
    async with entry_world(clock, [FIRST, SECOND, FIRST, SECOND]) as world:
        asked = world.ask(1)
        session = await world.stages[0].session()
        await session.known()
        began = trio.current_time()
        await session.closed()
        assert 20.0 < trio.current_time() - began <= SESSION_IDLE_S
        await finish(await world.stages[2].session(), world.stages[3])
        await asked.done.wait()
        assert asked.token_ids == [7]
        assert not world.failures(), "nobody is named"


async def test_a_stage_that_dies_costs_its_session_nothing_but_time(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE, WHOLE]) as world:
        asked = world.ask(3)
        first, second = world.stages
        session = await first.session()
        await session.known()
        await session.answer(await session.open_tokens(), HERE, [7])
        await session.step()
        world.fabric.crash(first.peer.peer_id)
        began = trio.current_time()
        again = await second.session()
        assert trio.current_time() - began < 1.0, "nothing waits for the dead"
        assert await again.known() == [*PROMPT, 7]
        assert again.body.epoch == 1
        await again.answer(await again.open_tokens(), HERE + 1, [8, 9])
        await asked.done.wait()
        assert asked.token_ids == [7, 8, 9]
        assert world.failures() == {first.peer.peer_id: 1}


@pytest.mark.parametrize("kind", [Kind.STEP, Kind.OPEN, Kind.CLOSE, Kind.TOKEN])
async def test_a_head_that_sends_anything_but_errors_loses_the_stream(clock: VirtualClock, kind: Kind) -> None:
    async with entry_world(clock, [WHOLE, WHOLE]) as world:
        asked = world.ask(1)
        session = await world.stages[0].session()
        is_rows = kind in (Kind.STEP, Kind.TOKEN)
        dtype = DType.U32 if is_rows else DType.NONE
        frame = Frame(kind, *session.key, position=HERE, rows=int(is_rows), dtype=dtype, body=bytes(4))
        await session.hop.send(frame)
        await finish(await world.stages[1].session())
        await asked.done.wait()
        assert asked.token_ids == [7]
        assert world.failures() == {world.stages[0].peer.peer_id: 1}


async def test_a_receipt_of_the_head_is_ignored(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(1)
        session = await world.stages[0].session()
        await session.hop.send(*[Frame(Kind.RECEIPT, *session.key, body=b"any")] * 100)
        await finish(session)
        await asked.done.wait()
        assert asked.token_ids == [7]


async def test_a_head_that_cannot_be_reached_is_passed_over(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE, WHOLE]) as world:
        world.fabric.crash(world.stages[0].peer.peer_id)
        asked = world.ask(1)
        await finish(await world.stages[1].session())
        await asked.done.wait()
        assert asked.token_ids == [7]
        assert world.failures() == {world.stages[0].peer.peer_id: 1}


async def test_a_head_that_reads_nothing_loses_the_session_within_the_hop_timeout(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE, WHOLE], hop_timeout_s=5.0) as world:
        for stage in world.stages:
            world.announce(stage, queue_depth=world.stages.index(stage), max_positions=1 << 20)
        asked = world.ask(1, prompt=[1] * 300_000)
        deaf = await world.stages[0].peer.inbound("/tessella/hop/1")
        assert deaf.stream.peer == ENTRY_KEY.peer_id
        again = await world.stages[1].session()
        assert again.body.epoch == 1
        assert trio.current_time() < 7.0
        known = await again.known()
        assert len(known) == 300_000
        asked.scope.cancel()
        await asked.done.wait()
        assert world.failures() == {world.stages[0].peer.peer_id: 1}


async def test_a_long_prompt_goes_in_as_many_steps_as_a_stage_takes_at_once(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        world.announce(world.stages[0], max_positions=1 << 20)
        asked = world.ask(1, prompt=[1] * 50_000)
        session = await world.stages[0].session()
        sizes = []
        while True:
            frame = await session.step()
            sizes.append(frame.rows)
            if frame.flags:
                break
        assert sum(sizes) == 50_000
        assert max(sizes) >= PREFILL_CHUNK
        assert len(sizes) <= 128
        asked.scope.cancel()


async def test_no_answer_at_all_ends_in_a_timeout(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(1)
        session = await world.stages[0].session()
        await session.closed()
        await asked.done.wait()
        assert isinstance(asked.error, HopTimeout | NoRoute)


# ---- full stages ----


async def test_a_full_stage_is_waited_for_and_is_no_failure(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(1)
        stage = world.stages[0]
        session, times = await stage.session(), [trio.current_time()]
        for _ in range(4):
            await session.hop.send(error_frame(session.body, FULL, stage.peer.peer_id, stage.peer.peer_id))
            session = await stage.session(session.hop)
            times.append(trio.current_time())
        await finish(session)
        await asked.done.wait()
        assert asked.token_ids == [7]
        assert not world.failures()
        pauses = [later - earlier for earlier, later in pairwise(times)]
        assert [round(pause) for pause in pauses] == [0, 1, 1, 2]
        assert pauses == sorted(pauses)


async def test_other_candidates_get_the_prompt_only_after_a_pause_and_one_at_a_time(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE, WHOLE, WHOLE]) as world:
        asked = world.ask(1)
        began = trio.current_time()
        for number, stage in enumerate(world.stages[:2]):
            session = await stage.session()
            assert trio.current_time() - began >= (0.0, 0.25)[number]
            await session.hop.send(error_frame(session.body, FULL, stage.peer.peer_id, stage.peer.peer_id))
            await session.closed()
        await finish(await world.stages[2].session())
        assert 0.75 <= trio.current_time() - began < 2.0
        await asked.done.wait()
        assert asked.token_ids == [7]
        assert not world.failures()


async def test_only_a_stage_that_said_that_it_is_full_is_asked_to_let_the_session_wait(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE, WHOLE]) as world:
        asked = world.ask(1)
        began = trio.current_time()
        hops = []
        for stage in world.stages:
            session = await stage.session()
            hops.append(session.hop)
            assert session.body.wait_ms == 0, "another one may have a place"
            await session.hop.send(error_frame(session.body, FULL, stage.peer.peer_id, stage.peer.peer_id))
        waiting = await world.stages[0].session(hops[0])
        assert 1000 * (FULL_PATIENCE_S - 2.0) < waiting.body.wait_ms <= 1000 * FULL_PATIENCE_S
        with trio.move_on_after(waiting.body.wait_ms / 1000 - 1.0):  # the place becomes free in the last second
            await trio.Event().wait()
        await finish(waiting)
        await asked.done.wait()
        assert asked.token_ids == [7]
        assert trio.current_time() - began > FULL_PATIENCE_S - 2.0
        assert not world.failures()


async def test_a_mesh_that_stays_full_is_told_to_the_client_within_the_hop_timeout(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(1)
        stage, hop, num_asked = world.stages[0], None, 0
        began = trio.current_time()
        while not asked.done.is_set():
            with trio.move_on_after(5.0):
                session = await stage.session(hop)
                hop, num_asked = session.hop, num_asked + 1
                await hop.send(error_frame(session.body, FULL, stage.peer.peer_id, stage.peer.peer_id))
        assert isinstance(asked.error, TooManyHopBodies)
        assert asked.error.http_status == 503
        assert 3 < num_asked < 9
        assert trio.current_time() - began < FULL_PATIENCE_S + 6.0
        assert not world.failures()


@pytest.mark.parametrize("code", [FULL, "overloaded", "cache_miss"])
async def test_a_stage_that_is_full_in_mid_answer_costs_the_client_nothing_but_time(
    clock: VirtualClock, code: str
) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(4)
        stage = world.stages[0]
        session = await stage.session()
        await session.known()
        await session.answer(await session.open_tokens(), HERE, [7, 8])
        await session.step()
        for refusal in (code, FULL, FULL):
            await session.hop.send(error_frame(session.body, refusal, stage.peer.peer_id, stage.peer.peer_id))
            session = await stage.session(session.hop)
        assert await session.known() == [*PROMPT, 7, 8]
        await session.answer(await session.open_tokens(), HERE + 2, [9, 10])
        await asked.done.wait()
        assert asked.error is None
        assert asked.token_ids == [7, 8, 9, 10]


async def test_a_head_that_calls_an_honest_tail_full_is_not_chosen_again(clock: VirtualClock) -> None:
    async with entry_world(clock, [FIRST, FIRST, SECOND]) as world:
        liar, honest, tail = world.stages
        asked = world.ask(1)
        session = await liar.session()
        await session.hop.send(error_frame(session.body, FULL, liar.peer.peer_id, tail.peer.peer_id))
        await finish(await honest.session(), tail)
        await asked.done.wait()
        assert asked.token_ids == [7]


# ---- reports ----


class WrittenDown(FailureReports):
    """What an entry would report."""

    def __init__(self) -> None:
        self.noted: list[tuple[PeerId, str]] = []

    def note(self, peer: PeerId, error: TessellaError) -> None:
        self.noted.append((peer, error.code))


async def test_what_an_entry_met_itself_is_reported(clock: VirtualClock) -> None:
    reports = WrittenDown()
    async with entry_world(clock, [WHOLE, WHOLE], reports=reports) as world:
        world.fabric.crash(world.stages[0].peer.peer_id)
        asked = world.ask(1)
        await finish(await world.stages[1].session())
        await asked.done.wait()
        assert [peer for peer, _ in reports.noted] == [world.stages[0].peer.peer_id]


@pytest.mark.parametrize("accused", ["tail", "entry", "stranger"])
async def test_what_a_stage_says_of_another_peer_is_no_report_of_the_entry(clock: VirtualClock, accused: str) -> None:
    reports = WrittenDown()
    async with entry_world(clock, [FIRST, FIRST, SECOND], reports=reports) as world:
        liar, honest, tail = world.stages
        named = {"tail": tail.peer.peer_id, "entry": ENTRY_KEY.peer_id}.get(accused, STRANGER)
        asked = world.ask(1)
        session = await liar.session()
        await session.hop.send(error_frame(session.body, "stream_reset", liar.peer.peer_id, named))
        await finish(await honest.session(), tail)
        await asked.done.wait()
        assert {peer for peer, _ in reports.noted} <= {liar.peer.peer_id}


# ---- admission ----


async def refused(world: EntryWorld, error: type[TessellaError], prompt: list[int], max_tokens: int | None) -> str:
    """The message of a request that is refused before any stage hears of it."""
    request = GenerateRequest(model="toy", prompt_ids=prompt, max_tokens=max_tokens)
    with pytest.raises(error) as caught:
        async with world.entry.generate(request):
            pass
    assert not world.network.connected_peers()
    return str(caught.value)


async def test_a_prompt_over_the_nodes_own_limit_is_refused_before_any_peer_works(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE], max_input_tokens=4) as world:
        said = await refused(world, PromptTooLong, [1, 2, 3, 4, 5], 1)
        assert "4 tokens" in said
        asked = world.ask(1, prompt=[1, 2, 3, 4])
        await finish(await world.stages[0].session())
        await asked.done.wait()
        assert asked.token_ids == [7]


async def test_a_prompt_that_does_not_fit_into_hops_is_refused_before_any_peer_works(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE], hidden_size=16384) as world:
        world.announce(world.stages[0], max_positions=1 << 20)
        said = await refused(world, HopBodyTooLarge, [1] * 300_000, 1)
        assert "64 MiB" in said


async def test_a_stage_with_little_room_is_passed_over_by_those_who_need_more(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE, WHOLE]) as world:
        small, large = world.stages
        world.announce(small, max_positions=8)
        world.announce(large, queue_depth=5)
        asked = world.ask(100)
        session = await large.session()
        assert session.body.max_positions == HERE + 100
        asked.scope.cancel()
        said = await refused_while_connected(world)
        assert "256" in said


async def refused_while_connected(world: EntryWorld) -> str:
    request = GenerateRequest(model="toy", prompt_ids=list(range(300)), max_tokens=1)
    with pytest.raises(PromptTooLong) as caught:
        async with world.entry.generate(request):
            pass
    return str(caught.value)


async def test_a_stage_of_another_depth_of_the_model_is_no_stage_of_it(clock: VirtualClock) -> None:
    async with entry_world(clock, []) as world, raw_peer(world.fabric, world.clock, "deep") as peer:
        world.announce(RawStage(peer, WHOLE), total_layers=7)
        await refused(world, NoRoute, [1], 1)


async def test_an_entry_takes_so_many_requests_and_no_more(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = [world.ask(1) for _ in range(MAX_ENTRY_SESSIONS)]
        await asked[-1].began.wait()
        over = world.ask(1)
        await over.done.wait()
        assert isinstance(over.error, Overloaded)
        for each in asked:
            each.scope.cancel()
        await world.entry.idle()
        again = world.ask(1)
        await again.began.wait()
        assert again.error is None


def test_the_longest_route_with_the_longest_addresses_fits_into_an_open() -> None:
    addresses = tuple(f"/dns4/{'x' * 240}/tcp/{port}" for port in range(16))
    share = 32 * 1024 // (MAX_STAGES + 1)
    kept = first_addresses(addresses, share)
    assert 1 <= len(kept) < len(addresses)
    assert kept == addresses[: len(kept)]
    assert first_addresses(("/ip4/10.0.0.1/tcp/9080",) * 40, 1 << 20) == ("/ip4/10.0.0.1/tcp/9080",) * 16


async def test_a_route_of_stages_with_long_addresses_can_be_opened(clock: VirtualClock) -> None:
    async with entry_world(clock, [FIRST, SECOND]) as world:
        long = tuple(f"/dns4/{'x' * 230}{i}/tcp/{i}" for i in range(15))
        for stage in world.stages:
            world.announce(stage, addresses=(*stage.peer.network.addresses, *long))
        asked = world.ask(1)
        session = await world.stages[0].session()
        assert len(session.opened.open) < 64 * 1024
        asked.scope.cancel()
