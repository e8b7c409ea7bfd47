"""Orders to workers (shell): the asking half of ``/tessella/orders/1``.

One sealed order out, one sealed answer in, on a stream of its own. "Taken" means that the worker will carry it out, not that it has:
what comes of an order is told by what the worker asks next, its `Ready` or its `AuditReport`.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import trio

from tessella_p2p.base.errors import HopTimeout, InvalidSignature, StreamReset, TessellaError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_ENVELOPE_BYTES, ORDER_S
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.orchestrator.context import OrchestratorContext
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import open_envelope, seal

_LOG: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Orders:
    """Sends orders. Tasks may send at the same time."""

    def __init__(self, context: OrchestratorContext) -> None:
        self._context = context

    async def send(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        body: m.UpdateAssignment | m.AuditOrder,
        timeout_s: float = ORDER_S,
    ) -> m.OrderTaken | m.OrderRefused:
        """Send ``body`` to ``peer``, and wait for its answer. Cancelled, the order may or may not have been taken.

        The envelope is to be delivered within its minute; how long an audit order may be shown to others is its ``report_before``.

        Args:
            peer: the worker; nobody else's answer counts.
            addresses: where it may be dialled, if the network does not know.
            body: the order.
            timeout_s: for the whole exchange.

        Raises:
            DialError, StreamReset, HopTimeout: the worker cannot be reached, or did not answer in time.
            RemoteProtocolError: it does not serve orders, or its answer is not its answer to this order.
        """
        context = self._context
        now_ms = context.clock.unix_ms()
        sequence = context.sequencer.next(m.ORDER, now_ms)
        order = seal(context.key, m.ORDER, m.OrderBody(body=body), sequence=sequence, now_ms=now_ms, audience=peer)
        try:
            with trio.move_on_after(timeout_s):
                answer = self._opened(await self._exchange(peer, addresses, order), peer, sequence)
                context.outcomes[f"{body.kind}:{answer.kind}"] += 1
                return answer
            raise HopTimeout(f"{peer} did not answer {body.kind} within {timeout_s:g} s").blame(peer)
        except TessellaError as error:
            context.outcomes[f"{body.kind}:{error.code}"] += 1
            _LOG.info("order_not_answered", peer=peer, kind=body.kind, code=error.code, reason=str(error))
            raise

    async def _exchange(self, peer: PeerId, addresses: Sequence[str], order: bytes) -> bytes:
        network = self._context.network
        network.add_addresses(peer, addresses)
        stream = await network.open_stream(peer, protocols.ORDERS)
        try:
            await send_message(stream, order)
            answer = await receive_message(stream, MAX_ENVELOPE_BYTES)
        except BaseException:  # a cancellation, too, has to leave no stream behind
            with trio.CancelScope(shield=True):
                await stream.reset()
            raise
        await stream.aclose()
        if answer is None:
            raise StreamReset(f"{peer} closed the stream without an answer to an order").blame(peer)
        return answer

    def _opened(self, raw: bytes, peer: PeerId, sequence: int) -> m.OrderTaken | m.OrderRefused:
        context = self._context
        envelope = open_envelope(
            raw, m.ORDER_ANSWER, now_ms=context.clock.unix_ms(), audience=context.key.peer_id, signer=peer
        )
        answer = envelope.message(m.OrderAnswer)
        if answer.to != sequence:
            raise InvalidSignature(f"an answer of {peer} to order {answer.to}, not to {sequence}").blame(peer)
        return answer.body
