"""What an entry, or any upstream, can do to a stage: end its own session, and nothing else."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tessella_p2p.base.errors import TransportError
from tessella_p2p.base.ids import SessionId
from tessella_p2p.base.limits import MAX_HOP_STREAMS_PER_PEER, MIB, OPEN_BURST, SESSION_IDLE_S
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import decode_message
from tessella_p2p.wire.frames import DType, Frame, Kind, TraceEntry, encode_frame
from tests.worker.hostile_mesh import PROMPT, eventually, hostile_mesh, pass_time
from tests.worker.raw_peer import close_frame, damaged, ids_step, raw_peer, rows_step


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def test_a_raw_entry_that_keeps_the_rules_gets_the_models_tokens(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, body = await mesh.to_head(), mesh.body()
        tokens = await mesh.begin(hop, body)
        assert mesh.held() == [1, 1, 1]
        assert await mesh.generate(hop, tokens, body, 6) == mesh.expected(6)
        await hop.send(close_frame(body))
        assert (await tokens.receive(Kind.CLOSE)).session == body.session
        await eventually(lambda: mesh.held() == [0, 0, 0], timeout_s=1.0)


NEXT = len(PROMPT)
WRONG_STEPS: dict[str, Callable[[m.ChainOpen], bytes]] = {
    "a gap": lambda body: encode_frame(ids_step(body, NEXT + 1, [1])),
    "partly repeated": lambda body: encode_frame(ids_step(body, NEXT - 1, [1, 2])),
    "beyond the session's positions": lambda body: encode_frame(ids_step(body, NEXT, [1] * 60)),
    "another dtype": lambda body: encode_frame(ids_step(body, NEXT, [1], dtype=DType.F32)),
    "a shorter dtype": lambda body: encode_frame(ids_step(body, NEXT, [1], dtype=DType.BF16, body=b"\0\0")),
    "more bytes than rows": lambda body: encode_frame(ids_step(body, NEXT, [1], body=bytes(8))),
    "much more than a row": lambda body: encode_frame(ids_step(body, NEXT, [1], body=bytes(8 * MIB))),
    "a token out of the vocabulary": lambda body: encode_frame(ids_step(body, NEXT, [1 << 20])),
    "a padded trace": lambda body: encode_frame(ids_step(body, NEXT, [1], trace=(TraceEntry(0, 0, 0),))),
    "damaged": lambda body: damaged(ids_step(body, NEXT, [1])),
}


@pytest.mark.parametrize("wrong", WRONG_STEPS.values(), ids=WRONG_STEPS)
async def test_a_wrong_step_ends_its_own_session_with_a_typed_error(
    tmp_path: Path, clock: VirtualClock, wrong: Callable[[m.ChainOpen], bytes]
) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, body, other = await mesh.to_head(), mesh.body(), mesh.body()
        tokens = await mesh.begin(hop, body)
        other_tokens = await mesh.begin(hop, other)
        await tokens.receive(Kind.TOKEN)
        await hop.stream.send_all(wrong(body))
        frame = await hop.receive(Kind.ERROR)
        assert frame.session == body.session
        said = stated(frame)
        assert (said.code, said.fault_of) == ("invalid_step", mesh.entry.peer_id)
        assert await mesh.generate(hop, other_tokens, other, 6) == mesh.expected(6)
        assert mesh.held() == [1, 1, 1]
        await hop.send(close_frame(other))
        await mesh.is_well()


def stated(frame: Frame) -> m.ErrorBody:
    return decode_message(m.ErrorBody, bytes(frame.body))


async def test_a_repeated_step_is_ignored(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, body = await mesh.to_head(), mesh.body()
        tokens = await mesh.begin(hop, body)
        await hop.send(*[ids_step(body, 0, PROMPT, sample=True)] * 3, ids_step(body, 2, PROMPT[2:5]))
        assert await mesh.generate(hop, tokens, body, 6) == mesh.expected(6)


async def test_a_step_without_a_session_is_refused_and_a_close_without_one_is_no_fault(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, body = await mesh.to_head(), mesh.body()
        await hop.send(close_frame(body), ids_step(body, 0, PROMPT))
        assert (await hop.error()).code == "stale_epoch"
        await mesh.is_well()


async def test_a_session_cannot_be_fed_or_closed_from_another_stream_or_peer(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh, raw_peer(mesh.mesh.fabric, mesh.mesh.date(), "thief") as thief:
        hop, body = await mesh.to_head(), mesh.body()
        tokens = await mesh.begin(hop, body)
        for stolen in (await mesh.to_head(thief), await mesh.to_head()):
            await stolen.send(ids_step(body, NEXT, [7]), close_frame(body), thief.open_frame(body))
            assert (await stolen.error()).code == "stale_epoch"
            assert (await stolen.error()).code in ("not_authorized", "stale_epoch")
        assert await mesh.generate(hop, tokens, body, 6) == mesh.expected(6)


async def test_a_close_that_catches_up_with_its_open_leaves_no_session_anywhere(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, body = await mesh.to_head(), mesh.body()
        await hop.send(mesh.entry.open_frame(body), ids_step(body, 0, PROMPT), close_frame(body))
        await hop.send(mesh.entry.open_frame(body))
        assert (await hop.error()).code == "stale_epoch", "an epoch is opened once"
        await eventually(lambda: mesh.held() == [0, 0, 0])
        await pass_time(1.0)
        assert mesh.held() == [0, 0, 0]


@pytest.mark.parametrize("after_s", [0.0, 0.04, 0.1, 0.2, 0.3])
async def test_a_close_at_any_moment_of_the_opening_frees_every_stage(
    tmp_path: Path, clock: VirtualClock, after_s: float
) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, body = await mesh.to_head(), mesh.body()
        await hop.send(mesh.entry.open_frame(body), ids_step(body, 0, PROMPT, sample=True))
        await pass_time(after_s)
        await hop.send(close_frame(body))
        await pass_time(3.0)
        assert mesh.held() == [0, 0, 0]
        await mesh.is_well()


@pytest.mark.parametrize("after_s", [0.04, 0.2, 1.0])
async def test_an_entry_that_dies_leaves_no_session_anywhere(
    tmp_path: Path, clock: VirtualClock, after_s: float
) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, body = await mesh.to_head(), mesh.body()
        await hop.send(mesh.entry.open_frame(body), ids_step(body, 0, PROMPT, sample=True))
        await pass_time(after_s)
        mesh.mesh.fabric.crash(mesh.entry.peer_id)
        await pass_time(3.0)
        assert mesh.held() == [0, 0, 0]
        await mesh.is_well()


async def test_a_new_epoch_ends_the_old_one_and_takes_its_place_on_a_full_stage(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop = await mesh.to_head()
        bodies = [mesh.body() for _ in range(16)]  # as many as the stage has slots
        for body in bodies:
            await mesh.begin(hop, body)
        full = mesh.body()
        await hop.send(mesh.entry.open_frame(full))
        assert (await hop.error()).code == "too_many_hop_bodies"
        again = bodies[0].model_copy(update={"epoch": 1})
        tokens = await mesh.begin(hop, again)
        said = await hop.error()
        assert said.code == "stale_epoch"
        assert await mesh.generate(hop, tokens, again, 4) == mesh.expected(4)
        await hop.send(close_frame(bodies[1]))
        await eventually(lambda: mesh.held()[0] == 15)
        await hop.send(mesh.entry.open_frame(bodies[0]))
        assert (await hop.error()).code == "stale_epoch"


async def test_a_session_without_steps_does_not_hold_its_kv_for_ever(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, bodies = await mesh.to_head(), [mesh.body() for _ in range(16)]
        await hop.send(*[mesh.entry.open_frame(body) for body in bodies])
        await eventually(lambda: mesh.held() == [16, 16, 16])
        for _ in bodies:
            said = await hop.error()
            assert said.code == "hop_timeout"
        assert trio.current_time() < 2 * SESSION_IDLE_S
        await mesh.is_well()


@pytest.mark.parametrize("kind", [Kind.RECEIPT, Kind.ERROR, Kind.TOKEN])
async def test_frames_that_never_go_downstream_end_the_stream_and_its_sessions(
    tmp_path: Path, clock: VirtualClock, kind: Kind
) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, body = await mesh.to_head(), mesh.body()
        await mesh.begin(hop, body)
        dtype, rows = (DType.U32, 1) if kind is Kind.TOKEN else (DType.NONE, 0)
        await hop.send(Frame(kind, SessionId(body.session), 0, rows=rows, dtype=dtype, body=b"\0\0\0\0"))
        assert not await hop.ended()
        await mesh.is_well()


@pytest.mark.parametrize("garbage", [bytes(48), b"\xff" * 4096, b"\x01\x02" + bytes(46), b"\x02" + bytes(47)])
async def test_garbage_ends_the_stream_and_nothing_else(tmp_path: Path, clock: VirtualClock, garbage: bytes) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, other, body = await mesh.to_head(), await mesh.to_head(), mesh.body()
        tokens = await mesh.begin(hop, body)
        await other.stream.send_all(garbage)
        assert not await other.ended()
        assert await mesh.generate(hop, tokens, body, 6) == mesh.expected(6)


async def test_one_peer_has_a_few_streams_however_many_it_opens(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        streams = [await mesh.to_head() for _ in range(MAX_HOP_STREAMS_PER_PEER)]
        refused = await mesh.to_head()
        assert not await refused.ended()
        await streams[0].stream.reset()
        await pass_time(1.0)
        body = mesh.body()
        hop = await mesh.to_head()
        tokens = await mesh.begin(hop, body)
        assert await mesh.generate(hop, tokens, body, 3) == mesh.expected(3)


async def test_a_flood_of_opens_is_refused_unverified(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop = await mesh.to_head()
        forged = Frame(
            Kind.OPEN, SessionId(bytes(16)), 0, body=bytes(mesh.entry.open_frame(mesh.body()).body)[:-1] + b"\0"
        )
        await hop.send(*[forged] * (OPEN_BURST + 100))
        codes = [(await hop.error()).code for _ in range(OPEN_BURST + 100)]
        assert codes.count("overloaded") >= 80
        await pass_time(1.0)
        body = mesh.body()
        tokens = await mesh.begin(hop, body)
        assert await mesh.generate(hop, tokens, body, 3) == mesh.expected(3)


async def test_a_peer_that_reads_nothing_is_dropped_and_holds_up_nobody(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        deaf, hop, body = await mesh.to_head(), await mesh.to_head(), mesh.body()
        tokens = await mesh.begin(hop, body)
        stranger = mesh.body()
        refused = encode_frame(ids_step(stranger, 0, PROMPT)) * 1000

        async def flood() -> None:
            try:
                while True:
                    await deaf.stream.send_all(refused)  # each step is answered with an error that nobody reads
            except TransportError:
                return

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            assert await mesh.generate(hop, tokens, body, 6) == mesh.expected(6)


async def test_a_ticket_pays_for_one_session_at_a_time_and_for_no_other_entry(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh, raw_peer(mesh.mesh.fabric, mesh.mesh.date(), "thief") as thief:
        hop = await mesh.to_head()
        paid = mesh.body(ticket=await mesh.ticket("paid"), request_id="paid")
        await mesh.begin(hop, paid)
        again = mesh.body(ticket=paid.ticket, request_id="paid")
        await hop.send(mesh.entry.open_frame(again))
        assert (await hop.error()).code == "not_authorized"
        stolen = await mesh.to_head(thief)
        await stolen.send(thief.open_frame(mesh.body(ticket=paid.ticket, request_id="paid")))
        assert (await stolen.error()).code == "not_authorized"
        await hop.send(mesh.entry.open_frame(mesh.body(ticket=b"none")))
        assert (await hop.error()).code == "malformed_message"


async def test_a_stage_that_is_not_the_previous_one_of_the_route_is_refused_and_blamed_for_its_rows(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh, raw_peer(mesh.mesh.fabric, mesh.mesh.date(), "middle") as middle:
        to_tail = await middle.connect(mesh.tail.peer_id, mesh.addresses_of(mesh.tail))
        honest = mesh.body()
        await to_tail.send(mesh.entry.open_frame(honest))
        assert (await to_tail.error()).code == "not_authorized"
        body = mesh.body(route=mesh.route(raw_at=1, raw=middle))
        await to_tail.send(mesh.entry.open_frame(body), rows_step(body, 0, bytes(64), row_bytes=64, traces=2))
        said = await to_tail.error()
        assert (said.code, said.fault_of) == ("invalid_step", middle.peer_id)
        tampered = bytearray(encode_frame(mesh.entry.open_frame(mesh.body(route=mesh.route(raw_at=1, raw=middle)))))
        frame = Frame(Kind.OPEN, SessionId(bytes(16)), 0, body=bytes(tampered[48:])[:-1] + b"\0")
        await to_tail.send(frame)
        said = await to_tail.error()
        assert said.fault_of == middle.peer_id
        await mesh.is_well()


async def test_what_an_entry_says_of_a_known_peers_address_is_not_believed(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        assert mesh.head.roles is not None
        lies = tuple(f"/ip4/10.99.0.{i}/tcp/1" for i in range(16))
        route = tuple(
            stage.model_copy(update={"addresses": lies}) if index == 1 else stage
            for index, stage in enumerate(mesh.route())
        )
        hop, body = await mesh.to_head(), mesh.body(route=route)
        tokens = await mesh.begin(hop, body)
        assert await mesh.generate(hop, tokens, body, 3) == mesh.expected(3)
        await mesh.is_well()


async def test_an_open_is_refused_while_no_stage_is_served(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        idle = mesh.mesh.add_node()
        await mesh.mesh.start_node(idle)
        hop = await mesh.entry.connect(idle.peer_id, mesh.addresses_of(idle))
        await hop.send(mesh.entry.open_frame(mesh.body()))
        assert (await hop.error()).code == "overloaded"


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": m.Sampling(logit_bias=((1 << 19, 1.0),))},
        {"sampling": m.Sampling(repetition_penalty=1.1), "history": b"\xff\xff\xff\x00"},
        {"sampling": m.Sampling(presence_penalty=1.0), "history": b"\xff" * 8, "history_answer": 2},
    ],
    ids=["bias", "prompt", "answer"],
)
async def test_tokens_out_of_the_vocabulary_are_refused_by_the_tail_and_no_fault_of_its_neighbour(
    tmp_path: Path, clock: VirtualClock, changes: dict[str, Any]
) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, body = await mesh.to_head(), mesh.body(**changes)
        await hop.send(mesh.entry.open_frame(body))
        said = stated(await hop.receive(Kind.ERROR))
        assert (said.code, said.fault_of) == ("invalid_request", mesh.entry.peer_id)
        assert "vocabulary" in said.reason
        await mesh.is_well()


async def test_a_tail_sends_logprobs_where_they_are_asked_for_and_its_receipts_run_over_ids_alone(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, body = await mesh.to_head(), mesh.body(output="logprobs", sampling=m.Sampling(num_top=2))
        tokens = await mesh.begin(hop, body)
        frame = await tokens.receive(Kind.TOKEN)
        scored = list(struct.iter_unpack("<If", frame.body))
        assert len(scored) == 3
        assert scored[0] == scored[1], "greedy: the likeliest one"
        assert scored[0][0] == mesh.expected(1)[0]
        assert 0.0 >= scored[1][1] >= scored[2][1]
        digest = mesh.token_digest(body, mesh.expected(1))
        await tokens.send(mesh.entry.receipt(body, mesh.tail.peer_id, frame.position, digest))
        await hop.send(ids_step(body, frame.position, mesh.expected(1), sample=True))
        again = await tokens.receive(Kind.TOKEN)
        assert int.from_bytes(again.body[:4], "little") == mesh.expected(2)[1], "the receipt was accepted"
        await hop.send(close_frame(body))
        await mesh.is_well()
