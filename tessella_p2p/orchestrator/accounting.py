"""The operator's view of the ledger (shell): its newest entries, accounts and reputations; and slashing.

Whoever is put on the blacklist leaves the mesh at once, as if it had said good-bye, and its leases are taken away; see `revocations`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.ids import PeerId
from tessella_p2p.ledger.accounts import Account
from tessella_p2p.ledger.changes import VerdictReached
from tessella_p2p.ledger.reputation import Reputation
from tessella_p2p.orchestrator.context import Handlers, OrchestratorContext
from tessella_p2p.orchestrator.grants import tier_of
from tessella_p2p.orchestrator.ledger_lines import ledger_line, within_an_answer
from tessella_p2p.wire import messages as m

_LEAST_BALANCE: Final = -(2**53)
"""What a balance may be on the wire."""


class Accounting:
    """Answers what only the operator may know, and slashes.

    Args:
        exclude: takes a peer out of the mesh.
        foreign_balance: micro-credits that other orchestrators vouch for; they count for the tier.
    """

    def __init__(
        self,
        context: OrchestratorContext,
        exclude: Callable[[PeerId], Awaitable[None]],
        foreign_balance: Callable[[str], int],
    ) -> None:
        self._context = context
        self._exclude = exclude
        self._foreign_balance = foreign_balance

    def handlers(self) -> Handlers:
        """What this part answers, for the operator alone."""
        return {
            m.ReadLedger: self._ledger,
            m.ReadEvidence: self._evidence,
            m.ReadAccounts: self._accounts,
            m.ReadReputation: self._reputation,
            m.Slash: self._slash,
        }

    async def _ledger(self, _: PeerId, request: m.ReadLedger) -> m.OrchestratorAnswer:
        context = self._context
        store = context.store
        head = await context.run_blocking(store.head)
        entries = await context.run_blocking(lambda: store.newest(request.before, request.limit))
        verdicts = [sequence for sequence, entry in entries if isinstance(entry.change, VerdictReached)]
        reports = await context.run_blocking(lambda: store.kept_reports(verdicts))
        lines = within_an_answer(ledger_line(sequence, entry, reports.get(sequence, 0)) for sequence, entry in entries)
        return m.LedgerLines(head=head.sequence, entries=lines)

    async def _evidence(self, _: PeerId, request: m.ReadEvidence) -> m.OrchestratorAnswer:
        context = self._context
        kept = await context.run_blocking(lambda: context.store.audit_evidence(request.sequence))
        if kept is None:
            raise InvalidRequest("no evidence of that entry is kept", param="sequence")
        return m.Evidence(sequence=request.sequence, proof=kept.proof, reports=kept.reports)

    async def _accounts(self, _: PeerId, request: m.ReadAccounts) -> m.OrchestratorAnswer:
        context = self._context
        store, peer = context.store, request.peer_id
        if peer is not None:
            account = await context.run_blocking(lambda: store.account(peer))
            return m.AccountEntries(accounts=(self._account_entry(account),))
        page = await context.run_blocking(lambda: store.accounts(request.after or "", request.limit + 1))
        shown = tuple(self._account_entry(account) for account in page[: request.limit])
        return m.AccountEntries(accounts=shown, more=len(page) > request.limit)

    async def _reputation(self, _: PeerId, request: m.ReadReputation) -> m.OrchestratorAnswer:
        context = self._context
        now_ms = context.clock.unix_ms()
        if request.peer_id is not None:
            entry = await self._reputation_of(PeerId(request.peer_id))
            return m.ReputationEntries(entries=(entry,))
        shown = await context.run_blocking(
            lambda: self._reputation_page(request.after or "", request.limit + 1, now_ms)
        )
        return m.ReputationEntries(entries=shown[: request.limit], more=len(shown) > request.limit)

    def _reputation_page(self, after: str, limit: int, now_ms: int) -> tuple[m.ReputationEntry, ...]:
        store = self._context.store
        return tuple(
            _reputation_entry(peer, reputation, blacklisted=store.is_blacklisted(peer))
            for peer, reputation in store.reputations(after, limit, now_ms)
        )

    async def _slash(self, _: PeerId, request: m.Slash) -> m.OrchestratorAnswer:
        context = self._context
        store, peer, now_ms = context.store, PeerId(request.peer_id), context.clock.unix_ms()
        if not request.micro_credits and request.blacklist is None:
            raise InvalidRequest("nothing is to be done: give an amount, or say blacklist", param="micro_credits")
        before = await context.run_blocking(lambda: store.account(peer))
        if before.micro_credits - request.micro_credits < _LEAST_BALANCE:
            raise InvalidRequest("no balance is that far below 0", param="micro_credits")
        if request.micro_credits:
            await context.run_blocking(
                lambda: store.slash(peer, request.micro_credits, request.reason, "operator", now_ms)
            )
        listed = request.blacklist
        if listed is not None:
            await context.run_blocking(lambda: store.set_blacklisted(peer, listed, request.reason, now_ms))
        if listed:
            await self._exclude(peer)
        account = await context.run_blocking(lambda: store.account(peer))
        return m.Slashed(account=self._account_entry(account), reputation=await self._reputation_of(peer))

    def _account_entry(self, account: Account) -> m.AccountEntry:
        foreign = self._foreign_balance(account.name)
        return m.AccountEntry(
            name=account.name,
            micro_credits=account.micro_credits,
            foreign_micro_credits=foreign,
            settled_proofs=account.settled_proofs,
            tier=tier_of(account.micro_credits + foreign),
        )

    async def _reputation_of(self, peer: PeerId) -> m.ReputationEntry:
        store, now_ms = self._context.store, self._context.clock.unix_ms()
        return await self._context.run_blocking(
            lambda: _reputation_entry(peer, store.reputation(peer, now_ms), blacklisted=store.is_blacklisted(peer))
        )


def _reputation_entry(peer: str, reputation: Reputation, *, blacklisted: bool) -> m.ReputationEntry:
    return m.ReputationEntry(
        peer_id=peer,
        score=reputation.score,
        audits_passed=reputation.audits_passed,
        audits_failed=reputation.audits_failed,
        inconclusive=reputation.inconclusive,
        copies=reputation.copies,
        slashes=reputation.slashes,
        blacklisted=blacklisted,
    )
