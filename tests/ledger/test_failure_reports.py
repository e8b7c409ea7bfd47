"""Failures are reported late, seldom, once a peer, and never where somebody waits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from tessella_p2p.base.errors import (
    CacheMiss,
    DialError,
    HopTimeout,
    InvalidStep,
    Overloaded,
    RemoteProtocolError,
    StaleEpoch,
    StreamReset,
    TessellaError,
    TooManyHopBodies,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_WAITING_REPORTS, REPORT_PERIOD_S
from tessella_p2p.ledger.client import OrchestratorClient
from tessella_p2p.ledger.failure_reports import FailureReports
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.keys import NodeKey


def peer(number: int) -> PeerId:
    return NodeKey(f"peer {number}".encode().ljust(32, b".")).peer_id


A, B = peer(1), peer(2)


class ListeningClient(OrchestratorClient):
    """An orchestrator's stand-in that writes down what it is told, or is out of reach."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.fails = False

    async def call(self, body: m.OrchestratorRequest, timeout_s: float = 10.0) -> m.OrchestratorAnswer:
        await trio.lowlevel.checkpoint()
        if self.fails:
            raise DialError("out of reach")
        assert isinstance(body, m.ReportFailure)
        self.told.append((body.peer_id, body.code))
        return m.Acknowledged()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@asynccontextmanager
async def reporting() -> AsyncIterator[tuple[FailureReports, ListeningClient]]:
    client = ListeningClient()
    reports = FailureReports(client)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reports.run)
        yield reports, client
        nursery.cancel_scope.cancel()


async def pass_time(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.Event().wait()


async def test_each_peer_is_reported_once_with_its_newest_code(clock: VirtualClock) -> None:
    async with reporting() as (reports, client):
        for _ in range(50):
            reports.note(A, StreamReset("gone"))
        reports.note(B, RemoteProtocolError("no"))
        reports.note(A, HopTimeout("slow"))
        await pass_time(REPORT_PERIOD_S / 2)
        assert not client.told
        await pass_time(REPORT_PERIOD_S)
        assert client.told == [(B, "remote_protocol_error"), (A, "hop_timeout")]
        reports.note(A, InvalidStep("again"))
        await pass_time(REPORT_PERIOD_S + 1)
        assert client.told[2:] == [(A, "invalid_step")]


@pytest.mark.parametrize("error", [TooManyHopBodies("full"), Overloaded("full"), CacheMiss("gone"), StaleEpoch("old")])
async def test_what_a_peer_refuses_is_no_failure(clock: VirtualClock, error: TessellaError) -> None:
    async with reporting() as (reports, client):
        reports.note(A, error)
        await pass_time(3 * REPORT_PERIOD_S)
        assert not client.told


async def test_so_many_peers_wait_and_no_more(clock: VirtualClock) -> None:
    async with reporting() as (reports, client):
        for number in range(10 * MAX_WAITING_REPORTS):
            reports.note(peer(number), StreamReset("gone"))
        await pass_time(REPORT_PERIOD_S + 1)
        assert len(client.told) == MAX_WAITING_REPORTS


async def test_an_orchestrator_that_is_out_of_reach_is_told_nothing_later(clock: VirtualClock) -> None:
    async with reporting() as (reports, client):
        client.fails = True
        reports.note(A, StreamReset("gone"))
        await pass_time(REPORT_PERIOD_S + 1)
        client.fails = False
        await pass_time(2 * REPORT_PERIOD_S)
        assert not client.told
        reports.note(B, StreamReset("gone"))
        await pass_time(REPORT_PERIOD_S + 1)
        assert client.told == [(B, "stream_reset")]
