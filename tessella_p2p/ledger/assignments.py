"""What an orchestrator keeps on disk of each worker, so that a restart forgets nobody's layers.

One row per peer, beside the ledger and not part of its journal: an assignment is replaced, not accounted for. The row holds the
sealed lease itself, and with it peer, model, manifest root, recipe, layers, serial and expiry, as the orchestrator signed them: who
reads a row back verifies it like any other envelope, so a row of another orchestrator's key certifies nothing.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tessella_p2p.wire.envelope import Message, decode_message, encode_message
from tessella_p2p.wire.messages import CanaryMode, Layers, Name, Sealed


class Assignment(Message):
    """What the newest lease of a worker certifies, and what the lease does not say.

    ``holds_range`` is whether the layers count as taken (the worker was not offline or draining); ``mesh_complete`` whether
    `min_stages` workers had registered. The rest is as the worker registered: its claim (MB; 0 where that is not known), its device,
    its own bound on its layers, and how it answers where it is a canary.
    """

    lease: Sealed
    holds_range: bool
    mesh_complete: bool
    claim_mb: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    device: Name | None = None
    bound: Layers | None = None
    canary: CanaryMode = "off"


def encode_assignment(assignment: Assignment) -> bytes:
    """The bytes of a row."""
    return encode_message(assignment)


def decode_assignment(row: bytes) -> Assignment:
    """The assignment in ``row``.

    Raises:
        MalformedMessage: damaged, or written by a newer version.
    """
    return decode_message(Assignment, row)
