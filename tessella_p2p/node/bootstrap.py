"""The bootstrap daemon (shell)."""

from __future__ import annotations

import random

import trio

from tessella_p2p.base.clock import SystemClock
from tessella_p2p.dht.service import Discovery
from tessella_p2p.node.config import BootstrapConfig
from tessella_p2p.node.keystore import held_key
from tessella_p2p.node.standing import come_up, open_network


async def run_bootstrap(config: BootstrapConfig) -> None:
    """Be a place to join the DHT through, until told to leave.

    Raises:
        ConfigurationError: a key file, port or address that cannot be used.
    """
    with held_key(config.keypair_path) as key:
        async with (
            open_network(config, key, config.p2p_host, config.p2p_port) as network,
            trio.open_nursery() as nursery,
        ):
            discovery = Discovery(network, SystemClock(), random.Random(), pins=frozenset(), bootstrap=config.bootstrap)
            await nursery.start(discovery.run)
            leaving = await come_up(nursery, config, network)
            await leaving.wait()
            nursery.cancel_scope.cancel()
