"""Host names in multiaddrs, by the machine's own resolver.

py-libp2p asks DNS servers directly: it knows neither the hosts file nor what else the machine resolves names with.
"""

from __future__ import annotations

import socket

import trio

from tessella_p2p.base.errors import DialError
from tessella_p2p.base.limits import MAX_ADDRESSES

_FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


async def resolve(address: str) -> tuple[str, ...]:
    """``address`` with its ``/dns``, ``/dns4`` or ``/dns6`` name replaced by each IP address of it; as it is without one.

    Raises:
        DialError: the name has no address.
    """
    _, protocol, rest = address.split("/", 2)
    family = _FAMILIES.get(protocol)
    if family is None:
        return (address,)
    name, _, tail = rest.partition("/")
    try:
        found = await trio.socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise DialError(f"{name} has no address: {error}") from error
    versions = {socket.AF_INET: 4, socket.AF_INET6: 6}
    hosts = dict.fromkeys((versions[each], host[0]) for each, _, _, _, host in found if each in versions)
    return tuple(f"/ip{version}/{host}/{tail}" for version, host in hosts)[:MAX_ADDRESSES]
