"""What was seen of a simulation: plain values that the checkers and the report are computed from.

Nothing here comes from what a role believes of others: requests and their answers as the clients saw them, chain-opens from the
wire, leases and judgements as the orchestrator gave them, turns as the engines ran them, faults as they were inflicted.
Times are virtual seconds since the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from tessella_p2p.base.ids import PeerId
from tessella_p2p.ledger.accounts import Account
from tessella_p2p.ledger.changes import JournalEntry
from tessella_p2p.ledger.proof_log import ProofCounts
from tessella_p2p.wire.messages import Settled

START_MS = 1_750_000_000_000
"""The date at which every simulation begins."""

Outcome = Literal["answered", "abandoned", "refused", "entry lost"]


def unix_ms(at_s: float) -> int:
    """The date of a virtual time."""
    return START_MS + int(at_s * 1000)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and how it ended, as its client saw it.

    Attributes:
        number, at_s, entry, prompt, max_tokens, temperature, seed: what was asked, when and of whom.
        outcome: ``answered``; ``abandoned``: the client left; ``refused``: an error, see ``code``; ``entry lost``: the entry died.
        tokens: what came before the end.
        done_s: when it ended.
        token_at_s: when each token came.
        paid: a ticket was minted for it; of answered requests.
    """

    number: int
    at_s: float
    entry: PeerId
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    outcome: Outcome
    tokens: tuple[int, ...]
    done_s: float
    code: str = ""
    token_at_s: tuple[float, ...] = ()
    paid: bool = False


@dataclass(frozen=True, slots=True)
class ChainOpened:
    """A chain-open left its entry; ``stages`` are the peers and ranges of its route."""

    at_s: float
    entry: PeerId
    session: bytes
    epoch: int
    request_id: str
    stages: tuple[tuple[PeerId, tuple[int, int]], ...]


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """The orchestrator gave a lease; ``expires_ms`` is a Unix time."""

    at_s: float
    peer: PeerId
    serial: int
    layers: tuple[int, int]
    expires_ms: int


@dataclass(frozen=True, slots=True)
class EpochServed:
    """An engine of ``peer`` (in its ``start``-th process) turned to an epoch of a session; these are in the order of time."""

    at_s: float
    peer: PeerId
    start: int
    session: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class JudgedProof:
    """A sealed proof that was uploaded, and the answer."""

    at_s: float
    proof: bytes
    settled: Settled


@dataclass(frozen=True, slots=True)
class Absence:
    """A peer was dead or frozen."""

    peer: PeerId
    since_s: float
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Separation:
    """``peers`` heard nobody but one another."""

    peers: frozenset[PeerId]
    since_s: float
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class CoverageSample:
    """At ``at_s``: whether the orchestrator's coverage is whole (None while it is down), and which of the entries had no route."""

    at_s: float
    whole: bool | None
    entries: int
    without_route: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A DHT lookup of the model's records; ``found`` counts them."""

    at_s: float
    peer: PeerId
    found: int
    hops: int
    took_s: float


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """What a node still held at the end; None for ``proofs`` where it was not up."""

    peer: PeerId
    up: bool
    kv_sessions: int
    hop_sessions: int
    proofs: ProofCounts | None


@dataclass(slots=True)
class Observations:
    """Everything that was seen of one run."""

    layers: int
    orchestrator: PeerId
    hostile: list[PeerId] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    chains: list[ChainOpened] = field(default_factory=list)
    leases: list[LeaseGranted] = field(default_factory=list)
    epochs: list[EpochServed] = field(default_factory=list)
    proofs: list[JudgedProof] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    separations: list[Separation] = field(default_factory=list)
    outages: list[Absence] = field(default_factory=list)
    coverage: list[CoverageSample] = field(default_factory=list)
    lookups: list[LookedUp] = field(default_factory=list)
    views: dict[PeerId, dict[PeerId, None]] = field(default_factory=dict)
    """Per node: whose stages its swarm view ever held as usable."""
    ends: list[NodeEnd] = field(default_factory=list)
    journal: list[JournalEntry] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """What a role logged as an error: an unexpected exception in a handler, storage that failed."""
    counts: dict[str, int] = field(default_factory=dict)
    """What the orchestrator and the network counted, over all its processes."""
