"""How often one peer may ask: honest nodes never notice, a flood is refused before it costs anything, and nobody pays for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import InvalidSignature, Overloaded, Replayed
from tessella_p2p.base.limits import (
    HEARTBEAT_S,
    HTTP_VERIFICATION_BURST,
    MAX_PROOFS_PER_BATCH,
    MAX_SETTLING_REQUESTS,
    PEER_MEMBERSHIP_BURST,
    PEER_PROOF_BURST,
    PEER_PROOFS_PER_S,
    PEER_REQUEST_BURST,
)
from tessella_p2p.dht.rate_limit import RateLimit
from tessella_p2p.orchestrator.rates import RequestRates
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import open_envelope, seal
from tests.orchestrator.paper_workers import ORCHESTRATOR, key_of, register
from tests.orchestrator.test_orchestrator_service import Bench, run_bench

PEER, OTHER = key_of("worker").peer_id, key_of("another worker").peer_id
DAY_S = 24 * 3600
BATCH = m.WorkDone(proofs=(b"proof",) * MAX_PROOFS_PER_BATCH)
ANNOUNCE = m.Announce.model_construct(kind="announce")
"""Its content is not looked at here."""


def refused(call: Callable[[], None]) -> bool:
    try:
        call()
    except Overloaded:
        return True
    return False


# ---- The buckets ----


def test_a_day_of_an_honest_worker_is_within_its_rates() -> None:
    """Heartbeats, and a full batch of proofs every second."""
    rates = RequestRates()
    for second in range(DAY_S):
        if second % int(HEARTBEAT_S) == 0:
            rates.check_peer(PEER, second)
            rates.check_content(PEER, ANNOUNCE, second)
        rates.check_peer(PEER, second)
        rates.check_content(PEER, BATCH, second)


def test_what_an_outage_left_is_uploaded_in_one_go_and_then_at_the_rate() -> None:
    rates = RequestRates()
    for _ in range(PEER_PROOF_BURST // MAX_PROOFS_PER_BATCH):
        rates.check_content(PEER, BATCH, 0.0)
    assert refused(lambda: rates.check_content(PEER, BATCH, 0.0))
    assert refused(lambda: rates.check_content(PEER, BATCH, 0.5 * MAX_PROOFS_PER_BATCH / PEER_PROOFS_PER_S))
    rates.check_content(PEER, BATCH, MAX_PROOFS_PER_BATCH / PEER_PROOFS_PER_S)
    rates.check_content(OTHER, BATCH, 0.0)  # another one has its own


def test_registrations_beyond_the_burst_are_refused_and_proofs_are_not() -> None:
    rates = RequestRates()
    for _ in range(PEER_MEMBERSHIP_BURST):
        rates.check_content(PEER, ANNOUNCE, 0.0)
    assert refused(lambda: rates.check_content(PEER, ANNOUNCE, 0.0))
    rates.check_content(PEER, BATCH, 0.0)
    rates.check_content(OTHER, ANNOUNCE, 0.0)
    rates.check_content(PEER, ANNOUNCE, 1.0)


@given(
    asked=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 64)), max_size=60),
    per_s=st.integers(1, 100),
    burst=st.integers(1, 100),
)
def test_no_more_passes_than_the_burst_and_what_came_back_since(
    asked: list[tuple[int, int]], per_s: int, burst: int
) -> None:
    limit: RateLimit[str] = RateLimit(per_s, burst)
    now = passed = 0
    for wait, cost in asked:
        now += wait
        before = passed
        passed += cost if limit.allows("who", now, cost) else 0
        assert passed - before in (0, cost), "all of it, or nothing"
        assert passed <= burst + per_s * now


# ---- At the door ----


def sealed(made: Bench, number: int, body: m.OrchestratorRequest | None = None) -> bytes:
    """Request ``number`` of the worker; by default for its credits."""
    return seal(
        key_of("worker"),
        m.REQUEST,
        m.RequestBody(body=body or m.ReadCredits()),
        sequence=1 + number,
        now_ms=made.clock.unix_ms(),
        audience=ORCHESTRATOR.peer_id,
    )


async def answered(made: Bench, raw: bytes) -> m.OrchestratorAnswer:
    """What the worker is answered, in no time: nothing comes back into its buckets meanwhile."""
    answer = await made.orchestrator.answer(PEER, raw)
    return open_envelope(answer, m.ANSWER, now_ms=None, audience=PEER).message(m.AnswerBody).body


def test_a_flood_over_a_stream_costs_no_verification_and_nobody_else(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        flood = made.request("worker", audience=PEER)  # to somebody else: refused as soon as it is verified
        for _ in range(PEER_REQUEST_BURST):
            await made.orchestrator.answer(PEER, flood)
        verified = made.orchestrator.outcomes["signatures_verified"]
        for _ in range(20):
            await made.orchestrator.answer(PEER, flood)
        assert made.orchestrator.outcomes["signatures_verified"] == verified
        answer = await answered(made, sealed(made, 1))
        assert isinstance(answer, m.Refused)
        assert answer.code == "overloaded"
        assert isinstance(await made.raw("another worker", made.request("another worker")), m.Credits)
        await trio.sleep(1.0)
        assert isinstance(await made.raw("worker", made.request("worker", 2)), m.Credits)

    run_bench(scenario, tmp_path)


def test_registering_again_and_again_is_refused_before_it_is_written(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        for number in range(PEER_MEMBERSHIP_BURST):
            assert isinstance(await answered(made, sealed(made, number, register())), m.Assigned)
        before = made.store.serial_floor(), made.store.assignments()
        answer = await answered(made, sealed(made, 1000, register()))
        assert isinstance(answer, m.Refused)
        assert answer.code == "overloaded"
        assert (made.store.serial_floor(), made.store.assignments()) == before
        assert isinstance(await answered(made, sealed(made, 1001)), m.Credits)
        await (await made.client("another worker")).ask(register(), m.Assigned)

    run_bench(scenario, tmp_path)


def test_over_http_what_somebody_shows_again_is_not_counted_as_its_signers(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        one = sealed(made, 0)
        await made.orchestrator.handle(one, None)
        for _ in range(PEER_REQUEST_BURST + 1):
            with pytest.raises(Replayed):
                await made.orchestrator.handle(one, None)
        assert isinstance(await made.orchestrator.handle(sealed(made, 1), None), m.Credits)

    run_bench(scenario, tmp_path)


def test_over_http_all_verifications_together_are_bounded_and_streams_go_on(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        forged = sealed(made, 0)[:-1] + b"\0"
        counts = made.orchestrator.outcomes
        for _ in range(HTTP_VERIFICATION_BURST + 10):
            with pytest.raises((InvalidSignature, Overloaded)):
                await made.orchestrator.handle(forged, None)
        assert counts["signatures_verified"] == HTTP_VERIFICATION_BURST
        with pytest.raises(Overloaded):
            await made.orchestrator.handle(sealed(made, 1), None)
        assert isinstance(await made.raw("worker", made.request("worker", 9)), m.Credits)
        await trio.sleep(1.0)
        assert isinstance(await made.orchestrator.handle(sealed(made, 2), None), m.Credits)

    run_bench(scenario, tmp_path)


def test_so_many_requests_have_their_proofs_verified_at_a_time(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        store, go = made.store, trio.Event()

        async def held_up(work: Callable[[], Any]) -> Any:
            await go.wait()
            return work()

        settling = made.orchestrator.settling
        settling._context = replace(settling._context, run_blocking=held_up)
        answers: list[m.OrchestratorAnswer] = []

        async def upload() -> None:
            answers.append(await settling._settle(PEER, m.WorkDone(proofs=(b"junk",))))

        async with trio.open_nursery() as nursery:
            for _ in range(MAX_SETTLING_REQUESTS):
                nursery.start_soon(upload)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(Overloaded):
                await settling._settle(OTHER, m.WorkDone(proofs=(b"junk",)))
            go.set()
        assert len(answers) == MAX_SETTLING_REQUESTS
        assert isinstance(await settling._settle(OTHER, m.WorkDone(proofs=(b"junk",))), m.WorkSettled)
        assert store.head().sequence == 0

    run_bench(scenario, tmp_path)
