"""What only the operator may do (shell): the admin token is checked, the action is written down, then its part does it.

A request comes in an `Operate` over an encrypted stream, or beside a bearer token over HTTP. Who has the token is the operator: the
signer of an `Operate` is noted and decides nothing. An action that changes something is in the operator's log before it begins, so
that whatever happened has its line; where the log cannot be written, nothing is done.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import cast

from pydantic import SecretStr

from tessella_p2p.base.errors import InvalidRequest, NotOperator, TessellaError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.orchestrator.context import Handlers, OrchestratorContext
from tessella_p2p.orchestrator.operator_log import OperatorLog
from tessella_p2p.wire import messages as m

_READS = (m.ReadLedger, m.ReadAccounts, m.ReadReputation, m.PullSnapshot)


class Operating:
    """Lets whoever has the admin token operate the orchestrator.

    Args:
        handlers: what answers each kind of operator request, once the token was right.
        log: where actions are written down; None writes none (simulations).
    """

    def __init__(self, context: OrchestratorContext, handlers: Handlers, log: OperatorLog | None = None) -> None:
        self._context = context
        self._handlers = handlers
        self._log = log
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
        self._check(token)
        handler = self._handlers.get(type(request))
        if handler is None:
            raise InvalidRequest(f"{request.kind} is not answered here", param="kind")
        number = 0 if isinstance(request, _READS) else await self._note(where, request, "begun")
        try:
            answer = await handler(self._context.key.peer_id, request)
        except TessellaError as error:
            await self._note(where, request, error.code, str(error), number)
            raise
        await self._note(where, request, "done", number=number)
        self._context.outcomes[f"operate.{request.kind}"] += 1
        return cast(m.OperatorAnswer, answer)  # the handler of an operator's request gives an operator's answer

    async def _operate(self, peer: PeerId, request: m.Operate) -> m.OrchestratorAnswer:
        return await self.operate(request.admin_token, request.request, f"p2p {peer}")

    def _check(self, token: str) -> None:
        """Compare digests in constant time, so that neither content nor length shows in how long it takes."""
        if self.admin_token is None:
            raise NotOperator("this orchestrator has no admin token: nobody operates it over the network")
        expected = hashlib.sha256(self.admin_token.get_secret_value().encode()).digest()
        if not hmac.compare_digest(hashlib.sha256(token.encode()).digest(), expected):
            raise NotOperator("that is not the admin token")

    async def _note(
        self, where: str, request: m.OperatorRequest, outcome: str, reason: str = "", number: int = 0
    ) -> int:
        log = self._log
        if log is None:
            return 0
        context = self._context
        asked = request.model_dump(mode="json", exclude={"kind"}, exclude_none=True)
        at_ms = context.clock.unix_ms()
        return await context.run_blocking(
            lambda: log.write(at_ms, where, request.kind, asked, outcome, reason=reason, number=number)
        )
