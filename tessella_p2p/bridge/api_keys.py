"""API keys of a node, and what each of them may do; pure.

A key is ``tsl-`` and 32 random bytes in base64url. A node keeps its SHA-256 and never the key: of 32 random bytes nobody guesses one
from its hash, so no salt and no slow hash is needed, and a look-up by the hash tells whoever measures its time nothing of any key.

A key has limits of its own, and may stand for an identity: its `Delegation` lets this node ask in that identity's name, so its balance
and not the node's decides the tier, and is charged where requesters pay. Without one its requests are the node's own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import API_KEY_BYTES, MAX_API_KEYS, MAX_KEY_LABEL_CHARS
from tessella_p2p.entry.api import Caller
from tessella_p2p.wire.messages import Tier

PREFIX: Final = "tsl-"
SECRET_CHARS: Final = len(PREFIX) + -(-API_KEY_BYTES * 4 // 3)
_ID_BYTES: Final = 6
NameT = TypeVar("NameT", str, bytes)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may use; None is no bound.

    Attributes:
        tier: the best that its requests may have.
        requests_per_minute: requests that are answered; reading counts as none.
        tokens_per_minute: of prompts and answers together.
        concurrent: requests at a time.
    """

    tier: Tier | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of one key. Times are Unix milliseconds.

    Attributes:
        key_id: names it in logs, lists and to the entry; it authorises nothing.
        label: for people.
        digest: SHA-256 of the key.
        expires: from when on it opens nothing; None for never.
        delegation: a sealed `wire.messages.Delegation`, or None.
    """

    key_id: str
    label: str
    digest: bytes
    created: int
    expires: int | None = None
    limits: KeyLimits = KeyLimits()
    delegation: bytes | None = None

    def counts_at(self, now_ms: int) -> bool:
        """Whether it opens anything at ``now_ms``."""
        return self.expires is None or now_ms < self.expires

    @property
    def caller(self) -> Caller:
        """For whom its requests are made."""
        return Caller(self.key_id, self.delegation, self.limits.tier)


class ApiKeys:
    """The keys of one node, at one time.

    Raises:
        InvalidRequest: more than `MAX_API_KEYS`, or two with one id or one digest.
    """

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._by_id: Mapping[str, ApiKey] = _once((key.key_id, key) for key in keys)
        self._by_digest = _once((key.digest, key) for key in self._by_id.values())

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, secret: str, now_ms: int) -> ApiKey | None:
        """The key that ``secret`` is; None where it is unknown, revoked or over."""
        if len(secret) != SECRET_CHARS or not secret.startswith(PREFIX) or not secret.isascii():
            return None
        key = self._by_digest.get(digest_of(secret))
        return key if key is not None and key.counts_at(now_ms) else None

    def with_key(self, key: ApiKey) -> ApiKeys:
        """These and one more."""
        return ApiKeys([*self, key])

    def without(self, key_id: str) -> ApiKeys:
        """These but for one.

        Raises:
            InvalidRequest: there is none of that id.
        """
        if key_id not in self._by_id:
            raise InvalidRequest(f"there is no API key {key_id!r}; `tessella-p2p keys api list` shows those there are")
        return ApiKeys(key for key in self if key.key_id != key_id)


def new_key(
    random_bytes: Callable[[int], bytes],
    *,
    label: str,
    now_ms: int,
    expires: int | None = None,
    limits: KeyLimits | None = None,
    delegation: bytes | None = None,
) -> tuple[str, ApiKey]:
    """A new key, which is to be shown once, and what is kept of it.

    Raises:
        InvalidRequest: a label that does not print, or a time that is over.
    """
    if len(label) > MAX_KEY_LABEL_CHARS or not label.isprintable():
        raise InvalidRequest(f"a label is at most {MAX_KEY_LABEL_CHARS} characters that print", "label")
    if expires is not None and expires <= now_ms:
        raise InvalidRequest("a key that is over already opens nothing", "expires")
    secret = PREFIX + base64.urlsafe_b64encode(random_bytes(API_KEY_BYTES)).decode("ascii").rstrip("=")
    key_id = f"key-{random_bytes(_ID_BYTES).hex()}"
    return secret, ApiKey(key_id, label, digest_of(secret), now_ms, expires, limits or KeyLimits(), delegation)


def digest_of(secret: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(secret.encode("ascii")).digest()


def bearer_of(authorization: Iterable[str]) -> str | None:
    """The key in the values of a request's ``Authorization`` headers; None where there is not exactly one, or no bearer's."""
    values = list(authorization)
    if len(values) != 1:
        return None
    scheme, _, secret = values[0].partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else None


def _once(pairs: Iterable[tuple[NameT, ApiKey]]) -> Mapping[NameT, ApiKey]:
    found: dict[NameT, ApiKey] = {}
    for name, key in pairs:
        if name in found:
            raise InvalidRequest(f"two API keys have one id or one digest: {key.key_id}")
        found[name] = key
        if len(found) > MAX_API_KEYS:
            raise InvalidRequest(f"more than {MAX_API_KEYS} API keys: revoke those that nobody uses")
    return found
