"""How much each API key has used lately, and whether it may use more; pure. ``now`` is in monotonic seconds everywhere.

    enter ──▶ admitted: one request more is open ──spend──▶ …tokens, as they come… ──leave──▶
      └─────▶ refused: says for how long

Requests and tokens have a bucket each that holds a minute's worth and fills evenly. What an answer costs is known only as it comes, so
a request needs no more than one token to begin, and its bucket may go below 0: the next one waits until it is above it again.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from tessella_p2p.bridge.api_keys import KeyLimits

_MINUTE_S = 60.0
_FULL_RETRY_S = 1.0
"""Nobody knows when one of a key's requests ends."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that a key may not make now: which of its limits is reached, and after how many seconds to come again."""

    limit: Literal["requests", "tokens", "concurrent"]
    retry_s: float


@dataclass(slots=True)
class _Bucket:
    """What is left of a minute's worth."""

    left: float
    at: float

    def fill(self, per_minute: int, now: float) -> None:
        self.left = min(float(per_minute), self.left + max(0.0, now - self.at) * per_minute / _MINUTE_S)
        self.at = max(self.at, now)


@dataclass(slots=True)
class _Use:
    open: int = 0
    requests: _Bucket | None = None
    tokens: _Bucket | None = None


@dataclass(slots=True)
class KeyRates:
    """What the keys of one node have used. Only ids of its keys may come in, so they bound what is remembered."""

    _uses: dict[str, _Use] = field(default_factory=dict)

    def enter(self, key_id: str, limits: KeyLimits, now: float) -> Refused | None:
        """Count one request more, which `leave` ends; or why it may not begin, and then nothing is counted."""
        use = self._uses.setdefault(key_id, _Use())
        if limits.concurrent is not None and use.open >= limits.concurrent:
            return Refused("concurrent", _FULL_RETRY_S)
        requests, tokens = _buckets(use, limits, now)
        if tokens is not None and limits.tokens_per_minute and tokens.left < 1:
            return Refused("tokens", (1 - tokens.left) * _MINUTE_S / limits.tokens_per_minute)
        if requests is not None and limits.requests_per_minute:
            if requests.left < 1:
                return Refused("requests", (1 - requests.left) * _MINUTE_S / limits.requests_per_minute)
            requests.left -= 1
        use.open += 1
        return None

    def leave(self, key_id: str) -> None:
        """A request that `enter` admitted is over."""
        use = self._uses.get(key_id)
        if use is not None:
            use.open -= 1

    def spend(self, key_id: str, num_tokens: int) -> None:
        """Count tokens of a request that `enter` admitted."""
        use = self._uses.get(key_id)
        if use is not None and use.tokens is not None:
            use.tokens.left -= num_tokens

    def keep(self, key_ids: Collection[str]) -> None:
        """Forget keys that there are no more; one that has a request open is left to a later call."""
        for key_id in [name for name, use in self._uses.items() if name not in key_ids and not use.open]:
            del self._uses[key_id]

    def headers(self, key_id: str, limits: KeyLimits, now: float) -> dict[str, str]:
        """OpenAI's ``x-ratelimit-*`` headers: of each limit its size, what is left, and when it is full again."""
        use = self._uses.get(key_id, _Use())
        requests, tokens = _buckets(use, limits, now)
        found: dict[str, str] = {}
        for name, bucket, per_minute in (
            ("requests", requests, limits.requests_per_minute),
            ("tokens", tokens, limits.tokens_per_minute),
        ):
            if bucket is not None and per_minute:
                found[f"x-ratelimit-limit-{name}"] = str(per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.left)))
                found[f"x-ratelimit-reset-{name}"] = f"{(per_minute - bucket.left) * _MINUTE_S / per_minute:.3f}s"
        return found


def _buckets(use: _Use, limits: KeyLimits, now: float) -> tuple[_Bucket | None, _Bucket | None]:
    """The buckets of what is bounded, filled up to ``now``: a limit that is new begins full, one that is gone is forgotten."""
    use.requests = _filled(use.requests, limits.requests_per_minute, now)
    use.tokens = _filled(use.tokens, limits.tokens_per_minute, now)
    return use.requests, use.tokens


def _filled(bucket: _Bucket | None, per_minute: int | None, now: float) -> _Bucket | None:
    if per_minute is None:
        return None
    bucket = bucket or _Bucket(float(per_minute), now)
    bucket.fill(per_minute, now)
    return bucket
