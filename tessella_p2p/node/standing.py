"""What every daemon does around its role (shell): a network, a sign of life, a sequence floor."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Protocol

import structlog
import trio

from tessella_p2p.base.errors import PortInUseError, StorageError
from tessella_p2p.ledger.blocking import in_thread
from tessella_p2p.net.libp2p_host import Libp2pNetwork
from tessella_p2p.node.config import RoleConfig
from tessella_p2p.node.lifetime import until_told, write_ready_file
from tessella_p2p.wire.envelope import ClockSequencer
from tessella_p2p.wire.keys import NodeKey

log = structlog.get_logger(__name__)

_SEQUENCE_SAVE_S = 15.0


@asynccontextmanager
async def open_network(config: RoleConfig, key: NodeKey, host: str, port: int) -> AsyncIterator[Libp2pNetwork]:
    """This node's libp2p host, announcing its public address where a NAT rule has one.

    Raises:
        PortInUseError: names the address and the setting.
    """
    announce = []
    if config.public_ip is not None:
        family = "ip6" if ":" in config.public_ip else "ip4"
        announce.append(f"/{family}/{config.public_ip}/tcp/{config.public_p2p_port or port}")
    family = "ip6" if ":" in host else "ip4"
    async with AsyncExitStack() as stack:
        try:
            network = await stack.enter_async_context(
                Libp2pNetwork.open(key, [f"/{family}/{host}/tcp/{port}"], announce, muxer=config.muxer)
            )
        except PortInUseError as error:
            raise PortInUseError(f"{error} (the setting is p2p_port)") from error
        yield network


def _p2p_addresses(network: Libp2pNetwork) -> list[str]:
    return [f"{address}/p2p/{network.peer_id}" for address in network.addresses]


async def come_up(
    nursery: trio.Nursery, config: RoleConfig, network: Libp2pNetwork, api_url: str | None = None
) -> trio.Event:
    """Say that the node is up; the event is set when it is told to leave."""
    leaving = trio.Event()

    async def watch(task_status: trio.TaskStatus[None]) -> None:
        await until_told(exit_with_stdin=config.exit_with_stdin, task_status=task_status)
        leaving.set()

    await nursery.start(watch)
    addresses = _p2p_addresses(network)
    ready = {"peer_id": network.peer_id, "p2p_addresses": addresses, "api_url": api_url, "pid": os.getpid()}
    write_ready_file(config.ready_file, ready)
    log.info("up", peer_id=network.peer_id, addresses=addresses, api_url=api_url)
    return leaving


class SequenceStore(Protocol):
    """Keeps a sequence floor on disk."""

    def raise_sequence_floor(self, value: int) -> None:
        """Make ``value`` the floor if it is higher; durable on return."""
        ...


async def save_sequences(sequencer: ClockSequencer, store: SequenceStore) -> None:
    """Keep the sequence floor on disk, ahead of what was given out: a clock that is set back cannot repeat one."""
    while True:
        ahead = sequencer.floor + int(_SEQUENCE_SAVE_S * 2e6)
        try:
            await in_thread(partial(store.raise_sequence_floor, ahead))
        except StorageError as error:  # sequences follow the clock: they matter when that is set back
            log.error("the sequence floor cannot be saved", reason=str(error))
        await trio.sleep(_SEQUENCE_SAVE_S)
