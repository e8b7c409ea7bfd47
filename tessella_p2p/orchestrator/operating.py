"""What only the operator may do (shell): the admin token is checked, the action is written down, then its part does it.

A request comes in an `Operate` over an encrypted stream, or beside a bearer token over HTTP. Who has the token is the operator: the
signer of an `Operate` is noted and decides nothing. An action that changes something is in the operator's log before it begins, so
that whatever happened has its line; where the log cannot be written, nothing is done.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import cast

import trio
from pydantic import SecretStr

from tessella_p2p.base.errors import InvalidRequest, NotOperator, TessellaError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.orchestrator.context import Handlers, OrchestratorContext
from tessella_p2p.orchestrator.operator_log import OperatorLog
from tessella_p2p.wire import messages as m

_READS = (m.ReadLedger, m.ReadEvidence, m.ReadAccounts, m.ReadReputation, m.PullSnapshot)


class Operating:
    """Lets whoever has the admin token operate the orchestrator.

    Args:
        handlers: what answers each kind of operator request, once the token was right.
        log: see `log`.
    """

    def __init__(self, context: OrchestratorContext, handlers: Handlers, log: OperatorLog | None = None) -> None:
        self._context = context
        self._handlers = handlers
        self.log = log
        """Where actions are written down; None writes none (simulations)."""
        self.admin_token: SecretStr | None = None
        """The token; without one nobody is the operator. It may be replaced while the orchestrator runs."""

    def handlers(self) -> Handlers:
        """What this part answers."""
        return {m.Operate: self._operate}

    async def operate(self, token: str, request: m.OperatorRequest, where: str) -> m.OperatorAnswer:
        """Do what the operator asks.

        Args:
            token: what is said to be the admin token.
            request: what is asked.
            where: where it comes from, for the log.

        Raises:
            NotOperator: another token, or this orchestrator has none.
            StorageError: the log or the ledger cannot be written.
            TessellaError: what the request is refused with.
        """
        self.check(token)
        handler = self._handlers.get(type(request))
        if handler is None:
            raise InvalidRequest(f"{request.kind} is not answered here", param="kind")
        asked = request.model_dump(mode="json", exclude={"kind"}, exclude_none=True)
        changes = not isinstance(request, _READS)
        async with self.action(where, request.kind, asked, changes=changes):
            answer = await handler(self._context.key.peer_id, request)
        self._context.outcomes[f"operate.{request.kind}"] += 1
        return cast(m.OperatorAnswer, answer)  # the handler of an operator's request gives an operator's answer

    @asynccontextmanager
    async def action(
        self, where: str, kind: str, request: Mapping[str, object], *, changes: bool = True
    ) -> AsyncIterator[None]:
        """Write down what the block does: before it, where it changes something, and how it ends.

        Args:
            where: who asked, and from where.
            kind: what was asked.
            request: its fields, as JSON.
            changes: whether it may change something.

        Raises:
            StorageError: the log cannot be written; the block did not begin, or its end is not noted.
        """
        number = await self._note(where, kind, request, "begun") if changes else 0
        try:
            yield
        except TessellaError as error:
            await self._note(where, kind, request, error.code, str(error), number)
            raise
        except BaseException:  # the asker left, or a bug: whether it is done is not known here
            await self._note(where, kind, request, "cut_off", number=number)
            raise
        await self._note(where, kind, request, "done", number=number)

    async def _operate(self, peer: PeerId, request: m.Operate) -> m.OrchestratorAnswer:
        return await self.operate(request.admin_token, request.request, f"p2p {peer}")

    def check(self, token: str) -> None:
        """Whether that is the admin token.

        Digests are compared, in constant time: neither content nor length shows in how long it takes.

        Raises:
            NotOperator: another token, or this orchestrator has none.
        """
        if self.admin_token is None:
            raise NotOperator("this orchestrator has no admin token: nobody operates it over the network")
        expected = hashlib.sha256(self.admin_token.get_secret_value().encode()).digest()
        if not hmac.compare_digest(hashlib.sha256(token.encode()).digest(), expected):
            raise NotOperator("that is not the admin token")

    async def _note(
        self, where: str, kind: str, request: Mapping[str, object], outcome: str, reason: str = "", number: int = 0
    ) -> int:
        log = self.log
        if log is None:
            return 0
        at_ms = self._context.clock.unix_ms()
        with trio.CancelScope(shield=True):  # what was done is noted, also for whoever no longer waits
            number = await self._context.run_blocking(
                lambda: log.write(at_ms, where, kind, request, outcome, reason=reason, number=number)
            )
        return number
