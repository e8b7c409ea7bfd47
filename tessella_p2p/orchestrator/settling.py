"""Grants, settlement and balances (shell over the ledger)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import structlog
import trio

from tessella_p2p.base.errors import Blacklisted, Overloaded, StorageError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import HEARTBEAT_S, MAX_SETTLING_REQUESTS
from tessella_p2p.ledger.evidence import ProvenWork, SettlementTerms, verify_proof
from tessella_p2p.ledger.store import Judged
from tessella_p2p.orchestrator.context import Handlers, OrchestratorContext
from tessella_p2p.orchestrator.grants import Grants, identity_behind, tier_of
from tessella_p2p.wire import messages as m

_EXPIRIES_AT_ONCE = 64
"""Transactions, each of a bounded number of tickets and proofs, before others have a heartbeat's time for theirs."""
_LOG: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Settling:
    """What concerns the ledger.

    Args:
        grants: mints tickets.
        terms: what proofs are judged by.
    """

    def __init__(self, context: OrchestratorContext, grants: Grants, terms: SettlementTerms) -> None:
        self._context = context
        self._grants = grants
        self._terms = terms
        self._num_settling = 0
        self.observers: list[Callable[[bytes, Judged], None]] = []
        """Called with each proof and its answer, once that is durable; they may not block."""
        self.foreign_balance: Callable[[PeerId], int] = lambda _: 0
        """Micro-credits that a peer has with other orchestrators and that count here, towards its tier."""

    def handlers(self) -> Handlers:
        """What this part answers."""
        return {m.SessionGrant: self._grant, m.WorkDone: self._settle, m.ReadCredits: self._credits}

    def trust_leases_of(self, others: frozenset[PeerId]) -> None:
        """Replace the other orchestrators under whose leases work is paid."""
        self._terms = replace(self._terms, lease_issuers=others)

    def proven(self, raw: bytes) -> ProvenWork:
        """What a sealed proof shows by itself.

        Raises:
            ProofRefused: it is forged, or its time is over.
        """
        return verify_proof(raw, self._terms, self._context.clock.unix_ms())

    async def run(self) -> None:
        """Forget tickets that can no longer settle, and proofs and evidence that nobody needs, until cancelled."""
        context = self._context
        while True:
            await trio.sleep(HEARTBEAT_S)
            try:
                for _ in range(_EXPIRIES_AT_ONCE):
                    if not await context.run_blocking(lambda: context.store.expire(context.clock.unix_ms())):
                        break
            except StorageError as error:
                _LOG.error("ledger_unwritable", reason=str(error))

    async def _grant(self, peer: PeerId, request: m.SessionGrant) -> m.OrchestratorAnswer:
        context = self._context
        now_ms = context.clock.unix_ms()
        identity = identity_behind(request, peer, now_ms)
        account, blacklisted = await context.run_blocking(lambda: context.store.standing(peer))
        if blacklisted:
            raise Blacklisted(f"{peer} is on this orchestrator's blacklist")
        if identity is not None:
            account, blacklisted = await context.run_blocking(lambda: context.store.standing(identity))
            if blacklisted:
                raise Blacklisted(f"{identity}, in whose name {peer} asks, is on this orchestrator's blacklist")
        return self._grants.grant(
            peer,
            request,
            micro_credits=account.micro_credits + self.foreign_balance(identity or peer),
            sequence=context.sequencer.next(m.TICKET, now_ms),
            now_ms=now_ms,
            identity=identity,
        )

    async def _settle(self, peer: PeerId, request: m.WorkDone) -> m.OrchestratorAnswer:
        context = self._context
        now_ms = context.clock.unix_ms()
        if self._num_settling >= MAX_SETTLING_REQUESTS:
            raise Overloaded(
                f"proofs of {MAX_SETTLING_REQUESTS} requests are being verified: keep yours, and try again"
            )
        self._num_settling += 1
        try:
            judged = await context.run_blocking(lambda: context.store.settle(request.proofs, self._terms, now_ms))
        finally:
            self._num_settling -= 1
        for raw, one in zip(request.proofs, judged, strict=True):
            context.outcomes[f"proof:{one.settled.status}"] += 1
            for observer in self.observers:
                observer(raw, one)
        unsettled = [one for one in judged if one.settled.status not in ("settled", "duplicate")]
        numbers = Counter(one.settled.code for one in unsettled)
        # The first one of each code: anybody may upload, and nobody shall fill the log.
        for code, one in {one.settled.code: one for one in reversed(unsettled)}.items():
            _LOG.warning(
                "proof_judged",
                worker=one.worker,
                uploader=peer,
                status=one.settled.status,
                micro_credits=one.settled.micro_credits,
                code=code,
                num=numbers[code],
                reason=one.settled.reason,
            )
        _LOG.info("proofs_judged", uploader=peer, statuses=dict(Counter(one.settled.status for one in judged)))
        return m.WorkSettled(results=tuple(one.settled for one in judged))

    async def _credits(self, peer: PeerId, _: m.ReadCredits) -> m.OrchestratorAnswer:
        store = self._context.store
        account = await self._context.run_blocking(lambda: store.account(peer))
        micro_credits = account.micro_credits + self.foreign_balance(peer)
        return m.Credits(
            micro_credits=micro_credits,
            tier=tier_of(micro_credits),
            settled_proofs=account.settled_proofs,
        )
