"""HTTP by hand, for what no well-behaved client does."""

from __future__ import annotations

import json
import socket

import trio


def post_bytes(path: str, body: object, *headers: str) -> bytes:
    """A whole POST request; ``body`` is bytes, or an object to send as JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head_bytes(path, len(raw), *headers) + raw


def head_bytes(path: str, content_length: int, *headers: str) -> bytes:
    """The head of a POST request."""
    lines = [f"POST {path} HTTP/1.1", "host: test", f"content-length: {content_length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


GET = b"GET / HTTP/1.1\r\nhost: test\r\n\r\n"


async def open_unread(port: int) -> trio.SocketStream:
    """A connection whose kernel takes little, so that not reading is soon felt at the other end."""
    raw = trio.socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await raw.connect(("127.0.0.1", port))
    return trio.SocketStream(raw)


async def receive_all(stream: trio.SocketStream) -> bytes:
    """Everything until the other side ends the connection."""
    received = b""
    while data := await stream.receive_some(65536):
        received += data
    return received


async def receive_until(stream: trio.SocketStream, marker: bytes) -> bytes:
    """What comes until ``marker`` did."""
    received = b""
    while marker not in received:
        data = await stream.receive_some(65536)
        assert data, received
        received += data
    return received
