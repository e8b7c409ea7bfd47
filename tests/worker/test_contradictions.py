"""A worker that proves another input than it signed for contradicts itself; a neighbour that lies about it gets nobody into trouble."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.history import History, Track, TrackKey
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import seal
from tessella_p2p.wire.frames import encode_frame
from tessella_p2p.wire.keys import NodeKey
from tests.stages.openings import STAGES, key_of
from tests.worker.audit_world import PROMPT, AuditWorld, Played, audit_world, play, relabelled

FALSE = b"f" * 32
STRANGER = key_of("stranger")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def receipt_of(
    world: AuditWorld, played: Played, positions: int, *, signer: NodeKey | None = None, **changes: Any
) -> bytes:
    """What the audited worker signed for, honestly."""
    sender = world.upstream.key.peer_id
    body = m.ReceiptBody(
        request_id=played.body.request_id,
        session=played.body.session,
        epoch=played.body.epoch,
        sender=sender,
        positions=positions,
        digest=played.input_digest(world.stage, positions),
    ).model_copy(update=changes)
    return seal(signer or STAGES[world.stage], m.RECEIPT, body, sequence=1, now_ms=1, audience=sender)


def keep(world: AuditWorld, played: Played, receipt: bytes | None, positions: int) -> Track:
    """What the upstream peer keeps, with the newest receipt."""
    audited = PeerId(STAGES[world.stage].peer_id)
    key = TrackKey(SessionId(played.body.session), played.body.epoch, "input", audited)
    track = world.upstream.history.begin(key, played.opened)
    for frame in played.frames[world.stage]:
        track.note(frame, encode_frame(frame))
    track.end(trio.current_time())
    if receipt is not None:
        track.note_receipt(receipt, positions)
    return track


def false_order(world: AuditWorld, played: Played, positions: int) -> m.AuditOrder:
    """The worker's proof states an input that it never had."""
    return world.order(played, positions=positions, input_digest=FALSE)


@pytest.mark.parametrize("stage", [0, 1, 2], ids=["head", "middle", "tail"])
@pytest.mark.parametrize("behind", [0, 1, 3])
async def test_a_false_input_is_contradicted_by_the_workers_own_receipt(
    clock: VirtualClock, stage: int, behind: int
) -> None:
    played = play()
    end = played.positions()
    async with audit_world(clock, stage) as world:
        receipt = receipt_of(world, played, end)
        keep(world, played, receipt, end)
        report = await world.audit(false_order(world, played, end - behind))
        assert (report.outcome, report.code, report.withheld_by) == ("contradicted", "false_input", None)
        assert report.receipt == receipt
        assert report.output_digest is None


async def test_an_honest_worker_is_computed_as_ever_beside_its_receipt(clock: VirtualClock) -> None:
    played = play()
    end = played.positions()
    async with audit_world(clock, 0) as world:
        keep(world, played, receipt_of(world, played, end), end)
        report = await world.audit(world.order(played, positions=end - 1))
        assert (report.outcome, report.output_digest) == ("computed", played.output_digest(0, end - 1))


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize(
    "forge",
    [
        lambda world, played, end: None,
        lambda world, played, end: b"no receipt",
        lambda world, played, end: receipt_of(world, played, end, signer=STRANGER),
        lambda world, played, end: receipt_of(world, played, end, session=b"o" * 16),
        lambda world, played, end: receipt_of(world, played, end, epoch=9),
        lambda world, played, end: receipt_of(world, played, end, request_id="another"),
        lambda world, played, end: receipt_of(world, played, end, sender=STRANGER.peer_id),
        lambda world, played, end: receipt_of(world, played, end, digest=FALSE),
        lambda world, played, end: receipt_of(world, played, end, digest=played.input_digest(0, end - 1)),
    ],
    ids=["none", "garbage", "forged", "session", "epoch", "request", "sender", "other bytes", "other positions"],
)
async def test_without_the_workers_receipt_for_what_it_shows_it_counts_against_the_upstream_peer(
    clock: VirtualClock, forge: Any, behind: int
) -> None:
    played = play()
    end = played.positions()
    async with audit_world(clock, 0) as world:
        keep(world, played, forge(world, played, end), end)
        report = await world.audit(false_order(world, played, end - behind))
        assert (report.outcome, report.code) == ("inconclusive", "history_mismatch")
        assert report.withheld_by == world.upstream.key.peer_id
        assert report.receipt is None


async def test_an_entry_that_shows_other_tokens_than_an_honest_head_signed_for_fails_nobody(
    clock: VirtualClock,
) -> None:
    played, other = play(), play(prompt=[*PROMPT[:-1], 9])
    end = played.positions()
    shown = relabelled(other)  # under an open of the same session; its entry can sign as many as it likes
    async with audit_world(clock, 0) as world:
        keep(world, shown, receipt_of(world, played, end), end)
        report = await world.audit(world.order(played))
        assert (report.outcome, report.withheld_by) == ("inconclusive", world.upstream.key.peer_id)


async def test_a_receipt_for_less_than_the_audit_looks_at_says_nothing_of_anybody(clock: VirtualClock) -> None:
    played = play()
    end = played.positions()
    async with audit_world(clock, 0) as world:
        keep(world, played, receipt_of(world, played, end - 1), end - 1)
        report = await world.audit(false_order(world, played, end))
        assert (report.outcome, report.code, report.withheld_by) == ("inconclusive", "history_mismatch", None)


async def test_an_upstream_peer_that_changes_its_story_at_the_second_look_fails_nobody(clock: VirtualClock) -> None:
    """At first it shows what it did not send; where the rest is asked for, what it did."""
    played = play()
    end = played.positions()
    async with audit_world(clock, 0) as world:
        receipt = receipt_of(world, played, end)
        honest = keep(world, played, receipt, end)
        history = world.upstream.history
        apart = History()
        world.upstream.history = apart
        lying = keep(world, play(prompt=[*PROMPT[:-1], 9]), receipt, end)
        tracks = iter([lying, honest])
        history.find = lambda _: next(tracks)  # type: ignore[method-assign,assignment]
        report = await world.audit(world.order(played, positions=end - 2))
        assert (report.outcome, report.withheld_by) == ("inconclusive", world.upstream.key.peer_id)
        assert next(tracks, None) is None
