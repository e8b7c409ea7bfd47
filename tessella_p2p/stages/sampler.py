"""Drawing a token from logits: a pure function of the logits, the seed and the position.

No generator has a state, so a draw does not depend on the batch that it ran in, on what was drawn before, or on the node; a route that
is rebuilt in the middle of an answer goes on with the same tokens, and an auditor repeats a single draw.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_DRAW_DOMAIN = b"tessella draw"


def uniform_at(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, position): 53 bits of BLAKE2b keyed with the seed, over the position."""
    digest = hashlib.blake2b(
        position.to_bytes(8, "little"), key=seed.to_bytes(8, "little"), digest_size=8, person=_DRAW_DOMAIN
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(logits: npt.NDArray[np.float32], temperature: float, seed: int, position: int) -> int:
    """The token at ``position``.

    Temperature 0 takes the largest logit, the lowest id among equals. Otherwise the cumulative distribution of
    ``softmax(logits / temperature)`` is inverted at `uniform_at`, in float64.

    Args:
        logits: [vocabulary] float32, finite.
        temperature: not negative.
        seed: 64 bits.
        position: of the token that is drawn.
    """
    if temperature == 0.0:
        return int(np.argmax(logits))
    wide = logits.astype(np.float64)
    # The largest becomes 0 before the division, so that no temperature, however small, gives inf − inf.
    with np.errstate(over="ignore"):
        weights = np.exp((wide - wide.max()) / temperature)
    cumulative = np.cumsum(weights)
    # u·total < total, so the index is at most the last one with a positive weight.
    return int(np.searchsorted(cumulative, uniform_at(seed, position) * cumulative[-1], side="right"))
