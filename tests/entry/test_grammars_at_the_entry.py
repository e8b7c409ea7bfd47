"""An entry follows the grammar too: a tail that breaks it is left, and a request that no stage can serve ends."""

from __future__ import annotations

import pytest

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.wire.messages import Grammar
from tests.entry.entry_world import ENTRY_KEY, PROMPT, WHOLE, entry_world
from tests.worker.raw_peer import error_frame

HERE = len(PROMPT)
WORDS = Grammar(kind="lark", text="start: (odd even){500}\nodd: /[13579bdf] /\neven: /[02468ace] /")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def test_a_tail_that_breaks_the_grammar_is_left_and_its_token_never_shown(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE, WHOLE]) as world:
        asked = world.ask(3, grammar=WORDS)
        session = await world.stages[0].session()
        await session.known()
        tokens = await session.open_tokens()
        await session.answer(tokens, HERE, [7])
        await session.step()
        await tokens.send(session.token(HERE + 1, 9))  # it is even's turn
        again = await world.stages[1].session()
        assert await again.known() == [*PROMPT, 7]
        assert again.body.sampling.grammar == WORDS
        assert (again.body.history, again.body.history_answer) == ((7).to_bytes(4, "little"), 1)
        await again.answer(await again.open_tokens(), HERE + 1, [8, 9])
        await asked.done.wait()
        assert asked.token_ids == [7, 8, 9]
        assert world.failures() == {session.stage.peer.peer_id: 1}


async def test_one_stage_that_cannot_follow_is_not_believed_and_two_are(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE, WHOLE]) as world:
        asked = world.ask(3, grammar=WORDS)
        for stage in world.stages:
            session = await stage.session()
            refusal = error_frame(session.body, "invalid_request", stage.peer.peer_id, ENTRY_KEY.peer_id, "too slow")
            await session.hop.send(refusal)
        await asked.done.wait()
        assert isinstance(asked.error, InvalidRequest)
        assert asked.error.param == "grammar"
        assert "too slow" in str(asked.error)


async def test_a_text_that_is_no_grammar_is_refused_before_any_stage_hears_of_it(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        asked = world.ask(3, grammar=Grammar(kind="lark", text="start: ("))
        await asked.done.wait()
        assert isinstance(asked.error, InvalidRequest)
        assert asked.error.param == "grammar"


async def test_no_stage_is_at_fault_for_a_grammar_that_nobody_can_follow(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE, WHOLE]) as world:
        asked = world.ask(3, grammar=Grammar(kind="lark", text="start: /[0-9] / /[x-z]/"))
        session = await world.stages[0].session()
        await session.known()
        await session.answer(await session.open_tokens(), HERE, [7])
        await session.step()
        refusal = error_frame(session.body, "invalid_request", session.stage.peer.peer_id, ENTRY_KEY.peer_id, "nothing")
        await session.hop.send(refusal)
        await asked.done.wait()
        assert isinstance(asked.error, InvalidRequest)
        assert "no token of this model can follow" in str(asked.error)
        world.ask(1)
        again = await world.stages[0].session(session.hop)
        assert again.body.epoch == 0  # it is preferred as before
