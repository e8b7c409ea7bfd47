"""What an auditor makes of a history that is not what the audited worker proved to have received (shell).

It is one peer's word against the other's, unless the worker itself has signed for what its upstream peer shows. So the upstream peer
shows the worker's newest receipt beside it:

    there is none, or it is for something else         the upstream peer withholds it: a neighbour that gives none is dropped
    it covers other rows than are shown                the upstream peer shows what it did not send
    it covers less than the audit looks at             nobody can say
    it covers what is shown                            the worker's receipt contradicts its proof

A receipt for more than the audit looks at covers the beginning too, once all of its rows are shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessella_p2p.base.errors import RemoteProtocolError
from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.base.limits import AUDIT_ROWS
from tessella_p2p.stages.digest import RunningDigest
from tessella_p2p.stages.work import open_receipt
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.frames import DType
from tessella_p2p.worker.context import StageContext
from tessella_p2p.worker.history_reader import HistoryReader, open_history


@dataclass(frozen=True, slots=True)
class Contradiction:
    """What can be said: with a ``receipt`` that the worker contradicts itself; else ``blamed`` shows what cannot be, or is None."""

    receipt: bytes | None
    reason: str
    blamed: PeerId | None = None


async def find_contradiction(
    context: StageContext, order: m.AuditOrder, raw_order: bytes, shown: HistoryReader, digest: bytes, dtype: DType
) -> Contradiction:
    """Look for the worker's signature under what its upstream peer shows.

    Args:
        raw_order: the order's envelope.
        shown: the history, which was read to the order's positions.
        digest: of that; it is not the order's.
        dtype: of its rows.

    Raises:
        TransportError, RemoteProtocolError, RefusalError: the upstream peer does not show the rest.
    """
    upstream = PeerId(order.upstream)
    receipt = _receipt(order, shown)
    if receipt is None:
        reason = "what it shows is not what the audited worker proved to have received, and no receipt of the worker is shown"
        return Contradiction(None, reason, upstream)
    if receipt.positions < order.positions:
        return Contradiction(None, f"the audited worker signed for {receipt.positions} of {order.positions} positions")
    at_order = at_receipt = digest
    if receipt.positions > order.positions:
        async with open_history(context, order, raw_order, "input", dtype, receipt.positions) as longer:
            at_order, at_receipt = await _digests(longer, order.positions, receipt.positions)
    if at_receipt != receipt.digest or at_order == order.input_digest:
        reason = "the receipt that it shows is not for the rows that it shows"
        return Contradiction(None, reason, upstream)
    reason = f"its receipt for {receipt.positions} positions is not for what its proof says that it received"
    return Contradiction(shown.receipt, reason)


def _receipt(order: m.AuditOrder, shown: HistoryReader) -> m.ReceiptBody | None:
    if shown.receipt is None:
        return None
    try:
        return open_receipt(
            shown.receipt,
            receiver=PeerId(order.audited),
            sender=PeerId(order.upstream),
            request_id=shown.body.request_id,
            key=(SessionId(order.session), order.epoch),
        )
    except RemoteProtocolError:
        return None


async def _digests(history: HistoryReader, first: int, last: int) -> tuple[bytes, bytes]:
    """Of the rows up to each of two positions."""
    digest, at_first = RunningDigest(history.body.digest_key, history.opened), b""
    position, has_drawn = 0, False
    while position < last:
        until = first if position < first else last
        piece = await history.next(min(AUDIT_ROWS, until - position))
        position += piece.rows
        digest.update(piece.body)
        if piece.draws and not has_drawn:
            has_drawn = True
            digest.mark_first_draw()
        if position == first:
            at_first = digest.digest()
    return at_first, digest.digest()
