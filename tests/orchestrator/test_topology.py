"""The topology stream: what a subscriber is told, when, and what becomes of one that breaks the rules."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from tessella_p2p.base.errors import (
    HopTimeout,
    InvalidSignature,
    NotAuthorized,
    Overloaded,
    RemoteProtocolError,
    Replayed,
    StreamReset,
    TessellaError,
    UnknownModel,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    HEARTBEAT_S,
    MAX_ENVELOPE_BYTES,
    REGISTRATION_GRACE_S,
    TOPOLOGY_KEEPALIVE_S,
    TOPOLOGY_PAUSE_S,
    TOPOLOGY_REFRESH_S,
    TOPOLOGY_SEND_S,
    TOPOLOGY_SILENCE_S,
)
from tessella_p2p.ledger.client import OrchestratorClient
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.memory import MemoryNetwork
from tessella_p2p.net.network import Stream
from tessella_p2p.orchestrator.news import Listing, News
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import open_envelope, seal
from tests.orchestrator.paper_workers import (
    NOW,
    ORCHESTRATOR,
    ROOT,
    key_of,
    lease_of,
    stage_record,
)
from tests.orchestrator.test_orchestrator_service import Bench, run_bench, serve_stage

SUBSCRIBE = m.Subscribe(manifest_root=ROOT)


class Subscriber:
    """A client that follows, and what it was told."""

    def __init__(self, made: Bench, client: OrchestratorClient) -> None:
        self.made = made
        self.client = client
        self.told: list[tuple[float, m.Stages | m.Acknowledged]] = []
        self.ended: TessellaError | None = None
        self.scope = trio.CancelScope()

    async def follow(self, request: m.Subscribe = SUBSCRIBE) -> None:
        with self.scope:
            try:
                await self.client.follow(request, lambda body: self.told.append((trio.current_time(), body)))
            except TessellaError as error:
                self.ended = error

    @property
    def lists(self) -> list[m.Stages]:
        return [body for _, body in self.told if isinstance(body, m.Stages)]


async def subscriber(made: Bench, name: str) -> Subscriber:
    made_one = Subscriber(made, await made.client(name))
    made.nursery.start_soon(made_one.follow)
    await pass_time(0.5)
    return made_one


async def pass_time(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.Event().wait()


async def announce(made: Bench, name: str, client: OrchestratorClient, lease: bytes, state: str = "ready") -> None:
    sequence = made.clock.unix_ms()
    record = stage_record(key_of(name), lease, now_ms=made.clock.unix_ms(), sequence=sequence)
    body = {"serial": lease_of(lease).serial, "queue_depth": 0, "state": state, "record": record}
    await client.call(m.Announce.model_validate(body))


def signers(stages: m.Stages) -> set[PeerId]:
    return {open_envelope(raw, m.STAGE_RECORD, now_ms=None).signer for raw in stages.records}


def test_a_subscriber_has_the_whole_list_at_once_and_each_change_within_a_second(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        await serve_stage(made, "first")
        reader = await subscriber(made, "reader")
        assert [signers(stages) for stages in reader.lists] == [{key_of("first").peer_id}]
        await pass_time(2.0)
        await serve_stage(made, "second")
        joined_at = trio.current_time()
        await pass_time(TOPOLOGY_PAUSE_S + 0.1)
        at, newest = reader.told[-1]
        assert isinstance(newest, m.Stages)
        assert at - joined_at < TOPOLOGY_PAUSE_S
        assert signers(newest) == {key_of("second").peer_id}, "what was told before is not told again"

    run_bench(scenario, tmp_path)


def test_a_worker_that_leaves_changes_the_health_that_is_told(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        client, _ = await serve_stage(made, "only")
        reader = await subscriber(made, "reader")
        assert reader.lists[-1].health == "healthy"
        await pass_time(2.0)
        await client.ask(m.Deregister(), m.Acknowledged)
        await pass_time(0.5)
        assert reader.lists[-1] == m.Stages(records=(), health="incomplete", missing=((0, 30),))

    run_bench(scenario, tmp_path)


def test_changes_in_quick_succession_go_out_together(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        reader = await subscriber(made, "reader")
        await pass_time(2.0)
        for number in range(20):
            await serve_stage(made, f"worker {number}")
        await pass_time(2 * TOPOLOGY_PAUSE_S)
        assert 2 <= len(reader.lists) <= 5
        told = set().union(*map(signers, reader.lists))
        assert told == {key_of(f"worker {number}").peer_id for number in range(20)}
        gaps = [later - earlier for (earlier, _), (later, _) in pairwise(reader.told)]
        assert min(gaps) >= TOPOLOGY_PAUSE_S - 0.01

    run_bench(scenario, tmp_path)


def test_a_quiet_stream_says_so_and_brings_the_whole_list_again_before_records_run_out(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        client, lease = await serve_stage(made, "worker")
        reader = await subscriber(made, "reader")
        for _ in range(12):
            await announce(made, "worker", client, lease)
            await pass_time(HEARTBEAT_S)
        gaps = [later - earlier for (earlier, _), (later, _) in pairwise(reader.told)]
        assert min(gaps) > 0.0
        assert max(gaps) <= TOPOLOGY_KEEPALIVE_S + TOPOLOGY_PAUSE_S + 0.1
        whole = [at for at, body in reader.told if isinstance(body, m.Stages) and body.records]
        assert len(whole) >= 3
        assert all(later - earlier <= TOPOLOGY_REFRESH_S + TOPOLOGY_KEEPALIVE_S for earlier, later in pairwise(whole))
        records = {raw for stages in reader.lists for raw in stages.records}
        assert len(records) == len(whole), "each time the newest record"

    run_bench(scenario, tmp_path)


def test_a_worker_that_falls_silent_is_news(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        await serve_stage(made, "worker")
        reader = await subscriber(made, "reader")
        await pass_time(REGISTRATION_GRACE_S + 2 * HEARTBEAT_S)
        assert reader.lists[-1].health == "incomplete"

    run_bench(scenario, tmp_path)


def test_a_peer_has_one_stream_per_model_and_the_newest_counts(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        old = await subscriber(made, "reader")
        new = await subscriber(made, "reader")
        await pass_time(1.0)
        assert isinstance(old.ended, StreamReset)
        assert new.ended is None
        assert made.orchestrator.topology.num_streams == 1
        new.scope.cancel()
        await pass_time(1.0)
        assert made.orchestrator.topology.num_streams == 0

    run_bench(scenario, tmp_path)


def test_beyond_the_bound_a_newcomer_is_refused_and_can_ask_for_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(made: Bench) -> None:
        monkeypatch.setattr(made.orchestrator.topology, "max_streams", 1)
        first = await subscriber(made, "first")
        second = await subscriber(made, "second")
        assert isinstance(second.ended, Overloaded)
        await second.client.ask(m.ListStages(manifest_root=ROOT), m.Stages)
        again = await subscriber(made, "first")
        assert again.ended is None
        assert first.ended is not None

    run_bench(scenario, tmp_path)


def test_unknown_models_and_strangers_of_a_private_mesh_are_refused(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        for name, root, error in (("friend", bytes(32), UnknownModel), ("stranger", ROOT, NotAuthorized)):
            client = await made.client(name)
            with pytest.raises(error):
                await client.follow(m.Subscribe(manifest_root=root), lambda _: None)
        assert made.orchestrator.topology.num_streams == 0
        assert made.orchestrator.outcomes["subscribe:worker_not_authorized"] == 1

    run_bench(scenario, tmp_path, allow=frozenset({key_of("friend").peer_id}))


# ---- hostile subscribers ----


async def raw_stream(made: Bench, name: str) -> Stream:
    network = await made.network_of(key_of(name))
    network.add_addresses(ORCHESTRATOR.peer_id, ["/ip4/10.0.0.1/tcp/9080"])
    return await network.open_stream(ORCHESTRATOR.peer_id, protocols.TOPOLOGY)


def sealed(made: Bench, name: str, body: m.SignedRequest = SUBSCRIBE, **changes: Any) -> bytes:
    fields: dict[str, Any] = {"sequence": 1, "now_ms": made.clock.unix_ms(), "audience": ORCHESTRATOR.peer_id}
    return seal(key_of(name), m.REQUEST, m.RequestBody(body=body), **(fields | changes))


async def answer_to(made: Bench, name: str, message: bytes) -> m.OrchestratorAnswer:
    stream = await raw_stream(made, name)
    await send_message(stream, message)
    raw = await receive_message(stream, MAX_ENVELOPE_BYTES)
    await stream.reset()
    assert raw is not None
    envelope = open_envelope(raw, m.ANSWER, now_ms=made.clock.unix_ms(), audience=key_of(name).peer_id)
    return envelope.message(m.AnswerBody).body


BAD_FIRST_MESSAGES: dict[str, tuple[Callable[[Bench], bytes], str]] = {
    "no envelope": (lambda made: b"\x00" * 50, "malformed_message"),
    "another's": (lambda made: sealed(made, "somebody else"), "invalid_signature"),
    "for another orchestrator": (
        lambda made: sealed(made, "reader", audience=key_of("other").peer_id),
        "invalid_signature",
    ),
    "expired": (lambda made: sealed(made, "reader", now_ms=NOW - 600_000), "expired"),
    "of the future": (lambda made: sealed(made, "reader", now_ms=NOW + 600_000), "expired"),
    "another request": (lambda made: sealed(made, "reader", m.ReadCredits()), "invalid_request"),
}


@pytest.mark.parametrize("case", BAD_FIRST_MESSAGES)
def test_a_first_message_that_is_no_subscription_is_refused_with_its_code(tmp_path: Path, case: str) -> None:
    async def scenario(made: Bench) -> None:
        message, code = BAD_FIRST_MESSAGES[case]
        answer = await answer_to(made, "reader", message(made))
        assert isinstance(answer, m.Refused)
        assert answer.code == code
        assert made.orchestrator.topology.num_streams == 0

    run_bench(scenario, tmp_path)


def test_a_replayed_subscription_is_refused(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        message = sealed(made, "reader")
        assert isinstance(await answer_to(made, "reader", message), m.Stages)
        again = await answer_to(made, "reader", message)
        assert isinstance(again, m.Refused)
        assert again.code == Replayed.code

    run_bench(scenario, tmp_path)


def test_a_subscriber_that_sends_more_ends_its_stream(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        stream = await raw_stream(made, "reader")
        await send_message(stream, sealed(made, "reader"))
        await receive_message(stream, MAX_ENVELOPE_BYTES)
        assert made.orchestrator.topology.num_streams == 1
        await send_message(stream, b"more")
        await pass_time(1.0)
        assert made.orchestrator.topology.num_streams == 0

    run_bench(scenario, tmp_path)


def test_a_subscriber_that_reads_nothing_is_let_go_when_its_window_is_full(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        workers = [await serve_stage(made, f"worker {number}") for number in range(120)]
        stream = await raw_stream(made, "deaf")
        await send_message(stream, sealed(made, "deaf"))
        until = trio.current_time() + 600.0
        while made.orchestrator.topology.num_streams or trio.current_time() < TOPOLOGY_SEND_S:
            for number, (client, lease) in enumerate(workers):
                await announce(made, f"worker {number}", client, lease)
            await pass_time(HEARTBEAT_S)
            assert trio.current_time() < until
        await stream.reset()

    run_bench(scenario, tmp_path)


def test_a_subscriber_that_says_nothing_holds_no_place(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        await raw_stream(made, "silent")
        await pass_time(60.0)
        assert made.orchestrator.topology.num_streams == 0

    run_bench(scenario, tmp_path)


class SlowToEnd:
    """A subscriber's stream whose end takes a while: what is being sent is not cut."""

    def __init__(self, message: bytes) -> None:
        self.peer = key_of("reader").peer_id
        self.left = bytearray(len(message).to_bytes(4, "big") + message)
        self.released = trio.Event()

    async def receive_some(self, max_bytes: int) -> bytes:
        if not self.left:
            await trio.sleep_forever()
        part = bytes(self.left[:max_bytes])
        del self.left[:max_bytes]
        return part

    async def send_all(self, data: bytes) -> None:
        with trio.CancelScope(shield=True):
            await self.released.wait()


def test_a_stream_that_was_replaced_may_end_after_the_one_in_its_place(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        serve = made.orchestrator.topology.serve
        old = SlowToEnd(sealed(made, "reader"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, cast(Stream, old))
            await pass_time(0.1)
            new = await raw_stream(made, "reader")
            await send_message(new, sealed(made, "reader", sequence=2))
            await pass_time(0.5)
            await new.reset()
            await pass_time(0.5)
            assert made.orchestrator.topology.num_streams == 0
            old.released.set()

    run_bench(scenario, tmp_path)


def test_a_model_that_is_not_served_any_more_ends_its_streams_in_order(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        reader = await subscriber(made, "reader")
        assert reader.lists
        del made.orchestrator.catalogue._by_root[ROOT]
        await pass_time(TOPOLOGY_REFRESH_S + 5.0)
        assert made.orchestrator.topology.num_streams == 0
        assert isinstance(reader.ended, StreamReset)
        network = made.orchestrator._context.network
        assert isinstance(network, MemoryNetwork)
        assert network.handler_failures == 0

    run_bench(scenario, tmp_path)


# ---- what a subscriber believes ----


async def false_orchestrator(
    made: Bench, say: Callable[[Stream, int], list[bytes]], *, stays: bool = True
) -> OrchestratorClient:
    """A client of a peer that answers a subscription with whatever ``say`` gives."""
    network = made.orchestrator._context.network

    async def serve(stream: Stream) -> None:
        raw = await receive_message(stream, MAX_ENVELOPE_BYTES)
        assert raw is not None
        sequence = open_envelope(raw, m.REQUEST, now_ms=None, audience=ORCHESTRATOR.peer_id).sequence
        for message in say(stream, sequence):
            await send_message(stream, message)
        if stays:
            await trio.sleep_forever()

    network.serve(protocols.TOPOLOGY, serve)
    return await made.client("reader")


def told(made: Bench, stream: Stream, to: int, sequence: int, **changes: Any) -> bytes:
    body = changes.pop("body", m.Stages(records=(), health="incomplete"))
    key = changes.pop("key", ORCHESTRATOR)
    fields: dict[str, Any] = {"now_ms": made.clock.unix_ms(), "audience": stream.peer}
    return seal(key, m.ANSWER, m.AnswerBody(to=to, body=body), sequence=sequence, **(fields | changes))


LIES: dict[str, tuple[Callable[[Bench, Stream, int], list[bytes]], type[TessellaError]]] = {
    "to another request": (lambda made, stream, to: [told(made, stream, to + 1, 1)], InvalidSignature),
    "of another signer": (lambda made, stream, to: [told(made, stream, to, 1, key=key_of("x"))], InvalidSignature),
    "to another peer": (
        lambda made, stream, to: [told(made, stream, to, 1, audience=key_of("x").peer_id)],
        InvalidSignature,
    ),
    "told again": (lambda made, stream, to: [told(made, stream, to, 7)] * 2, Replayed),
    "older": (lambda made, stream, to: [told(made, stream, to, 7), told(made, stream, to, 6)], Replayed),
    "another kind": (
        lambda made, stream, to: [
            told(made, stream, to, 1, body=m.Credits(micro_credits=0, tier="VIP", settled_proofs=0))
        ],
        RemoteProtocolError,
    ),
    "no message": (lambda made, stream, to: [b"\xff" * 20], RemoteProtocolError),
}


@pytest.mark.parametrize("case", LIES)
def test_a_stream_that_breaks_the_rules_ends_with_a_typed_error(tmp_path: Path, case: str) -> None:
    async def scenario(made: Bench) -> None:
        say, error = LIES[case]
        client = await false_orchestrator(made, lambda stream, to: say(made, stream, to))
        with pytest.raises(error):
            await client.follow(SUBSCRIBE, lambda _: None)

    run_bench(scenario, tmp_path)


def test_a_stream_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        client = await false_orchestrator(made, lambda stream, to: [told(made, stream, to, 1)])
        began = trio.current_time()
        with pytest.raises(HopTimeout):
            await client.follow(SUBSCRIBE, lambda _: None)
        assert TOPOLOGY_SILENCE_S <= trio.current_time() - began < TOPOLOGY_SILENCE_S + 1.0

    run_bench(scenario, tmp_path)


def test_a_stream_that_is_closed_in_order_is_the_end_of_it_too(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        client = await false_orchestrator(made, lambda stream, to: [told(made, stream, to, 1)], stays=False)
        heard: list[object] = []
        with pytest.raises(StreamReset):
            await client.follow(SUBSCRIBE, heard.append)
        assert len(heard) == 1

    run_bench(scenario, tmp_path)


# ---- news ----


def listed(*records: bytes) -> Listing:
    return Listing.of(m.Stages(records=records, health="healthy"))


def leased(name: str, serial: int = 1) -> bytes:
    lease = m.Lease(
        serial=serial, peer_id=key_of(name).peer_id, model_id="toy", manifest_root=ROOT, recipe="f32", layers=(0, 30)
    )
    return seal(ORCHESTRATOR, m.LEASE, lease, sequence=serial, now_ms=NOW, ttl_ms=600_000)


def test_a_heartbeat_alone_is_no_news_and_another_lease_state_or_address_is() -> None:
    news, key = News(), key_of("worker")
    lease, renewed = leased("worker"), leased("worker", 2)
    first = stage_record(key, lease, sequence=1)
    assert news.since(listed(first)).records == (first,)
    assert news.since(listed(stage_record(key, lease, sequence=2, queue_depth=9))).records == ()
    for sequence, changes in enumerate(
        ({"state": "saturated"}, {"state": "ready"}, {"addresses": ("/ip4/10.0.0.9/tcp/1",)}), start=3
    ):
        record = stage_record(key, lease, sequence=sequence, **changes)  # type: ignore[arg-type]
        assert news.since(listed(record)).records == (record,)
    record = stage_record(key, renewed, sequence=9)
    assert news.since(listed(record)).records == (record,)


def test_who_comes_back_is_news() -> None:
    news = News()
    record = stage_record(key_of("worker"), leased("worker"), sequence=1)
    assert news.since(listed(record)).records == (record,)
    assert news.since(listed()).records == ()
    assert news.since(listed(record)).records == (record,)
