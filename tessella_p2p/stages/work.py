"""What a stage did in one (session, epoch), as a proof will say it (pure).

A receiver signs the digest of what it got at a step's boundary. The stage looks the boundary up, compares, and from then on can prove
that far: `confirmed`. So a proof claims only what its receiver signed for, at exactly those positions.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tessella_p2p.base.errors import RemoteProtocolError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import DIGEST_MARK_POSITIONS, TICKET_OPEN_S, TICKET_SETTLE_S
from tessella_p2p.stages.digest import RunningDigest
from tessella_p2p.stages.engine import Buffer
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import Sequencer, open_envelope, seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.marks import mark_stride

MAX_UNCONFIRMED_STEPS = 8192
MAX_STALE_RECEIPTS = 16
"""Receipts for nothing new that one receiver may send."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Running digests after ``positions`` positions."""

    positions: int
    input_digest: bytes
    output_digest: bytes


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A boundary that the receiver signed for; ``receipt`` is its envelope."""

    boundary: Boundary
    receipt: bytes


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A step that waits to be computed: where it ends, the input's digest there, and whether the first draw follows it."""

    positions: int
    input_digest: bytes
    begins_draws: bool


class WorkMeter:
    """Counts positions and digests of one stage in one (session, epoch).

    Rows are digested when they arrive, so a receipt for them does not wait until they are computed; `finish` then takes the steps in
    the order of their arrival.

    Args:
        digest_key: the session's digest key.
        opened: the hash of the chain-open; see `digest.RunningDigest`.
    """

    def __init__(self, digest_key: bytes, opened: bytes) -> None:
        self._input = RunningDigest(digest_key, opened)
        self._output = RunningDigest(digest_key, opened)
        self._arrived: deque[_Arrived] = deque()
        self._has_drawn = False
        self._input_marks: deque[bytes] = deque()
        self._unconfirmed: deque[Boundary] = deque()
        self._marks: list[m.DigestMark] = []
        self._num_stale = 0
        self.received = 0
        """Positions whose rows have arrived."""
        self.positions = 0
        """Positions that are computed."""
        self.compute_us = 0
        self.confirmed: Confirmed | None = None

    @property
    def unconfirmed_steps(self) -> int:
        """Steps with an output whose receipt is still out."""
        return len(self._unconfirmed)

    def receive(self, rows: int, inputs: Buffer, *, draws: bool = False) -> None:
        """The ``rows`` rows of one step arrived; with ``draws`` the tail draws after the last of them."""
        begins = draws and not self._has_drawn
        self._has_drawn = self._has_drawn or draws
        row_bytes = len(inputs) // rows
        done = 0
        while done < rows:
            part = min(rows - done, DIGEST_MARK_POSITIONS - self.received % DIGEST_MARK_POSITIONS)
            self._input.update(inputs[done * row_bytes : (done + part) * row_bytes])
            done += part
            self.received += part
            if begins and done == rows:
                self._input.mark_first_draw()
            if self.received % DIGEST_MARK_POSITIONS == 0:
                self._input_marks.append(self._input.digest())
        self._arrived.append(_Arrived(self.received, self._input.digest(), begins))

    def finish(self, outputs: Buffer, *, is_token: bool = False, compute_us: int = 0) -> None:
        """The oldest step that arrived is computed.

        Args:
            outputs: its rows; or, with ``is_token``, what a tail says behind its last row, a token's u32 id or a vector; empty when
                it has no output.
            compute_us: what it took.

        Raises:
            RemoteProtocolError: the receiver left too many steps without a receipt.
        """
        if len(self._unconfirmed) >= MAX_UNCONFIRMED_STEPS:
            raise RemoteProtocolError(f"no receipt for {len(self._unconfirmed)} steps")
        arrived = self._arrived.popleft()
        end = arrived.positions
        rows = end - self.positions
        row_bytes = 0 if is_token else len(outputs) // rows
        done = 0
        while done < rows:
            part = min(rows - done, DIGEST_MARK_POSITIONS - self.positions % DIGEST_MARK_POSITIONS)
            self._output.update(outputs[done * row_bytes : (done + part) * row_bytes])
            done += part
            self.positions += part
            if done == rows and is_token:
                self._output.update_draw(end, outputs)
            elif done == rows and arrived.begins_draws:
                self._output.mark_first_draw()
            if self.positions % DIGEST_MARK_POSITIONS == 0:
                mark = m.DigestMark(
                    positions=self.positions, input=self._input_marks.popleft(), output=self._output.digest()
                )
                self._marks.append(mark)
        self.compute_us += compute_us
        if outputs:
            self._unconfirmed.append(Boundary(end, arrived.input_digest, self._output.digest()))

    def confirm(self, raw: bytes, *, receiver: PeerId, sender: PeerId, request_id: str, key: tuple[bytes, int]) -> None:
        """Take a receipt.

        Args:
            raw: its envelope.
            receiver: who has to have signed it.
            sender: this node.
            request_id, key: what it has to be for.

        Raises:
            RemoteProtocolError: forged, for something else, or a digest that is not ours: one of the two is lying.
        """
        receipt = open_receipt(raw, receiver=receiver, sender=sender, request_id=request_id, key=key)
        if self.confirmed is not None and receipt.positions <= self.confirmed.boundary.positions:
            self._num_stale += 1
            if self._num_stale > MAX_STALE_RECEIPTS:
                raise RemoteProtocolError(f"{receiver} signs again and again for what it signed for before")
            return
        while self._unconfirmed and self._unconfirmed[0].positions < receipt.positions:
            self._unconfirmed.popleft()
        if not self._unconfirmed or self._unconfirmed[0].positions != receipt.positions:
            raise RemoteProtocolError(f"a receipt for {receipt.positions} positions, which is no step's end")
        boundary = self._unconfirmed.popleft()
        if boundary.output_digest != receipt.digest:
            raise RemoteProtocolError(f"{receiver} signed for other bytes than were sent (up to {receipt.positions})")
        self.confirmed = Confirmed(boundary, raw)

    def marks(self) -> tuple[m.DigestMark, ...]:
        """Digests at multiples of `DIGEST_MARK_POSITIONS` up to the confirmed boundary, for neighbours to compare.

        Of a very long session only every second one is kept, or every fourth, and so on, so that the proof stays within its bound. A
        neighbour that is at another position may keep twice as many, the same ones among them, so the two have marks in common.
        """
        limit = self.confirmed.boundary.positions if self.confirmed is not None else 0
        stride = mark_stride(limit)
        return tuple(mark for mark in self._marks if mark.positions <= limit and mark.positions % stride == 0)

    def input_receipt(self) -> tuple[int, bytes]:
        """(positions, digest) of what has arrived: what this node signs for its upstream."""
        return self.received, self._input.digest()


def open_receipt(
    raw: bytes, *, receiver: PeerId, sender: PeerId, request_id: str, key: tuple[bytes, int]
) -> m.ReceiptBody:
    """The receipt in ``raw``; whether its digest is right is for those to say who know the rows.

    Raises:
        RemoteProtocolError: malformed, forged, or for another receiver, sender, request or (session, epoch).
    """
    receipt = open_envelope(raw, m.RECEIPT, now_ms=None, audience=sender, signer=receiver).message(m.ReceiptBody)
    if (receipt.request_id, receipt.session, receipt.epoch, receipt.sender) != (request_id, *key, sender):
        raise RemoteProtocolError("a receipt for another session")
    return receipt


def seal_receipt(body: m.ReceiptBody, key: NodeKey, sequencer: Sequencer, now_ms: int) -> bytes:
    """The receiver's signature over what it received; it is evidence, so it outlives the ticket."""
    return seal(
        key,
        m.RECEIPT,
        body,
        sequence=sequencer.next(m.RECEIPT, now_ms),
        now_ms=now_ms,
        audience=body.sender,
        ttl_ms=int((TICKET_OPEN_S + TICKET_SETTLE_S) * 1000),
    )
