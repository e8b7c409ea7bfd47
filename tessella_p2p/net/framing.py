"""Length-prefixed messages and exact reads over a `Stream`; every length is checked before it is allocated."""

from __future__ import annotations

from tessella_p2p.base.errors import MalformedMessage, StreamReset
from tessella_p2p.base.limits import KIB, MAX_MESSAGE_BYTES, MIB
from tessella_p2p.net.network import Stream

_PREFIX_BYTES = 4
_JOINED_BYTES = 64 * KIB
"""Up to here a copy costs less than a second frame."""


async def receive_exactly(stream: Stream, size_bytes: int) -> bytes | bytearray | None:
    """Exactly ``size_bytes``, or None at an end of the stream before the first byte.

    Raises:
        StreamReset: when the stream ends in between. Cancellation in between loses what was read: reset the stream then.
    """
    buffer = bytearray()
    while len(buffer) < size_bytes:
        part = await stream.receive_some(min(size_bytes - len(buffer), MIB))
        if not part:
            if not buffer:
                return None
            raise StreamReset(
                f"the stream of {stream.peer} ended inside a message ({len(buffer)} of {size_bytes} bytes)"
            )
        if len(part) == size_bytes:
            return bytes(part)  # in one piece, as nearly always
        buffer += part
    return buffer


async def send_message(stream: Stream, message: bytes) -> None:
    """Send one message: a 4-byte big-endian length, then the bytes."""
    prefix = len(message).to_bytes(_PREFIX_BYTES, "big")
    if len(message) <= _JOINED_BYTES:
        await stream.send_all(prefix + message)
    else:
        await stream.send_all(prefix)
        await stream.send_all(message)


async def receive_message(stream: Stream, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes | None:
    """The next message, or None at the end of the stream.

    Raises:
        MalformedMessage: an empty message, or one over ``max_bytes``; nothing of it was read.
        StreamReset: when the stream breaks.
    """
    prefix = await receive_exactly(stream, _PREFIX_BYTES)
    if prefix is None:
        return None
    size_bytes = int.from_bytes(prefix, "big")
    if not 0 < size_bytes <= max_bytes:
        raise MalformedMessage(
            f"{stream.peer} announces a message of {size_bytes} bytes (1 to {max_bytes} are accepted)"
        )
    message = await receive_exactly(stream, size_bytes)
    if message is None:
        raise StreamReset(f"the stream of {stream.peer} ended after a message's length")
    return bytes(message)
