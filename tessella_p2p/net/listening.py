"""Listening sockets, and what a node says about where they are."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence

import psutil
import trio
from multiaddr import Multiaddr

from tessella_p2p.base.errors import ConfigurationError, PortInUseError
from tessella_p2p.base.limits import MAX_ADDRESSES


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        parts = [(protocol.name, value) for protocol, value in Multiaddr(address).items()]
        (family, host), (transport, port) = parts
    except Exception as error:  # the multiaddr library's errors have no common type
        raise ConfigurationError(
            f"{address!r} cannot be listened on: /ip4|ip6/<address>/tcp/<port> is needed"
        ) from error
    if family not in ("ip4", "ip6") or transport != "tcp":
        raise ConfigurationError(f"{address!r} cannot be listened on: /ip4|ip6/<address>/tcp/<port> is needed")
    return str(host), int(str(port))


async def bind(addresses: Sequence[str]) -> list[trio.SocketListener]:
    """Open a listening socket for each address, or none.

    py-libp2p sets SO_REUSEPORT, with which two nodes of one user share a port and neither is told; here the second one is refused.

    Raises:
        PortInUseError: names the address that is taken.
        ConfigurationError: for what is no address of this machine, or not allowed.
    """
    listeners: list[trio.SocketListener] = []
    try:
        for address in addresses:
            host, port = _host_and_port(address)
            listeners += await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        for listener in listeners:
            await listener.aclose()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"{address} is in use; stop what listens there or choose another port") from error
        raise ConfigurationError(f"{address} cannot be listened on: {error.strerror or error}") from error
    except BaseException:  # whatever it is, also a cancellation: nobody else would close those that are open
        for listener in listeners:
            await listener.aclose()
        raise
    return listeners


def listening_addresses(listeners: Sequence[trio.SocketListener]) -> tuple[str, ...]:
    """The sockets' addresses with their real ports; a wildcard stands for each address of this machine, loopback last."""
    found: dict[str, None] = {}
    for listener in listeners:
        host, port = listener.socket.getsockname()[:2]
        ip = ipaddress.ip_address(host)
        for each in _machine_addresses(ip.version) if ip.is_unspecified else [host]:
            found[f"/ip{ip.version}/{each}/tcp/{port}"] = None
    return tuple(found)[:MAX_ADDRESSES]


def _machine_addresses(version: int) -> list[str]:
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    known = [each.address for nic in psutil.net_if_addrs().values() for each in nic if each.family == family]
    usable = [ipaddress.ip_address(address) for address in known if "%" not in address]  # link-local ones need a zone
    return [str(ip) for ip in sorted(usable, key=lambda ip: ip.is_loopback)]


def announced_addresses(announce: Sequence[str], listening: tuple[str, ...]) -> tuple[str, ...]:
    """``announce`` with port 0 replaced by the first listening port, or the listening addresses when nothing is announced."""
    if not announce:
        return listening
    port = listening[0].rpartition("/")[2] if listening else "0"
    return tuple(f"{address[:-1]}{port}" if address.endswith("/tcp/0") else address for address in announce)
