"""What the parts of an orchestrator share, and the form of what they answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import TessellaError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_REFUSAL_CHARS
from tessella_p2p.ledger.blocking import RunBlocking, in_thread
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.net.network import Network
from tessella_p2p.wire.envelope import Message, Sequencer
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import OrchestratorAnswer, Refused

Handler: TypeAlias = Callable[[PeerId, Any], Awaitable[OrchestratorAnswer]]
"""Answers one kind of request of a verified signer, or raises the `TessellaError` that it is refused with. A public read is answered
whoever asks, so what a handler of one gets as its signer may be the orchestrator itself."""
Handlers: TypeAlias = Mapping[type[Message], Handler]


@dataclass(frozen=True, slots=True)
class OrchestratorContext:
    """What every part shares.

    Attributes:
        network: where it is asked, and asks; its identity is ``key``'s.
        key: signs leases, tickets, orders, entries and answers.
        store: the ledger; closing it is the caller's.
        sequencer: numbers what is signed.
        recipe: the mesh's own, where a request names none.
        run_blocking: how the ledger is called; ``in_place`` under virtual time.
        outcomes: how many requests were answered, by ``kind`` or ``kind:code``; proofs, by ``proof:status``; what the operator asked,
            by ``operate.kind``; and how often a request's signature was looked at, ``signatures_verified``.
    """

    network: Network
    key: NodeKey
    clock: WallClock
    store: LedgerStore
    sequencer: Sequencer
    recipe: str
    run_blocking: RunBlocking = in_thread
    outcomes: Counter[str] = field(default_factory=Counter)


def refused(error: TessellaError) -> Refused:
    """The answer to a request that ``error`` refuses."""
    return Refused(code=error.code, reason=str(error)[:MAX_REFUSAL_CHARS])
