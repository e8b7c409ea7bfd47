"""Several orchestrators of one federation: the first that answers is asked (shell).

    asked ──▶ the first of the list that is not known to be down ──no answer──▶ down: the next one is asked, at once and from then on
                         ▲                                                        │
                         └──────────── answers a probe, every 10 s ◀──────────────┘

All nodes of a mesh list the same orchestrators in the same order, so that they meet at the same one: it alone sees all workers, and
splits the model among them. The others stand by. A worker that comes to one of them shows the lease that it has, and goes on with its
layers. A ticket settles only at the orchestrator that minted it: `FailoverClient.at` leads there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn, TypeVar

import structlog
import trio

from tessella_p2p.base.errors import LocalProtocolError, TessellaError, TransportError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import ORCHESTRATOR_PROBE_S, ORCHESTRATOR_REQUEST_S
from tessella_p2p.ledger.client import AnswerT, OrchestratorClient
from tessella_p2p.wire.messages import (
    Acknowledged,
    Identity,
    OrchestratorAnswer,
    OrchestratorRequest,
    ReadIdentity,
    Stages,
    Subscribe,
)

log = structlog.get_logger(__name__)

T = TypeVar("T")
_PROBE_TIMEOUT_S = 3.0


class FailoverClient:
    """Asks the first of several pinned orchestrators that answers. Tasks may ask at the same time.

    Args:
        clients: one for each, in order of preference.
    """

    def __init__(self, clients: Sequence[OrchestratorClient]) -> None:
        if not clients:
            raise LocalProtocolError("no orchestrator to ask")
        self._clients = {client.orchestrator: client for client in clients}
        self._down: set[PeerId] = set()
        self._asked = next(iter(self._clients))
        self._follows: set[trio.CancelScope] = set()

    @property
    def orchestrator(self) -> PeerId:
        """Who is asked now."""
        return self._asked

    @property
    def orchestrators(self) -> tuple[PeerId, ...]:
        """All of them, the preferred one first."""
        return tuple(self._clients)

    def at(self, orchestrator: PeerId) -> OrchestratorClient | None:
        """The way to one of them, whether it answers or not; None where it is not pinned."""
        return self._clients.get(orchestrator)

    async def run(self) -> None:
        """Look until cancelled whether those that are down answer again."""
        if len(self._clients) == 1:  # the next request shows it
            await trio.sleep_forever()
        while True:
            await trio.sleep(ORCHESTRATOR_PROBE_S)
            for orchestrator in [each for each in self._clients if each in self._down]:
                try:
                    await self._clients[orchestrator].ask(ReadIdentity(), Identity, _PROBE_TIMEOUT_S)
                except TransportError:
                    continue
                except TessellaError as error:  # it answers, whatever it says
                    log.info("a probe was refused", orchestrator=orchestrator, code=error.code, reason=str(error))
                self._note(orchestrator, is_up=True)

    async def call(self, body: OrchestratorRequest, timeout_s: float = ORCHESTRATOR_REQUEST_S) -> OrchestratorAnswer:
        """Ask, and wait for the answer of the first that gives one; each has ``timeout_s``.

        One that gave none in time may have served the request all the same.

        Raises:
            TransportError: none of them can be reached, or answered in time.
            RefusalError, RemoteProtocolError: as `OrchestratorClient.call`, of the one that answered.
        """
        return await self._first(lambda client: client.call(body, timeout_s))

    async def ask(
        self, body: OrchestratorRequest, answer: type[AnswerT], timeout_s: float = ORCHESTRATOR_REQUEST_S
    ) -> AnswerT:
        """`call`, for a request that has one kind of answer."""
        return await self._first(lambda client: client.ask(body, answer, timeout_s))

    async def follow(self, request: Subscribe, take: Callable[[Stages | Acknowledged], None]) -> NoReturn:
        """See `OrchestratorClient.follow`; it follows the one that is asked, and moves on when another one is.

        Raises:
            TransportError: no other one is known to answer.
            RefusalError, RemoteProtocolError: of the one that is followed.
        """
        while True:
            followed = self._asked
            scope = trio.CancelScope()
            self._follows.add(scope)
            try:
                with scope:  # `_note` ends it
                    await self._clients[followed].follow(request, take)
            except TransportError as error:
                self._note(followed, is_up=False)
                if self._asked == followed:
                    raise
                log.warning("the next orchestrator is followed", instead_of=followed, reason=str(error))
            finally:
                self._follows.discard(scope)

    async def _first(self, ask: Callable[[OrchestratorClient], Awaitable[T]]) -> T:
        """The answer of the first that gives one."""
        # Where all are down, each is tried: something has to find out, and no probe may be running.
        tried = [each for each in self._clients if each not in self._down] or list(self._clients)
        for orchestrator in tried[:-1]:
            try:
                return await self._noting(orchestrator, ask)
            except TransportError as error:
                log.warning("the next orchestrator is asked", instead_of=orchestrator, reason=str(error))
        return await self._noting(tried[-1], ask)

    async def _noting(self, orchestrator: PeerId, ask: Callable[[OrchestratorClient], Awaitable[T]]) -> T:
        """What one of them answers; whether it did is remembered."""
        try:
            answer = await ask(self._clients[orchestrator])
        except TransportError:
            self._note(orchestrator, is_up=False)
            raise
        except TessellaError:
            self._note(orchestrator, is_up=True)
            raise
        self._note(orchestrator, is_up=True)
        return answer

    def _note(self, orchestrator: PeerId, *, is_up: bool) -> None:
        if is_up:
            self._down.discard(orchestrator)
        else:
            self._down.add(orchestrator)
        asked = next((each for each in self._clients if each not in self._down), self._asked)
        if asked != self._asked:
            log.warning("another orchestrator is asked", orchestrator=asked, before=self._asked)
            self._asked = asked
            for scope in self._follows:
                scope.cancel()
