"""Says when a change in ``net/libp2p_patches.py`` may go: each test fails once the library no longer has the fault."""

from __future__ import annotations

import errno
import importlib.metadata
import inspect
import logging
import os

import pytest
import trio
from libp2p.host import basic_host
from libp2p.io.utils import read_exactly
from libp2p.network import swarm
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream
from libp2p.transport.tcp import tcp

from tessella_p2p.base.limits import MAX_HALF_OPEN, MAX_HALF_OPEN_PER_ADDRESS
from tessella_p2p.net.libp2p_patches import LIBP2P_VERSION, HalfOpen, build_swarm, describe, quiet_libp2p
from tests.net.networks import ALICE


def test_the_installed_library_is_the_one_that_was_read() -> None:
    assert importlib.metadata.version("libp2p") == LIBP2P_VERSION


def test_every_dial_would_wait_for_happy_eyeballs() -> None:
    assert "move_on_after(_HAPPY_EYEBALLS_DELAY)" in inspect.getsource(swarm.Swarm.dial_peer)
    build_swarm(ALICE, fast=True)
    assert swarm._HAPPY_EYEBALLS_DELAY == 0


def test_inbound_slots_would_be_held_until_the_swarm_ends() -> None:
    assert "await self.manager.wait_finished()" in inspect.getsource(swarm.Swarm._do_handle_inbound_connection)


def test_the_library_builds_its_own_muxer_whatever_is_registered() -> None:
    assert "yamux_conn = Yamux(" in inspect.getsource(MuxerMultistream.new_conn)


def test_an_exception_in_a_handler_would_end_the_host() -> None:
    source = inspect.getsource(basic_host.BasicHost._swarm_stream_handler)
    assert source.rstrip().endswith("await handler(net_stream)")
    assert "nursery.start_soon(self._handle_muxed_stream, stream)" in inspect.getsource(SwarmConn._handle_new_streams)


def test_the_stock_muxer_only_warns_when_its_window_is_overrun() -> None:
    assert "exceeded" in inspect.getsource(Yamux.handle_incoming)
    assert "Timed out waiting for window update after 5 seconds" in inspect.getsource(YamuxStream.write)


def test_the_library_shares_ports_between_processes() -> None:
    assert "SO_REUSEPORT" in inspect.getsource(tcp._set_reuse_flags)


def test_connections_would_be_closed_one_after_the_other() -> None:
    assert "await conn.close()" in inspect.getsource(swarm.Swarm.close)
    assert "await trio.sleep(0.1)" in inspect.getsource(SwarmConn._cleanup)


async def test_exact_reads_of_the_library_give_up_after_a_hundred_pieces() -> None:
    class Dribble:
        async def read(self, n: int | None = None) -> bytes:
            await trio.lowlevel.checkpoint()
            return b"x"

    with pytest.raises(Exception, match="expected 200 bytes"):
        await read_exactly(Dribble(), 200)  # type: ignore[arg-type]


async def test_the_swarm_dials_nobody_by_itself() -> None:
    assert "int((low_watermark + high_watermark) / 2)" in inspect.getsource(AutoConnector.maybe_connect)
    ours = build_swarm(ALICE, fast=True)
    assert type(ours.auto_connector).maybe_connect is not AutoConnector.maybe_connect
    assert isinstance(ours.connection_config, ConnectionConfig)


async def test_the_oldest_silent_socket_gives_way_first_among_its_own_address() -> None:
    half_open = HalfOpen()
    cancelled: list[str] = []

    async def silent(name: str, address: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with half_open.admit(address) as scope:
            task_status.started()
            await trio.sleep_forever()
        if scope.cancelled_caught:
            cancelled.append(name)

    async with trio.open_nursery() as nursery:
        await nursery.start(silent, "other", "198.51.100.1")
        for number in range(MAX_HALF_OPEN_PER_ADDRESS):
            await nursery.start(silent, str(number), "198.51.100.2")
        await trio.testing.wait_all_tasks_blocked()
        assert cancelled == []
        await nursery.start(silent, "one too many", "198.51.100.2")
        await trio.testing.wait_all_tasks_blocked()
        assert cancelled == ["0"]
        for number in range(MAX_HALF_OPEN - len(half_open)):
            await nursery.start(silent, "filler", f"203.0.113.{number}")
        await nursery.start(silent, "newcomer", "192.0.2.1")
        await trio.testing.wait_all_tasks_blocked()
        assert cancelled == ["0", "other"]
        assert len(half_open) == MAX_HALF_OPEN
        nursery.cancel_scope.cancel()
    assert len(half_open) == 0


def test_the_librarys_records_below_error_are_dropped() -> None:
    quiet_libp2p()
    assert not logging.getLogger("libp2p.stream_muxer.yamux.yamux").isEnabledFor(logging.WARNING)


def test_describe_names_the_cause() -> None:
    error = SwarmException("dial failed")
    error.__cause__ = OSError("connection refused")
    assert describe(error) == "dial failed: connection refused"


def test_describe_says_what_the_system_said_and_no_more() -> None:
    error = SwarmException("fail to open connection to peer 12D3KooWpeer")
    error.__cause__ = OSError("all attempts to connect failed")
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Error connecting to ('127.0.0.1', 9): Connection refused")
    error.__cause__.__cause__ = ExceptionGroup("all attempts failed", [refused])
    assert describe(error) == os.strerror(errno.ECONNREFUSED)


def test_describe_names_another_peer_and_ends_at_a_circle_of_causes() -> None:
    error = SwarmException("failed to upgrade security for peer 12D3KooWpeer")
    error.__cause__ = PeerIDMismatchesPubkey("peer id does not correspond to the received pubkey: 12D3KooWpeer")
    assert describe(error) == "another peer answers there, with another key"
    circle = SwarmException("round")
    circle.__cause__ = circle
    assert describe(circle) == "round"
