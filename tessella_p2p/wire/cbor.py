"""Canonical CBOR (RFC 8949, section 4.2.1), decoded strictly.

cbor2 by itself accepts trailing bytes, duplicate keys, indefinite lengths and long integers. So what is decoded is encoded
again and has to give the same bytes: one value has one encoding, and a signature covers that one.
"""

from __future__ import annotations

import cbor2

from tessella_p2p.base.errors import MalformedMessage
from tessella_p2p.base.limits import MAX_CBOR_DEPTH, MAX_CBOR_ITEMS, MAX_MESSAGE_BYTES

_MAX_INT = 2**64 - 1


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
        _check(value, MAX_CBOR_DEPTH)
        again = encode(value)
    except MalformedMessage:
        raise
    except (cbor2.CBORError, ValueError, TypeError, OverflowError, RecursionError, MemoryError, KeyError) as error:
        raise MalformedMessage(f"no canonical CBOR: {type(error).__name__}") from error
    if again != raw:
        raise MalformedMessage("CBOR that is not canonical")
    return value


def _check_structure(raw: bytes, max_items: int) -> None:
    """Refuse nesting, numbers of values and tags before the decoder, written in another language, allocates or recurses."""
    depth_limit = MAX_CBOR_DEPTH
    pending: list[int] = []  # items left on each open level
    i, end = 0, len(raw)
    items_left = max_items
    while True:
        while pending and pending[-1] == 0:
            pending.pop()
        if not pending and i:
            if i != end:
                raise MalformedMessage("bytes after the end of the message")
            return
        if i >= end:
            raise MalformedMessage("the message ends early")
        items_left -= 1
        if items_left < 0:
            raise MalformedMessage(f"over {max_items} values in one message")
        major, info = raw[i] >> 5, raw[i] & 31
        i += 1
        size = 0 if info < 24 else {24: 1, 25: 2, 26: 4, 27: 8}.get(info, -1)
        if size < 0 or i + size > end:
            raise MalformedMessage("indefinite lengths and reserved codes are not canonical")
        argument = info if size == 0 else int.from_bytes(raw[i : i + size], "big")
        i += size
        if pending:
            pending[-1] -= 1
        if major in (2, 3):
            if argument > end - i:
                raise MalformedMessage("a string runs over the end of the message")
            i += argument
        elif major in (4, 5):
            count = argument * (major - 3)
            if count > end - i:
                raise MalformedMessage("a list or map runs over the end of the message")
            if len(pending) >= depth_limit:
                raise MalformedMessage(f"nested deeper than {depth_limit} levels")
            pending.append(count)
        elif major == 6:
            raise MalformedMessage("tags are not used")


def _check(value: object, depth: int) -> None:
    if value is None or isinstance(value, bool | float | str | bytes):
        return
    if isinstance(value, int):
        if not -_MAX_INT <= value <= _MAX_INT:
            raise MalformedMessage("an integer of over 64 bits")
        return
    if depth == 0:
        raise MalformedMessage("nested too deeply")
    if isinstance(value, list):
        for item in value:
            _check(item, depth - 1)
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise MalformedMessage("keys are text")
            _check(item, depth - 1)
        return
    raise MalformedMessage(f"values of type {type(value).__name__} are not used")
