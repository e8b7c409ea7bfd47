"""Audits on the network and in the ledger (shell): proofs are picked as they settle, auditors are asked, verdicts are written down.

An audit is one linear task: ask an auditor, hear its report or its silence, ask the next one until `judging.conclude` has an end. What
is under way is not durable: after a restart of the orchestrator those audits are forgotten, and nobody is judged by half of one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import structlog
import trio

from tessella_p2p.audits.judging import (
    NO_AUDITOR,
    Conclusion,
    Statement,
    Verdict,
    conclude,
    penalty_micro_credits,
    statement_of,
)
from tessella_p2p.audits.orders import Auditor, Server, auditors_for, canaries_for, order_for, report_within_s
from tessella_p2p.audits.sampling import AuditSampler, Cause, Claim, claim_of
from tessella_p2p.audits.tolerance import NONE_MEASURED, Tolerances
from tessella_p2p.base.errors import LocalProtocolError, NotAuthorized, StorageError, TessellaError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    AUDIT_RECHECK_SHARE,
    AUDIT_SHARE,
    BLACKLIST_AFTER_FAILED,
    HEARTBEAT_S,
    MAX_AUDITORS_ASKED,
    MAX_OPEN_AUDITS,
)
from tessella_p2p.ledger.changes import VerdictReached
from tessella_p2p.ledger.store import Judged
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.context import Handlers, OrchestratorContext
from tessella_p2p.orchestrator.member import Member, MemberState
from tessella_p2p.orchestrator.orders import Orders
from tessella_p2p.wire import messages as m

_LOG: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)
_SERVING: Final = (MemberState.READY, MemberState.HEALTHY)
_NO_REPORT: Final = "no_report"


@dataclass(frozen=True, slots=True)
class AuditPolicy:
    """How much is audited, and what follows.

    Attributes:
        share: of the settled proofs that are audited; those that contradict a neighbour's always are.
        recheck_share: of audits that find nothing, in which a second auditor is asked all the same.
        blacklist_after: failed audits of one peer, after which it is excluded; a copier is at once.
        tolerances: what was measured between recipes; without, auditors are of the worker's own recipe.
    """

    share: float = AUDIT_SHARE
    recheck_share: float = AUDIT_RECHECK_SHARE
    blacklist_after: int = BLACKLIST_AFTER_FAILED
    tolerances: Tolerances = NONE_MEASURED


@dataclass(slots=True)
class _Asked:
    """An order that is out."""

    claim: Claim
    order: m.AuditOrder
    statement: Statement | None = None
    arrived: trio.Event = field(default_factory=trio.Event)


class Auditing:
    """Has settled work recomputed.

    Args:
        catalogue: how many layers a model has.
        members: the workers that are known now.
        orders: sends audit orders.
        exclude: takes a blacklisted peer out of the mesh.
        rng: chooses what is audited and by whom, and makes the ids; secret, so a daemon gives `random.SystemRandom`.
    """

    def __init__(
        self,
        context: OrchestratorContext,
        catalogue: Catalogue,
        members: Callable[[], Iterable[Member]],
        orders: Orders,
        exclude: Callable[[PeerId], Awaitable[None]],
        policy: AuditPolicy,
        rng: random.Random,
    ) -> None:
        self._context = context
        self._catalogue = catalogue
        self._members = members
        self._orders = orders
        self._exclude = exclude
        self._policy = policy
        self._rng = rng
        self._sampler = AuditSampler(rng, policy.share, policy.recheck_share)
        self._asked: dict[tuple[bytes, PeerId], _Asked] = {}
        self._odd: set[PeerId] = (
            set()
        )  # whose odd proofs wait or are audited: one each, for they can be sent again and again
        self._send, self._receive = trio.open_memory_channel[tuple[Claim, Cause]](MAX_OPEN_AUDITS)

    def handlers(self) -> Handlers:
        """What this part answers."""
        return {m.AuditReport: self._report}

    def judged(self, _: bytes, judged: Judged) -> None:
        """Pick the proof that was answered just now, or do not; an observer of `Settling`.

        Where as many audits wait as may, it is passed over: audits never hold up a settlement.
        """
        cause = self._sampler.cause(judged.worker, judged.settled)
        if cause is None or judged.work is None:
            return
        model = self._catalogue.find(judged.work.proof.manifest_root)
        claim = None if model is None else claim_of(judged.work, model.total_layers)
        if claim is None or (cause is Cause.ODD and claim.worker in self._odd):
            return
        try:
            self._send.send_nowait((claim, cause))
        except trio.WouldBlock:
            self._count("passed_over")
            return
        if cause is Cause.ODD:
            self._odd.add(claim.worker)

    async def run(self) -> None:
        """Audit until cancelled; audits that are under way are forgotten then."""
        async with trio.open_nursery() as nursery:
            for _ in range(MAX_OPEN_AUDITS):
                nursery.start_soon(self._work)

    async def _work(self) -> None:
        async for claim, cause in self._receive:
            await self._audit(claim, cause)
            if cause is Cause.ODD:
                self._odd.discard(claim.worker)

    # ---- One audit ----

    async def _audit(self, claim: Claim, cause: Cause) -> None:
        audit_id = self._rng.randbytes(16)
        left = self._auditors(claim)
        recheck = self._sampler.rechecks()
        statements: list[Statement] = []
        while True:
            conclusion = conclude(claim, statements, recheck=recheck, exhausted=not left)
            if conclusion is not None:
                break
            statement = await self._ask(audit_id, claim, left.pop(0))
            if statement is not None:
                statements.append(statement)
        _LOG.info(
            "audit_concluded",
            worker=claim.worker,
            cause=cause,
            verdict=conclusion.worker.verdict,
            code=conclusion.worker.code,
            auditors=[each.auditor for each in statements],
        )
        if not statements:  # a mesh without replicas is not to fill its journal with that
            self._count(NO_AUDITOR)
            return
        if cause is Cause.ODD:  # one of the two neighbours said something else before, and was paid
            self._sampler.owe(claim.upstream)
            self._sampler.owe(claim.downstream)
        await self._record(audit_id, claim, conclusion)

    def _auditors(self, claim: Claim) -> list[Auditor]:
        """Who is to be asked, whoever has the least to do first."""
        found = auditors_for(claim, self._servers(), self._policy.tolerances, self._rng)
        busy = Counter(peer for _, peer in self._asked)
        found.sort(key=lambda each: (each.comparison != "bitwise", busy[each.server.peer_id]))
        return found[:MAX_AUDITORS_ASKED]

    def _servers(self) -> list[Server]:
        return [
            Server(
                peer_id=member.peer_id,
                addresses=member.addresses,
                manifest_root=member.manifest_root,
                recipe=member.recipe,
                layers=member.layers,
                canary=member.canary,
            )
            for member in self._members()
            if member.state in _SERVING
        ]

    async def _ask(self, audit_id: bytes, claim: Claim, auditor: Auditor) -> Statement | None:
        """What one auditor says; None where it cannot be reached or declines."""
        peer = auditor.server.peer_id
        addresses = {member.peer_id: member.addresses for member in self._members()}
        order = order_for(
            claim,
            auditor,
            audit_id=audit_id,
            upstream_addresses=addresses.get(claim.upstream, ()),
            downstream_addresses=addresses.get(claim.downstream, ()),
            canaries=canaries_for(claim, self._servers()),
            now_ms=self._context.clock.unix_ms(),
        )
        asked = _Asked(claim, order)
        self._asked[audit_id, peer] = asked
        try:
            answer = await self._orders.send(peer, auditor.server.addresses, order)
            if isinstance(answer, m.OrderRefused):
                self._count("declined")
                return None
            with trio.move_on_after(report_within_s(claim)):
                await asked.arrived.wait()
        except LocalProtocolError:
            raise
        except TessellaError:
            self._count("unreachable")
            return None
        finally:
            del self._asked[audit_id, peer]
        if asked.statement is None:
            self._count(_NO_REPORT)
            return Statement(peer, None, code=_NO_REPORT)
        return asked.statement

    async def _report(self, peer: PeerId, report: m.AuditReport) -> m.OrchestratorAnswer:
        """Take the report of an auditor that was asked; the first one counts."""
        asked = self._asked.get((report.audit_id, peer))
        if asked is None:
            raise NotAuthorized(
                "no audit that you were asked for is open under this id: it is over, or was never yours"
            )
        if asked.statement is None:
            asked.statement = statement_of(asked.claim, asked.order, report)
            asked.arrived.set()
        return m.Acknowledged()

    # ---- What follows ----

    async def _record(self, audit_id: bytes, claim: Claim, conclusion: Conclusion) -> None:
        worker = conclusion.worker
        self._count(worker.verdict)
        if worker.verdict == "inconclusive":
            self._sampler.owe(claim.worker)
        await self._write_down(audit_id, claim, worker, is_worker=True)
        for verdict in conclusion.others:
            self._count(verdict.code or verdict.verdict)
            await self._write_down(audit_id, claim, verdict, is_worker=False)

    async def _write_down(self, audit_id: bytes, claim: Claim, verdict: Verdict, *, is_worker: bool) -> None:
        """A verdict and what follows from it, in this order, durable; waits while the ledger cannot be written."""
        store, now_ms = self._context.store, self._context.clock.unix_ms()
        reached = VerdictReached(
            audit_id=audit_id,
            peer=verdict.peer,
            verdict=verdict.verdict,
            auditor=verdict.auditor,
            adjudicator=verdict.adjudicator,
            code=verdict.code,
            reason=verdict.reason,
            requester=claim.requester if is_worker else None,
            request_id=claim.request_id if is_worker else None,
            session=claim.session if is_worker else None,
            epoch=claim.epoch if is_worker else None,
        )
        await self._durably(lambda: store.record_verdict(reached, now_ms))
        if verdict.verdict not in ("failed", "copied"):
            return
        penalty = penalty_micro_credits(claim, self._policy.share)
        reason = f"{verdict.code}: {verdict.reason}"
        _LOG.warning("peer_slashed", peer=verdict.peer, micro_credits=penalty, reason=reason)
        await self._durably(lambda: store.slash(verdict.peer, penalty, reason, "audit", now_ms, audit_id))
        if verdict.verdict == "copied" or await self._failed(verdict.peer) >= self._policy.blacklist_after:
            await self._durably(lambda: store.set_blacklisted(verdict.peer, True, reason, now_ms))
            await self._leave(verdict.peer)

    async def _failed(self, peer: PeerId) -> int:
        context = self._context
        reputation = await context.run_blocking(lambda: context.store.reputation(peer, context.clock.unix_ms()))
        return reputation.audits_failed

    async def _leave(self, peer: PeerId) -> None:
        try:
            await self._exclude(peer)
        except StorageError as error:
            # It is on the blacklist: its next announce is refused, and it leaves by its silence.
            _LOG.error("ledger_unwritable", reason=str(error))

    async def _durably(self, write: Callable[[], object]) -> None:
        while True:
            try:
                await self._context.run_blocking(write)
            except StorageError as error:
                _LOG.error("ledger_unwritable", reason=str(error))
                await trio.sleep(HEARTBEAT_S)
            else:
                return

    def _count(self, what: str) -> None:
        self._context.outcomes[f"audit:{what}"] += 1
