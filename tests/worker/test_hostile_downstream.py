"""What a next stage, or an entry as the receiver of tokens, can do to a stage: end the session, and take the blame for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from tessella_p2p.base.ids import SessionId
from tessella_p2p.base.limits import CHECKPOINT_S, RECEIPT_PATIENCE_S
from tessella_p2p.ledger.evidence import ProofRefused
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.stages.work import MAX_STALE_RECEIPTS
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.frames import DType, Frame, Kind
from tests.worker.hostile_mesh import (
    PROMPT,
    HostileMesh,
    eventually,
    held,
    hostile_mesh,
    keyed,
    pass_time,
)
from tests.worker.raw_peer import RawPeer, RawStream, close_frame, damaged, error_frame, ids_step, raw_peer, rows_step


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


FIRST_DRAW = b"\xff" * 4


@dataclass
class Watched:
    """A session of the raw entry whose head is real and whose next stage is a raw peer, just after the prompt came through."""

    mesh: HostileMesh
    next_stage: RawPeer
    body: m.ChainOpen
    up: RawStream
    """Entry → head."""
    down: RawStream
    """Head → the raw stage."""
    rows: bytes
    """What the head sent, the mark of the first draw behind it."""

    def receipt(self, positions: int = len(PROMPT), digest: bytes | None = None) -> Frame:
        signed = self.mesh.digest(self.body, self.rows) if digest is None else digest
        return self.next_stage.receipt(self.body, self.mesh.head.peer_id, positions, signed)

    async def fails_with(self, code: str, fault_of: str | None = None) -> None:
        """The head reports ``code`` to the entry, and frees its KV."""
        said = await self.up.error()
        assert (said.code, said.fault_of) == (code, fault_of or self.next_stage.peer_id), said
        await eventually(lambda: held(self.mesh.head) == 0)


@asynccontextmanager
async def watched(folder: Path, clock: VirtualClock) -> AsyncIterator[Watched]:
    async with (
        hostile_mesh(folder, clock) as mesh,
        raw_peer(mesh.mesh.fabric, mesh.mesh.date(), "next") as next_stage,
    ):
        next_stage.serve(protocols.HOP)
        up, body = await mesh.to_head(), mesh.body(route=mesh.route(raw_at=1, raw=next_stage))
        await up.send(mesh.entry.open_frame(body), ids_step(body, 0, PROMPT, sample=True))
        down = await next_stage.inbound(protocols.HOP)
        assert (await down.receive()).kind is Kind.OPEN
        step = await down.receive()
        assert (step.kind, step.rows) == (Kind.STEP, len(PROMPT))
        yield Watched(mesh, next_stage, body, up, down, bytes(step.body) + FIRST_DRAW)
        await mesh.is_well()


async def test_a_stage_sends_rows_with_its_times_and_signs_nothing_for_the_entry(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with watched(tmp_path, clock) as seen:
        await seen.down.send(seen.receipt())
        await pass_time(3 * CHECKPOINT_S)
        assert held(seen.mesh.head) == 1
        await seen.up.send(close_frame(seen.body))
        assert (await seen.down.receive()).kind is Kind.CLOSE
        await eventually(lambda: held(seen.mesh.head) == 0)


@pytest.mark.parametrize("kind", [Kind.STEP, Kind.OPEN, Kind.CLOSE, Kind.TOKEN])
async def test_a_next_stage_cannot_pass_for_the_one_before(tmp_path: Path, clock: VirtualClock, kind: Kind) -> None:
    async with watched(tmp_path, clock) as seen:
        if kind is Kind.STEP:
            await seen.down.send(ids_step(seen.body, len(PROMPT), [5]))
        else:
            is_token = kind is Kind.TOKEN
            dtype = DType.U32 if is_token else DType.NONE
            session = SessionId(seen.body.session)
            await seen.down.send(Frame(kind, session, 0, rows=int(is_token), dtype=dtype, body=b"\0\0\0\0"))
        await seen.fails_with("malformed_message")


async def test_a_receipt_for_other_rows_drops_the_receiver_and_blames_it(tmp_path: Path, clock: VirtualClock) -> None:
    async with watched(tmp_path, clock) as seen:
        await seen.down.send(seen.receipt(digest=keyed(b"other rows")))
        await seen.fails_with("remote_protocol_error")


async def test_a_receipt_of_somebody_else_drops_the_receiver(tmp_path: Path, clock: VirtualClock) -> None:
    async with watched(tmp_path, clock) as seen:
        forged = seen.mesh.entry.receipt(
            seen.body, seen.mesh.head.peer_id, len(PROMPT), seen.mesh.digest(seen.body, seen.rows)
        )
        await seen.down.send(forged)
        await seen.fails_with("invalid_signature")


async def test_a_damaged_receipt_ends_the_session(tmp_path: Path, clock: VirtualClock) -> None:
    async with watched(tmp_path, clock) as seen:
        await seen.down.stream.send_all(damaged(seen.receipt()))
        await seen.fails_with("invalid_step")


async def test_a_receiver_that_gives_no_receipts_is_dropped_and_blamed(tmp_path: Path, clock: VirtualClock) -> None:
    async with watched(tmp_path, clock) as seen:
        began = trio.current_time()
        await seen.fails_with("remote_protocol_error")
        assert RECEIPT_PATIENCE_S <= trio.current_time() - began <= RECEIPT_PATIENCE_S + 2 * CHECKPOINT_S


async def test_a_flood_of_receipts_ends_the_session(tmp_path: Path, clock: VirtualClock) -> None:
    async with watched(tmp_path, clock) as seen:
        await seen.down.send(*[seen.receipt()] * (MAX_STALE_RECEIPTS + 2))
        await seen.fails_with("remote_protocol_error")


async def test_an_error_reaches_the_entry_with_its_code(tmp_path: Path, clock: VirtualClock) -> None:
    async with watched(tmp_path, clock) as seen:
        me, tail = seen.next_stage.peer_id, seen.mesh.tail.peer_id
        await seen.down.send(error_frame(seen.body, "cache_miss", me, tail))
        await seen.fails_with("cache_miss", fault_of=tail)


async def test_a_stage_cannot_blame_a_peer_outside_of_the_session(tmp_path: Path, clock: VirtualClock) -> None:
    async with watched(tmp_path, clock) as seen:
        stranger = seen.mesh.mesh.orchestrator_key.peer_id
        await seen.down.send(error_frame(seen.body, "hop_timeout", stranger, stranger))
        await seen.fails_with("hop_timeout")


@pytest.mark.parametrize("code", ["storage_error", "configuration_error", ProofRefused.code, "internal_error", "x"])
async def test_no_code_can_end_more_than_the_session(tmp_path: Path, clock: VirtualClock, code: str) -> None:
    async with watched(tmp_path, clock) as seen:
        await seen.down.send(error_frame(seen.body, code, seen.next_stage.peer_id, seen.next_stage.peer_id))
        await seen.fails_with("remote_protocol_error")


async def test_an_error_that_cannot_be_read_is_the_fault_of_its_sender(tmp_path: Path, clock: VirtualClock) -> None:
    async with watched(tmp_path, clock) as seen:
        await seen.down.send(Frame(Kind.ERROR, SessionId(seen.body.session), 0, body=b"\xff\xff"))
        await seen.fails_with("malformed_message")


async def test_a_lost_next_stage_is_told_to_the_entry(tmp_path: Path, clock: VirtualClock) -> None:
    async with watched(tmp_path, clock) as seen:
        seen.mesh.mesh.fabric.crash(seen.next_stage.peer_id)
        await seen.fails_with("stream_reset")


async def test_a_next_stage_that_reads_nothing_holds_up_no_other_neighbour(tmp_path: Path, clock: VirtualClock) -> None:
    async with watched(tmp_path, clock) as seen:
        mesh = seen.mesh
        deaf = mesh.body(route=seen.body.route, max_positions=2048)
        await seen.up.send(mesh.entry.open_frame(deaf))
        body = mesh.body()
        tokens = await mesh.begin(seen.up, body)

        async def flood() -> None:
            for start in range(0, 2048, 16):
                await seen.up.send(ids_step(deaf, start, [1] * 16))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            assert await mesh.generate(seen.up, tokens, body, 6) == mesh.expected(6)
        await seen.up.send(close_frame(deaf), close_frame(body), close_frame(seen.body))
        await eventually(lambda: mesh.held() == [0, 0, 0])


async def test_many_errors_and_receipts_for_sessions_that_are_over_change_nothing(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with watched(tmp_path, clock) as seen:
        await seen.up.send(close_frame(seen.body))
        await eventually(lambda: held(seen.mesh.head) == 0)
        me = seen.next_stage.peer_id
        await seen.down.send(*[error_frame(seen.body, "cache_miss", me, me), seen.receipt()] * 500)
        await pass_time(1.0)


# ---- the entry as a receiver of tokens ----


async def test_an_entry_that_does_not_accept_the_token_stream_is_at_fault(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh, raw_peer(mesh.mesh.fabric, mesh.mesh.date(), "mute") as mute:
        hop = await mesh.to_head(mute)
        body = mesh.body(entry_addresses=mute.network.addresses)
        await hop.send(mute.open_frame(body), ids_step(body, 0, PROMPT, sample=True))
        said = await hop.error()
        assert (said.code, said.fault_of) == ("version_mismatch", mute.peer_id)
        await eventually(lambda: mesh.held() == [0, 0, 0])


async def test_an_entry_that_signs_for_no_tokens_is_dropped(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, body = await mesh.to_head(), mesh.body()
        await mesh.begin(hop, body)
        said = await hop.error()
        assert (said.code, said.fault_of) == ("remote_protocol_error", mesh.entry.peer_id)
        await eventually(lambda: mesh.held() == [0, 0, 0])


async def test_a_prompt_that_takes_long_needs_no_receipt_before_its_first_token(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with hostile_mesh(tmp_path, clock, compute_s=2.0) as mesh:
        hop, body = await mesh.to_head(), mesh.body()
        prompt = list(range(20))
        await hop.send(mesh.entry.open_frame(body))
        for position, token in enumerate(prompt):
            await hop.send(ids_step(body, position, [token], sample=position == 19))
        tokens = await mesh.entry.inbound(protocols.TOKENS)
        began = trio.current_time()
        assert await mesh.generate(hop, tokens, body, 1) == mesh.expected(1, prompt)
        assert trio.current_time() - began > RECEIPT_PATIENCE_S + CHECKPOINT_S


async def test_an_entry_that_signs_for_other_tokens_is_dropped(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, body = await mesh.to_head(), mesh.body()
        tokens = await mesh.begin(hop, body)
        await tokens.receive(Kind.TOKEN)
        lie = mesh.entry.receipt(body, mesh.tail.peer_id, len(PROMPT), mesh.token_digest(body, [1023]))
        await tokens.send(lie)
        said = await hop.error()
        assert (said.code, said.fault_of) == ("remote_protocol_error", mesh.entry.peer_id)


async def test_an_entry_cannot_feed_the_tail_past_the_stages_before(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop, body = await mesh.to_head(), mesh.body()
        tokens = await mesh.begin(hop, body)
        await tokens.receive(Kind.TOKEN)
        await tokens.send(rows_step(body, len(PROMPT), bytes(32), traces=2, sample=True))
        said = await hop.error()
        assert (said.code, said.fault_of) == ("malformed_message", mesh.entry.peer_id)
        await eventually(lambda: mesh.held() == [0, 0, 0])


async def test_a_tail_proves_what_the_entry_signed_for_at_the_end(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop = await mesh.to_head()
        body = mesh.body(ticket=await mesh.ticket("paid"), request_id="paid")
        tokens = await mesh.begin(hop, body)
        found = await mesh.generate(hop, tokens, body, 4)
        await hop.send(close_frame(body))
        await tokens.receive(Kind.CLOSE)
        positions = len(PROMPT) + 3
        await tokens.send(mesh.entry.receipt(body, mesh.tail.peer_id, positions, mesh.token_digest(body, found)))

        def credits_of_each() -> list[int]:
            return [mesh.mesh.store.account(node.peer_id).micro_credits for node in mesh.stages]

        await eventually(lambda: credits_of_each() == [4 * positions * 1000] * 3)
        assert mesh.mesh.store.total() == 0


async def test_a_stage_that_leaves_says_so_and_is_paid_for_what_it_did(tmp_path: Path, clock: VirtualClock) -> None:
    async with hostile_mesh(tmp_path, clock) as mesh:
        hop = await mesh.to_head()
        body = mesh.body(ticket=await mesh.ticket("paid"), request_id="paid")
        tokens = await mesh.begin(hop, body)
        await mesh.generate(hop, tokens, body, 3)
        leaving = mesh.middle
        mesh.mesh.stop_node(leaving)
        said = await hop.error()
        assert (said.code, said.fault_of) == ("overloaded", leaving.peer_id)
        await eventually(lambda: [held(mesh.head), held(mesh.tail)] == [0, 0])
        await leaving.down.wait()
        await mesh.mesh.start_node(leaving)
        paid = 4 * (len(PROMPT) + 2) * 1000
        await eventually(lambda: mesh.mesh.store.account(leaving.peer_id).micro_credits == paid)
