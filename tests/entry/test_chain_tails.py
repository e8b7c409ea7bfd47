"""What a tail can send an entry: the token that was asked for, and nothing that gets past it."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trio

from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import (
    CHECKPOINT_S,
    RECEIPT_PATIENCE_S,
    TOKEN_STREAM_DRAIN_S,
    TOKEN_STREAM_OPEN_S,
)
from tessella_p2p.entry.api import Caller
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.opening import seal_capability
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import open_envelope
from tessella_p2p.wire.frames import DType, Frame, Kind, TraceEntry, encode_frame
from tests.entry.entry_world import ENTRY_KEY, PROMPT, WHOLE, RawSession, RawStage, entry_world
from tests.worker.raw_peer import RawStream, damaged, raw_peer

HERE = len(PROMPT)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def digest_of(session: RawSession, tokens: Sequence[int]) -> bytes:
    """What an entry signs for: the open, then each token behind the position that it was drawn for."""
    drawn = b"".join(number.to_bytes(4, "little") for pair in enumerate(tokens, HERE) for number in pair)
    opened = hashlib.sha256(session.opened.open).digest()
    return hashlib.blake2b(opened + drawn, key=session.body.digest_key, digest_size=32).digest()


async def test_an_honest_tail_is_believed_signed_for_and_closed(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(3)
        session = await world.stages[0].session()
        assert await session.known() == list(PROMPT)
        tokens = await session.open_tokens()
        await session.answer(tokens, HERE, [7, 8, 9])
        await session.closed()
        signed = await tokens.receive(Kind.RECEIPT)
        receipt = open_envelope(
            bytes(signed.body), m.RECEIPT, now_ms=None, audience=session.stage.peer.peer_id, signer=ENTRY_KEY.peer_id
        ).message(m.ReceiptBody)
        assert (receipt.positions, receipt.digest) == (HERE + 2, digest_of(session, [7, 8, 9]))
        await asked.done.wait()
        assert asked.token_ids == [7, 8, 9]
        assert asked.finished is not None
        assert not asked.finished.paid
        await tokens.send(Frame(Kind.CLOSE, *session.key))
        assert await tokens.ended()
        assert not world.failures()


WRONG_TOKENS: dict[str, Callable[[RawSession], bytes]] = {
    "for a later position": lambda s: encode_frame(s.token(HERE + 1, 7)),
    "for an earlier position": lambda s: encode_frame(s.token(HERE - 1, 7)),
    "out of the vocabulary": lambda s: encode_frame(s.token(HERE, 1024)),
    "twice": lambda s: encode_frame(s.token(HERE, 7)) + encode_frame(s.token(HERE, 7)),
    "one more than was asked for": lambda s: encode_frame(s.token(HERE, 7)) + encode_frame(s.token(HERE + 1, 7)),
    "of two rows": lambda s: encode_frame(s.token(HERE, 7, rows=2, body=bytes(8))),
    "of another dtype": lambda s: encode_frame(s.token(HERE, 7, dtype=DType.F32)),
    "of eight bytes": lambda s: encode_frame(s.token(HERE, 7, body=bytes(8))),
    "without a trace": lambda s: encode_frame(s.token(HERE, 7, trace=())),
    "with a longer trace": lambda s: encode_frame(s.token(HERE, 7, trace=(TraceEntry(1, 1, 1),) * 2)),
    "of another session": lambda s: encode_frame(Frame(Kind.TOKEN, s.key[0], 9, 0, HERE, 1, DType.U32, body=bytes(4))),
    "that is a step": lambda s: encode_frame(Frame(Kind.STEP, *s.key, 0, HERE, 1, DType.U32, body=bytes(4))),
    "that is an error": lambda s: encode_frame(Frame(Kind.ERROR, *s.key, body=b"x")),
    "that is a second open": lambda s: encode_frame(Frame(Kind.OPEN, *s.key, body=s.opened.capability)),
    "damaged": lambda s: damaged(s.token(HERE, 7)),
    "garbage": lambda s: b"\xff" * 48,
}


@pytest.mark.parametrize("wrong", WRONG_TOKENS.values(), ids=WRONG_TOKENS)
async def test_a_wrong_token_costs_the_tail_its_session_and_the_client_sees_none_of_it(
    clock: VirtualClock, wrong: Callable[[RawSession], bytes]
) -> None:
    async with entry_world(clock, [WHOLE, WHOLE]) as world:
        liar, honest = world.stages
        asked = world.ask(3, pause_s=0.5)
        session = await liar.session()
        await session.known()
        tokens = await session.open_tokens()
        await tokens.stream.send_all(wrong(session))
        await session.closed()
        again = await honest.session()
        assert (again.body.session, again.body.epoch) == (session.body.session, 1)
        known = await again.known()
        assert known[:HERE] == list(PROMPT)
        fresh = await again.open_tokens()
        await again.answer(fresh, len(known), [7, 8, 9][len(known) - HERE :])
        await asked.done.wait()
        assert asked.error is None
        assert asked.token_ids == [7, 8, 9]
        assert world.failures() == {liar.peer.peer_id: 1}


def scored(*pairs: tuple[int, float]) -> bytes:
    """The body of a token with logprobs."""
    return b"".join(struct.pack("<If", *pair) for pair in pairs)


HONEST = scored((7, -0.5), (9, -0.25), (7, -0.5))
WRONG_LOGPROBS: dict[str, bytes] = {
    "none": (7).to_bytes(4, "little"),
    "no alternatives": scored((7, -0.5)),
    "too few alternatives": scored((7, -0.5), (9, -0.25)),
    "too many alternatives": HONEST + scored((1, -4.0)),
    "half an alternative": HONEST[:-4],
    "not a number": scored((7, math.nan), (9, -0.25), (7, -0.5)),
    "above zero": scored((7, 0.5), (9, -0.25), (7, -0.5)),
    "infinite": scored((7, -math.inf), (9, -0.25), (7, -0.5)),
    "an alternative that is not a number": scored((7, -0.5), (9, math.nan), (7, -0.5)),
    "an alternative above zero": scored((7, -0.5), (9, 0.25), (7, -0.5)),
    "an alternative out of the vocabulary": scored((7, -0.5), (1024, -0.25), (7, -0.5)),
    "a token out of the vocabulary": scored((1024, -0.5), (9, -0.25), (7, -0.5)),
    "one alternative twice": scored((7, -0.5), (9, -0.25), (9, -0.25)),
    "alternatives out of order": scored((7, -0.5), (7, -0.5), (9, -0.25)),
    "another logprob for the token than for itself": scored((7, -0.75), (9, -0.25), (7, -0.5)),
}


@pytest.mark.parametrize("wrong", WRONG_LOGPROBS.values(), ids=WRONG_LOGPROBS)
async def test_wrong_logprobs_cost_the_tail_its_session_and_right_ones_reach_the_client(
    clock: VirtualClock, wrong: bytes
) -> None:
    async with entry_world(clock, [WHOLE, WHOLE]) as world:
        liar, honest = world.stages
        asked = world.ask(1, logprobs=True, top_logprobs=2)
        session = await liar.session()
        assert (session.body.output, session.body.sampling.num_top) == ("logprobs", 2)
        await session.known()
        tokens = await session.open_tokens()
        await tokens.send(session.token(HERE, 7, body=wrong))
        await session.closed()
        again = await honest.session()
        await again.known()
        fresh = await again.open_tokens()
        await fresh.send(again.token(HERE, 7, body=HONEST))
        await again.closed()
        signed = await fresh.receive(Kind.RECEIPT)
        receipt = open_envelope(
            bytes(signed.body), m.RECEIPT, now_ms=None, audience=honest.peer.peer_id, signer=ENTRY_KEY.peer_id
        ).message(m.ReceiptBody)
        assert receipt.digest == digest_of(again, [7]), "of ids alone"
        await asked.done.wait()
        assert asked.error is None
        assert asked.token_ids == [7]
        (told,) = asked.scores
        assert (told.chosen.token_id, told.chosen.token, told.chosen.logprob) == (7, b"7 ", -0.5)
        assert [(each.token_id, each.logprob) for each in told.top] == [(9, -0.25), (7, -0.5)]
        assert world.failures() == {liar.peer.peer_id: 1}


async def test_logprobs_that_nobody_asked_for_cost_the_tail_its_session(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(1)
        session = await world.stages[0].session()
        await session.known()
        tokens = await session.open_tokens()
        await tokens.send(session.token(HERE, 7, body=scored((7, -0.5))))
        await session.closed()
        assert not asked.token_ids
        assert world.failures() == {session.stage.peer.peer_id: 1}


@pytest.mark.parametrize(
    ("fields", "first", "second"),
    [
        ({}, [], []),
        ({"temperature": 1.0, "logit_bias": ((5, 1.0),)}, [], []),
        ({"presence_penalty": 0.5}, [], [7, 7]),
        ({"frequency_penalty": 0.5}, [], [7, 7]),
        ({"repetition_penalty": 1.1}, [1, 3, 4, 5], [1, 3, 4, 5, 7, 7]),
    ],
)
async def test_each_epoch_tells_the_tail_what_its_penalties_have_to_know_and_no_more(
    clock: VirtualClock, fields: dict[str, Any], first: list[int], second: list[int]
) -> None:
    async with entry_world(clock, [WHOLE, WHOLE]) as world:
        asked = world.ask(3, **fields)
        session = await world.stages[0].session()
        await session.known()
        tokens = await session.open_tokens()
        await session.answer(tokens, HERE, [7, 7])
        await session.step()
        await tokens.send(session.token(HERE + 3, 7))  # too early: the entry looks for another tail
        again = await world.stages[1].session()
        assert await again.known() == [*PROMPT, 7, 7]
        fresh = await again.open_tokens()
        await again.answer(fresh, HERE + 2, [8])
        await asked.done.wait()
        assert asked.token_ids == [7, 7, 8]
        for body, history, answer in ((session.body, first, 0), (again.body, second, 2)):
            assert [value for (value,) in struct.iter_unpack("<I", body.history)] == history
            assert body.history_answer == (answer if second else 0)


async def test_the_next_step_leaves_before_the_client_has_read_the_token(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(3, pause_s=20.0)
        session = await world.stages[0].session()
        await session.known()
        tokens = await session.open_tokens()
        began = trio.current_time()
        await session.answer(tokens, HERE, [7, 8])
        assert (await session.step()).position == HERE + 1
        assert trio.current_time() - began < 25.0  # one pause, not two: the client is a token behind
        await tokens.send(session.token(HERE + 2, 9))
        await asked.done.wait()
        assert asked.token_ids == [7, 8, 9]


async def test_each_caller_has_cached_prefixes_of_its_own(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        scopes: list[bytes] = []
        hop: RawStream | None = None
        for name in ("", "key-a", "key-b", "key-a"):
            asked = world.ask(1, caller=Caller(name))
            session = await world.stages[0].session(hop)
            hop = session.hop
            scopes.append(session.body.cache_scope)
            await session.known()
            await session.answer(await session.open_tokens(), HERE, [7])
            await session.closed()
            await asked.done.wait()
        assert all(len(scope) == 32 for scope in scopes)
        assert scopes[1] == scopes[3]
        assert len(set(scopes)) == 3


async def test_a_stolen_capability_opens_no_token_stream(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world, raw_peer(world.fabric, world.clock, "thief") as thief:
        asked = world.ask(1)
        session = await world.stages[0].session()
        await session.known()
        stolen = await thief.connect(ENTRY_KEY.peer_id, world.network.addresses, protocols.TOKENS)
        await stolen.send(Frame(Kind.OPEN, *session.key, body=session.opened.capability), session.token(HERE, 666))
        assert not await stolen.ended()
        await session.answer(await session.open_tokens(), HERE, [7])
        await asked.done.wait()
        assert asked.token_ids == [7]
        assert not world.failures()


async def test_a_capability_is_good_for_one_stream(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(1)
        session = await world.stages[0].session()
        await session.known()
        tokens = await session.open_tokens()
        second = await session.open_tokens()
        await second.send(session.token(HERE, 666))
        assert not await second.ended()
        await session.answer(tokens, HERE, [7])
        await asked.done.wait()
        assert asked.token_ids == [7]


async def test_a_capability_of_another_epoch_session_or_signer_is_refused(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked, other = world.ask(1), world.ask(1)
        first = await world.stages[0].session()
        second = await world.stages[0].session(first.hop)
        mine = world.stages[0].peer.key
        forged = seal_capability(
            mine, first.body, first.opened.open, sequence=1, now_ms=world.clock.unix_ms(), ttl_ms=60_000
        )
        for capability in (second.opened.capability, forged, b"none", first.opened.open):
            refused = await first.open_tokens(capability)
            assert not await refused.ended()
        for session in (first, second):
            await session.answer(await session.open_tokens(), HERE, [7])
        await asked.done.wait()
        await other.done.wait()
        assert asked.token_ids == other.token_ids == [7]
        refused = await first.open_tokens()
        assert not await refused.ended(), "the session is over"


async def test_a_token_stream_that_proves_nothing_in_time_is_reset(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        peer = world.stages[0].peer
        silent = await peer.connect(ENTRY_KEY.peer_id, world.network.addresses, protocols.TOKENS)
        began = trio.current_time()
        assert not await silent.ended()
        assert trio.current_time() - began == pytest.approx(TOKEN_STREAM_OPEN_S, abs=0.5)


async def test_a_tail_may_not_keep_its_stream_for_ever(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(1)
        session = await world.stages[0].session()
        tokens = await session.open_tokens()
        await session.known()
        await session.answer(tokens, HERE, [7])
        await asked.done.wait()
        began = trio.current_time()
        await world.entry.idle()
        assert not await tokens.ended()
        assert trio.current_time() - began <= TOKEN_STREAM_DRAIN_S + 1.0


async def test_a_client_that_reads_slowly_still_has_its_tokens_signed_for(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(2, pause_s=3 * RECEIPT_PATIENCE_S)
        session = await world.stages[0].session()
        await session.known()
        tokens = await session.open_tokens()
        await session.answer(tokens, HERE, [7, 8])  # the second is asked for before the first is read
        began = trio.current_time()
        await tokens.receive(Kind.RECEIPT)
        assert trio.current_time() - began <= CHECKPOINT_S + 1.0
        await asked.done.wait()
        assert asked.token_ids == [7, 8]
        assert not world.failures()


async def test_what_a_stage_makes_up_is_no_longer_than_the_step_was_and_no_more_than_was_sent(
    clock: VirtualClock,
) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(2)
        session = await world.stages[0].session()
        await session.known()
        tokens = await session.open_tokens()
        huge = (TraceEntry(0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),)
        await tokens.send(session.token(HERE, 7, trace=huge))
        await session.step()
        await tokens.send(session.token(HERE + 1, 8, trace=huge))
        await asked.done.wait()
        assert asked.finished is not None
        (hop,) = asked.finished.route
        assert 0 <= hop.compute_ms <= hop.hop_ms <= 200.0
        assert hop.cached == HERE + 1
        assert asked.finished.hop_added_ms_p50 is not None
        assert asked.finished.hop_added_ms_p50 >= 0.0


async def test_the_token_that_is_on_its_way_when_the_client_leaves_is_signed_for(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(50)
        session = await world.stages[0].session()
        await session.known()
        tokens = await session.open_tokens()
        await session.answer(tokens, HERE, [7])
        await session.step()
        asked.scope.cancel()
        await session.closed()
        late = session.token(HERE + 1, 8)
        await tokens.send(
            late, session.token(HERE + 2, 9), Frame(Kind.CLOSE, *session.key)
        )  # the last was not asked for
        positions: list[int] = []
        while positions[-1:] != [HERE + 1]:
            signed = await tokens.receive(Kind.RECEIPT)
            body = open_envelope(
                bytes(signed.body), m.RECEIPT, now_ms=None, audience=session.stage.peer.peer_id
            ).message(m.ReceiptBody)
            positions.append(body.positions)
        assert body.digest == digest_of(session, [7, 8])
        assert await tokens.ended()
        assert not world.failures()


async def test_leaving_closes_the_chain_at_once_and_what_comes_after_is_ignored(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(50)
        session = await world.stages[0].session()
        await session.known()
        tokens = await session.open_tokens()
        await session.answer(tokens, HERE, [7])
        await session.step()
        asked.scope.cancel()
        began = trio.current_time()
        await session.closed()
        assert trio.current_time() - began < 0.1
        await tokens.send(session.token(HERE + 1, 8), Frame(Kind.CLOSE, *session.key))
        assert await tokens.ended()
        assert not world.failures()


async def test_a_route_of_another_length_after_a_reroute_is_reported_as_it_is(clock: VirtualClock) -> None:
    halves = [LayerRange(0, 3), LayerRange(3, 6)]
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(4)
        session = await world.stages[0].session()
        await session.known()
        tokens = await session.open_tokens()
        await session.answer(tokens, HERE, [7, 8])
        await session.step()
        async with (
            raw_peer(world.fabric, world.clock, "head") as head,
            raw_peer(world.fabric, world.clock, "t") as tail,
        ):
            for peer, layers in ((head, halves[0]), (tail, halves[1])):
                peer.serve(protocols.HOP)
                world.stages.append(RawStage(peer, layers))
                world.announce(world.stages[-1])
            await tokens.stream.reset()
            again = await world.stages[1].session()
            assert await again.known() == [*PROMPT, 7, 8]
            as_tail = RawSession(world.stages[2], again.hop, again.opened, again.body)
            await again.answer(await as_tail.open_tokens(), HERE + 2, [9, 10])
            await asked.done.wait()
        assert asked.error is None
        assert asked.finished is not None
        assert [hop.layers for hop in asked.finished.route] == halves
        assert asked.finished.token_ids == (7, 8, 9, 10)
