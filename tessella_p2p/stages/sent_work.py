"""What an entry sent to its head, and how far the head has signed for it (pure).

An entry proves nothing, so it needs no receipt for itself. But a head that may say afterwards that it received something else cannot
be audited; so an entry insists on receipts as a stage does, and shows the newest to auditors. What was sent is digested when a receipt
comes: a step costs an entry in a queue.
"""

from __future__ import annotations

from collections import deque

from tessella_p2p.base.errors import RemoteProtocolError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.stages.digest import RunningDigest
from tessella_p2p.stages.work import MAX_STALE_RECEIPTS, MAX_UNCONFIRMED_STEPS, open_receipt


class SentWork:
    """The steps of one (session, epoch).

    Args:
        digest_key: the session's digest key.
        opened: the hash of the chain-open; see `digest.RunningDigest`.
    """

    def __init__(self, digest_key: bytes, opened: bytes) -> None:
        self._digest = RunningDigest(digest_key, opened)
        self._unsigned: deque[tuple[int, bytes, bool]] = deque()  # where a step ends, its ids, whether a draw follows
        self._has_drawn = False
        self._num_stale = 0
        self.sent = 0
        """Positions that were sent."""
        self.signed = 0
        """Positions that the head signed for."""

    @property
    def unsigned_steps(self) -> int:
        """Steps whose receipt is still out."""
        return len(self._unsigned)

    def send(self, rows: int, ids: bytes, *, draws: bool) -> None:
        """A step leaves; with ``draws`` the tail draws after its last row.

        Raises:
            RemoteProtocolError: the head left too many steps without a receipt.
        """
        if len(self._unsigned) >= MAX_UNCONFIRMED_STEPS:
            raise RemoteProtocolError(f"no receipt for {len(self._unsigned)} steps")
        self.sent += rows
        self._unsigned.append((self.sent, ids, draws))

    def confirm(self, raw: bytes, *, receiver: PeerId, sender: PeerId, request_id: str, key: tuple[bytes, int]) -> bool:
        """Take a receipt; whether it covers more than the one before.

        Args:
            raw: its envelope.
            receiver: the head.
            sender: this entry.
            request_id, key: what it has to be for.

        Raises:
            RemoteProtocolError: forged, for something else, or for other bytes than were sent; nothing that the head signs from now on
                can be checked.
        """
        receipt = open_receipt(raw, receiver=receiver, sender=sender, request_id=request_id, key=key)
        if receipt.positions <= self.signed:
            self._num_stale += 1
            if self._num_stale > MAX_STALE_RECEIPTS:
                raise RemoteProtocolError(f"{receiver} signs again and again for what it signed for before")
            return False
        end = self.signed
        while self._unsigned and self._unsigned[0][0] <= receipt.positions:
            end, ids, draws = self._unsigned.popleft()
            self._digest.update(ids)
            if draws and not self._has_drawn:
                self._has_drawn = True
                self._digest.mark_first_draw()
        if end != receipt.positions:
            raise RemoteProtocolError(f"a receipt for {receipt.positions} positions, which is no step's end")
        if self._digest.digest() != receipt.digest:
            raise RemoteProtocolError(f"{receiver} signed for other bytes than were sent (up to {receipt.positions})")
        self.signed = end
        return True
