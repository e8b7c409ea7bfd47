"""What the epochs of a session share, and what comes out of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.ids import SessionId
from tessella_p2p.base.limits import CHECKPOINT_S, HOP_TIMEOUT_S
from tessella_p2p.net.network import Network
from tessella_p2p.stages.hop_links import HopLinks
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import Sequencer
from tessella_p2p.wire.frames import TraceEntry
from tessella_p2p.wire.keys import NodeKey


@dataclass(frozen=True, slots=True)
class EntryContext:
    """What every session of an entry shares."""

    network: Network
    key: NodeKey
    clock: WallClock
    sequencer: Sequencer
    links: HopLinks
    random_bytes: Callable[[int], bytes]
    hop_timeout_s: float = HOP_TIMEOUT_S
    checkpoint_s: float = CHECKPOINT_S


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What stays the same over all epochs of a session."""

    session: SessionId
    request_id: str
    model_id: str
    manifest_root: bytes
    vocabulary: int
    max_positions: int
    sampling: m.Sampling
    digest_key: bytes
    ticket: bytes | None


@dataclass(frozen=True, slots=True)
class Token:
    """One token from the tail: its id, the step's wall time at the entry, and each stage's times."""

    token_id: int
    wall_us: int
    trace: tuple[TraceEntry, ...]
