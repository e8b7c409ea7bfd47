"""Audits on the network and in the ledger (shell): proofs are picked as they settle, auditors are asked, verdicts are written down.

An audit is one linear task: ask an auditor, hear its report or its silence, ask the next one until `judging.conclude` has an end. That
it is under way is durable, what was said of it is not: after a restart it begins again, and nobody is judged by half of one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
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
from tessella_p2p.base.errors import (
    InvalidRequest,
    LocalProtocolError,
    NotAuthorized,
    StorageError,
    TessellaError,
    UnknownModel,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    AUDIT_RECHECK_SHARE,
    AUDIT_SHARE,
    AUDITS_RESUMED_AFTER_S,
    BLACKLIST_AFTER_FAILED,
    HEARTBEAT_S,
    MAX_AUDIT_REPORT_BYTES,
    MAX_AUDITORS_ASKED,
    MAX_OPEN_AUDITS,
)
from tessella_p2p.ledger.audit_evidence import AuditEvidence, OpenAudit
from tessella_p2p.ledger.changes import Slashed, VerdictReached
from tessella_p2p.ledger.evidence import ProofRefused, ProvenWork
from tessella_p2p.ledger.store import Judged, Recorded
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.context import OrchestratorContext
from tessella_p2p.orchestrator.member import SERVING, Member
from tessella_p2p.orchestrator.orders import Orders
from tessella_p2p.wire import messages as m

_LOG: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)
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


@dataclass(frozen=True, slots=True)
class _Picked:
    """A proof that is to be audited."""

    claim: Claim
    cause: Cause
    proof: bytes


@dataclass(slots=True)
class _Asked:
    """An order that is out, and what came of it: the report as it was sealed."""

    claim: Claim
    order: m.AuditOrder
    statement: Statement | None = None
    report: bytes | None = None
    arrived: trio.Event = field(default_factory=trio.Event)


class Auditing:
    """Has settled work recomputed.

    Args:
        catalogue: how many layers a model has, and what they take of a claim.
        members: the workers that are known now.
        orders: sends audit orders.
        exclude: takes a blacklisted peer out of the mesh.
        proven: checks a sealed proof again; see `ledger.evidence.verify_proof`.
        rng: chooses what is audited and by whom, and makes the ids; secret, so a daemon gives `random.SystemRandom`.
    """

    def __init__(
        self,
        context: OrchestratorContext,
        catalogue: Catalogue,
        members: Callable[[], Iterable[Member]],
        orders: Orders,
        exclude: Callable[[PeerId], Awaitable[None]],
        proven: Callable[[bytes], ProvenWork],
        policy: AuditPolicy,
        rng: random.Random,
    ) -> None:
        self._context = context
        self._catalogue = catalogue
        self._members = members
        self._orders = orders
        self._exclude = exclude
        self._proven = proven
        self._policy = policy
        self._rng = rng
        self._sampler = AuditSampler(rng, policy.share, policy.recheck_share)
        self._asked: dict[tuple[bytes, PeerId], _Asked] = {}
        # Whose odd proofs wait or are audited: one each, for they can be sent again and again.
        self._odd: set[PeerId] = set()
        self._send, self._receive = trio.open_memory_channel[_Picked](MAX_OPEN_AUDITS)

    def judged(self, raw: bytes, judged: Judged) -> None:
        """Pick the proof that was answered just now, or do not; an observer of `Settling`.

        Where as many audits wait as may, it is passed over: audits never hold up a settlement.
        """
        cause = self._sampler.cause(judged.worker, judged.settled)
        if cause is None or judged.work is None:
            return
        claim = self._claim(judged.work)
        if claim is None or (cause is Cause.ODD and claim.worker in self._odd):
            self._still_owed(cause, judged.work.worker)
            return
        try:
            self._send.send_nowait(_Picked(claim, cause, raw))
        except trio.WouldBlock:
            self._count("passed_over")
            self._still_owed(cause, claim.worker)
            return
        if cause is Cause.ODD:
            self._odd.add(claim.worker)

    def _still_owed(self, cause: Cause, worker: PeerId) -> None:
        """An audit that was owed does not take place: then the next proof's does."""
        if cause is Cause.OWED:
            self._sampler.owe(worker)

    def _claim(self, work: ProvenWork) -> Claim | None:
        model = self._catalogue.find(work.proof.manifest_root)
        return None if model is None else claim_of(work, model.total_layers)

    async def run(self) -> None:
        """Audit until cancelled; audits that are under way then begin again after the next start."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._resume)
            for _ in range(MAX_OPEN_AUDITS):
                nursery.start_soon(self._work)

    async def _work(self) -> None:
        async for picked in self._receive:
            audit_id = self._rng.randbytes(16)
            begun = OpenAudit(audit_id, picked.cause.value, picked.proof)
            await self._durably(partial(self._context.store.begin_audit, begun))
            await self._audit(audit_id, picked)

    async def _resume(self) -> None:
        """Take up what the process before this one began; once its workers are heard again."""
        left: list[OpenAudit] = []

        def read() -> None:
            left.extend(self._context.store.open_audits())

        await self._durably(read)
        works = [(audit, work) for audit in left if (work := await self._proven_still(audit)) is not None]
        # From here on, though it begins later: else the same proof, sent again, would begin a second one meanwhile.
        self._odd |= {work.worker for audit, work in works if audit.cause == Cause.ODD}
        if not works:
            return
        await trio.sleep(AUDITS_RESUMED_AFTER_S)
        places = trio.CapacityLimiter(MAX_OPEN_AUDITS)
        async with trio.open_nursery() as nursery:
            for audit, work in works:
                nursery.start_soon(self._resumed, audit, work, places)

    async def _proven_still(self, audit: OpenAudit) -> ProvenWork | None:
        """What an audit from before the restart is of; None where that cannot be settled any more, and then it is over."""
        try:
            return self._proven(audit.proof)
        except ProofRefused as error:
            _LOG.info("audit_not_resumed", code=error.reason_code, reason=str(error))
        await self._durably(partial(self._context.store.end_audit, audit.audit_id))
        return None

    async def _resumed(self, audit: OpenAudit, work: ProvenWork, places: trio.CapacityLimiter) -> None:
        """One audit from before the restart, once there is a place for it."""
        async with places:
            cause, claim = Cause(audit.cause), self._claim(work)
            if claim is None:  # the model is not served any more
                await self._durably(partial(self._context.store.end_audit, audit.audit_id))
                if cause is Cause.ODD:
                    self._odd.discard(work.worker)
                return
            self._count("resumed")
            await self._audit(audit.audit_id, _Picked(claim, cause, audit.proof))

    # ---- One audit ----

    async def _audit(self, audit_id: bytes, picked: _Picked) -> None:
        claim = picked.claim
        left = self._auditors(claim)
        recheck = self._sampler.rechecks()
        statements: list[Statement] = []
        reports: list[bytes] = []
        while True:
            conclusion = conclude(claim, statements, recheck=recheck, exhausted=not left)
            if conclusion is not None:
                break
            statement, report = await self._ask(audit_id, claim, left.pop(0))
            if statement is not None:
                statements.append(statement)
            if report is not None:
                reports.append(report)
        _LOG.info(
            "audit_concluded",
            worker=claim.worker,
            cause=picked.cause,
            verdict=conclusion.worker.verdict,
            code=conclusion.worker.code,
            auditors=[each.auditor for each in statements],
        )
        if not statements:  # a mesh where nobody can audit is not to fill its journal with that
            self._count(NO_AUDITOR)
            self._still_owed(picked.cause, claim.worker)
        else:
            if picked.cause is Cause.ODD:  # one of the two neighbours said something else before, and was paid
                self._sampler.owe(claim.upstream)
                self._sampler.owe(claim.downstream)
            await self._record(audit_id, claim, conclusion, AuditEvidence(picked.proof, tuple(reports)))
        await self._durably(partial(self._context.store.end_audit, audit_id))
        if picked.cause is Cause.ODD:
            self._odd.discard(claim.worker)

    def _auditors(self, claim: Claim) -> list[Auditor]:
        """Who is to be asked, whoever has the least to do first."""
        found = auditors_for(claim, self._servers(claim), self._policy.tolerances, self._rng)
        busy = Counter(peer for _, peer in self._asked)
        found.sort(key=lambda each: (each.preference, busy[each.server.peer_id]))
        return found[:MAX_AUDITORS_ASKED]

    def _servers(self, claim: Claim) -> list[Server]:
        return [
            Server(
                peer_id=member.peer_id,
                addresses=member.addresses,
                manifest_root=member.manifest_root,
                recipe=member.recipe,
                layers=member.layers,
                canary=member.canary,
                has_room=self._has_room(member, claim),
            )
            for member in self._members()
            if member.state in SERVING
        ]

    def _has_room(self, member: Member, claim: Claim) -> bool:
        """Whether a member's claim holds the audited range beside its own; one that is being moved needs it for that."""
        model = self._catalogue.find(member.manifest_root)
        if model is None or member.device is None or member.move is not None:
            return False
        try:
            terms = model.terms_for(member.recipe, member.device)
        except UnknownModel:
            return False
        return terms.claim_mb(member.layers) + terms.claim_mb(claim.layers) <= member.claim_mb

    async def _ask(self, audit_id: bytes, claim: Claim, auditor: Auditor) -> tuple[Statement | None, bytes | None]:
        """What one auditor says, and the sealed report; None where it cannot be reached or declines, and where it keeps silent."""
        peer = auditor.server.peer_id
        addresses = {member.peer_id: member.addresses for member in self._members()}
        order = order_for(
            claim,
            auditor,
            audit_id=audit_id,
            upstream_addresses=addresses.get(claim.upstream, ()),
            downstream_addresses=addresses.get(claim.downstream, ()),
            canaries=canaries_for(claim, self._servers(claim)),
            now_ms=self._context.clock.unix_ms(),
        )
        asked = _Asked(claim, order)
        self._asked[audit_id, peer] = asked
        try:
            answer = await self._orders.send(peer, auditor.server.addresses, order)
            if isinstance(answer, m.OrderRefused):
                self._count("declined")
                return None, None
            with trio.move_on_after(report_within_s(claim, auditor)):
                await asked.arrived.wait()
        except LocalProtocolError:
            raise
        except TessellaError:
            self._count("unreachable")
            return None, None
        finally:
            del self._asked[audit_id, peer]
        if asked.statement is None:
            self._count(_NO_REPORT)
            return Statement(peer, None, code=_NO_REPORT), None
        return asked.statement, asked.report

    def report(self, peer: PeerId, report: m.AuditReport, raw: bytes) -> m.OrchestratorAnswer:
        """Take the report of an auditor that was asked; the first one counts.

        Args:
            peer: who signed it.
            raw: its envelope, as it came.

        Raises:
            NotAuthorized: nobody asked.
            InvalidRequest: it lacks what its outcome needs, or is too long.
        """
        asked = self._asked.get((report.audit_id, peer))
        if asked is None:
            raise NotAuthorized(
                "no audit that you were asked for is open under this id: it is over, or was never yours"
            )
        if len(raw) > MAX_AUDIT_REPORT_BYTES:
            raise InvalidRequest(f"a report of {len(raw)} bytes; {MAX_AUDIT_REPORT_BYTES} are the limit")
        if asked.statement is None:
            asked.statement, asked.report = statement_of(asked.claim, asked.order, report), raw
            asked.arrived.set()
        return m.Acknowledged()

    # ---- What follows ----

    async def _record(self, audit_id: bytes, claim: Claim, conclusion: Conclusion, evidence: AuditEvidence) -> None:
        worker = conclusion.worker
        self._count(worker.verdict)
        if worker.verdict == "inconclusive":
            self._sampler.owe(claim.worker)
        await self._write_down(audit_id, claim, worker, evidence, is_worker=True)
        for verdict in conclusion.others:
            self._count(verdict.code or verdict.verdict)
            await self._write_down(audit_id, claim, verdict, evidence, is_worker=False)

    async def _write_down(
        self, audit_id: bytes, claim: Claim, verdict: Verdict, evidence: AuditEvidence, *, is_worker: bool
    ) -> None:
        """A verdict and what follows from it, durable; waits while the ledger cannot be written."""
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
        is_guilty = verdict.verdict in ("failed", "copied")
        reason = f"{verdict.code}: {verdict.reason}"
        penalty = penalty_micro_credits(claim, self._policy.share)
        slashed = (
            Slashed(peer=verdict.peer, micro_credits=penalty, reason=reason, by="audit", audit_id=audit_id)
            if is_guilty
            else None
        )
        kept = None if verdict.verdict == "passed" or not evidence.reports else evidence
        recorded: list[Recorded | None] = []
        await self._durably(lambda: recorded.append(store.record_verdict(reached, now_ms, slashed, kept)))
        if recorded[0] is not None and kept is not None and not recorded[0].evidence_kept:
            self._count("evidence_not_kept")
        if not is_guilty:
            return
        _LOG.warning("peer_slashed", peer=verdict.peer, micro_credits=penalty, reason=reason)
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
