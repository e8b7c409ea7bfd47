"""What both ends of the ``net`` group agree on."""

from __future__ import annotations

import logging
import socket
import struct

import structlog

from tessella_p2p.net.framing import receive_exactly
from tessella_p2p.net.network import Stream
from tessella_p2p.wire.keys import NodeKey

ECHO = "/tessella-bench/echo/1"
SINK = "/tessella-bench/sink/1"


def quiet() -> None:
    """Log warnings and worse only, as a node of a benchmark's mesh does."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


def key_named(name: str) -> NodeKey:
    """The key of a process of a benchmark."""
    return NodeKey(name.encode().ljust(32, b"."))


async def answer_echo(stream: Stream) -> None:
    """The first 8 bytes say how long a message is; every message is sent back once it is whole."""
    prefix = await receive_exactly(stream, 8)
    if prefix is None:
        return
    (message_bytes,) = struct.unpack("!Q", prefix)
    while (message := await receive_exactly(stream, message_bytes)) is not None:
        await stream.send_all(message)


async def answer_sink(stream: Stream) -> None:
    """Say how much came, once all did."""
    received = 0
    while part := await stream.receive_some(1 << 20):
        received += len(part)
    await stream.send_all(struct.pack("!Q", received))
    await stream.send_eof()


def receive_into(connection: socket.socket, message: bytearray) -> bool:
    """Fill ``message`` from a blocking socket; False at the end of the stream."""
    with memoryview(message) as view:
        done = 0
        while done < len(view):
            count = connection.recv_into(view[done:])
            if not count:
                return False
            done += count
    return True
