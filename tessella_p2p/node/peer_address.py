"""Where a peer is and who has to answer there: multiaddrs with a pin, and the shorter forms an ``orchestrator_url`` may take.

Pure: text in, a value or a `ConfigurationError` out.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from tessella_p2p.base.errors import ConfigurationError, MalformedMessage
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_ADDRESS_CHARS
from tessella_p2p.wire.keys import public_key_of

HOW_TO_PIN = (
    "the orchestrator is pinned by its peer id: run `tessella-p2p keys show --role orchestrator` on its machine and write "
    "/ip4/HOST/tcp/PORT/p2p/PEER_ID, or tcp://PEER_ID@HOST:PORT, or set orchestrator_peer_id beside tcp://HOST:PORT"
)

_HOST_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}")
_MAX_HOST_CHARS = 253
_PARTS_UNPINNED = 5  # "", family, host, "tcp", port
_PARTS_PINNED = 7


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A dialable multiaddr and the peer id that has to answer there."""

    address: str
    """``/ip4/HOST/tcp/PORT`` (or ``ip6``, ``dns``, ``dns4``, ``dns6``), without ``/p2p``."""
    peer_id: PeerId

    @property
    def multiaddr(self) -> str:
        """The address with its pin: what `net.Network.connect` dials."""
        return f"{self.address}/p2p/{self.peer_id}"

    def __str__(self) -> str:
        return self.multiaddr


def check_peer_id(text: str) -> PeerId:
    """``text`` as an Ed25519 peer id.

    Raises:
        ConfigurationError: when it is none.
    """
    try:
        public_key_of(PeerId(text))
    except MalformedMessage as error:
        raise ConfigurationError(f"{error} (12D3KooW… is what `tessella-p2p keys show` prints)") from error
    return PeerId(text)


def parse_peer_address(text: str) -> PeerAddress:
    """The address and pin of a multiaddr ``/ip4/HOST/tcp/PORT/p2p/PEER_ID``.

    Raises:
        ConfigurationError: when it is no such multiaddr, or has no pin.
    """
    address, peer_id = _split_multiaddr(text)
    if peer_id is None:
        raise ConfigurationError(f"{text!r} has no /p2p/PEER_ID at its end: a peer is dialled by its pin only")
    return PeerAddress(address, peer_id)


def parse_orchestrator(url: str, peer_id: str | None = None) -> PeerAddress:
    """The orchestrator's address and pin.

    Args:
        url: a multiaddr, ``tcp://HOST:PORT`` or ``tcp://PEER_ID@HOST:PORT``.
        peer_id: the pin where ``url`` has none; where both have one they have to agree.

    Raises:
        ConfigurationError: no such form, no pin, or two pins that differ.
    """
    address, pinned = _split_multiaddr(url) if url.startswith("/") else _split_url(url)
    stated = None if peer_id is None else check_peer_id(peer_id)
    if pinned is not None and stated is not None and pinned != stated:
        raise ConfigurationError(
            f"orchestrator_url pins {pinned} and orchestrator_peer_id {stated}: keep the right one"
        )
    pin = pinned or stated
    if pin is None:
        raise ConfigurationError(f"{url!r} says where the orchestrator is, not who it is; {HOW_TO_PIN}")
    return PeerAddress(address, pin)


def _split_multiaddr(text: str) -> tuple[str, PeerId | None]:
    if len(text) > MAX_ADDRESS_CHARS:
        raise ConfigurationError(f"an address of {len(text)} characters is over the limit of {MAX_ADDRESS_CHARS}")
    parts = text.split("/")
    if (
        len(parts) not in (_PARTS_UNPINNED, _PARTS_PINNED)
        or parts[0]
        or parts[3] != "tcp"
        or parts[5:6] not in ([], ["p2p"])
    ):
        raise ConfigurationError(f"{text!r} is no multiaddr of the form /ip4/HOST/tcp/PORT/p2p/PEER_ID")
    _check_host(parts[1], parts[2], text)
    _check_port(parts[4], text)
    return "/".join(parts[:5]), check_peer_id(parts[6]) if len(parts) == _PARTS_PINNED else None


def _split_url(text: str) -> tuple[str, PeerId | None]:
    try:
        parts = urlsplit(text)
        host, user, port = parts.hostname, parts.username, parts.port
    except ValueError as error:
        raise ConfigurationError(f"{text!r} is no address: {error}") from error
    if parts.scheme in ("http", "https"):
        raise ConfigurationError(f"{text!r}: nodes reach the orchestrator over libp2p, not over HTTP; {HOW_TO_PIN}")
    extras = parts.path.strip("/") or parts.query or parts.fragment or parts.password
    if parts.scheme != "tcp" or not host or port is None or extras:
        raise ConfigurationError(f"{text!r} is no orchestrator address; {HOW_TO_PIN}")
    address = f"/{_family_of(host)}/{host}/tcp/{port}"
    _split_multiaddr(address)
    return address, check_peer_id(user) if user else None


def _family_of(host: str) -> str:
    try:
        return "ip4" if ipaddress.ip_address(host).version == 4 else "ip6"
    except ValueError:
        return "dns"


def _check_host(family: str, host: str, text: str) -> None:
    try:
        if family == "ip4":
            ipaddress.IPv4Address(host)
        elif family == "ip6":
            ipaddress.IPv6Address(host)
        elif family not in ("dns", "dns4", "dns6") or not _is_host_name(host):
            raise ValueError(f"{family}/{host} is no host (ip4, ip6, dns, dns4 and dns6 are known)")
    except ValueError as error:
        raise ConfigurationError(f"{text!r}: {error}") from error


def _is_host_name(host: str) -> bool:
    return len(host) <= _MAX_HOST_CHARS and all(_HOST_LABEL.fullmatch(label) for label in host.split("."))


def _check_port(port: str, text: str) -> None:
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65_535):
        raise ConfigurationError(f"{text!r}: {port!r} is no port (1 to 65535)")
