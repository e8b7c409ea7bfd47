"""A model of hashes: an engine for simulations, without torch and in microseconds.

A row is a digest. Layer ``l`` turns row ``x`` at position ``p`` into ``H(l, p, x, s)``, where ``s`` chains all rows that this layer saw
before in the session: so a lost, reordered or foreign row changes every token after it, as a wrong KV would, and any split into
stages gives the tokens of the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessella_p2p.base.errors import InvalidStep, TessellaError
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import DEFAULT_MAX_POSITIONS, DEFAULT_MAX_SESSIONS
from tessella_p2p.stages.engine import Buffer, KvUse, SessionKey, StepAnswer, StepInput, StepOutput, check_body
from tessella_p2p.stages.kv_pages import PAGE_POSITIONS, KvPages, KvSession, PrefixHit
from tessella_p2p.stages.sessions import pages_of
from tessella_p2p.wire.frames import DType

_ROW_BYTES = 32
HIDDEN_SIZE = _ROW_BYTES // DType.F32.size
"""Elements of one row."""


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

    def normed(self, rows: Sequence[bytes]) -> bytes:
        """[rows, 8] float32: the rows' bits as numbers from -1 to 1."""
        return (np.frombuffer(b"".join(rows), "<i4") * np.float64(2**-31)).astype("<f4").tobytes()


@dataclass(frozen=True, slots=True)
class _Work:
    """An admitted step: where its answer goes, its session, its rows, and how many of them the cache serves."""

    index: int
    step: StepInput
    session: KvSession
    rows: list[bytes]
    hit: PrefixHit | None


class ToyEngine:
    """A stage of a `ToyModel`; implements `engine.StageEngine`.

    Its KV is one digest a layer: the chain of all rows so far. Pages are booked as in a real engine, and hold the chains at their end.

    Args:
        model: the whole.
        layers: this stage's part of it.
        max_sessions: sessions that may be open at once.
        max_positions: positions that one session may have.
        num_pages: of KV; by default as many as all sessions together may need.
        now: seconds by a clock that never goes back: sessions that idle may lose their KV. Without one, time stands still.
    """

    def __init__(
        self,
        model: ToyModel,
        layers: LayerRange,
        *,
        max_sessions: int = DEFAULT_MAX_SESSIONS,
        max_positions: int = DEFAULT_MAX_POSITIONS,
        num_pages: int | None = None,
        now: Callable[[], float] = float,
    ) -> None:
        if layers.end > model.layers:
            raise ValueError(f"layers {layers} of a toy with {model.layers}")
        self.model = model
        self.layers = layers
        self.is_head = layers.start == 0
        self.is_tail = layers.end == model.layers
        self.hidden_size = HIDDEN_SIZE
        self.vocabulary = model.vocabulary
        self.wire_dtype = DType.F32
        self.max_sessions = max_sessions
        self.max_positions = max_positions
        self._now = now
        self._pages = KvPages(
            num_pages=max_sessions * pages_of(max_positions) if num_pages is None else num_pages,
            page_bytes=len(layers) * _ROW_BYTES,
            max_sessions=max_sessions,
            max_positions=max_positions,
            secret=model.hash(b"pages"),
            row_bytes_out=0 if self.is_tail else _ROW_BYTES,
        )
        self._chains: dict[SessionKey, list[bytes]] = {}
        self._chains_at_end: dict[int, tuple[bytes, ...]] = {}  # of each full page

    @property
    def kv(self) -> KvUse:
        """See `engine.StageEngine.kv`."""
        return self._pages.use

    @property
    def memory_bytes(self) -> int:
        """See `engine.StageEngine.memory_bytes`."""
        return self.kv.pages_total * self.kv.page_bytes

    def open_session(self, key: SessionKey, max_positions: int, scope: bytes = b"") -> None:
        """See `engine.StageEngine.open_session`."""
        self._pages.open(key, max_positions, scope, self._now())
        self._chains[key] = [bytes(_ROW_BYTES)] * len(self.layers)

    def keep(self, waiting: Collection[SessionKey]) -> None:
        """See `engine.StageEngine.keep`."""
        self._pages.keep(waiting, self._now())

    def cached_positions(self, key: SessionKey) -> int:
        """See `engine.StageEngine.cached_positions`."""
        return self._pages.cached_positions(key)

    def close_session(self, key: SessionKey) -> None:
        """See `engine.StageEngine.close_session`."""
        self._pages.close(key)
        self._chains.pop(key, None)

    def close(self) -> None:
        """See `engine.StageEngine.close`."""
        self._chains.clear()
        self._chains_at_end.clear()

    def forward(self, batch: Sequence[StepInput]) -> list[StepAnswer]:
        """See `engine.StageEngine.forward`."""
        answers: list[StepAnswer] = [None] * len(batch)
        works: list[_Work] = []
        seen: set[SessionKey] = set()
        for index, step in enumerate(batch):
            admitted = self._admit(index, step) if step.session not in seen else _twice(step)
            seen.add(step.session)
            if isinstance(admitted, _Work):
                works.append(admitted)
            else:
                answers[index] = admitted
        ends = [(work.session, work.step.position + work.step.rows) for work in works]
        for work, refused in zip(works, self._pages.grow(ends, self._now()), strict=True):
            if refused is not None:
                self._pages.revert(work.session, work.hit)
            answers[work.index] = refused or self._answer(work)
        return answers

    def _admit(self, index: int, step: StepInput) -> _Work | TessellaError:
        session = self._pages.admit(step)
        if isinstance(session, TessellaError):
            return session
        rows = self._rows(step)
        if isinstance(rows, InvalidStep):
            return rows
        if self.is_tail and step.normed:  # of rows that the cache serves a tail keeps nothing
            return _Work(index, step, session, rows, None)
        hit = self._pages.match(session, step.rows, step.body, keep_last=self.is_tail and step.sample is not None)
        return _Work(index, step, session, rows, hit)

    def _answer(self, work: _Work) -> StepAnswer:
        step, session, rows = work.step, work.session, work.rows
        chains = self._chains[step.session]
        done = 0
        if work.hit is not None:
            done = work.hit.rows
            rows[:done] = rows[:done] if self.is_tail else [row for page in work.hit.outputs for row in _cut(page)]
            chains[:] = self._chains_at_end[int(session.pages[session.position // PAGE_POSITIONS - 1])]
        for index in range(done, step.rows):
            position = step.position + index
            rows[index] = self._row(rows[index], position, chains)
            if (position + 1) % PAGE_POSITIONS == 0:
                self._chains_at_end[int(session.pages[position // PAGE_POSITIONS])] = tuple(chains)
        sent = b"" if self.is_tail else b"".join(rows)
        if done < step.rows:
            bytes_in, bytes_out = len(step.body) // step.rows, len(sent) // step.rows
            self._pages.advance(session, step.rows - done, step.body[done * bytes_in :], sent[done * bytes_out :])
        if not self.is_tail:
            return StepOutput(sent, self.wire_dtype)
        if step.normed:
            return StepOutput(self.model.normed(rows), DType.F32)
        return step.sample.draw(self.model.logits(rows[-1]), session.position) if step.sample is not None else None

    def _row(self, row: bytes, position: int, chains: list[bytes]) -> bytes:
        """One row through the layers of this stage."""
        place = position.to_bytes(4, "little")
        for layer, chain in enumerate(chains):
            row = self.model.hash((self.layers.start + layer).to_bytes(4, "little"), place, row, chain)
            chains[layer] = self.model.hash(chain, row)
        return row

    def _rows(self, step: StepInput) -> list[bytes] | InvalidStep:
        """The rows that enter the first layer, each 32 bytes."""
        refused = check_body(self, step)
        if refused is not None:
            return refused
        if not self.is_head:
            return _cut(step.body)
        tokens = _cut(step.body, DType.U32.size)
        if any(int.from_bytes(token, "little") >= self.vocabulary for token in tokens):
            return InvalidStep(f"a token id out of the vocabulary of {self.vocabulary}")
        return [self.model.hash(token) for token in tokens]


def _cut(body: Buffer, row_bytes: int = _ROW_BYTES) -> list[bytes]:
    return [bytes(body[at : at + row_bytes]) for at in range(0, len(body), row_bytes)]


def _twice(step: StepInput) -> InvalidStep:
    return InvalidStep(f"two steps of session {step.session} in one batch")
