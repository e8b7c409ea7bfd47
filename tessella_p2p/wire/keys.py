"""Ed25519 identities and the libp2p peer ids that derive from them.

A peer id is the base58 form of an identity multihash over the protobuf of the public key (libp2p spec, "Peer Ids and Keys"),
so a peer id carries its own public key and nothing has to be looked up to verify a signature.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from functools import lru_cache

import base58
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from tessella_p2p.base.errors import InvalidSignature, KeyFileError, MalformedMessage
from tessella_p2p.base.ids import PeerId

SEED_BYTES = 32
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64

_PUBLIC_PROTOBUF = bytes.fromhex("08011220")  # PublicKey{Type: Ed25519, Data: 32 bytes}
_PRIVATE_PROTOBUF = bytes.fromhex("08011240")  # PrivateKey{Type: Ed25519, Data: 64 bytes}
_IDENTITY_MULTIHASH = bytes.fromhex("0024")  # identity, 36 bytes
MAX_PEER_ID_CHARS = 64


class NodeKey:
    """One node's signing key. Holding it is being that peer.

    Args:
        seed: the 32 secret bytes of an Ed25519 key.
    """

    __slots__ = ("_signing", "peer_id", "public_key")

    def __init__(self, seed: bytes) -> None:
        self._signing = SigningKey(seed)
        self.public_key: bytes = bytes(self._signing.verify_key)
        self.peer_id: PeerId = peer_id_of(self.public_key)

    def __repr__(self) -> str:
        return f"NodeKey({self.peer_id})"

    @property
    def seed(self) -> bytes:
        """The 32 secret bytes."""
        return bytes(self._signing)

    def sign(self, message: bytes) -> bytes:
        """The 64-byte signature over ``message``."""
        return self._signing.sign(message).signature

    def to_protobuf(self) -> bytes:
        """The libp2p protobuf of the private key (68 bytes): the content of a key file."""
        return _PRIVATE_PROTOBUF + self.seed + self.public_key

    @classmethod
    def from_protobuf(cls, data: bytes) -> NodeKey:
        """The key in a libp2p protobuf.

        Raises:
            KeyFileError: for any other bytes, or a public half that does not belong to the secret one.
        """
        if len(data) != 68 or not data.startswith(_PRIVATE_PROTOBUF):
            raise KeyFileError("no Ed25519 private key in libp2p's protobuf form (68 bytes are expected)")
        key = cls(data[4:36])
        if key.public_key != data[36:]:
            raise KeyFileError("the public half of the key does not belong to its secret half")
        return key


@lru_cache(maxsize=8192)
def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id of a 32-byte Ed25519 public key."""
    return PeerId(base58.b58encode(_IDENTITY_MULTIHASH + _PUBLIC_PROTOBUF + public_key).decode("ascii"))


@lru_cache(maxsize=8192)
def public_key_of(peer_id: PeerId) -> bytes:
    """The 32-byte public key that a peer id carries.

    Raises:
        MalformedMessage: when it is no Ed25519 peer id.
    """
    if len(peer_id) > MAX_PEER_ID_CHARS:
        raise MalformedMessage("a peer id of over 64 characters is no Ed25519 peer id")
    try:
        raw = base58.b58decode(peer_id)
    except ValueError as error:
        raise MalformedMessage(f"{peer_id!r} is no base58 peer id") from error
    prefix = _IDENTITY_MULTIHASH + _PUBLIC_PROTOBUF
    if len(raw) != len(prefix) + PUBLIC_KEY_BYTES or not raw.startswith(prefix):
        raise MalformedMessage(f"{peer_id!r} is no Ed25519 peer id")
    public_key = raw[len(prefix) :]
    if (
        peer_id_of(public_key) != peer_id
    ):  # the base58 reader ignores white space at the end: one peer would have many names
        raise MalformedMessage(f"{peer_id!r} is not the canonical form of a peer id")
    return public_key


class _Verified:
    """The last signatures that were found valid, by digest: a cache that kept the messages could be filled with gigabytes."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, public_key: bytes, message: bytes, signature: bytes) -> bool:
        entry = hashlib.sha256(public_key + signature + message).digest()  # the first two have a fixed length
        with self._lock:
            if entry in self._seen:
                self._seen.move_to_end(entry)
                return True
        try:
            VerifyKey(public_key).verify(message, signature)
        except (BadSignatureError, ValueError):
            return False
        with self._lock:
            self._seen[entry] = None
            if len(self._seen) > self._max_entries:
                self._seen.popitem(last=False)
        return True


_verified = _Verified(max_entries=16_384)


def verify(peer_id: PeerId, message: bytes, signature: bytes) -> None:
    """Check that ``peer_id`` signed ``message``.

    The same record reaches a node through the DHT, by gossip and from the orchestrator, so valid signatures are remembered (the
    check is a pure function of its arguments).

    Raises:
        InvalidSignature: when it did not.
        MalformedMessage: when ``peer_id`` is no Ed25519 peer id.
    """
    if len(signature) != SIGNATURE_BYTES or not _verified.check(public_key_of(peer_id), message, signature):
        raise InvalidSignature(f"the signature is not {peer_id}'s")
