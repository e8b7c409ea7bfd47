"""Where a simulation is looked into: on the wire, at the engines, at the orchestrator's answers and at its ledger (shell)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from simulations.observations import ChainOpened, EpochServed, JudgedProof, LeaseGranted, Observations
from simulations.recording import ChainTapNetwork
from tessella_p2p.base.ids import PeerId
from tessella_p2p.ledger.evidence import SettlementTerms
from tessella_p2p.ledger.store import Judged, LedgerStore
from tessella_p2p.net.network import Network
from tessella_p2p.orchestrator.member import Member
from tessella_p2p.orchestrator.service import Orchestrator
from tessella_p2p.stages.engine import SessionKey, StepAnswer, StepInput
from tessella_p2p.stages.toy import ToyEngine
from tessella_p2p.wire.messages import ChainOpen


class Watch:
    """Fills `Observations` while a mesh runs.

    Args:
        seen: what is filled.
        now: virtual seconds.
    """

    def __init__(self, seen: Observations, now: Callable[[], float]) -> None:
        self.seen = seen
        self._now = now
        self._serials: dict[PeerId, int] = {}
        self._opened: set[tuple[bytes, int]] = set()

    def network(self, network: Network) -> Network:
        """A node's network, whose own chain-opens are noted."""
        own = network.peer_id

        def opened(chain: ChainOpen, entry: PeerId) -> None:
            if entry == own:
                self._note_chain(chain, entry)

        return ChainTapNetwork(network, opened)

    def _note_chain(self, chain: ChainOpen, entry: PeerId) -> None:
        key = (chain.session, chain.epoch)
        if key in self._opened:
            return  # an entry that is also a stage in the middle passes its own chain on
        self._opened.add(key)
        stages = tuple((PeerId(stage.peer_id), stage.layers) for stage in chain.route)
        self.seen.chains.append(ChainOpened(self._now(), entry, *key, chain.request_id, stages))

    def engine(self, engine: ToyEngine, peer: PeerId, start: int) -> WatchedEngine:
        """An engine whose epochs are noted."""

        def turned(key: SessionKey) -> None:
            self.seen.epochs.append(EpochServed(self._now(), peer, start, key.session, key.epoch))

        return WatchedEngine(engine, turned)

    def member(self, member: Member) -> None:
        """A member of the orchestrator as it is now; a lease that was not seen before is noted."""
        if self._serials.get(member.peer_id) != member.serial and member.lease_expires_at:
            self._serials[member.peer_id] = member.serial
            layers = member.layers.as_tuple()
            self.seen.leases.append(
                LeaseGranted(self._now(), member.peer_id, member.serial, layers, member.lease_expires_at)
            )

    def judged(self, proofs: Sequence[bytes], judged: Sequence[Judged]) -> None:
        """Proofs that were judged just now."""
        self.seen.proofs += [
            JudgedProof(self._now(), proof, one.settled) for proof, one in zip(proofs, judged, strict=True)
        ]

    def count(self, outcomes: Counter[str]) -> None:
        """What an orchestrator's process counted in its life."""
        for name, number in outcomes.items():
            self.seen.counts[name] = self.seen.counts.get(name, 0) + number


class WatchedEngine(ToyEngine):
    """A toy engine that tells when it turns to another epoch of a session.

    Args:
        engine: whose model, layers and bounds it has.
        turned: called before the first step of a session, and again whenever a step is of another epoch than the one before.
    """

    def __init__(self, engine: ToyEngine, turned: Callable[[SessionKey], None]) -> None:
        super().__init__(
            engine.model, engine.layers, max_sessions=engine.max_sessions, max_positions=engine.max_positions
        )
        self._turned = turned
        self._epochs: dict[bytes, int] = {}

    def forward(self, batch: Sequence[StepInput]) -> list[StepAnswer]:
        """See `stages.engine.StageEngine.forward`."""
        answers = super().forward(batch)
        for step, answer in zip(batch, answers, strict=True):
            key = step.session
            if not isinstance(answer, Exception) and self._epochs.get(key.session) != key.epoch:
                self._epochs[key.session] = key.epoch
                self._turned(key)
        return answers


class WatchedOrchestrator(Orchestrator):
    """An orchestrator whose leases are noted. They go to ``watch``, where there is one."""

    watch: Watch | None = None

    async def answer(self, peer: PeerId, raw: bytes) -> bytes:
        """See `orchestrator.service.Orchestrator.answer`."""
        answer = await super().answer(peer, raw)
        member = self.membership.core.get(peer)
        if member is not None and self.watch is not None:
            self.watch.member(member)
        return answer


class WatchedLedger(LedgerStore):
    """A ledger whose judgements are noted. They go to ``watch``, where there is one."""

    watch: Watch | None = None

    def settle(self, proofs: Sequence[bytes], terms: SettlementTerms, now_ms: int) -> list[Judged]:
        """See `ledger.store.LedgerStore.settle`."""
        judged = super().settle(proofs, terms, now_ms)
        if self.watch is not None:
            self.watch.judged(proofs, judged)
        return judged
