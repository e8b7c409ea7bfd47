"""What every session of a worker shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import CHECKPOINT_S, HOP_TIMEOUT_S
from tessella_p2p.ledger.failure_reports import FailureReports
from tessella_p2p.net.network import Network
from tessella_p2p.stages.history import History
from tessella_p2p.stages.hop_links import HopLinks
from tessella_p2p.stages.opening import Opening
from tessella_p2p.stages.work import WorkMeter
from tessella_p2p.wire.envelope import Sequencer
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.worker.grammars import Grammars
from tessella_p2p.worker.open_journal import OpenJournal


class ProofSink(Protocol):
    """Where work is made durable. Each call returns once it is on disk."""

    async def checkpoint(self, opening: Opening, meter: WorkMeter) -> None:
        """Journal what is confirmed so far; a crash is paid up to here."""
        ...

    async def prove(self, opening: Opening, meter: WorkMeter) -> None:
        """Write the proof, and let the upload begin."""
        ...


def _nobody_known(peer: PeerId) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class StageContext:
    """What every session of a node shares.

    Attributes:
        links: towards the next stages.
        proofs: where work is made durable.
        is_known: whether a peer's own signed addresses are known; if so, what an entry says of its address is not believed.
        checkpoint_s: how often confirmed work is journaled.
        reports: of next stages that failed this one; None where nobody is told.
        history: keeps what auditors may ask for; None keeps nothing.
        opens: remembers over restarts what was opened; None forgets it.
        grammars: compiles what answers have to follow; by default there is no model to compile for, and every grammar is refused.
    """

    network: Network
    key: NodeKey
    clock: WallClock
    sequencer: Sequencer
    links: HopLinks
    proofs: ProofSink
    is_known: Callable[[PeerId], bool] = _nobody_known
    hop_timeout_s: float = HOP_TIMEOUT_S
    checkpoint_s: float = CHECKPOINT_S
    reports: FailureReports | None = None
    history: History | None = None
    opens: OpenJournal | None = None
    grammars: Grammars = field(default_factory=Grammars)
