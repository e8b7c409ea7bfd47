"""Canonical CBOR: one value, one encoding; any bytes give a value or `MalformedMessage`."""

from __future__ import annotations

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import MalformedMessage
from tessella_p2p.base.limits import MAX_CBOR_DEPTH, MAX_CBOR_ITEMS
from tessella_p2p.wire import cbor

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**64) + 1, 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    | st.binary(max_size=40)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text("abc\u00e9日", max_size=30), inner, max_size=6),
)


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


@given(VALUES)
@settings(max_examples=60, deadline=None)
def test_decode_gives_back_what_was_encoded(value: object) -> None:
    data = cbor.encode(value)
    decoded = cbor.decode(data)
    assert decoded == value
    assert cbor.encode(decoded) == data


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_a_value_of_that_encoding_or_a_typed_error(data: bytes) -> None:
    try:
        value = cbor.decode(data)
    except MalformedMessage:
        return
    assert cbor.encode(value) == data


@given(VALUES, st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_message_is_another_message_or_a_typed_error(value: object, data: st.DataObject) -> None:
    raw = bytearray(cbor.encode(value))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        again = cbor.decode(bytes(raw))
    except MalformedMessage:
        return
    assert cbor.encode(again) == raw


@given(VALUES, st.data())
@settings(max_examples=60, deadline=None)
def test_every_proper_prefix_and_every_longer_message_is_refused(value: object, data: st.DataObject) -> None:
    raw = cbor.encode(value)
    with pytest.raises(MalformedMessage):
        cbor.decode(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(MalformedMessage):
        cbor.decode(raw + data.draw(st.binary(min_size=1, max_size=4)))


# Each of these is accepted by cbor2 as it is (RFC 8949, section 4.2.1, forbids the first group in deterministic encodings).
LOOSE = {
    "integer in two bytes": "1801",
    "integer in nine bytes": "1b0000000000000001",
    "long length of a string": "780161",
    "long length of a list": "980101",
    "indefinite list": "9f01ff",
    "indefinite map": "bf616101ff",
    "indefinite text": "7f6161ff",
    "indefinite bytes": "5f4161ff",
    "duplicate key": "a2616101616102",
    "keys out of order": "a2616201616101",
    "float that fits into fewer bytes": "fb3ff8000000000000",
    "NaN with a payload": "f97e01",
    "tag: date": "c1fb41d452d9e20a8000",
    "tag: big number": "c249010000000000000000",
    "tag: shared value": "d81c80",
    "integer keys": "a10102",
    "bytes as keys": "a1416101",
    "list as key": "a18001",
    "undefined": "f7",
    "simple value": "e0",
    "integer below 64 bits": "3bffffffffffffffff",
}


@pytest.mark.parametrize("data", LOOSE.values(), ids=LOOSE.keys())
def test_what_cbor2_accepts_loosely_is_refused(data: str) -> None:
    cbor2.loads(bytes.fromhex(data))
    with pytest.raises(MalformedMessage):
        cbor.decode(bytes.fromhex(data))


@pytest.mark.parametrize(
    "data",
    [
        "",
        "1c",
        "ff",
        "62c328",
        "63eda080",
        "5bffffffffffffffff",
        "9affffffff",
        "bbffffffffffffffff",
        "9b7fffffffffffffff00",
    ],
)
def test_broken_bytes_and_announced_lengths_are_refused_before_anything_is_allocated(data: str) -> None:
    with pytest.raises(MalformedMessage):
        cbor.decode(bytes.fromhex(data))


@pytest.mark.parametrize("data", LOOSE.values(), ids=LOOSE.keys())
def test_the_quick_reader_is_sure_of_nothing_that_is_refused(data: str) -> None:
    assert cbor._quickly(bytes.fromhex(data), list) is cbor._UNSURE


MUTATIONS = VALUES.map(cbor.encode).flatmap(
    lambda raw: st.tuples(st.just(raw), st.integers(0, len(raw) - 1), st.integers(0, 255), st.binary(max_size=2))
)


@given(
    st.one_of(st.binary(max_size=64), MUTATIONS.map(lambda m: m[0][: m[1]] + bytes([m[2]]) + m[0][m[1] + 1 :] + m[3]))
)
@settings(max_examples=600, deadline=None)
def test_what_the_quick_reader_is_sure_of_the_careful_one_reads_the_same(data: bytes) -> None:
    """Also with values of every type of its own: 1 is not True, and 1.0 is not 1."""
    for lists in (list, tuple):
        quick = cbor._quickly(data, lists)
        if quick is not cbor._UNSURE:
            careful = cbor._carefully(data, MAX_CBOR_ITEMS, lists)
            assert repr(quick) == repr(careful)


def test_the_quick_reader_is_sure_of_what_messages_are_made_of() -> None:
    value: dict[str, object] = {"a": [1, -1, 2**64 - 1, None, True, "text", b"bytes", {}], "bb": {"c": [[]], "dd": b""}}
    assert cbor._quickly(cbor.encode(value), list) == value
    for depth in range(1, MAX_CBOR_DEPTH + 3):
        quick = cbor._quickly(cbor.encode(nested(depth)), list)
        assert quick is cbor._UNSURE or depth <= MAX_CBOR_DEPTH


def test_nesting_is_bounded() -> None:
    assert cbor.decode(cbor.encode(nested(MAX_CBOR_DEPTH))) == nested(MAX_CBOR_DEPTH)
    with pytest.raises(MalformedMessage, match="nested deeper"):
        cbor.decode(cbor.encode(nested(MAX_CBOR_DEPTH + 1)))
    for bottomless in (b"\x81" * 200_000, b"\xa1\x61a" * 60_000, b"\xc1" * 200_000, b"\x9f" * 200_000):
        with pytest.raises(MalformedMessage):
            cbor.decode(bottomless)


def test_the_number_of_values_is_bounded() -> None:
    values = [0] * (MAX_CBOR_ITEMS - 1)
    assert cbor.decode(cbor.encode(values)) == values
    with pytest.raises(MalformedMessage, match="values in one message"):
        cbor.decode(cbor.encode([*values, 0]))
    with pytest.raises(MalformedMessage, match="values in one message"):
        cbor.decode(cbor.encode([1, 2, 3]), max_items=3)


def test_a_long_message_is_refused_unread() -> None:
    data = cbor.encode(b"x" * 100)
    assert cbor.decode(data, max_bytes=len(data)) == b"x" * 100
    with pytest.raises(MalformedMessage, match="over the limit"):
        cbor.decode(data, max_bytes=len(data) - 1)


def test_a_view_decodes_as_its_bytes_do() -> None:
    assert cbor.decode(memoryview(cbor.encode({"a": [1]}))) == {"a": [1]}


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        (b"\x61\xff", None),
        (b"\xa1\x61\xff\x01", None),
        (b"\xa1\x64body\xa1\x61a\x62\xff\xff", "body.a"),
        (b"\xa1\x64body\xa1\x61\xff\x01", "body"),
        (b"\x82\x01\xa1\x61b\x61\xff", "1.b"),
        (b"\xa1\x61a\x82\x61x\x62\xc0\x80", "a.1"),
    ],
)
def test_text_that_is_no_utf8_is_refused_with_its_place(raw: bytes, place: str | None) -> None:
    with pytest.raises(MalformedMessage) as caught:
        cbor.decode(raw)
    assert caught.value.param == place
