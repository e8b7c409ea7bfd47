"""A model of hashes: an engine for simulations, without torch and in microseconds.

A row is a digest. Layer ``l`` turns row ``x`` at position ``p`` into ``H(l, p, x, s)``, where ``s`` chains all rows that this layer saw
before in the session: so a lost, reordered or foreign row changes every token after it, as a wrong KV would, and any split into
stages gives the tokens of the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessella_p2p.base.errors import InvalidStep
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import DEFAULT_MAX_POSITIONS, DEFAULT_MAX_SESSIONS
from tessella_p2p.stages.engine import SessionKey, StepAnswer, StepInput, StepOutput, check_body
from tessella_p2p.stages.sessions import OpenSession, SessionTable
from tessella_p2p.wire.frames import DType

_ROW_BYTES = 32


@dataclass(frozen=True, slots=True)
class ToyModel:
    """Which toy it is.

    Args:
        layers: how many there are.
        vocabulary: tokens are below this.
        salt: two toys with different salts disagree on every token.
    """

    layers: int
    vocabulary: int = 1024
    salt: bytes = b""

    def hash(self, *parts: bytes) -> bytes:
        """32 bytes from ``parts``, each of which has a fixed length."""
        return hashlib.blake2b(b"".join(parts), digest_size=_ROW_BYTES, key=self.salt).digest()

    def logits(self, row: bytes) -> npt.NDArray[np.float32]:
        """[vocabulary] float32 from the last row: uniform in [0, 8), in steps so fine that equal ones are rare."""
        numbers = np.frombuffer(hashlib.shake_128(row).digest(2 * self.vocabulary), "<u2")
        return numbers.astype(np.float32) * np.float32(2**-13)


class ToyEngine:
    """A stage of a `ToyModel`; implements `engine.StageEngine`.

    Args:
        model: the whole.
        layers: this stage's part of it.
        max_sessions: sessions that may be open at once.
        max_positions: positions that one session may have.
    """

    def __init__(
        self,
        model: ToyModel,
        layers: LayerRange,
        *,
        max_sessions: int = DEFAULT_MAX_SESSIONS,
        max_positions: int = DEFAULT_MAX_POSITIONS,
    ) -> None:
        if layers.end > model.layers:
            raise ValueError(f"layers {layers} of a toy with {model.layers}")
        self.model = model
        self.layers = layers
        self.is_head = layers.start == 0
        self.is_tail = layers.end == model.layers
        self.hidden_size = _ROW_BYTES // DType.F32.size
        self.vocabulary = model.vocabulary
        self.wire_dtype = DType.F32
        self.max_sessions = max_sessions
        self.max_positions = max_positions
        self.memory_bytes = max_sessions * len(layers) * _ROW_BYTES
        self.drift_class = "toy"
        self._sessions = SessionTable(max_sessions, max_positions)
        self._chains: dict[SessionKey, list[bytes]] = {}

    def open_session(self, key: SessionKey, max_positions: int, scope: bytes = b"") -> None:
        """See `engine.StageEngine.open_session`."""
        self._sessions.open(key, max_positions)
        self._chains[key] = [bytes(_ROW_BYTES)] * len(self.layers)

    def close_session(self, key: SessionKey) -> None:
        """See `engine.StageEngine.close_session`."""
        self._sessions.close(key)
        self._chains.pop(key, None)

    def forward(self, batch: Sequence[StepInput]) -> list[StepAnswer]:
        """See `engine.StageEngine.forward`."""
        answers: list[StepAnswer] = []
        seen: set[SessionKey] = set()
        for step in batch:
            admitted = self._sessions.admit(step)
            if step.session in seen:
                answers.append(InvalidStep(f"two steps of session {step.session} in one batch"))
            elif isinstance(admitted, OpenSession):
                answers.append(self._step(step, admitted))
            else:
                answers.append(admitted)
            seen.add(step.session)
        return answers

    def _step(self, step: StepInput, session: OpenSession) -> StepAnswer:
        rows = self._rows(step)
        if isinstance(rows, InvalidStep):
            return rows
        chains = self._chains[step.session]
        for index, row in enumerate(rows):
            place = (step.position + index).to_bytes(4, "little")
            for layer, chain in enumerate(chains):
                row = self.model.hash((self.layers.start + layer).to_bytes(4, "little"), place, row, chain)
                chains[layer] = self.model.hash(chain, row)
            rows[index] = row
        session.position += step.rows
        if not self.is_tail:
            return StepOutput(b"".join(rows), self.wire_dtype)
        if step.sample is None:
            return None
        return step.sample.draw(self.model.logits(rows[-1]), session.position)

    def _rows(self, step: StepInput) -> list[bytes] | InvalidStep:
        """The rows that enter the first layer, each 32 bytes."""
        refused = check_body(self, step)
        if refused is not None:
            return refused
        row_bytes = len(step.body) // step.rows
        body = bytes(step.body)
        cut = [body[at : at + row_bytes] for at in range(0, len(body), row_bytes)]
        if not self.is_head:
            return cut
        if any(int.from_bytes(token, "little") >= self.model.vocabulary for token in cut):
            return InvalidStep(f"a token id out of the vocabulary of {self.model.vocabulary}")
        return [self.model.hash(token) for token in cut]
