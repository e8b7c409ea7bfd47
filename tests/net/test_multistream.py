"""Settling the protocol of a stream: the same bytes as any libp2p, bounded whatever the peer sends."""

from __future__ import annotations

import contextlib

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import MalformedMessage, StreamReset, TessellaError, VersionMismatch
from tessella_p2p.net.multistream import MAX_ATTEMPTS, answer, encode_line, select
from tessella_p2p.net.pipe import open_pipe
from tests.net.networks import BOB

SERVED = {"/tessella/hop/1", "/tessella/hop/2", "/tessella/kad/1"}


async def settle(protocol: str) -> str | None:
    near, far = open_pipe(BOB.peer_id)
    outcome: str | None = None

    async def serve() -> None:
        nonlocal outcome
        outcome = await answer(far, SERVED)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        try:
            await select(near, protocol)
        finally:
            await near.aclose()
    return outcome


async def test_served_protocol_is_settled() -> None:
    assert await settle("/tessella/hop/1") == "/tessella/hop/1"


async def test_refusal_names_the_majors_that_are_served() -> None:
    near, far = open_pipe(BOB.peer_id)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer, far, SERVED)
        with pytest.raises(VersionMismatch, match=r"/tessella/hop/3; it serves /tessella/hop/1, /tessella/hop/2$"):
            await select(near, "/tessella/hop/3")
        await near.aclose()


async def test_the_bytes_are_the_specifications() -> None:
    near, far = open_pipe(BOB.peer_id)
    await far.send_all(b"\x13/multistream/1.0.0\n\x10/tessella/hop/1\n")
    await select(near, "/tessella/hop/1")
    assert bytes(await far.receive_some(100)) == b"\x13/multistream/1.0.0\n\x10/tessella/hop/1\n"
    assert encode_line("x" * 199)[:2] == b"\xc8\x01"


async def test_endless_asking_is_cut_off() -> None:
    near, far = open_pipe(BOB.peer_id)
    await near.send_all(encode_line("/multistream/1.0.0") + encode_line("/nobody/serves/this") * (MAX_ATTEMPTS + 1))
    with pytest.raises(MalformedMessage, match="none is served"):
        await answer(far, SERVED)


@pytest.mark.parametrize(
    "greeting", [b"\x00", b"\xff\xff\xff\xff\x01", b"\x05abcd\n", b"\x03abc", b"\x81\x20" + b"x" * 5000, b"\x02\xff\n"]
)
async def test_malformed_greeting_is_refused_by_both_sides(greeting: bytes) -> None:
    for asks in (True, False):
        near, far = open_pipe(BOB.peer_id)
        await near.send_all(greeting)
        await near.send_eof()
        with pytest.raises(MalformedMessage):
            await (select(far, "/tessella/hop/1") if asks else answer(far, SERVED))


async def test_end_of_the_stream_while_asking_is_a_reset() -> None:
    near, far = open_pipe(BOB.peer_id)
    await far.send_eof()
    with pytest.raises(StreamReset):
        await select(near, "/tessella/hop/1")


@given(st.binary(max_size=300))
def test_any_bytes_give_an_outcome_or_a_typed_error(sent: bytes) -> None:
    async def attempt() -> None:
        for asks in (True, False):
            near, far = open_pipe(BOB.peer_id)
            await near.send_all(sent)
            await near.send_eof()
            with contextlib.suppress(TessellaError):
                await (select(far, "/tessella/hop/1") if asks else answer(far, SERVED))

    trio.run(attempt)
