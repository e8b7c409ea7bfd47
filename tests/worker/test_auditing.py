"""An auditor repeats an honest worker's bits, names other ones for a liar's, and says nothing where it was shown nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from tessella_p2p.base.errors import Expired, InvalidRequest, Overloaded, StreamReset, UnknownModel
from tessella_p2p.base.ids import LayerRange, PeerId, SessionId
from tessella_p2p.base.limits import MAX_HISTORY_READS, MAX_WAITING_AUDITS
from tessella_p2p.model.gguf import GgmlType
from tessella_p2p.model.recipe import RECIPES
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.network import Stream
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.canary import dressed
from tessella_p2p.stages.engine import SessionKey, StageEngine
from tessella_p2p.stages.loading import load_engine
from tessella_p2p.stages.toy import ToyEngine
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import peek_sequence, seal
from tessella_p2p.wire.frames import DType, Flag, Frame, Kind, TraceEntry, encode_frame
from tessella_p2p.worker import history_reader
from tests.model.tiny_gguf import write_tiny_llama
from tests.stages.openings import ENTRY, STAGES, key_of
from tests.worker.audit_world import (
    AUDIT_ID,
    AUDITOR,
    CUTS,
    PROMPT,
    RANGES,
    TOY,
    AuditWorld,
    Loader,
    Played,
    audit_world,
    honest,
    play,
    relabelled,
    toy_engine,
)

ROLES = {"head": 0, "middle": 1, "tail": 2}
LAYERS = [LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 3)]
"""Of the tiny model."""
CANARY = PeerId(key_of("canary").peer_id)
PENALTIES = m.Sampling(
    temperature=0.9, top_k=40, top_p=0.9, seed=7, presence_penalty=0.5, repetition_penalty=1.2, logit_bias=((3, 2.0),)
)

WORDS = m.Sampling(
    temperature=1.0,
    seed=5,
    grammar=m.Grammar(
        kind="lark", text="start: (odd even){50}\nodd: /[0-9a-f]?[13579bdf] /\neven: /[0-9a-f]?[02468ace] /"
    ),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """Loads a range of a real, if tiny, model into the native engine."""
    path = write_tiny_llama(tmp_path_factory.mktemp("tiny"), matrices=GgmlType.Q4_1)
    return lambda layers: load_engine(path, layers, RECIPES["f32"], max_sessions=4, max_positions=64)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.mark.parametrize("stage", ROLES.values(), ids=ROLES)
@pytest.mark.parametrize("sampling", [m.Sampling(), PENALTIES], ids=["greedy", "sampled"])
async def test_an_honest_worker_is_matched_bit_for_bit(clock: VirtualClock, stage: int, sampling: m.Sampling) -> None:
    played = play(sampling=sampling)
    async with audit_world(clock, stage) as world:
        world.keep(played)
        report = await world.audit(world.order(played))
        assert report == m.AuditReport(
            audit_id=AUDIT_ID, outcome="computed", output_digest=played.output_digest(stage, played.positions())
        )
        assert world.service.num_sessions == 0, "an audit leaves no session behind"


@pytest.mark.parametrize("known", [0, 1])
async def test_draws_that_follow_a_grammar_are_repeated_and_one_that_does_not_is_found(
    clock: VirtualClock, known: int
) -> None:
    """``known``: of an answer that an earlier epoch began."""

    def lie(stage: int, position: int, output: bytes) -> bytes:
        return bytes([output[0] ^ 1]) + output[1:] if (stage, position) == (2, len(PROMPT) + 2) else output

    changes: dict[str, Any] = {
        "sampling": WORDS,
        "history": (33).to_bytes(4, "little") * known,
        "history_answer": known,
    }
    true, wrong = play(**changes), play(**changes, lie=lie)
    assert [token % 2 for _, token in true.tokens] == [(known + i + 1) % 2 for i in range(5)]
    async with audit_world(clock, ROLES["tail"]) as world:
        for played, is_honest in ((true, True), (wrong, False)):
            world.keep(played)
            report = await world.audit(world.order(played))
            assert report.outcome == "computed"
            assert (report.output_digest == played.output_digest(2, played.positions())) == is_honest


@pytest.mark.parametrize(
    ("text", "reason"),
    [("start: (", "Expected token"), ("start: /[0-9a-f]?[0-9a-f] / /x|y/", "no token of this model")],
    ids=["no grammar", "a draw that nothing is left for"],
)
async def test_what_cannot_be_followed_here_is_inconclusive_and_nobodys_fault(
    clock: VirtualClock, text: str, reason: str
) -> None:
    played = play(sampling=m.Sampling(temperature=1.0))
    follows = m.Sampling(grammar=m.Grammar(kind="lark", text=text))
    body = played.body.model_copy(update={"sampling": follows})
    played = replace(played, body=body, opened=seal(ENTRY, m.CHAIN_OPEN, body, sequence=1, now_ms=1))
    async with audit_world(clock, ROLES["tail"]) as world:
        world.keep(played)
        report = await world.audit(world.order(played))
        assert (report.outcome, report.code, report.withheld_by) == ("inconclusive", "invalid_request", None)
        assert report.reason is not None
        assert reason in report.reason
        assert world.service.num_sessions == 0


async def test_a_whole_model_on_one_worker_is_audited_by_what_its_entry_kept(clock: VirtualClock) -> None:
    ranges = [LayerRange(0, 6)]
    played = play(ranges=ranges, sampling=PENALTIES)
    async with audit_world(clock, 0, ranges=ranges) as world:
        world.keep(played, encoded=False)
        report = await world.audit(world.order(played))
        assert report.output_digest == played.output_digest(0, played.positions())


@pytest.mark.parametrize("stage", ROLES.values(), ids=ROLES)
@pytest.mark.parametrize("positions", [1, 3, len(PROMPT) - 1, len(PROMPT), len(PROMPT) + 2])
async def test_any_beginning_of_the_work_can_be_audited(clock: VirtualClock, stage: int, positions: int) -> None:
    played = play()
    async with audit_world(clock, stage) as world:
        world.keep(played)
        report = await world.audit(world.order(played, positions=positions))
        assert report.output_digest == played.output_digest(stage, positions)


@pytest.mark.parametrize("stage", ROLES.values(), ids=ROLES)
@pytest.mark.parametrize("sampling", [m.Sampling(), PENALTIES], ids=["greedy", "sampled"])
async def test_a_real_models_stages_are_matched_bit_for_bit_and_one_wrong_bit_is_found(
    clock: VirtualClock, tiny: Loader, stage: int, sampling: m.Sampling
) -> None:
    def lie(index: int, position: int, output: bytes) -> bytes:
        if index != stage or position != len(PROMPT) + 1:
            return output
        return bytes([output[0] ^ 1]) + output[1:]  # the last bit of one value; or of the token's id

    true, wrong = play(tiny, LAYERS, sampling=sampling), play(tiny, LAYERS, sampling=sampling, lie=lie)
    async with audit_world(clock, stage, load=tiny, ranges=LAYERS) as world:
        for played, is_honest in ((true, True), (wrong, False)):
            world.keep(played)
            report = await world.audit(world.order(played))
            assert report.outcome == "computed"
            agrees = report.output_digest == played.output_digest(stage, played.positions())
            assert agrees == is_honest


@pytest.mark.parametrize("stage", ROLES.values(), ids=ROLES)
async def test_one_wrong_value_at_one_position_is_found(clock: VirtualClock, stage: int) -> None:
    at = len(PROMPT) + 2 if stage == 2 else len(PROMPT) - 1

    def lie(index: int, position: int, output: bytes) -> bytes:
        if index != stage or not position <= at < position + max(1, len(output) // 32):
            return output
        return bytes([output[0] ^ 1]) + output[1:]

    played, true = play(lie=lie), play()
    assert played.output_digest(stage, played.positions()) != true.output_digest(stage, played.positions())
    async with audit_world(clock, stage) as world:
        world.keep(played)
        report = await world.audit(world.order(played))
        assert report.outcome == "computed"
        assert report.output_digest != played.output_digest(stage, played.positions())
        assert report.withheld_by is None


async def test_the_stages_behind_a_liar_are_honest(clock: VirtualClock) -> None:
    played = play(lie=lambda index, position, output: output[::-1] if index == 0 else output)
    async with audit_world(clock, 1) as world:
        world.keep(played)
        report = await world.audit(world.order(played))
        assert report.output_digest == played.output_digest(1, played.positions())


# ---- what neighbours show ----


async def refused(world: AuditWorld, order: m.AuditOrder, code: str, withheld_by: str | None) -> m.AuditReport:
    report = await world.audit(order)
    assert (report.outcome, report.code, report.withheld_by) == ("inconclusive", code, withheld_by), report
    assert report.output_digest is None
    assert world.service.num_sessions == 0
    return report


async def test_a_neighbour_that_kept_nothing_withholds_it(clock: VirtualClock) -> None:
    played = play()
    async with audit_world(clock, 1) as world:
        await refused(world, world.order(played), "cache_miss", world.upstream.key.peer_id)


async def test_a_neighbour_that_is_gone_withholds_it(clock: VirtualClock) -> None:
    played = play()
    async with audit_world(clock, 1) as world:
        order = world.order(played)
        world.fabric.crash(world.upstream.key.peer_id)
        await refused(world, order, "dial_error", world.upstream.key.peer_id)


async def test_a_neighbour_that_kept_too_little_withholds_it(clock: VirtualClock) -> None:
    played, shorter = play(), play(num_tokens=2)
    async with audit_world(clock, 1) as world:
        world.keep(shorter)
        await refused(world, world.order(played), "cache_miss", world.upstream.key.peer_id)


WRONG_HISTORIES: dict[str, Any] = {
    "other rows": lambda played: play(lie=lambda i, p, out: out[::-1] if i == 0 and p > 4 else out),
    "another seed": lambda played: relabelled(played, sampling=m.Sampling(seed=8, temperature=1.0)),
    "another digest key": lambda played: relabelled(played, digest_key=b"x" * 32),
    "an earlier first draw": lambda played: play(cuts=(11,), num_tokens=4),
}


@pytest.mark.parametrize("show", WRONG_HISTORIES.values(), ids=WRONG_HISTORIES)
@pytest.mark.parametrize("stage", [1, 2], ids=["middle", "tail"])
async def test_a_neighbour_that_shows_something_else_without_a_receipt_is_the_one_who_withholds(
    clock: VirtualClock, stage: int, show: Any
) -> None:
    played = play(sampling=m.Sampling(seed=7, temperature=1.0))
    async with audit_world(clock, stage) as world:
        world.keep(show(played))
        positions = min(played.positions(), show(played).positions())
        upstream = world.upstream.key.peer_id
        await refused(world, world.order(played, positions=positions), "history_mismatch", upstream)


async def test_draws_that_were_not_asked_for_cannot_be_blamed_on_a_tail(clock: VirtualClock) -> None:
    played = play(num_tokens=5)
    lying = play(prompt=[*PROMPT, *(token for _, token in played.tokens[:2])], cuts=(*CUTS, 1, 1), num_tokens=3)
    assert [frame.body for frame in lying.frames[2]] == [frame.body for frame in played.frames[2]], "the same rows"
    async with audit_world(clock, 2) as world:
        world.keep(lying)
        await refused(world, world.order(played), "history_mismatch", world.upstream.key.peer_id)


def without_draws(frames: list[Frame]) -> list[Frame]:
    """The rows behind the first draw, of which nobody asked for a token."""
    first = next(index for index, frame in enumerate(frames) if frame.flags is Flag.SAMPLE)
    return [*frames[: first + 1], *(replace(frame, flags=Flag.NONE) for frame in frames[first + 1 :])]


def with_one_draw_less(frames: list[Frame]) -> list[Frame]:
    """The last two rows as one step, behind which one token is drawn."""
    *others, one, last = frames
    return [*others, replace(last, position=one.position, rows=2, body=bytes(one.body) + bytes(last.body))]


@pytest.mark.parametrize("show", [without_draws, with_one_draw_less])
async def test_draws_that_are_left_out_cannot_be_blamed_on_a_tail(
    clock: VirtualClock, show: Callable[[list[Frame]], list[Frame]]
) -> None:
    """The digest of what came in marks the first draw alone: behind it every row is a step with a draw, here as on a hop."""
    played = play()
    lying = replace(played, frames=[*played.frames[:2], show(played.frames[2])])
    order_digest = played.input_digest(2, played.positions())
    assert lying.input_digest(2, played.positions()) == order_digest, "the digest does not tell them apart"
    async with audit_world(clock, 2) as world:
        world.keep(lying)
        await refused(world, world.order(played), "invalid_step", world.upstream.key.peer_id)


async def test_rows_under_another_dtype_than_the_recipes_are_no_history(
    clock: VirtualClock, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A digest is over bytes: of two dtypes of one width it does not say which, so nobody else may either."""
    path = write_tiny_llama(tmp_path_factory.mktemp("bf16"), matrices=GgmlType.Q4_1)

    def load(layers: LayerRange) -> StageEngine:
        return load_engine(path, layers, RECIPES["torch-bf16"], max_sessions=4, max_positions=64)

    played, recipe = play(load, LAYERS), "torch-bf16@test"
    played = relabelled(played, recipe=recipe)
    lying = replace(
        played, frames=[played.frames[0], *([replace(f, dtype=DType.F16) for f in fs] for fs in played.frames[1:])]
    )
    assert lying.input_digest(1, 8) == played.input_digest(1, 8)
    async with audit_world(clock, 1, load=load, ranges=LAYERS, recipe=recipe) as world:
        world.keep(lying)
        await refused(world, world.order(played, recipe=recipe), "invalid_step", world.upstream.key.peer_id)
    async with audit_world(clock, 1, load=load, ranges=LAYERS, recipe="torch-bf16@other") as world:
        order = world.by_tolerance(played, recipe=recipe)
        world.keep(played)
        report = await world.audit(order)
        assert (report.outcome, report.error_ppm) == ("computed", 0)
        world.downstream.keep(lying, 1, "output")
        await refused(world, order, "invalid_step", world.downstream.key.peer_id)
        world.upstream.keep(lying, 1, "input")
        await refused(world, order, "invalid_step", world.upstream.key.peer_id)


async def test_of_a_recipe_that_is_not_known_nothing_is_compared_by_tolerance(clock: VirtualClock) -> None:
    played = play()
    async with audit_world(clock, 1) as world:
        order = world.by_tolerance(played, recipe="unheard-of")
        with pytest.raises(InvalidRequest) as raised:
            await world.auditor.take(order, world.seal(order))
        assert raised.value.param == "recipe"


@pytest.mark.parametrize(
    "changes",
    [{"session": b"t" * 16}, {"epoch": 1}, {"manifest_root": bytes(32)}, {"recipe": "q8_0"}, {"route": ()}],
    ids=["session", "epoch", "artifact", "recipe", "route"],
)
async def test_a_chain_open_of_something_else_is_no_history(clock: VirtualClock, changes: dict[str, Any]) -> None:
    played = play()
    if "route" in changes:
        changes = {"route": (*played.body.route[:1], *played.body.route[2:])}
    other = relabelled(played, **changes)
    async with audit_world(clock, 1) as world:
        world.keep(played)
        key = next(iter(world.upstream.history._tracks.values()))
        key.opened = other.opened
        await refused(world, world.order(played), "remote_protocol_error", world.upstream.key.peer_id)


async def test_rows_that_no_stage_can_have_computed_are_no_history(clock: VirtualClock) -> None:
    played = play()
    for frame in played.frames[0]:
        object.__setattr__(frame, "body", b"\xff\xff\xff\0" * frame.rows)
    async with audit_world(clock, 0) as world:
        world.keep(played)
        await refused(world, world.order(played), "invalid_step", world.upstream.key.peer_id)


# ---- by tolerance ----


async def test_by_tolerance_the_workers_own_rows_are_measured(clock: VirtualClock, tiny: Loader) -> None:
    played = play(tiny, LAYERS)
    async with audit_world(clock, 1, load=tiny, ranges=LAYERS, recipe="torch-f32@another") as world:
        world.keep(played)
        report = await world.audit(world.by_tolerance(played))
        assert (report.outcome, report.error_ppm) == ("computed", 0)


async def test_a_large_deviation_is_reported_as_it_is(clock: VirtualClock, tiny: Loader) -> None:
    def lie(index: int, position: int, output: bytes) -> bytes:
        values = np.frombuffer(output, "<f4").copy()
        if index == 1 and position == 4:
            row = values[:64]
            row[np.abs(row).argmax()] *= np.float32(1.5)
        return values.tobytes() if index < 2 else output

    played = play(tiny, LAYERS, lie=lie)
    async with audit_world(clock, 1, load=tiny, ranges=LAYERS, recipe="torch-f32@another") as world:
        world.keep(played)
        report = await world.audit(world.by_tolerance(played))
        assert report.outcome == "computed"
        assert report.error_ppm is not None
        assert 499_000 < report.error_ppm < 501_000


async def test_a_receiver_that_shows_other_rows_than_it_signed_for_is_named(clock: VirtualClock, tiny: Loader) -> None:
    played = play(tiny, LAYERS)
    async with audit_world(clock, 1, load=tiny, ranges=LAYERS, recipe="torch-f32@another") as world:
        world.keep(played)
        world.downstream.keep(play(tiny, LAYERS, prompt=PROMPT[::-1]), 1, "output")
        await refused(world, world.by_tolerance(played), "history_mismatch", world.downstream.key.peer_id)


async def test_a_receiver_that_shows_nothing_is_named(clock: VirtualClock) -> None:
    played = play()
    async with audit_world(clock, 1, recipe="torch-f32@another") as world:
        world.upstream.keep(played, 1, "input")
        await refused(world, world.by_tolerance(played), "cache_miss", world.downstream.key.peer_id)


# ---- canaries ----


@pytest.mark.parametrize("stage", ROLES.values(), ids=ROLES)
async def test_a_copy_of_a_scaling_canary_is_recognised(clock: VirtualClock, stage: int) -> None:
    def load(layers: LayerRange) -> Any:
        return dressed(lambda: toy_engine(layers), "scale", CANARY)() if layers == RANGES[stage] else toy_engine(layers)

    copied, true = play(load), play()
    async with audit_world(clock, stage) as world:
        world.keep(copied)
        named = (
            m.CanaryNamed(peer_id=CANARY, mode="scale"),
            m.CanaryNamed(peer_id=STAGES[0].peer_id, mode="echo"),
        )
        report = await world.audit(world.order(copied, canaries=named))
        assert report.outcome == "computed"
        assert report.output_digest != copied.output_digest(stage, copied.positions())
        assert report.canary_digests == (
            m.CanaryDigest(peer_id=CANARY, digest=copied.output_digest(stage, copied.positions())),
        ), "an echo proves no copy"
        world.keep(true)
        again = await world.audit(world.order(true, canaries=named))
        assert again.output_digest == true.output_digest(stage, true.positions())
        assert again.canary_digests[0].digest != again.output_digest


# ---- orders ----

WRONG_ORDERS: dict[str, dict[str, Any]] = {
    "another auditor": {"auditor": STAGES[0].peer_id},
    "an audit of oneself": {"audited": AUDITOR.peer_id},
    "other layers": {"layers": (0, 2)},
    "another artifact": {"manifest_root": bytes(32)},
    "another recipe": {"recipe": "q8_0"},
    "no position": {"positions": 0},
    "too many positions": {"positions": 1 << 20},
    "by tolerance without a digest": {"comparison": "tolerance"},
}


@pytest.mark.parametrize("changes", WRONG_ORDERS.values(), ids=WRONG_ORDERS)
async def test_an_order_that_is_not_for_this_stage_is_refused(clock: VirtualClock, changes: dict[str, Any]) -> None:
    played = play()
    async with audit_world(clock, 1) as world:
        order = world.order(played).model_copy(update=changes)
        with pytest.raises(InvalidRequest):
            await world.auditor.take(order, world.seal(order))
        assert not world.recorder.reports


async def test_a_tails_tokens_are_not_compared_by_tolerance(clock: VirtualClock) -> None:
    played = play()
    async with audit_world(clock, 2) as world:
        with pytest.raises(InvalidRequest):
            await world.auditor.take(world.by_tolerance(played), world.seal(world.by_tolerance(played)))


async def test_an_order_without_time_and_one_without_a_stage_are_refused(clock: VirtualClock) -> None:
    played = play()
    async with audit_world(clock, 1) as world:
        late = world.order(played, report_before=world.clock.unix_ms() + 1000)
        with pytest.raises(Expired):
            await world.auditor.take(late, world.seal(late))
        world.serving[0] = None
        order = world.order(played)
        with pytest.raises(Overloaded):
            await world.auditor.take(order, world.seal(order))


async def test_so_many_orders_wait_and_no_more(clock: VirtualClock) -> None:
    played = play()
    async with audit_world(clock, 1) as world:
        order = world.order(played)
        refusals = 0
        for _ in range(2 * MAX_WAITING_AUDITS):
            try:
                await world.auditor.take(order, world.seal(order))
            except Overloaded:
                refusals += 1
        assert refusals == MAX_WAITING_AUDITS - 1, "one is being carried out"


async def test_the_last_place_is_for_somebody_who_pays(clock: VirtualClock) -> None:
    played = play()
    async with audit_world(clock, 1, load=small_engine) as world:
        world.keep(played)
        busy = SessionKey(SessionId(b"b" * 16), 0)
        await world.service.open(busy, 10)
        order = world.order(played)
        await world.auditor.take(order, world.seal(order))
        await quiet(30.0)
        assert not world.recorder.reports
        assert world.service.num_sessions == 1
        await world.service.close(busy)
        await world.recorder.arrived.wait()
        assert world.recorder.reports[0].outcome == "computed"


class OftenFull(ToyEngine):
    """Has no room for a session the first few times, as one whose KV others need."""

    def __init__(self, times: int) -> None:
        super().__init__(TOY, RANGES[1])
        self.times = times

    def open_session(self, key: SessionKey, max_positions: int, scope: bytes = b"") -> None:
        if self.times:
            self.times -= 1
            raise Overloaded("no room in the KV")
        super().open_session(key, max_positions, scope)


@pytest.mark.parametrize("comparison", ["bitwise", "tolerance"])
async def test_an_auditor_without_room_asks_once_and_blames_nobody(clock: VirtualClock, comparison: str) -> None:
    """It begins again more often than a history is shown."""
    played, engine = play(), OftenFull(3 * MAX_HISTORY_READS)
    async with audit_world(clock, 1, load=lambda _: engine) as world:
        world.keep(played)
        order = world.order(played) if comparison == "bitwise" else world.by_tolerance(played)
        report = await world.audit(order)
        assert (report.outcome, report.withheld_by) == ("computed", None)
        assert engine.times == 0
        assert world.upstream.server.shown == 1
        assert world.downstream.server.shown == (comparison == "tolerance")


async def test_a_history_longer_than_anybody_keeps_is_none(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = play()
    kept = sum(len(frame.body) for frame in played.frames[1])
    async with audit_world(clock, 1) as world:
        world.keep(played)
        monkeypatch.setattr(history_reader, "HISTORY_TRACK_BYTES", kept)
        assert (await world.audit(world.order(played))).outcome == "computed"
        monkeypatch.setattr(history_reader, "HISTORY_TRACK_BYTES", kept - 1)
        await refused(world, world.order(played), "malformed_message", world.upstream.key.peer_id)


async def test_an_audit_that_finds_no_time_says_so_before_its_deadline(clock: VirtualClock) -> None:
    played = play()
    async with audit_world(clock, 1, load=small_engine) as world:
        world.keep(played)
        await world.service.open(SessionKey(SessionId(b"b" * 16), 0), 10)
        order = world.order(played)
        report = await world.audit(order)
        assert (report.outcome, report.code, report.withheld_by) == ("inconclusive", "too_late", None)
        assert world.clock.unix_ms() < order.report_before


async def test_an_audit_of_layers_that_are_given_up_meanwhile_ends(clock: VirtualClock) -> None:
    played = play()
    async with audit_world(clock, 1, load=small_engine) as world:
        world.keep(played)
        busy = SessionKey(SessionId(b"b" * 16), 0)
        await world.service.open(busy, 10)
        order = world.order(played)
        await world.auditor.take(order, world.seal(order))
        await quiet(3.0)
        moved = {name: getattr(world.identity, name) for name in world.identity.__slots__} | {"layers": RANGES[0]}
        world.serving[0] = (world.service, type(world.identity)(**moved))
        await world.recorder.arrived.wait()
        report = world.recorder.reports[0]
        assert (report.outcome, report.code, report.withheld_by) == ("inconclusive", "invalid_request", None)


async def test_a_report_waits_for_an_orchestrator_that_cannot_be_reached_and_not_for_one_that_refuses_it(
    clock: VirtualClock,
) -> None:
    played = play()
    async with audit_world(clock, 1) as world:
        world.keep(played)
        world.recorder.failures = [StreamReset("gone"), StreamReset("gone")]
        report = await world.audit(world.order(played))
        assert report.outcome == "computed"
        world.recorder.failures = [UnknownModel("what audit?")]
        order = world.order(played)
        await world.auditor.take(order, world.seal(order))
        await quiet(60.0)
        assert len(world.recorder.reports) == 1
        assert world.auditor.audits == 2


def small_engine(layers: LayerRange) -> ToyEngine:
    engine = toy_engine(layers)
    engine.max_sessions = 2
    return engine


async def quiet(seconds: float) -> None:
    """Let virtual time pass."""
    with trio.move_on_after(seconds):
        await trio.Event().wait()


def random_play(seed: int) -> Played:
    rng = random.Random(seed)
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, 40))]
    cuts: list[int] = []
    while sum(cuts) < len(prompt):
        cuts.append(min(rng.randint(1, 20), len(prompt) - sum(cuts)))
    sampling = m.Sampling(temperature=rng.random() * 2, seed=rng.randrange(1000), frequency_penalty=rng.random())
    return play(prompt=prompt, cuts=cuts, num_tokens=rng.randint(1, 9), sampling=sampling, lie=honest)


@pytest.mark.parametrize("stage", ROLES.values(), ids=ROLES)
async def test_no_honest_worker_is_contradicted_however_its_session_was_cut(clock: VirtualClock, stage: int) -> None:
    async with audit_world(clock, stage) as world:
        rng = random.Random(stage)
        for seed in range(25):
            played = random_play(seed)
            world.keep(played, encoded=rng.random() < 0.5)
            positions = rng.randint(1, played.positions())
            await quiet(8.0)  # neighbours show so much, and no more
            report = await world.audit(world.order(played, positions=positions))
            assert report.output_digest == played.output_digest(stage, positions), (seed, report)


# ---- neighbours that break the protocol ----


def shown(world: AuditWorld, played: Played, sequence: int, **changes: Any) -> bytes:
    """The sealed head that an honest neighbour sends."""
    fields: dict[str, Any] = {
        "open": played.opened,
        "session": played.body.session,
        "epoch": 0,
        "side": "input",
        "positions": played.positions(),
    }
    to, signer = changes.pop("to", sequence), changes.pop("signer", world.upstream.key)
    audience = changes.pop("audience", AUDITOR.peer_id)
    answer = m.HistoryAnswer(to=to, body=m.HistoryHead(**(fields | changes)))
    return seal(signer, m.HISTORY, answer, sequence=1, now_ms=world.clock.unix_ms(), audience=audience)


WRONG_HEADS: dict[str, tuple[dict[str, Any], str]] = {
    "to another request": ({"to": 0}, "invalid_signature"),
    "signed by a stranger": ({"signer": key_of("stranger")}, "invalid_signature"),
    "for another auditor": ({"audience": STAGES[0].peer_id}, "invalid_signature"),
    "of another session": ({"session": b"t" * 16}, "remote_protocol_error"),
    "of the other side": ({"side": "output"}, "remote_protocol_error"),
    "of too few positions": ({"positions": 3}, "cache_miss"),
    "with an open that is none": ({"open": b"open"}, "malformed_message"),
}


async def misbehaving(world: AuditWorld, played: Played, head: dict[str, Any], frames: bytes, code: str) -> None:
    """Whatever the upstream peer sends, the audit ends with its code, and it is named."""

    async def answer(stream: Stream) -> None:
        raw = await receive_message(stream)
        assert raw is not None
        await send_message(stream, shown(world, played, peek_sequence(raw), **head))
        await stream.send_all(frames)
        await stream.aclose()

    world.upstream.network.serve(protocols.HISTORY, answer)
    await refused(world, world.order(played), code, world.upstream.key.peer_id)


@pytest.mark.parametrize(("head", "code"), WRONG_HEADS.values(), ids=WRONG_HEADS)
async def test_a_head_that_is_no_answer_ends_the_audit(clock: VirtualClock, head: dict[str, Any], code: str) -> None:
    played = play()
    async with audit_world(clock, 1) as world:
        await misbehaving(world, played, head, b"", code)


WRONG_FRAMES: dict[str, tuple[Callable[[list[Frame]], bytes], str]] = {
    "none": (lambda frames: b"", "cache_miss"),
    "too few": (lambda frames: encode_frame(frames[0]), "cache_miss"),
    "an end inside a frame": (lambda frames: encode_frame(frames[0])[:-1], "stream_reset"),
    "a gap": (lambda frames: encode_frame(frames[1]), "malformed_message"),
    "a repetition": (lambda frames: encode_frame(frames[0]) * 2, "malformed_message"),
    "of another session": (
        lambda frames: encode_frame(replace(frames[0], session=SessionId(b"t" * 16))),
        "malformed_message",
    ),
    "of another kind": (lambda frames: encode_frame(replace(frames[0], kind=Kind.TOKEN)), "malformed_message"),
    "with a trace": (
        lambda frames: encode_frame(replace(frames[0], trace=(TraceEntry(1, 1, 1),))),
        "malformed_message",
    ),
    "beyond the order": (
        lambda frames: encode_frame(replace(frames[0], rows=100, body=bytes(3200))),
        "malformed_message",
    ),
    "of another width": (
        lambda frames: b"".join(encode_frame(replace(each, body=each.body[: len(each.body) // 2])) for each in frames),
        "invalid_step",
    ),
    "of token ids": (lambda frames: encode_frame(replace(frames[0], dtype=DType.U32)), "invalid_step"),
    "damaged": (lambda frames: encode_frame(frames[0])[:-1] + b"\0", "stream_reset"),
    "no frames at all": (lambda frames: bytes(range(256)), "version_mismatch"),
}


@pytest.mark.parametrize(("frames", "code"), WRONG_FRAMES.values(), ids=WRONG_FRAMES)
async def test_frames_that_are_no_history_end_the_audit(
    clock: VirtualClock, frames: Callable[[list[Frame]], bytes], code: str
) -> None:
    played = play()
    async with audit_world(clock, 1) as world:
        await misbehaving(world, played, {}, frames(played.frames[1]), code)


async def test_a_neighbour_that_says_nothing_is_not_waited_for_beyond_the_deadline(clock: VirtualClock) -> None:
    async def say_nothing(_: Stream) -> None:
        await trio.sleep_forever()

    played = play()
    async with audit_world(clock, 1) as world:
        world.upstream.network.serve(protocols.HISTORY, say_nothing)
        order = world.order(played)
        await refused(world, order, "hop_timeout", world.upstream.key.peer_id)
        assert world.clock.unix_ms() < order.report_before


# ---- a real model ----


async def test_the_stages_of_a_real_model_are_audited_at_its_own_recipe(
    clock: VirtualClock, smollm2_path: Path
) -> None:
    ranges = [LayerRange(0, 15), LayerRange(15, 30)]

    def load(layers: LayerRange) -> StageEngine:
        return load_engine(smollm2_path, layers, RECIPES["f32"], max_sessions=2, max_positions=64)

    played = play(load, ranges, num_tokens=3)
    for stage in range(2):
        async with audit_world(clock, stage, load=load, ranges=ranges) as world:
            world.keep(played)
            report = await world.audit(world.order(played))
            assert report.output_digest == played.output_digest(stage, played.positions())
