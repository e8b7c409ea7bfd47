"""What a stage did in one (session, epoch), as a proof will say it (pure).

A receiver signs the digest of what it got at a step's boundary. The stage looks the boundary up, compares, and from then on can prove
that far: `confirmed`. So a proof claims only what its receiver signed for, at exactly those positions.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tessella_p2p.base.errors import InvalidStep, RemoteProtocolError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import DIGEST_MARK_POSITIONS, MAX_DIGEST_MARKS, TICKET_OPEN_S, TICKET_SETTLE_S
from tessella_p2p.stages.digest import RunningDigest
from tessella_p2p.stages.engine import Buffer
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import Sequencer, open_envelope, seal
from tessella_p2p.wire.keys import NodeKey

MAX_UNCONFIRMED_STEPS = 8192
_TOKEN_BYTES = 4


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


class WorkMeter:
    """Counts positions and digests of one stage in one (session, epoch).

    Args:
        digest_key: the session's digest key.
    """

    def __init__(self, digest_key: bytes) -> None:
        self._input = RunningDigest(digest_key)
        self._output = RunningDigest(digest_key)
        self._open: deque[Boundary] = deque()
        self._marks: list[m.DigestMark] = []
        self.positions = 0
        self.compute_us = 0
        self.confirmed: Confirmed | None = None

    @property
    def unconfirmed_steps(self) -> int:
        """Steps whose receipt is still out."""
        return len(self._open)

    def expect(self, position: int) -> None:
        """Check that a step continues where the last one ended.

        Raises:
            InvalidStep: it leaves a gap or goes back.
        """
        if position != self.positions:
            raise InvalidStep(f"a step at position {position} where {self.positions} is next")

    def add(self, rows: int, inputs: Buffer, outputs: Buffer, compute_us: int = 0) -> None:
        """Account for one step: ``rows`` rows of input, and its output (rows, or the tail's u32 token ids, or nothing).

        Raises:
            RemoteProtocolError: the receiver left too many steps without a receipt.
        """
        if len(self._open) >= MAX_UNCONFIRMED_STEPS:
            raise RemoteProtocolError(f"no receipt for {len(self._open)} steps")
        in_row = len(inputs) // rows
        out_row = (
            len(outputs) // rows if len(outputs) > _TOKEN_BYTES else 0
        )  # a tail's token belongs to the step's last row
        done = 0
        while done < rows:
            part = min(rows - done, DIGEST_MARK_POSITIONS - self.positions % DIGEST_MARK_POSITIONS)
            self._input.update(inputs[done * in_row : (done + part) * in_row])
            self._output.update(outputs[done * out_row : (done + part) * out_row])
            done += part
            self.positions += part
            if done == rows and not out_row:
                self._output.update(outputs)
            if self.positions % DIGEST_MARK_POSITIONS == 0 and len(self._marks) < MAX_DIGEST_MARKS:
                self._marks.append(self._mark())
        self.compute_us += compute_us
        self._open.append(Boundary(self.positions, self._input.digest(), self._output.digest()))

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
        receipt = open_envelope(raw, m.RECEIPT, now_ms=None, audience=sender, signer=receiver).message(m.ReceiptBody)
        if (receipt.request_id, receipt.session, receipt.epoch, receipt.sender) != (request_id, *key, sender):
            raise RemoteProtocolError("a receipt for another session")
        if self.confirmed is not None and receipt.positions <= self.confirmed.boundary.positions:
            return
        while self._open and self._open[0].positions < receipt.positions:
            self._open.popleft()
        if not self._open or self._open[0].positions != receipt.positions:
            raise RemoteProtocolError(f"a receipt for {receipt.positions} positions, which is no step's end")
        boundary = self._open.popleft()
        if boundary.output_digest != receipt.digest:
            raise RemoteProtocolError(f"{receiver} signed for other bytes than were sent (up to {receipt.positions})")
        self.confirmed = Confirmed(boundary, raw)

    def marks(self) -> tuple[m.DigestMark, ...]:
        """Digests at the multiples of `DIGEST_MARK_POSITIONS` up to the confirmed boundary, for neighbours to compare."""
        limit = self.confirmed.boundary.positions if self.confirmed is not None else 0
        return tuple(mark for mark in self._marks if mark.positions <= limit)

    def _mark(self) -> m.DigestMark:
        return m.DigestMark(positions=self.positions, input=self._input.digest(), output=self._output.digest())

    def input_receipt(self) -> tuple[int, bytes]:
        """(positions, digest) of what was received so far: what this node signs for its upstream."""
        return self.positions, self._input.digest()


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
