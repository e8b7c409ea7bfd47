"""Grants for an entry's requests (shell): one round trip while the orchestrator answers, held tickets while it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog
import trio

from tessella_p2p.base.errors import NoRoute, RemoteProtocolError, TessellaError, TransportError
from tessella_p2p.base.limits import (
    FOLLOW_S,
    GRANT_TIMEOUT_S,
    MAX_HELD_TICKETS,
    MAX_HELD_TICKETS_UNUSED,
    MAX_POSITIONS,
    TICKET_CHECK_S,
)
from tessella_p2p.entry.api import Caller
from tessella_p2p.entry.plan import EntryContext
from tessella_p2p.entry.reach import Reach
from tessella_p2p.entry.routes import Route
from tessella_p2p.entry.tickets import HeldTicket, TicketReserve
from tessella_p2p.ledger.client import OrchestratorPort
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import open_envelope, peek_signer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to start a request: its id, its tier and, unless it is served unpaid, its ticket.

    ``open_before`` is until when the ticket opens chains, in Unix milliseconds; 0 without one.
    """

    request_id: str
    tier: m.Tier
    ticket: bytes | None = None
    open_before: int = 0


class Granting:
    """Asks for grants, and holds some tickets for when nobody answers.

    Args:
        client: asks the orchestrator; None where there is none, and every request is served unpaid.
        reach: whether it answers.
        model_id, manifest_root: what the tickets are for.
        find_route: the route that serves now, which tickets are held for; raises `NoRoute`.
    """

    def __init__(
        self,
        context: EntryContext,
        client: OrchestratorPort | None,
        reach: Reach,
        model_id: str,
        manifest_root: bytes,
        find_route: Callable[[], Route],
    ) -> None:
        self._context = context
        self._client = client
        self._reach = reach
        self._model_id = model_id
        self._manifest_root = manifest_root
        self._find_route = find_route
        self._held = TicketReserve(MAX_HELD_TICKETS_UNUSED)
        self._wanted = trio.Event()

    @property
    def num_held(self) -> int:
        """Unspent tickets."""
        return len(self._held)

    async def grant(self, request_id: str, recipe: str, positions: int, caller: Caller) -> Grant:
        """Leave to start a request of so many positions under ``recipe``, in the name and within the tier of ``caller``.

        It goes by ``request_id``, unless a held ticket is spent on it, which has an id of its own.

        Nobody waits for an orchestrator that is known not to answer. A held ticket is spent then, if the request is in this node's own
        name; when there is none that fits, the request is served unpaid, and says so. Cancelled while it asks, the grant is lost, and
        costs nothing.

        Raises:
            OrchestratorUnreachable: nobody has answered for longer than the grace.
            DelegationRefused: the caller's delegation does not count.
            RefusalError, RemoteProtocolError: the orchestrator refuses, or its ticket is not what was asked for.
        """
        if self._client is None:
            return Grant(request_id, "Leech")
        if self._held.size < MAX_HELD_TICKETS:
            self._held.size = MAX_HELD_TICKETS
            self._wanted.set()
        if self._reach.is_reachable:
            try:
                ticket = await self._ask(self._client, request_id, recipe, positions, caller)
            except TransportError as error:
                self._reach.lost()
                log.warning("no orchestrator grants this request", reason=str(error))
            else:
                return _granted(ticket)
        self._reach.check(trio.current_time())
        held = None
        if caller.delegation is None:
            held = self._held.take(recipe, positions, self._context.clock.unix_ms(), caller.tier)
        if held is None:
            log.warning("no ticket: this request is served unpaid", request_id=request_id)
            return Grant(request_id, "Leech")
        self._wanted.set()
        return _granted(held)

    async def run(self) -> None:
        """Hold tickets, and replace them in time, until cancelled."""
        if self._client is None:
            return
        while True:
            self._wanted = trio.Event()
            full = self._reach.is_reachable and await self._refill(self._client)
            with trio.move_on_after(TICKET_CHECK_S if full else FOLLOW_S):
                await self._wanted.wait()

    async def _refill(self, client: OrchestratorPort) -> bool:
        """Ask for what is lacking; whether nothing is any more."""
        try:
            route = self._find_route()
        except NoRoute:
            return False
        positions = min(route.max_positions, MAX_POSITIONS)
        lacking = self._held.lacking(route.recipe, positions, self._context.clock.unix_ms())
        try:
            for _ in range(lacking):
                self._held.put(await self._ask(client, self.new_request_id(), route.recipe, positions, Caller()))
        except TransportError as error:
            self._reach.lost()
            log.info("no tickets for an outage", held=len(self._held), reason=str(error))
            return False
        except TessellaError as error:  # asked again as late as for the next ones: nothing is urgent about it
            log.warning("no tickets for an outage", held=len(self._held), code=error.code, reason=str(error))
        return True

    async def _ask(
        self, client: OrchestratorPort, request_id: str, recipe: str, positions: int, caller: Caller
    ) -> HeldTicket:
        """A ticket for a new request id, checked as the stages will."""
        request = m.SessionGrant(
            request_id=request_id,
            model_id=self._model_id,
            manifest_root=self._manifest_root,
            recipe=recipe,
            max_positions=positions,
            delegation=caller.delegation,
            tier=caller.tier,
        )
        answer = await client.ask(request, m.Granted, GRANT_TIMEOUT_S)
        envelope = open_envelope(answer.ticket, m.TICKET, now_ms=self._context.clock.unix_ms())
        ticket = envelope.message(m.Ticket)
        if envelope.signer not in client.orchestrators:
            raise RemoteProtocolError(f"a ticket of {envelope.signer}, which this node does not pin")
        own = self._context.key.peer_id
        bound = (ticket.request_id, ticket.requester, ticket.manifest_root, ticket.recipe)
        if bound != (request.request_id, own, self._manifest_root, recipe):
            raise RemoteProtocolError("the orchestrator's ticket is for another request")
        identity = own if caller.delegation is None else peek_signer(caller.delegation)
        if ticket.payer != identity or m.capped(ticket.tier, caller.tier) != ticket.tier:
            raise RemoteProtocolError(
                "the orchestrator's ticket is on another account, or of a better tier, than was asked for"
            )
        if ticket.max_positions < positions:
            raise RemoteProtocolError("the orchestrator's ticket is for fewer positions")
        self._reach.reached(trio.current_time())
        return HeldTicket(
            request.request_id, recipe, ticket.max_positions, ticket.tier, ticket.open_before, answer.ticket
        )

    def new_request_id(self) -> str:
        """An id that no other request has."""
        return f"req-{self._context.random_bytes(12).hex()}"


def _granted(ticket: HeldTicket) -> Grant:
    return Grant(ticket.request_id, ticket.tier, ticket.raw, ticket.open_before)
