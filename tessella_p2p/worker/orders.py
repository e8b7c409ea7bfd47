"""Orders of the orchestrator (shell): the serving half of ``/tessella/orders/1``.

Whoever opens a stream is judged by the node's own pins before a byte of it is read. An order is then judged like any request: form,
signer = the stream's authenticated peer, audience, times, replay; and handed to whoever carries out its kind. The answer says that it
was taken, or why not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import structlog
import trio

from tessella_p2p.base.errors import InvalidRequest, LocalProtocolError, TessellaError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_ENVELOPE_BYTES, MAX_REASON_CHARS, ORDER_S
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.network import Stream
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import ReplayGuard, open_envelope, peek_sequence, seal
from tessella_p2p.worker.context import StageContext

log = structlog.get_logger(__name__)

AssignmentHandler: TypeAlias = Callable[[m.UpdateAssignment, PeerId], Awaitable[None]]
"""Takes an order for other layers, of the orchestrator that signed it; raises the `TessellaError` that it is refused with."""
AuditHandler: TypeAlias = Callable[[m.AuditOrder, bytes], Awaitable[None]]
"""Takes an audit order and its envelope, byte for byte; raises the `TessellaError` that it is refused with."""


class OrderServer:
    """Serves orders of pinned orchestrators.

    Args:
        pins: whose orders count; they come from the node's own configuration and from nowhere else.
        on_assignment: carries out `UpdateAssignment`.
    """

    def __init__(self, context: StageContext, pins: frozenset[PeerId], on_assignment: AssignmentHandler) -> None:
        self._context = context
        self._pins = pins
        self._on_assignment = on_assignment
        self._guard = ReplayGuard()
        self.on_audit: AuditHandler | None = None
        """Carries out `AuditOrder`; None where this node audits nobody."""

    def serve(self) -> None:
        """Answer orders from now on, for as long as the network lives."""
        self._context.network.serve(protocols.ORDERS, self._serve)

    async def _serve(self, stream: Stream) -> None:
        """Answer one order. Ends quietly when the peer sends nothing, or nothing in time."""
        if stream.peer not in self._pins:
            log.info("an order of a peer that is not pinned", peer=stream.peer)
            await stream.reset()
            return
        with trio.move_on_after(ORDER_S):
            raw = await receive_message(stream, MAX_ENVELOPE_BYTES)
            if raw is not None:
                await send_message(stream, await self.answer(stream.peer, raw))

    async def answer(self, peer: PeerId, raw: bytes) -> bytes:
        """The sealed answer to the sealed order ``raw`` of the authenticated and pinned ``peer``.

        Raises:
            MalformedMessage, VersionMismatch: no envelope; there is no sequence that an answer could name.
            LocalProtocolError: our own bug.
        """
        sequence = peek_sequence(raw)
        body: m.OrderTaken | m.OrderRefused = m.OrderTaken()
        try:
            await self._take(peer, raw)
        except LocalProtocolError:
            raise
        except TessellaError as error:
            log.info("order refused", peer=peer, code=error.code, reason=str(error))
            body = m.OrderRefused(code=error.code, reason=str(error)[:MAX_REASON_CHARS])
        context = self._context
        now_ms = context.clock.unix_ms()
        return seal(
            context.key,
            m.ORDER_ANSWER,
            m.OrderAnswer(to=sequence, body=body),
            sequence=context.sequencer.next(m.ORDER_ANSWER, now_ms),
            now_ms=now_ms,
            audience=peer,
        )

    async def _take(self, peer: PeerId, raw: bytes) -> None:
        context = self._context
        now_ms = context.clock.unix_ms()
        envelope = open_envelope(raw, m.ORDER, now_ms=now_ms, audience=context.key.peer_id, signer=peer)
        self._guard.check(envelope, now_ms)
        order = envelope.message(m.OrderBody).body
        if isinstance(order, m.UpdateAssignment):
            await self._on_assignment(order, peer)
        elif self.on_audit is None:
            raise InvalidRequest("this node audits nobody", param="kind")
        else:
            await self.on_audit(order, envelope.raw)
