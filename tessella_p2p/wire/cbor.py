"""Canonical CBOR (RFC 8949, section 4.2.1), decoded strictly.

cbor2 by itself accepts trailing bytes, duplicate keys, indefinite lengths and long integers. So what is decoded is encoded
again and has to give the same bytes: one value has one encoding, and a signature covers that one.
"""

from __future__ import annotations

import cbor2

from tessella_p2p.base.errors import MalformedMessage
from tessella_p2p.base.limits import MAX_CBOR_DEPTH, MAX_CBOR_ITEMS, MAX_MESSAGE_BYTES

_MAX_INT = 2**64 - 1
# Major types (section 3.1), and the bytes of an argument by its code; 0 for codes that are not canonical.
_NEGATIVE, _BYTES, _TEXT, _LIST, _MAP, _TAG, _SIMPLE = range(1, 8)
_ARGUMENT_BYTES = (0,) * 24 + (1, 2, 4, 8, 0, 0, 0, 0)
_SIMPLE_VALUES = (20, 21, 22, 25, 26, 27)
"""False, true, null, and floats of 16, 32 and 64 bits."""


def encode(value: object) -> bytes:
    """The canonical bytes of ``value`` (None, bool, int, float, str, bytes, lists and dicts with text keys)."""
    return cbor2.dumps(value, canonical=True)


def decode(data: bytes | memoryview, max_bytes: int = MAX_MESSAGE_BYTES, max_items: int = MAX_CBOR_ITEMS) -> object:
    """The value whose canonical encoding is ``data``.

    Args:
        data: exactly one encoded value.
        max_bytes: more than this is refused unread.
        max_items: so many values are accepted, nested ones included.

    Raises:
        MalformedMessage: too long, no CBOR, not canonical, too deep, too many values, or of a type that no message uses.
    """
    if len(data) > max_bytes:
        raise MalformedMessage(f"a message of {len(data)} bytes is over the limit of {max_bytes}")
    raw = bytes(data)
    _check_structure(raw, max_items)
    try:
        value: object = cbor2.loads(raw)
        again = encode(value)
    except (cbor2.CBORError, ValueError, TypeError, OverflowError, RecursionError, MemoryError, KeyError) as error:
        raise MalformedMessage(f"no canonical CBOR: {type(error).__name__}") from error
    if again != raw:
        raise MalformedMessage("CBOR that is not canonical")
    return value


def _check_structure(raw: bytes, max_items: int) -> None:
    """Walk over the encoding before the decoder, written in another language, allocates or recurses.

    Refuses what no message uses: tags, keys that are no text, integers of over 64 bits, other simple values than false, true, null
    and floats; and nesting and numbers of values beyond their bounds. Every message passes here, so it is one flat loop.
    """
    outer: list[tuple[int, bool]] = []
    left, in_map = 1, False  # items left on this level, keys and values counted
    i, end = 0, len(raw)
    items_left = max_items
    while True:
        if not left:
            if not outer:
                break
            left, in_map = outer.pop()
            continue
        if i >= end:
            raise MalformedMessage("the message ends early")
        items_left -= 1
        if items_left < 0:
            raise MalformedMessage(f"over {max_items} values in one message")
        major, info = raw[i] >> 5, raw[i] & 31
        i += 1
        argument = info
        if info > 23:
            size = _ARGUMENT_BYTES[info]
            if size == 0 or i + size > end:
                raise MalformedMessage("indefinite lengths and reserved codes are not canonical")
            argument = int.from_bytes(raw[i : i + size], "big")
            i += size
        if in_map and major != _TEXT and not left & 1:
            raise MalformedMessage("keys are text")
        left -= 1
        if major in (_BYTES, _TEXT):
            if argument > end - i:
                raise MalformedMessage("a string runs over the end of the message")
            i += argument
        elif major in (_LIST, _MAP):
            count = argument if major == _LIST else 2 * argument
            if count > end - i:
                raise MalformedMessage("a list or map runs over the end of the message")
            if len(outer) >= MAX_CBOR_DEPTH:
                raise MalformedMessage(f"nested deeper than {MAX_CBOR_DEPTH} levels")
            outer.append((left, in_map))
            left, in_map = count, major == _MAP
        elif major == _TAG or (major == _SIMPLE and info not in _SIMPLE_VALUES):
            raise MalformedMessage("tags and other simple values than false, true, null and floats are not used")
        elif major == _NEGATIVE and argument == _MAX_INT:
            raise MalformedMessage("an integer of over 64 bits")
    if i != end:
        raise MalformedMessage("bytes after the end of the message")
