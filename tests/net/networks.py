"""What the tests of this package share: two connected nodes of each kind, and an echo."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
import trio

from tessella_p2p.net.framing import receive_exactly
from tessella_p2p.net.libp2p_host import Libp2pNetwork
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork, constant_latency
from tessella_p2p.net.network import Network, Stream
from tessella_p2p.net.virtual_clock import VirtualClock, run_deterministic
from tessella_p2p.wire.keys import NodeKey

ALICE, BOB, CAROL = (NodeKey(bytes([number]) * 32) for number in (1, 2, 3))
ECHO = "/tessella/echo/1"
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]

Check = Callable[[Network, Network], Awaitable[None]]


def _on_memory(check: Check) -> None:
    clock = VirtualClock()

    async def main() -> None:
        fabric = MemoryFabric(random.Random(7), clock, latency=constant_latency(0.01))
        async with MemoryNetwork.open(fabric, ALICE.peer_id) as a, MemoryNetwork.open(fabric, BOB.peer_id) as b:
            with trio.fail_after(600):
                await check(a, b)

    run_deterministic(main, 7, clock=clock)


def _on_libp2p(check: Check, muxer: str) -> None:
    async def main() -> None:
        async with (
            Libp2pNetwork.open(ALICE, LOOPBACK, muxer="stock" if muxer == "stock" else "fast") as a,
            Libp2pNetwork.open(BOB, LOOPBACK, muxer="stock" if muxer == "stock" else "fast") as b,
        ):
            with trio.fail_after(60):
                await check(a, b)

    trio.run(main)


KINDS: dict[str, Callable[[Check], None]] = {
    "memory": _on_memory,
    "libp2p": lambda check: _on_libp2p(check, "fast"),
    "libp2p-stock": lambda check: _on_libp2p(check, "stock"),
}
FULL = ("memory", "libp2p")
"""The kinds that keep the whole port; the stock muxer ends the connection where these keep it."""


def contract(*kinds: str) -> Callable[[Check], Callable[[str], None]]:
    """Run a check against two nodes of each kind; neither is connected yet, each knows the other's addresses."""

    def decorate(check: Check) -> Callable[[str], None]:
        async def introduced(a: Network, b: Network) -> None:
            a.add_addresses(b.peer_id, b.addresses)
            b.add_addresses(a.peer_id, a.addresses)
            await check(a, b)

        @pytest.mark.parametrize("kind", kinds or tuple(KINDS))
        def test(kind: str) -> None:
            KINDS[kind](introduced)

        test.__name__ = getattr(check, "__name__", "test")
        test.__doc__ = check.__doc__
        return test

    return decorate


async def echo(stream: Stream) -> None:
    """Send back what comes, and end when the peer ends."""
    while data := await stream.receive_some(1 << 20):
        await stream.send_all(data)
    await stream.send_eof()


async def read_to_end(stream: Stream) -> bytes:
    """Everything up to the end of the stream."""
    received = bytearray()
    while part := await stream.receive_some(1 << 20):
        received += part
    return bytes(received)


def pattern(size_bytes: int) -> bytes:
    """Bytes that show where a piece is missing, doubled or moved."""
    return random.Random(size_bytes).randbytes(size_bytes)


async def take(stream: Stream, size_bytes: int) -> bytes:
    """The next ``size_bytes``."""
    return bytes(await receive_exactly(stream, size_bytes) or b"")
