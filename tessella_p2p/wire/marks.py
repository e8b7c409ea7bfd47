"""At which positions a proof carries its running digests, so that neighbours and auditors have a common prefix to look at (pure)."""

from __future__ import annotations

from tessella_p2p.base.limits import DIGEST_MARK_POSITIONS, MAX_PROOF_MARKS


def mark_stride(positions: int) -> int:
    """How far apart the marks of a proof of ``positions`` positions are: there is one at each multiple of this.

    `DIGEST_MARK_POSITIONS`; of a very long session twice that, or four times, and so on, so that the proof stays within its bound. What
    is a mark of a longer proof is one of a shorter proof too.
    """
    stride = DIGEST_MARK_POSITIONS
    while positions // stride > MAX_PROOF_MARKS:
        stride *= 2
    return stride
