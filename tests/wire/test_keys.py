"""Keys and peer ids: ours are libp2p's, byte for byte."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from tessella_p2p.base.errors import InvalidSignature, KeyFileError, MalformedMessage
from tessella_p2p.base.ids import PeerId
from tessella_p2p.wire.keys import NodeKey, peer_id_of, public_key_of, verify

SEEDS = st.binary(min_size=32, max_size=32)


@given(SEEDS)
@settings(max_examples=50, deadline=None)
def test_peer_ids_and_signatures_are_those_of_py_libp2p(seed: bytes) -> None:
    theirs = create_new_key_pair(seed)
    ours = NodeKey(seed)
    assert ours.peer_id == ID.from_pubkey(theirs.public_key).to_string()
    assert ours.public_key == theirs.public_key.to_bytes()
    assert theirs.public_key.verify(b"message", ours.sign(b"message"))
    verify(ours.peer_id, b"message", theirs.private_key.sign(b"message"))


def test_key_files_are_those_of_the_libp2p_specification() -> None:
    """Its test vector ("Peer Ids and Keys"); py-libp2p writes another form, without the public half."""
    public = "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    private = bytes.fromhex("080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d" + public)
    key = NodeKey.from_protobuf(private)
    assert key.public_key.hex() == public
    assert key.to_protobuf() == private


@given(SEEDS)
@settings(max_examples=50, deadline=None)
def test_a_key_file_and_a_peer_id_give_back_what_they_hold(seed: bytes) -> None:
    key = NodeKey(seed)
    again = NodeKey.from_protobuf(key.to_protobuf())
    assert (again.seed, again.peer_id) == (seed, key.peer_id)
    assert public_key_of(key.peer_id) == key.public_key
    assert peer_id_of(key.public_key) == key.peer_id
    assert seed.hex() not in repr(key)


@given(st.binary(max_size=80))
def test_any_other_key_file_is_refused(data: bytes) -> None:
    with pytest.raises(KeyFileError):
        NodeKey.from_protobuf(data)


def test_a_key_file_with_the_wrong_public_half_is_refused() -> None:
    data = bytearray(NodeKey(bytes(32)).to_protobuf())
    data[-1] ^= 1
    with pytest.raises(KeyFileError, match="public half"):
        NodeKey.from_protobuf(bytes(data))


@given(st.text(max_size=70) | st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", max_size=70))
def test_any_other_text_is_no_peer_id(text: str) -> None:
    with pytest.raises(MalformedMessage):
        public_key_of(PeerId(text))


KEY = NodeKey(bytes(range(32)))


@pytest.mark.parametrize(
    "text",
    [
        f"{KEY.peer_id} ",
        f"{KEY.peer_id}\n",
        f" {KEY.peer_id}",
        f"1{KEY.peer_id}",
        KEY.peer_id[:-1],
        KEY.peer_id.lower(),
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",  # of an RSA key
        "x" * 100_000,
    ],
)
def test_one_peer_has_one_name(text: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        verify(PeerId(text), b"m", KEY.sign(b"m"))
    assert len(str(caught.value)) < 200


def test_only_the_signers_signature_over_that_message_verifies() -> None:
    signature = KEY.sign(b"message")
    for _ in range(2):  # the second time out of what is remembered
        verify(KEY.peer_id, b"message", signature)
    other = NodeKey(bytes(32))
    flipped = bytes([signature[0] ^ 1]) + signature[1:]
    for peer_id, message, claimed in (
        (other.peer_id, b"message", signature),
        (KEY.peer_id, b"massage", signature),
        (KEY.peer_id, b"", signature),
        (KEY.peer_id, b"message", flipped),
        (KEY.peer_id, b"message", b""),
        (KEY.peer_id, b"message", signature + b"\0"),
        (KEY.peer_id, b"message", bytes(64)),
    ):
        for _ in range(2):
            with pytest.raises(InvalidSignature):
                verify(peer_id, message, claimed)


def test_the_neutral_element_as_a_public_key_signs_nothing() -> None:
    """A key of small order would accept one signature for every message."""
    for public_key in (b"\x01" + bytes(31), bytes(32), b"\xec" + b"\xff" * 30 + b"\x7f"):
        with pytest.raises(InvalidSignature):
            verify(peer_id_of(public_key), b"any", public_key + bytes(32))


def test_signatures_verify_from_several_threads() -> None:
    cases = [(f"message {i % 7}".encode(), NodeKey(bytes([i % 5]) * 32)) for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda case: verify(case[1].peer_id, case[0], case[1].sign(case[0])), cases))
