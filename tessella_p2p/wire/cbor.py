"""Canonical CBOR (RFC 8949, section 4.2.1), decoded strictly.

Decoders accept trailing bytes, duplicate keys, indefinite lengths and long integers. This one accepts the canonical encoding alone:
one value has one encoding, and a signature covers that one.
"""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import cbor2

from tessella_p2p.base.errors import MalformedMessage
from tessella_p2p.base.limits import MAX_CBOR_DEPTH, MAX_CBOR_ITEMS, MAX_MESSAGE_BYTES

_MAX_INT = 2**64 - 1
# Major types (section 3.1); by an initial byte's lower bits the bytes of an argument and its smallest canonical value.
_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _LIST, _MAP, _TAG, _SIMPLE = range(8)
_ARGUMENT_BYTES = (0,) * 24 + (1, 2, 4, 8, 0, 0, 0, 0)
_SMALLEST = (0,) * 24 + (24, 1 << 8, 1 << 16, 1 << 32, 0, 0, 0, 0)
_SIMPLE_VALUES = {20: False, 21: True, 22: None}
_FLOATS = {25: struct.Struct(">e"), 26: struct.Struct(">f"), 27: struct.Struct(">d")}


Lists = Callable[[list[object]], Sequence[object]]


def encode(value: object) -> bytes:
    """The canonical bytes of ``value`` (None, bool, int, float, str, bytes, lists and dicts with text keys)."""
    return cbor2.dumps(value, canonical=True)


class _Encoders(threading.local):
    """One for each thread: making one takes as long as encoding a message."""

    def __init__(self) -> None:
        self.encoder = cbor2.CBOREncoder(io.BytesIO())


_ENCODERS = _Encoders()


def encode_plain(value: object) -> bytes:
    """`encode`, for values of which the encoder sorts nothing and shortens nothing: maps in canonical order, and no floats."""
    try:
        return _ENCODERS.encoder.encode_to_bytes(value)
    except BaseException:
        _ENCODERS.encoder = cbor2.CBOREncoder(io.BytesIO())  # it may remember half of what it was at
        raise


def decode(
    data: bytes | memoryview,
    max_bytes: int = MAX_MESSAGE_BYTES,
    max_items: int = MAX_CBOR_ITEMS,
    lists: Lists = list,
) -> object:
    """The value whose canonical encoding is ``data``.

    Every message passes here, often several times nested. What is plainly canonical is read by the C decoder (`_quickly`), at a third
    of the time; whatever is not, by a loop of our own (`_carefully`), which alone refuses.

    Args:
        data: exactly one encoded value.
        max_bytes: more than this is refused unread.
        max_items: so many values are accepted, nested ones included.
        lists: what a list becomes; ``tuple`` for frozen messages.

    Raises:
        MalformedMessage: too long, no CBOR, not canonical, too deep, too many values, or of a type that no message uses: tags, keys
            that are no text, integers of over 64 bits, other simple values than false, true, null and floats.
    """
    if len(data) > max_bytes:
        raise MalformedMessage(f"a message of {len(data)} bytes is over the limit of {max_bytes}")
    raw = bytes(data)
    if len(raw) <= max_items:  # a value takes a byte at least
        value = _quickly(raw, lists)
        if value is not _UNSURE:
            return value
    return _carefully(raw, max_items, lists)


# ---- Quickly ----


class _Unsure(Exception):
    """It may be canonical or not: that is for `_carefully` to say."""


def _refuse(*_: object) -> NoReturn:
    raise _Unsure


_UNSURE: Final = object()
_PLAIN_TYPES = frozenset({int, str, bytes, bool, type(None)})
"""What has one encoding, which the encoder finds without being told to."""
_BELOW_64_BITS = b"\x3b" + b"\xff" * 8
"""The one integer of CBOR that no message has and that the encoder would write as it came."""
_TAGS = (0, 1, 2, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 100, 256, 258, 260, 261, 1004, 43000, 55799)
"""Those that the decoder would make something of: regular expressions, big numbers, references and more."""
_STRICT: Final[dict[str, Any]] = {
    "max_depth": MAX_CBOR_DEPTH,
    "allow_indefinite": False,
    "allow_duplicate_keys": False,
    "tag_hook": _refuse,
    "semantic_decoders": dict.fromkeys(_TAGS, _refuse),
}


def _quickly(raw: bytes, lists: Lists) -> object:
    """The value of ``raw``, or `_UNSURE`. The decoder allocates for no length that ``raw`` does not have."""
    try:
        value = cbor2.loads(raw, **_STRICT)
        # The same bytes again: every length and integer was in its shortest form, and nothing came behind.
        if encode_plain(value) != raw or _BELOW_64_BITS in raw:
            return _UNSURE
        return _plain(value, lists)
    except (_Unsure, cbor2.CBORError, ValueError, TypeError, OverflowError, RecursionError, MemoryError):
        return _UNSURE


def _plain(value: Any, lists: Lists) -> object:
    """``value`` with its lists as ``lists``, where it holds plain types alone and each map is in the order of its keys' encodings."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if kind is list:
        return lists([item if type(item) in _PLAIN_TYPES else _plain(item, lists) for item in value])
    if kind is not dict:
        raise _Unsure  # a float has several lengths; the rest is in no message
    last = b""
    for key, item in value.items():
        if type(key) is not str:
            raise _Unsure
        place = key.encode()
        if (len(place), place) <= (len(last), last) and last:
            raise _Unsure
        last = place
        if type(item) not in _PLAIN_TYPES:
            value[key] = _plain(item, lists)
    return value


# ---- Carefully ----


def _carefully(raw: bytes, max_items: int, lists: Lists) -> object:  # noqa: PLR0912, PLR0915 - a call for each value would double its time
    """One flat loop builds the value and checks its form.

    No length that the bytes announce is believed before so many bytes, or items of at least one byte, are there.
    """
    i, end = 0, len(raw)
    items_left = max_items - 1
    # The level that is being read: its items (keys and values by turns), how many are left, and the encoding of its last key.
    items: list[object] = []
    left, in_map, last_key = 1, False, b""
    outer: list[tuple[list[object], int, bool, bytes]] = []
    while left or outer:
        if not left:
            value: object = dict(zip(items[::2], items[1::2], strict=True)) if in_map else lists(items)
            items, left, in_map, last_key = outer.pop()
            items.append(value)
            continue
        if i >= end:
            raise MalformedMessage("the message ends early")
        start = i
        major, info = raw[i] >> 5, raw[i] & 31
        i += 1
        argument = info
        if info > 23:
            if info == 24 and i < end and raw[i] > 23 and major != _SIMPLE:
                argument = raw[i]  # nearly always
                i += 1
            else:
                argument = _argument(raw, i, major, info)
                i += _ARGUMENT_BYTES[info]
        left -= 1
        is_key = in_map and left & 1
        if major == _TEXT:
            i += argument
            if i > end:
                raise MalformedMessage("a string runs over the end of the message")
            if is_key:
                # In the ascending order of their encodings, which rules out duplicates too.
                if raw[start:i] <= last_key:
                    raise _not_canonical()
                last_key = raw[start:i]
            try:
                items.append(raw[i - argument : i].decode())
            except UnicodeDecodeError as error:
                levels = [(level, is_map) for level, _, is_map, _ in outer] + [(items, in_map)]
                raise MalformedMessage("text that is no UTF-8", param=_path(levels)) from error
            continue
        if is_key:
            raise MalformedMessage("keys are text")
        if major == _BYTES:
            i += argument
            if i > end:
                raise MalformedMessage("a string runs over the end of the message")
            items.append(raw[i - argument : i])
        elif major == _UNSIGNED:
            items.append(argument)
        elif major == _LIST or major == _MAP:  # noqa: SIM109, PLR1714 - a tuple would be made each time
            count = argument if major == _LIST else 2 * argument
            if count > end - i:
                raise MalformedMessage("a list or map runs over the end of the message")
            if len(outer) >= MAX_CBOR_DEPTH:
                raise MalformedMessage(f"nested deeper than {MAX_CBOR_DEPTH} levels")
            items_left -= count
            if items_left < 0:
                raise MalformedMessage(f"over {max_items} values in one message")
            outer.append((items, left, in_map, last_key))
            items, left, in_map, last_key = [], count, major == _MAP, b""
        else:
            items.append(_simple(major, info, argument, raw[start:i]))
    if i != end:
        raise MalformedMessage("bytes after the end of the message")
    return items[0]


def _path(levels: Sequence[tuple[list[object], bool]]) -> str | None:
    """Where the value is that comes next: ``body.model_id``; None for a value that stands alone, and for a key.

    Args:
        levels: from the outermost in, what was read of each, and whether it is a map: then its last item is the value's key.
    """
    steps = [str(items[-1] if is_map and len(items) & 1 else len(items)) for items, is_map in levels[1:]]
    is_key = levels[-1][1] and not len(levels[-1][0]) & 1
    return ".".join(steps[:-1] if is_key else steps) or None


def _argument(raw: bytes, i: int, major: int, info: int) -> int:
    """The argument in the bytes from ``i`` on, of an item whose initial byte leaves it to them."""
    size = _ARGUMENT_BYTES[info]
    if size == 0 or i + size > len(raw):
        raise MalformedMessage("indefinite lengths and reserved codes are not canonical")
    argument = int.from_bytes(raw[i : i + size], "big")
    if argument < _SMALLEST[info] and major != _SIMPLE:
        raise _not_canonical()
    return argument


def _simple(major: int, info: int, argument: int, encoded: bytes) -> object:
    """The negative integer, simple value or float that ``encoded`` is, its initial byte included."""
    if major == _NEGATIVE:
        if argument == _MAX_INT:
            raise MalformedMessage("an integer of over 64 bits")
        return -1 - argument
    if major != _SIMPLE or info not in _SIMPLE_VALUES | _FLOATS:
        raise MalformedMessage("tags and other simple values than false, true, null and floats are not used")
    if info in _SIMPLE_VALUES:
        return _SIMPLE_VALUES[info]
    value: float = _FLOATS[info].unpack(encoded[1:])[0]
    if encode(value) != encoded:
        raise _not_canonical()
    return value


def _not_canonical() -> MalformedMessage:
    return MalformedMessage("CBOR that is not canonical")
