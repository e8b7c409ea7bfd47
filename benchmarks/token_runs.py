"""Pinned prompts, and the rate of several sessions that decode at the same time (pure)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.results import BenchmarkError

_FIRST_ID = 1000
_LAST_ID = 40_000
"""Ordinary words of the pinned model's vocabulary: no control tokens among them."""


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """``count`` prompts of ``tokens`` ids. Another seed gives others, so that no cached prefix serves a later run."""
    rng = random.Random(f"{seed} {tokens}")
    return [[rng.randrange(_FIRST_ID, _LAST_ID) for _ in range(tokens)] for _ in range(count)]


def decode_rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens a second of all sessions together, over the time in which every one of them decodes.

    Args:
        times: per session the moments of its tokens, rising. The time counted begins when the last session has its first token, and
            ends with the first session's last one; so no prompt and no emptier batch is part of it.

    Raises:
        BenchmarkError: there is no such time: sessions ended before others began.
    """
    start = max((moments[0] for moments in times if moments), default=0.0)
    end = min((moments[-1] for moments in times if moments), default=0.0)
    if end <= start or not all(times):
        raise BenchmarkError(f"{len(times)} sessions never decoded at the same time: nothing to measure")
    return sum(start < moment <= end for moments in times for moment in moments) / (end - start)
