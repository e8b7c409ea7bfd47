"""``/tessella/ping/1``: 8 bytes there and back on a stream that lives as long as its connection."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator

import trio

from tessella_p2p.base.errors import RemoteProtocolError
from tessella_p2p.net.framing import receive_exactly
from tessella_p2p.net.network import Stream

_NUMBER = struct.Struct("!Q")


async def answer_pings(stream: Stream) -> None:
    """The handler: send back what comes."""
    while (number := await receive_exactly(stream, _NUMBER.size)) is not None:
        await stream.send_all(number)


async def watch_pings(stream: Stream, interval_s: float, timeout_s: float) -> AsyncIterator[float]:
    """Round trips in seconds, one per interval.

    Raises:
        trio.TooSlowError: an answer took longer than ``timeout_s``.
        RemoteProtocolError: a wrong answer, or an end of the stream.
        StreamReset: the connection broke.
    """
    number = 0
    while True:
        number += 1
        started = trio.current_time()
        with trio.fail_after(timeout_s):
            await stream.send_all(_NUMBER.pack(number))
            answer = await receive_exactly(stream, _NUMBER.size)
        if answer is None or bytes(answer) != _NUMBER.pack(number):
            raise RemoteProtocolError(f"{stream.peer} does not answer a ping as it should")
        yield trio.current_time() - started
        await trio.sleep(interval_s)
