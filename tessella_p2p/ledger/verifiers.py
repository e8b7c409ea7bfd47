"""Child processes that verify batches of proofs, so that signatures neither hold up the event loop nor share its one core (shell).

What a proof shows needs no state (``evidence``), and is most of what a settlement costs. A child is started when a batch first needs
it. It reads requests on its standard input until that ends: it outlives its parent by no more than the request at hand, however that
one died. Both ends are this program, on this machine, so what they exchange are pickles.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import IO, Any, Protocol

import structlog

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.ledger.evidence import ProofRefused, ProvenWork, SettlementTerms, verify_proof
from tessella_p2p.wire.messages import DigestMark, Proof, Ticket

Verified = ProvenWork | ProofRefused
_LOG: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)
_MIN_BATCH = 8
"""Fewer proofs are verified in place: that takes less time than handing them over."""
_END_S = 5.0
_LENGTH_BYTES = 4


class VerifyProofs(Protocol):
    """Verifies proofs that came together; blocks."""

    def __call__(self, proofs: Sequence[bytes], terms: SettlementTerms, now_ms: int, /) -> list[Verified]:
        """What each shows, or why it is refused, in their order."""
        ...


def verify_in_place(proofs: Sequence[bytes], terms: SettlementTerms, now_ms: int, /) -> list[Verified]:
    """`VerifyProofs` in the calling thread."""
    verified: list[Verified] = []
    for raw in proofs:
        try:
            verified.append(verify_proof(raw, terms, now_ms))
        except ProofRefused as error:
            verified.append(error)
    return verified


class ProofVerifiers:
    """`VerifyProofs` in child processes. Threads may call it at the same time; each waits for a child of its own.

    Args:
        processes: how many children there may be; with 0 everything is verified in place.
    """

    def __init__(self, processes: int) -> None:
        self._free = threading.Semaphore(processes)
        self._none = processes == 0
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._closed = False

    def __call__(self, proofs: Sequence[bytes], terms: SettlementTerms, now_ms: int, /) -> list[Verified]:
        """What each proof shows, or why it is refused. Where a child fails, it is found out in place."""
        if self._none or len(proofs) < _MIN_BATCH:
            return verify_in_place(proofs, terms, now_ms)
        # Live views stay here; a child gets what they show now.
        shown = replace(terms, total_layers=dict(terms.total_layers), revoked=dict(terms.revoked))
        with self._free:
            child = None
            try:
                child = self._take()
                verified = child.verify(proofs, shown, now_ms)
            except (OSError, EOFError) as error:
                _LOG.error("proof_verifier_failed", reason=str(error) or type(error).__name__)
                if child is not None:
                    child.close()
                return verify_in_place(proofs, terms, now_ms)
            self._give_back(child)
        return verified

    def children(self) -> list[int]:
        """The process ids of the children that wait for work."""
        with self._lock:
            return [child.pid for child in self._idle]

    def close(self) -> None:
        """End the children that are idle now, and the others once they are."""
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for child in idle:
            child.close()

    def _take(self) -> _Child:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Child()

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        child.close()


class _Child:
    """One child process. Its methods raise OSError or EOFError where it is gone."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tessella_p2p.ledger.verifiers"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._process.pid

    def verify(self, proofs: Sequence[bytes], terms: SettlementTerms, now_ms: int) -> list[Verified]:
        """`verify_in_place`, over there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _send(self._process.stdin, pickle.dumps((list(proofs), terms, now_ms), pickle.HIGHEST_PROTOCOL))
        answer = _receive(self._process.stdout)
        if answer is None:
            raise EOFError(f"a process that verifies proofs ended with status {self._process.wait()}")
        return [_unpacked(one) for one in pickle.loads(answer)]  # noqa: S301 - our own child

    def close(self) -> None:
        """End it, and wait until it has."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):  # it ended with half a request unread
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


_Packed = tuple[str, str, PeerId | None] | dict[str, Any]
_SHOWN = tuple(field.name for field in fields(ProvenWork))


def _packed(verified: Verified) -> _Packed:
    """Plain values, which take a tenth of the time that messages take on the way; and an exception does not survive it whole."""
    if isinstance(verified, ProofRefused):
        return verified.reason_code, str(verified), verified.peer
    marks = tuple(mark.__dict__ for mark in verified.proof.marks)
    return {
        **{name: getattr(verified, name) for name in _SHOWN},
        "proof": {**verified.proof.__dict__, "marks": marks},
        "ticket": verified.ticket.__dict__,
        "layers": verified.layers.as_tuple(),
        "points": [point.__dict__ for point in verified.points[len(marks) :]],  # they begin with the marks
    }


def _unpacked(packed: _Packed) -> Verified:
    if isinstance(packed, tuple):
        reason_code, message, peer = packed
        error = ProofRefused(reason_code, message)
        return error if peer is None else error.blame(peer)
    proof = Proof.model_validate(packed["proof"])
    shown = {
        **packed,
        "proof": proof,
        "ticket": Ticket.model_validate(packed["ticket"]),
        "layers": LayerRange(*packed["layers"]),
        "points": (*proof.marks, *(DigestMark.model_validate(point) for point in packed["points"])),
    }
    return ProvenWork(**shown)


def _send(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes | None:
    """One message; None at the end of the stream."""
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    data = stream.read(int.from_bytes(head, "big"))
    return data if len(data) == int.from_bytes(head, "big") else None


def main() -> None:
    """In the child: answer until the parent is gone."""
    # A terminal sends these to the whole group: when to leave is the parent's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while (request := _receive(sys.stdin.buffer)) is not None:
        proofs, terms, now_ms = pickle.loads(request)  # noqa: S301 - our own parent
        answer = [_packed(one) for one in verify_in_place(proofs, terms, now_ms)]
        try:
            _send(sys.stdout.buffer, pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
