"""What a tail can send an entry that asked for a vector: one that can be true, signed for as it came, and nothing else."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio

from simulations.toy_model import MODEL_ID
from tessella_p2p.base.errors import HopBodyTooLarge, InvalidRequest, PromptTooLong, TessellaError
from tessella_p2p.entry.api import Embedded, EmbedRequest, Gap, GenerateRequest
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.toy import HIDDEN_SIZE
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import open_envelope
from tessella_p2p.wire.frames import DType, Kind
from tests.entry.entry_world import ENTRY_KEY, PROMPT, WHOLE, EntryWorld, entry_world

HERE = len(PROMPT)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def body(*numbers: float) -> bytes:
    """A vector whose last numbers are zero."""
    return struct.pack(f"<{HIDDEN_SIZE}f", *numbers, *[0.0] * (HIDDEN_SIZE - len(numbers)))


TRUE = body(0.6, 0.0, -0.8)


@dataclass
class Asked:
    """A request that runs."""

    found: tuple[Embedded, ...] = ()
    error: TessellaError | None = None
    done: trio.Event = field(default_factory=trio.Event)


def ask(world: EntryWorld, *inputs: list[int]) -> Asked:
    asked = Asked()

    async def run() -> None:
        try:
            asked.found = await world.entry.embed(EmbedRequest(MODEL_ID, inputs or [list(PROMPT)]))
        except TessellaError as error:
            asked.error = error
        asked.done.set()

    world.nursery.start_soon(run)
    return asked


async def test_a_vector_is_signed_for_as_it_came(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE], hidden_size=HIDDEN_SIZE) as world:
        asked = ask(world)
        session = await world.stages[0].session()
        assert session.body.output == "embedding"
        assert session.body.max_positions == HERE
        assert await session.known() == list(PROMPT)
        tokens = await session.open_tokens()
        await tokens.send(session.token(HERE, 0, dtype=DType.F32, body=TRUE))
        await session.closed()
        signed = await tokens.receive(Kind.RECEIPT)
        receipt = open_envelope(
            bytes(signed.body), m.RECEIPT, now_ms=None, audience=session.stage.peer.peer_id, signer=ENTRY_KEY.peer_id
        ).message(m.ReceiptBody)
        covered = hashlib.sha256(session.opened.open).digest() + HERE.to_bytes(4, "little") + TRUE
        digest = hashlib.blake2b(covered, key=session.body.digest_key, digest_size=32).digest()
        assert (receipt.positions, receipt.digest) == (HERE, digest)
        await asked.done.wait()
        (found,) = asked.found
        assert found.vector == pytest.approx((0.6, 0.0, -0.8, 0, 0, 0, 0, 0))
        assert (found.num_tokens, [hop.peer_id for hop in found.route]) == (HERE, [session.stage.peer.peer_id])
        assert not world.failures()


async def test_whoever_counts_is_told_of_an_input_before_it_has_a_vector(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE], hidden_size=HIDDEN_SIZE) as world:
        told: list[int] = []
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(world.entry.embed, EmbedRequest(MODEL_ID, [list(PROMPT)], admitted=told.append))
                session = await world.stages[0].session()
                assert await session.known() == list(PROMPT)
                scope.cancel()
        assert told == [HERE]


WRONG: dict[str, dict[str, Any]] = {
    "a token": {"dtype": DType.U32, "body": bytes(4)},
    "another dtype": {"dtype": DType.U32, "body": TRUE},
    "halves": {"dtype": DType.F16, "body": TRUE[: HIDDEN_SIZE * 2]},
    "too short": {"body": TRUE[:-4]},
    "too long": {"body": TRUE + bytes(4)},
    "two rows": {"rows": 2, "body": TRUE * 2},
    "for another position": {"early": 1},
    "not a number": {"body": body(1.0, math.nan)},
    "infinite": {"body": body(math.inf)},
    "zero": {"body": body()},
    "not 1 long": {"body": body(1.0, 1.0)},
    "without a trace": {"trace": ()},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
async def test_a_wrong_vector_costs_the_tail_its_session(clock: VirtualClock, wrong: dict[str, Any]) -> None:
    async with entry_world(clock, [WHOLE, WHOLE], hidden_size=HIDDEN_SIZE) as world:
        liar, honest = world.stages
        asked = ask(world)
        session = await liar.session()
        await session.known()
        tokens = await session.open_tokens()
        changes: dict[str, Any] = {"dtype": DType.F32, "body": TRUE} | wrong
        await tokens.send(session.token(HERE - changes.pop("early", 0), 0, **changes))
        await session.closed()
        again = await honest.session()
        assert (again.body.session, again.body.epoch) == (session.body.session, 1)
        assert await again.known() == list(PROMPT)
        fresh = await again.open_tokens()
        await fresh.send(again.token(HERE, 0, dtype=DType.F32, body=TRUE))
        await again.closed()
        await asked.done.wait()
        assert asked.found[0].vector == pytest.approx(struct.unpack(f"<{HIDDEN_SIZE}f", TRUE))
        assert world.failures() == {liar.peer.peer_id: 1}


async def test_one_failure_ends_the_others(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE], hidden_size=HIDDEN_SIZE) as world:
        (stage,) = world.stages
        asked = ask(world, [1, 2], [3, 4])
        first = await stage.session()
        await stage.session(first.hop)
        assert len(world.entry.requests.in_flight()) == 2
        world.fabric.crash(stage.peer.peer_id)
        await asked.done.wait()
        assert asked.error is not None
        assert not world.entry.requests.in_flight()
        ends = {each.end: each.request_id for each in world.entry.requests.recent()}
        assert ends.keys() == {asked.error.code, "cancelled"}
        assert asked.error.request_id == ends[asked.error.code]


async def test_inputs_are_checked_together_before_any_stage_hears_of_one(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE], hidden_size=16384, max_input_tokens=250) as world:
        cases: list[tuple[list[list[int]], type[TessellaError]]] = [
            ([[1], [1024]], InvalidRequest),
            ([[1], []], InvalidRequest),
            ([[1], [1] * 251], PromptTooLong),
        ]
        for inputs, expected in cases:
            asked = ask(world, *inputs)
            await asked.done.wait()
            assert isinstance(asked.error, expected)
            newest, *before = world.entry.requests.recent()
            assert (newest.end, newest.request_id) == (asked.error.code, asked.error.request_id)
        assert len(before) == len(cases) - 1, "what is refused is one request, however many its inputs are"
    async with entry_world(clock, [WHOLE], hidden_size=1 << 20) as world:
        asked = ask(world, [1] * 200)
        await asked.done.wait()
        assert isinstance(asked.error, HopBodyTooLarge)


async def test_a_gap_and_tools_need_a_model_that_has_them(clock: VirtualClock) -> None:
    async with entry_world(clock, [WHOLE]) as world:
        tool = {"type": "function", "function": {"name": "x"}}
        for request, param in (
            (GenerateRequest(MODEL_ID, gap=Gap("a", "b")), "suffix"),
            (GenerateRequest(MODEL_ID, prompt="x", tools=(tool,)), "tools"),
            (GenerateRequest(MODEL_ID, prompt="x", gap=Gap("a", "b")), "prompt"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                async with world.entry.generate(request):
                    pass
            assert caught.value.param == param
        assert world.entry.text_of([1, 0x3FF]) == "1 3ff "
        with pytest.raises(InvalidRequest):
            world.entry.text_of([-1])
