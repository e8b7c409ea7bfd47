"""May a worker register, with this claim, from there, under this key (pure).

The allow-list, the signature and the clock are judged before, for every request (``service``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Final

from tessella_p2p.base.errors import InvalidRequest, KeyInUse, UnknownModel
from tessella_p2p.base.limits import HEARTBEAT_S, OFFLINE_AFTER_MISSED, REGISTRATION_GRACE_S
from tessella_p2p.base.urls import check_http_url
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.member import Member, MemberState
from tessella_p2p.orchestrator.terms import ServedModel
from tessella_p2p.wire.messages import Register

OFFLINE_MS: Final = int(HEARTBEAT_S * OFFLINE_AFTER_MISSED * 1000)
"""Whoever is silent for so long is taken to be gone."""
_PRIVATE: Final = tuple(
    ip_network(network)
    for network in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *(
            "192.168.0.0/16",
            "224.0.0.0/3",
            "::/127",
            "fc00::/7",
            "fe80::/10",
            "ff00::/8",
            "::ffff:0:0/96",
            "64:ff9b::/96",
        ),
    )
)
"""Networks that are not reached from everywhere, or hold no single host: RFC 1122, 1918, 3927, 6598, 1112, 4193, 4291, 6052. An IPv4
address has its own spelling."""
_LOCAL_NAMES: Final = ("localhost", ".localhost", ".local", ".internal")
_DIALLED: Final = re.compile(
    r"/(?:(?P<kind>ip[46])/(?P<ip>[0-9A-Fa-f.:]{2,45})|dns[46]?/(?P<name>[0-9A-Za-z_.:-]{1,253}))/tcp/(?P<port>[1-9][0-9]{0,4})",
    re.ASCII,
)
_MAX_PORT: Final = 65535
_NUMBER: Final = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class MemberRules:
    """What the operator asks of workers.

    Attributes:
        registration_grace_s: how long a worker that loads its range may stay silent.
        allow_private_addrs: whether a worker may be at an address that is not reached from everywhere.
        min_claim_mb: claims below it are refused, whatever they could hold.
    """

    registration_grace_s: float = REGISTRATION_GRACE_S
    allow_private_addrs: bool = True
    min_claim_mb: int = 0

    @property
    def grace_ms(self) -> int:
        """`registration_grace_s`, but never shorter than a served range's."""
        return max(int(self.registration_grace_s * 1000), OFFLINE_MS)


def check_model(catalogue: Catalogue, request: Register) -> ServedModel:
    """The model that a worker wants to serve.

    Raises:
        InvalidRequest: nobody may serve its manifest here, it is another one than the model's newest, or it states other figures;
            ``param`` says which.
    """
    try:
        model = catalogue.by_root(request.manifest_root)
    except UnknownModel as error:  # the manual: 400, manifest not owned
        raise InvalidRequest(str(error), param="manifest_root") from error
    if not catalogue.is_current(request.manifest_root):
        raise InvalidRequest(
            f"another manifest of {model.model_id} was published since: pull it", param="manifest_root"
        )
    for name, got, expected in (
        ("model_id", request.model_id, model.model_id),
        ("contract_hash", request.contract_hash, model.contract_hash),
        ("total_layers", request.total_layers, model.total_layers),
    ):
        if got != expected:
            raise InvalidRequest(f"{name} is not that of {model.model_id} as it is served here", param=name)
    return model


def check_addresses(addresses: Sequence[str], rules: MemberRules) -> None:
    """Refuse a worker that its peers cannot dial.

    Raises:
        InvalidRequest: it names no address, one that is none, or a private one where those are not allowed.
    """
    if not addresses:
        raise InvalidRequest("a worker needs an address at which its peers can dial it", param="addresses")
    for address in addresses:
        if not is_dialled(address):
            raise InvalidRequest(
                f"{address[:64]!r} is no multiaddr /ip4/HOST/tcp/PORT (or ip6, dns, dns4, dns6)", "addresses"
            )
        if not rules.allow_private_addrs and is_private(address):
            raise InvalidRequest(
                f"{address} is not reached from everywhere: announce a public address (public_ip), "
                "or let the orchestrator allow private ones (allow_private_addrs)",
                param="addresses",
            )


def check_api_url(url: str | None) -> None:
    """Refuse an API address that no client should be sent to.

    Raises:
        InvalidRequest: it is no URL of HTTP.
    """
    if url is None:
        return
    try:
        check_http_url(url)
    except ValueError as error:
        raise InvalidRequest(f"api_url: {error}", param="api_url") from error


def is_dialled(address: str) -> bool:
    """Whether a node can dial what ``address`` says: TCP, at an IP address or a name."""
    found = _DIALLED.fullmatch(address)
    if found is None or int(found["port"]) > _MAX_PORT:
        return False
    try:
        return found["ip"] is None or ip_address(found["ip"]).version == int(found["kind"][2])
    except ValueError:
        return False


def is_private(address: str) -> bool:
    """Whether a multiaddr that can be dialled is not reached from everywhere.

    A resolver takes a name whose last part is a number for an IP address, in more spellings than are told apart here; so that is no
    name. Where other names lead is not known.
    """
    host = address.split("/")[2].lower().rstrip(".")
    try:
        ip = ip_address(host)
    except ValueError:
        return host.endswith(_LOCAL_NAMES) or ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]) is not None
    return any(ip in network for network in _PRIVATE)


def check_key(before: Member | None, instance: bytes | None, addresses: Sequence[str], now_ms: int) -> None:
    """Refuse a second process that uses a worker's key, while the first one is heard.

    A worker that is started again is another process too: it is known by its address, which the first one could not have beside it.

    Raises:
        KeyInUse: says whose key it is, and where the first process is.
    """
    if before is None or instance is None or before.instance in (None, instance):
        return
    is_heard = before.state not in (MemberState.OFFLINE, MemberState.LEFT) and before.last_seen + OFFLINE_MS > now_ms
    if is_heard and not set(addresses) & set(before.addresses):
        first = ", ".join(before.addresses[:2])
        raise KeyInUse(f"{before.peer_id} is in use by another process, at {first}: give this node a key of its own")


def check_instance(member: Member, instance: bytes | None) -> None:
    """Refuse the heartbeat of a process whose key another one has registered with since.

    Raises:
        KeyInUse: says so.
    """
    if instance is not None and member.instance not in (None, instance):
        raise KeyInUse(f"{member.peer_id} was registered by another process since: give each node a key of its own")
