"""History is shown to the auditor that a pinned orchestrator's order names, a few times, and to nobody else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio

from tessella_p2p.base.errors import StreamReset
from tessella_p2p.base.limits import (
    HISTORY_REQUEST_S,
    HISTORY_SHOWN_BURST,
    HISTORY_TTL_S,
    MAX_AUDITOR_STREAMS,
    MAX_HISTORY_READS,
    MAX_HISTORY_STREAMS,
    MIB,
)
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.memory import MemoryNetwork
from tessella_p2p.net.network import Stream
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.frame_link import FrameReader
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import open_envelope, seal
from tessella_p2p.wire.frames import Frame
from tessella_p2p.wire.keys import NodeKey
from tests.stages.openings import ORCHESTRATOR, STAGES, STRANGER, key_of
from tests.worker.audit_world import AUDITOR, AuditWorld, Played, audit_world, play


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def connect(world: AuditWorld, network: MemoryNetwork | None = None) -> Stream:
    dialler = network or world.context.network
    dialler.add_addresses(world.upstream.key.peer_id, world.upstream.network.addresses)
    return await dialler.open_stream(world.upstream.key.peer_id, protocols.HISTORY)


def request(world: AuditWorld, order: bytes, side: m.HistorySide = "input", **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "sequence": 5,
        "now_ms": world.clock.unix_ms(),
        "audience": world.upstream.key.peer_id,
    }
    key = changes.pop("key", AUDITOR)
    return seal(key, m.HISTORY_REQUEST, m.HistoryRequest(order=order, side=side), **(fields | changes))


async def answered(world: AuditWorld, raw: bytes) -> m.HistoryHead | m.HistoryRefused:
    stream = await connect(world)
    await send_message(stream, raw)
    return await answer_on(stream, world)


async def answer_on(stream: Stream, world: AuditWorld, key: NodeKey = AUDITOR) -> m.HistoryHead | m.HistoryRefused:
    with trio.fail_after(100):
        answer = await receive_message(stream)
    assert answer is not None
    opened = open_envelope(
        answer,
        m.HISTORY,
        now_ms=world.clock.unix_ms(),
        audience=key.peer_id,
        signer=world.upstream.key.peer_id,
    ).message(m.HistoryAnswer)
    assert opened.to == 5
    return opened.body


async def test_what_is_shown_is_the_open_and_the_rows_without_a_trace(clock: VirtualClock) -> None:
    played = play()
    async with audit_world(clock, 1) as world:
        world.keep(played)
        stream = await connect(world)
        order = world.seal(world.order(played, positions=9))
        await send_message(stream, request(world, order))
        head = await answer_on(stream, world)
        assert head == m.HistoryHead(
            open=played.opened, session=played.body.session, epoch=0, side="input", positions=9
        )
        reader = FrameReader(stream, lambda _: True)
        frames = []
        while isinstance(frame := await reader.receive(), Frame):
            frames.append(frame)
        assert b"".join(frame.body for frame in frames) == b"".join(f.body for f in played.frames[1])[: 9 * 32]
        assert all(not frame.trace for frame in frames)
        assert frames[-1].flags == 0, "the draw that follows a later row is not shown"
        assert world.upstream.server.shown == 1


WRONG_REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "an order of a stranger": ({}, {"signer": STRANGER}, {}, "not_authorized"),
    "an order of the auditor itself": ({}, {"signer": AUDITOR}, {}, "not_authorized"),
    "an order for another auditor": ({"auditor": STAGES[2].peer_id}, {}, {}, "invalid_signature"),
    "an order that names another auditor": (
        {"auditor": STAGES[2].peer_id},
        {"audience": AUDITOR.peer_id},
        {},
        "not_authorized",
    ),
    "an order whose time is over": ({"report_before": 1}, {}, {}, "expired"),
    "the other side": ({}, {}, {"side": "output"}, "invalid_request"),
    "another neighbour": ({"upstream": STAGES[2].peer_id}, {}, {}, "invalid_request"),
    "another session": ({"session": b"t" * 16}, {}, {}, "cache_miss"),
    "another epoch": ({"epoch": 3}, {}, {}, "cache_miss"),
    "another audited worker": ({"audited": STAGES[2].peer_id}, {}, {}, "cache_miss"),
    "a request for somebody else": ({}, {}, {"audience": STAGES[2].peer_id}, "invalid_signature"),
    "a request of somebody else": ({}, {}, {"key": STRANGER}, "invalid_signature"),
    "an expired request": ({}, {}, {"ttl_ms": -1000}, "malformed_message"),
}


@pytest.mark.parametrize(("order", "sealing", "asking", "code"), WRONG_REQUESTS.values(), ids=WRONG_REQUESTS)
async def test_it_is_shown_to_nobody_else(
    clock: VirtualClock, order: dict[str, Any], sealing: dict[str, Any], asking: dict[str, Any], code: str
) -> None:
    played = play()
    async with audit_world(clock, 1) as world:
        world.keep(played)
        raw = world.seal(world.order(played, **order), **sealing)
        answer = await answered(world, request(world, raw, **asking))
        assert isinstance(answer, m.HistoryRefused)
        assert answer.code == code, answer
        assert not world.upstream.server.shown


async def test_an_order_for_other_layers_is_no_order_to_show_history(clock: VirtualClock) -> None:
    played = play()
    async with audit_world(clock, 1) as world:
        world.keep(played)
        other = m.UpdateAssignment(model_id="toy", layers=(0, 2), lease=b"lease", reason="")
        raw = seal(
            ORCHESTRATOR,
            m.ORDER,
            m.OrderBody(body=other),
            sequence=1,
            now_ms=world.clock.unix_ms(),
            audience=AUDITOR.peer_id,
        )
        answer = await answered(world, request(world, raw))
        assert isinstance(answer, m.HistoryRefused)
        assert answer.code == "not_authorized"


@pytest.mark.parametrize("raw", [b"x", b"\x80", b"\xff" * 100])
async def test_garbage_ends_the_stream_and_nothing_else(clock: VirtualClock, raw: bytes) -> None:
    played = play()
    async with audit_world(clock, 1) as world:
        world.keep(played)
        stream = await connect(world)
        await send_message(stream, raw)
        with pytest.raises(StreamReset):
            await receive_message(stream)
        assert isinstance(await answered(world, request(world, world.seal(world.order(played)))), m.HistoryHead)


async def test_who_asks_for_nothing_is_not_waited_for(clock: VirtualClock) -> None:
    async with audit_world(clock, 1) as world:
        stream = await connect(world)
        began = trio.current_time()
        with pytest.raises(StreamReset):
            await receive_message(stream)
        assert trio.current_time() - began == pytest.approx(HISTORY_REQUEST_S, abs=1.0)


async def test_one_direction_of_a_session_is_shown_to_one_auditor_a_few_times_only(clock: VirtualClock) -> None:
    played = play()
    async with audit_world(clock, 1) as world:
        world.keep(played)
        raw = world.seal(world.order(played, report_before=world.clock.unix_ms() + 10**6))
        for _ in range(MAX_HISTORY_READS):
            assert isinstance(await answered(world, request(world, raw)), m.HistoryHead)
            await quiet(2.0)
        answer = await answered(world, request(world, raw))
        assert isinstance(answer, m.HistoryRefused)
        assert answer.code == "not_authorized"


async def as_second_auditor(world: AuditWorld, played: Played) -> m.HistoryHead | m.HistoryRefused:
    """What another auditor of the same session is shown."""
    key = key_of("second auditor")
    order = world.order(played, auditor=key.peer_id, report_before=world.clock.unix_ms() + 10**6)
    async with MemoryNetwork.open(world.fabric, key.peer_id) as network:
        stream = await connect(world, network)
        await send_message(stream, request(world, world.seal(order), key=key))
        return await answer_on(stream, world, key)


async def test_an_auditor_cannot_use_up_what_others_may_read(clock: VirtualClock) -> None:
    """Else an accomplice reads until nobody else can say anything, and who told the truth about a liar stands alone."""
    played = play()
    async with audit_world(clock, 1) as world:
        world.keep(played)
        raw = world.seal(world.order(played, report_before=world.clock.unix_ms() + 10**6))
        for _ in range(MAX_HISTORY_READS + 1):
            await answered(world, request(world, raw))
            await quiet(2.0)
        assert isinstance(await as_second_auditor(world, played), m.HistoryHead)


async def test_an_auditor_cannot_hold_all_the_streams_that_others_may_read_on(clock: VirtualClock) -> None:
    played = play()
    rows = [replace(played.frames[1][0], position=at, rows=1, body=bytes(MIB)) for at in range(played.positions())]
    played = replace(played, frames=[played.frames[0], rows, played.frames[2]])
    async with audit_world(clock, 1) as world:
        world.keep(played)
        raw = world.seal(world.order(played, report_before=world.clock.unix_ms() + 10**6))
        answers = []
        for _ in range(MAX_HISTORY_STREAMS):
            stream = await connect(world)  # the head is read, and none of the rows
            await send_message(stream, request(world, raw))
            answers.append(await answer_on(stream, world))
        refused = [answer for answer in answers if isinstance(answer, m.HistoryRefused)]
        assert [answer.code for answer in refused] == ["overloaded"] * (MAX_HISTORY_STREAMS - MAX_AUDITOR_STREAMS)
        assert isinstance(await as_second_auditor(world, played), m.HistoryHead)


async def test_a_peer_that_asks_too_often_is_not_read(clock: VirtualClock) -> None:
    async with audit_world(clock, 1) as world:
        for _ in range(HISTORY_SHOWN_BURST):
            assert isinstance(await answered(world, request(world, b"no order")), m.HistoryRefused)
        stream = await connect(world)
        with pytest.raises(StreamReset):
            await receive_message(stream)
        network_key = key_of("another")
        async with MemoryNetwork.open(world.fabric, network_key.peer_id) as network:
            other = await connect(world, network)
            await send_message(other, request(world, b"no order", key=network_key))
            assert await receive_message(other) is not None, "others may go on asking"


async def test_history_is_forgotten_in_time(clock: VirtualClock) -> None:
    played = play()
    async with audit_world(clock, 1) as world:
        world.keep(played)
        assert world.upstream.history.num_bytes
        await quiet(HISTORY_TTL_S + 61.0)
        assert world.upstream.history.num_tracks == world.upstream.history.num_bytes == 0
        answer = await answered(world, request(world, world.seal(world.order(played))))
        assert isinstance(answer, m.HistoryRefused)
        assert answer.code == "cache_miss"


async def quiet(seconds: float) -> None:
    """Let virtual time pass."""
    with trio.move_on_after(seconds):
        await trio.Event().wait()
