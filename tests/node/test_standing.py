"""What stands in a daemon's way is named with its setting."""

from __future__ import annotations

import socket

import pytest

from tessella_p2p.base.errors import PortInUseError
from tessella_p2p.node.config import BootstrapConfig, load_config
from tessella_p2p.node.standing import open_network
from tessella_p2p.wire.keys import NodeKey

KEY = NodeKey(bytes(range(32)))


async def test_a_port_in_use_is_named_with_its_setting() -> None:
    config = load_config(BootstrapConfig, flags={}, environ={})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError) as caught:
            async with open_network(config, KEY, "127.0.0.1", port):
                pass
    assert str(port) in str(caught.value)
    assert "p2p_port" in str(caught.value)


async def test_a_free_port_gives_a_network_with_that_address() -> None:
    config = load_config(BootstrapConfig, flags={}, environ={})
    async with open_network(config, KEY, "127.0.0.1", 0) as network:
        assert network.peer_id == KEY.peer_id
        assert network.addresses[0].startswith("/ip4/127.0.0.1/tcp/")
