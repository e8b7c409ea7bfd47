"""An auditor that serves other layers loads the audited ones, and finds what a replica finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.ids import LayerRange, SessionId
from tessella_p2p.model.gguf import GgmlType
from tessella_p2p.model.recipe import RECIPES
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.engine import SessionKey, StageEngine
from tessella_p2p.stages.loading import load_engine
from tessella_p2p.wire import messages as m
from tests.model.tiny_gguf import write_tiny_llama
from tests.worker.audit_world import RANGES, AuditWorld, Loader, audit_world, play, toy_engine

LAYERS = [LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 3)]
"""Of the tiny model."""
SAMPLED = m.Sampling(temperature=0.9, seed=7, repetition_penalty=1.2)
ROLES = {"head": 0, "middle": 1, "tail": 2}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """Loads a range of a real, if tiny, model into the native engine."""
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("tiny"), matrices=GgmlType.Q4_1)
    return lambda layers: load_engine(path, layers, RECIPES["f32"], max_sessions=4, max_positions=64)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def flipped(stage: int) -> Callable[[int, int, bytes], bytes]:
    """The last bit of one value of a stage's answer is another one; of a tail's token, where it draws."""

    def lie(index: int, _: int, output: bytes) -> bytes:
        return bytes([output[0] ^ 1]) + output[1:] if index == stage else output

    return lie


@pytest.mark.parametrize("stage", ROLES.values(), ids=ROLES)
@pytest.mark.parametrize("engine", ["toy", "native"])
async def test_honest_work_is_matched_bit_for_bit_and_a_lie_is_found(
    clock: VirtualClock, tiny: Loader, engine: str, stage: int
) -> None:
    load: Loader = tiny if engine == "native" else toy_engine
    ranges = LAYERS if engine == "native" else RANGES
    true = play(load, ranges, sampling=SAMPLED)
    wrong = play(load, ranges, sampling=SAMPLED, lie=flipped(stage))
    async with audit_world(clock, stage, load=load, ranges=ranges, serves=(stage + 1) % 3) as world:
        for played, is_honest in ((true, True), (wrong, False)):
            world.keep(played)
            report = await world.audit(world.order(played))
            assert report.outcome == "computed", report
            agrees = report.output_digest == played.output_digest(stage, played.positions())
            assert agrees == is_honest
        assert world.guests is not None
        assert world.guests.loads == 1, "the second order found the range loaded"
        assert world.service.num_sessions == 0


async def test_it_leaves_the_stage_that_it_serves_alone(clock: VirtualClock) -> None:
    """A full stage is no reason to wait: the audit takes no place of its sessions."""
    played = play()
    async with audit_world(clock, 1, load=small, serves=0) as world:
        world.keep(played)
        for number in range(2):
            await world.service.open(SessionKey(SessionId(bytes([number]) * 16), 0), 10)
        assert world.service.num_sessions == world.service.engine.max_sessions
        report = await world.audit(world.order(played))
        assert report.outcome == "computed"
        assert world.service.num_sessions == 2


def small(layers: LayerRange) -> StageEngine:
    from tessella_p2p.stages.toy import ToyEngine
    from tests.worker.audit_world import TOY

    return ToyEngine(TOY, layers, max_sessions=2)


async def test_its_own_loading_sends_the_guest_away_and_the_audit_begins_again(clock: VirtualClock) -> None:
    played = play()
    async with audit_world(clock, 1, serves=0) as world:
        world.keep(played)
        order = world.order(played)
        await world.auditor.take(order, world.seal(order))
        await quiet(0.5)
        assert world.guests is not None
        own = await world.guests.load_own(RANGES[2])
        await world.nursery.start(own.run)
        await world.recorder.arrived.wait()
        report = world.recorder.reports[0]
        assert (report.outcome, report.output_digest) == ("computed", played.output_digest(1, played.positions()))


async def quiet(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.Event().wait()


async def test_a_range_that_does_not_load_is_said_and_the_next_audit_is_carried_out(clock: VirtualClock) -> None:
    played, failures = play(), [RuntimeError("no such tensors")]

    def failing(layers: LayerRange) -> StageEngine:
        if layers == RANGES[1] and failures:
            raise failures.pop()
        return toy_engine(layers)

    async with audit_world(clock, 1, load=failing, serves=0) as world:
        world.keep(played)
        report = await world.audit(world.order(played))
        assert (report.outcome, report.code, report.withheld_by) == ("inconclusive", "internal_error", None)
        assert (await world.audit(world.order(played))).outcome == "computed"


WRONG_ORDERS: dict[str, dict[str, Any]] = {
    "beyond the model": {"layers": (4, 7)},
    "another artifact": {"manifest_root": bytes(32)},
    "another recipe": {"recipe": "q8_0"},
    "by tolerance": {"comparison": "tolerance", "output_digest": bytes(32)},
}


@pytest.mark.parametrize("changes", WRONG_ORDERS.values(), ids=WRONG_ORDERS)
async def test_what_it_cannot_load_it_refuses(clock: VirtualClock, changes: dict[str, Any]) -> None:
    played = play()
    async with audit_world(clock, 1, serves=0) as world:
        order = world.order(played).model_copy(update=changes)
        await refused(world, order)


async def refused(world: AuditWorld, order: m.AuditOrder) -> None:
    with pytest.raises(InvalidRequest):
        await world.auditor.take(order, world.seal(order))
    assert world.guests is not None
    assert world.guests.loads == 0
