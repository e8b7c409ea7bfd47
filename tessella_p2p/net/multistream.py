"""multistream-select 1.0: which protocol a stream speaks, settled in one round trip.

https://github.com/multiformats/multistream-select. py-libp2p's client waits for the greeting before it says what it wants; this one
sends both at once. Its server reads the same bytes either way.
"""

from __future__ import annotations

from collections.abc import Collection

from tessella_p2p.base.errors import MalformedMessage, RemoteProtocolError, StreamReset, VersionMismatch
from tessella_p2p.base.limits import KIB
from tessella_p2p.net.framing import receive_exactly
from tessella_p2p.net.network import Stream

GREETING = "/multistream/1.0.0"
NOT_AVAILABLE = "na"
LIST = "ls"
MAX_LINE_BYTES = 1 * KIB
MAX_LISTING_BYTES = 16 * KIB
MAX_ATTEMPTS = 16
"""Lines that a peer may send before it has settled."""


def encode_line(text: str) -> bytes:
    """A varint length, the text, a newline."""
    line = text.encode() + b"\n"
    size_bytes, prefix = len(line), bytearray()
    while size_bytes > 0x7F:
        prefix.append(size_bytes & 0x7F | 0x80)
        size_bytes >>= 7
    return bytes([*prefix, size_bytes]) + line


async def _receive_line(stream: Stream, max_bytes: int = MAX_LINE_BYTES) -> str | None:
    """The next line without its newline, or None at the end of the stream."""
    size_bytes = shift = 0
    while True:
        byte = await receive_exactly(stream, 1)
        if byte is None:
            return None
        size_bytes |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            break
        if shift > 21:
            raise MalformedMessage(f"{stream.peer} sends no multistream-select (a length of over three bytes)")
    if not 0 < size_bytes <= max_bytes:
        raise MalformedMessage(f"{stream.peer} sends a multistream-select line of {size_bytes} bytes")
    line = await receive_exactly(stream, size_bytes)
    if line is None or not line.endswith(b"\n"):
        raise MalformedMessage(f"{stream.peer} sends a multistream-select line without an end")
    try:
        return line[:-1].decode()
    except UnicodeDecodeError as error:
        raise MalformedMessage(f"{stream.peer} sends a multistream-select line that is no text") from error


async def _expect(stream: Stream) -> str:
    line = await _receive_line(stream)
    if line is None:
        raise StreamReset(f"{stream.peer} ended the stream while its protocol was settled")
    return line


async def select(stream: Stream, protocol: str) -> None:
    """Settle on ``protocol`` as the side that opened the stream.

    Raises:
        VersionMismatch: the peer does not serve it; the message names what it serves instead, where it says so.
        MalformedMessage, StreamReset: the peer speaks something else, or ended.
    """
    await stream.send_all(encode_line(GREETING) + encode_line(protocol))
    if (greeting := await _expect(stream)) != GREETING:
        raise MalformedMessage(f"{stream.peer} greets with {greeting[:64]!r}, not {GREETING!r}")
    answer = await _expect(stream)
    if answer == protocol:
        return
    if answer != NOT_AVAILABLE:
        raise MalformedMessage(f"{stream.peer} answers {answer[:64]!r} when asked for {protocol}")
    raise await _mismatch(stream, protocol)


async def _mismatch(stream: Stream, protocol: str) -> VersionMismatch:
    base = protocol.rpartition("/")[0] + "/"
    try:
        await stream.send_all(encode_line(LIST))
        listing = await _receive_line(stream, MAX_LISTING_BYTES) or ""
    except (StreamReset, RemoteProtocolError):
        listing = ""  # the answer to a courtesy question; the refusal stands without it
    served = sorted(name for name in listing.splitlines() if name.startswith(base) and len(name) < 128)
    others = f"; it serves {', '.join(served)}" if served else ""
    return VersionMismatch(f"{stream.peer} does not serve {protocol}{others}")


async def answer(stream: Stream, served: Collection[str]) -> str | None:
    """Settle as the side that was called: the protocol, or None when the peer gave up.

    Raises:
        MalformedMessage, StreamReset: the peer speaks something else, or ended.
    """
    await stream.send_all(encode_line(GREETING))
    if (greeting := await _receive_line(stream)) != GREETING:
        if greeting is None:
            return None
        raise MalformedMessage(f"{stream.peer} greets with {greeting[:64]!r}, not {GREETING!r}")
    for _ in range(MAX_ATTEMPTS):
        asked = await _receive_line(stream)
        if asked is None:
            return None
        if asked == LIST:
            await stream.send_all(encode_line("\n".join(sorted(served)) + "\n"))
        elif asked in served:
            await stream.send_all(encode_line(asked))
            return asked
        else:
            await stream.send_all(encode_line(NOT_AVAILABLE))
    raise MalformedMessage(f"{stream.peer} asked for {MAX_ATTEMPTS} protocols and none is served")
