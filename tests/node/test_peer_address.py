"""Addresses with a pin, and the shorter forms of an orchestrator's URL."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.node.peer_address import PeerAddress, parse_orchestrator, parse_peer_address
from tessella_p2p.wire.keys import NodeKey

PEER = NodeKey(bytes(32)).peer_id
OTHER = NodeKey(bytes([1]) * 32).peer_id


@pytest.mark.parametrize(
    "address",
    ["/ip4/203.0.113.7/tcp/9090", "/ip6/2001:db8::7/tcp/1", "/dns/a.example.org/tcp/65535", "/dns4/host/tcp/9090"],
)
def test_a_pinned_multiaddr_gives_address_and_peer(address: str) -> None:
    parsed = parse_peer_address(f"{address}/p2p/{PEER}")
    assert parsed == PeerAddress(address, PEER)
    assert parsed.multiaddr == f"{address}/p2p/{PEER}"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        (f"/ip4/203.0.113.7/tcp/9090/p2p/{PEER}", "/ip4/203.0.113.7/tcp/9090"),
        (f"tcp://{PEER}@203.0.113.7:9090", "/ip4/203.0.113.7/tcp/9090"),
        (f"tcp://{PEER}@[2001:db8::7]:9090", "/ip6/2001:db8::7/tcp/9090"),
        (f"tcp://{PEER}@tracker.example.org:9090/", "/dns/tracker.example.org/tcp/9090"),
    ],
)
def test_every_form_of_an_orchestrator_url_means_the_same(url: str, address: str) -> None:
    assert parse_orchestrator(url) == PeerAddress(address, PEER)
    assert parse_orchestrator(url, PEER) == PeerAddress(address, PEER)


@pytest.mark.parametrize("url", ["tcp://tracker.example.org:9090", "/dns/tracker.example.org/tcp/9090"])
def test_a_url_without_a_pin_takes_the_separate_one(url: str) -> None:
    assert parse_orchestrator(url, PEER) == PeerAddress("/dns/tracker.example.org/tcp/9090", PEER)


@pytest.mark.parametrize(
    "url", ["tcp://tracker.example.org:9090", "/ip4/203.0.113.7/tcp/9090", "https://tracker.example.org"]
)
def test_an_orchestrator_without_a_pin_is_refused_with_the_way_to_get_it(url: str) -> None:
    with pytest.raises(ConfigurationError, match="keys show --role orchestrator"):
        parse_orchestrator(url)


def test_two_pins_that_differ_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="keep the right one"):
        parse_orchestrator(f"tcp://{PEER}@host:1", OTHER)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "203.0.113.7:9090",
        f"/ip4/203.0.113.7/udp/9090/p2p/{PEER}",
        f"/ip4/203.0.113.256/tcp/9090/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/0/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/65536/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/+90/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/٩/p2p/{PEER}",
        f"/ip6/fe80::1%eth0/x/tcp/1/p2p/{PEER}",
        f"/dns/ho st/tcp/1/p2p/{PEER}",
        f"/dns//tcp/1/p2p/{PEER}",
        f"/onion3/abc/tcp/1/p2p/{PEER}",
        "/ip4/203.0.113.7/tcp/9090/p2p/12D3KooWnobody",
        f"/ip4/203.0.113.7/tcp/9090/p2p/{PEER}/p2p-circuit",
        f"/ip4/203.0.113.7/tcp/9090/ws/{PEER}",
        f"/dns/{'a' * 250}/tcp/1/p2p/{PEER}",
    ],
)
def test_what_is_no_pinned_multiaddr_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_peer_address(text)


@pytest.mark.parametrize(
    "url",
    [
        "tcp://",
        "tcp://host",
        "tcp://host:x",
        "tcp://[::1:1",
        f"tcp://{PEER}:pw@host:1",
        f"tcp://{PEER}@host:1/path",
        "udp://h:1",
    ],
)
def test_what_is_no_orchestrator_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_orchestrator(url, PEER)


@given(st.text(max_size=80), st.none() | st.text(max_size=80))
@example("tcp://\u2100:1", None)
def test_any_text_gives_an_address_or_a_configuration_error(url: str, peer_id: str | None) -> None:
    with suppress(ConfigurationError):
        assert parse_orchestrator(url, peer_id).multiaddr.startswith("/")
