"""How an identity did, in one number that forgets (pure).

A score is in thousandths: 1,000 is a clean slate, for a stranger as for whoever had nothing to answer for in a long while. Verdicts and
slashes move it, and its distance from 1,000 halves every `REPUTATION_HALF_LIFE_S`. Integers only, so that a replayed journal gives the
same bytes on every machine. The counters beside it never decay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tessella_p2p.base.limits import REPUTATION_HALF_LIFE_S

CLEAN_SLATE = 1_000
WORST, BEST = 0, 1_500
PASSED, FAILED, COPIED, SLASHED = 5, -500, -1_000, -250
"""What an event does to the score: a hundred passed audits weigh as much as one failed one, and for as long."""

Verdict = Literal["passed", "failed", "inconclusive", "copied"]

_HALF_LIFE_MS = round(REPUTATION_HALF_LIFE_S * 1000)
_FORGOTTEN_HALVES = 16
"""After so many half-lives nothing is left of the largest distance."""


@dataclass(frozen=True, slots=True)
class Reputation:
    """One identity. ``score`` is as it was at ``at`` (Unix milliseconds); `at_time` brings it to another time."""

    score: int = CLEAN_SLATE
    at: int = 0
    audits_passed: int = 0
    audits_failed: int = 0
    inconclusive: int = 0
    copies: int = 0
    slashes: int = 0


def decayed(score: int, at_ms: int, now_ms: int) -> int:
    """What is left at ``now_ms`` of a ``score`` of ``at_ms``: nearer to a clean slate, never beyond it.

    Whole half-lives halve the distance; within one it falls in a straight line. A time before ``at_ms`` changes nothing.
    """
    halves, rest = divmod(max(0, now_ms - at_ms), _HALF_LIFE_MS)
    if halves >= _FORGOTTEN_HALVES:
        return CLEAN_SLATE
    distance = score - CLEAN_SLATE
    left = abs(distance) * (2 * _HALF_LIFE_MS - rest) // (2 * _HALF_LIFE_MS << halves)
    return CLEAN_SLATE + (left if distance > 0 else -left)


def at_time(reputation: Reputation, now_ms: int) -> Reputation:
    """The same identity, its score decayed to ``now_ms``."""
    now_ms = max(now_ms, reputation.at)
    return replace(reputation, score=decayed(reputation.score, reputation.at, now_ms), at=now_ms)


def judged(reputation: Reputation, verdict: Verdict, at_ms: int) -> Reputation:
    """After a verdict at ``at_ms``. An inconclusive one is counted and moves nothing: it may be another's fault."""
    now = at_time(reputation, at_ms)
    if verdict == "passed":
        return replace(_moved(now, PASSED), audits_passed=now.audits_passed + 1)
    if verdict == "failed":
        return replace(_moved(now, FAILED), audits_failed=now.audits_failed + 1)
    if verdict == "copied":
        return replace(_moved(now, COPIED), audits_failed=now.audits_failed + 1, copies=now.copies + 1)
    return replace(now, inconclusive=now.inconclusive + 1)


def slashed(reputation: Reputation, at_ms: int) -> Reputation:
    """After a slash at ``at_ms``."""
    now = at_time(reputation, at_ms)
    return replace(_moved(now, SLASHED), slashes=now.slashes + 1)


def _moved(reputation: Reputation, by: int) -> Reputation:
    return replace(reputation, score=min(BEST, max(WORST, reputation.score + by)))
