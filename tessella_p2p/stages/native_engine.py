"""The native engine for llama models: float32 arithmetic on weights as they are stored, in one C call per turn.

Its bits depend on the rows and their history alone: not on the batch, the chunks, the threads, the split into stages or the
instruction set (``native/kernels.h`` says why, `native_proof` checks it on the machine at hand). So one recipe is exact and fast at
once, its KV may be shared between sessions, and any two machines may share a route.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tessella_p2p.base.errors import ConfigurationError, InvalidStep, TessellaError
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import MAX_PREFILL_ROWS_PER_TURN, MAX_SESSIONS_PER_STAGE
from tessella_p2p.model.config import ModelConfig
from tessella_p2p.model.gguf import GgufFile
from tessella_p2p.model.recipe import Recipe
from tessella_p2p.stages.engine import Buffer, KvUse, SessionKey, StepAnswer, StepInput, StepOutput, check_body
from tessella_p2p.stages.kv_pages import PAGE_POSITIONS, KvPages, KvSession, PrefixHit
from tessella_p2p.stages.native.binding import SEGMENT, Floats, Kernels
from tessella_p2p.stages.native_proof import prove_kernels
from tessella_p2p.stages.native_weights import NativeWeights, load_weights
from tessella_p2p.stages.rotations import rotations
from tessella_p2p.wire.frames import DType

_MAX_ROWS = MAX_PREFILL_ROWS_PER_TURN + MAX_SESSIONS_PER_STAGE
"""Rows of one call; a longer batch takes several."""


@dataclass(slots=True)
class _Work:
    """An admitted step: where its answer goes, what the prefix cache served of it, and where its other rows begin among all rows."""

    index: int
    step: StepInput
    session: KvSession
    hit: PrefixHit | None
    row: int = 0

    @property
    def skipped(self) -> int:
        return self.hit.rows if self.hit is not None else 0

    @property
    def rows(self) -> int:
        """That are to be computed."""
        return self.step.rows - self.skipped

    @property
    def body(self) -> memoryview:
        """Those rows as they arrived."""
        row_bytes = len(self.step.body) // self.step.rows
        return memoryview(self.step.body)[self.skipped * row_bytes :]


class NativeEngine:
    """A stage of a llama model; implements `engine.StageEngine`. Made by `load`.

    Attributes:
        config: the whole model's.
        recipe: its arithmetic.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: LayerRange,
        recipe: Recipe,
        weights: NativeWeights,
        *,
        threads: int,
        max_sessions: int,
        max_positions: int,
        kv_bytes: int | None = None,
        portable: bool = False,
    ) -> None:
        self.config = config
        self.recipe = recipe
        self.layers = layers
        self.is_head = config.is_head(layers)
        self.is_tail = config.is_tail(layers)
        self.hidden_size = config.hidden
        self.vocabulary = config.vocabulary
        self.wire_dtype = recipe.wire_dtype
        self.max_sessions = max_sessions
        self.max_positions = max_positions
        self._weights = weights
        self._rotations = rotations(config, max_positions)
        self._kernels = Kernels(
            (config.hidden, config.heads, config.kv_heads, config.head_dim, config.ffn),
            config.rms_eps,
            weights.layers,
            self._rotations,
            embedding=weights.embedding,
            output=weights.output,
            threads=threads,
            max_rows=_MAX_ROWS,
            portable=portable,
        )
        page_floats = len(layers) * config.kv_heads * 2 * config.head_dim * PAGE_POSITIONS
        page_bytes = page_floats * DType.F32.size
        row_bytes_out = 0 if self.is_tail else config.hidden * self.wire_dtype.size
        num_pages = _pages(max_sessions, max_positions, page_bytes + PAGE_POSITIONS * row_bytes_out, kv_bytes)
        # Zeros come from the operating system, so memory is committed as pages are written.
        self._arena: Floats = np.zeros((num_pages, page_floats), np.float32)
        self._kv = KvPages(
            num_pages=num_pages,
            page_bytes=page_bytes,
            max_sessions=max_sessions,
            max_positions=max_positions,
            secret=os.urandom(32),
            row_bytes_out=row_bytes_out,
        )

    @classmethod
    def load(
        cls,
        path: Path,
        layers: LayerRange,
        recipe: Recipe,
        *,
        threads: int,
        max_sessions: int,
        max_positions: int,
        kv_bytes: int | None = None,
        portable: bool = False,
    ) -> NativeEngine:
        """Read ``layers`` from a GGUF file; see `loading.load_engine`. ``portable`` computes in plain C, for comparison."""
        prove_kernels()
        with GgufFile.open(path) as file:
            config = ModelConfig.from_gguf(file)
            recipe.check_architecture(config.architecture)
            weights = load_weights(file, config, layers, recipe)
        return cls(
            config,
            layers,
            recipe,
            weights,
            threads=threads,
            max_sessions=max_sessions,
            max_positions=min(max_positions, config.context_length),
            kv_bytes=kv_bytes,
            portable=portable,
        )

    @property
    def memory_bytes(self) -> int:
        """See `engine.StageEngine.memory_bytes`."""
        kv = self._arena.nbytes + self._kv.max_outputs_bytes
        return self._weights.nbytes + kv + sum(table.nbytes for table in self._rotations)

    @property
    def kv(self) -> KvUse:
        """See `engine.StageEngine.kv`."""
        return self._kv.use

    def open_session(self, key: SessionKey, max_positions: int, scope: bytes = b"") -> None:
        """See `engine.StageEngine.open_session`."""
        self._kv.open(key, max_positions, scope, time.monotonic())

    def keep(self, waiting: Collection[SessionKey]) -> None:
        """See `engine.StageEngine.keep`."""
        self._kv.keep(waiting, time.monotonic())

    def cached_positions(self, key: SessionKey) -> int:
        """See `engine.StageEngine.cached_positions`."""
        return self._kv.cached_positions(key)

    def close_session(self, key: SessionKey) -> None:
        """See `engine.StageEngine.close_session`."""
        self._kv.close(key)

    def close(self) -> None:
        """See `engine.StageEngine.close`."""
        if hasattr(self, "_kernels"):
            self._kernels.close()
            del self._kernels, self._weights  # a sleeping stage keeps this object for what it says of itself
        self._arena = np.empty((0, 0), np.float32)

    # ---- in ----

    def forward(self, batch: Sequence[StepInput]) -> list[StepAnswer]:
        """See `engine.StageEngine.forward`."""
        answers: list[StepAnswer] = [None] * len(batch)
        works = list(self._admit(batch, answers))
        if works:
            refused = self._kv.grow([(w.session, w.session.position + w.rows) for w in works], time.monotonic())
            for work, error in zip(works, refused, strict=True):
                if error is not None:
                    self._kv.revert(work.session, work.hit)
                    answers[work.index] = error
            works = [work for work, error in zip(works, refused, strict=True) if error is None]
        if works:
            self._answer(works, self._compute(works), answers)
        return answers

    def _admit(self, batch: Sequence[StepInput], answers: list[StepAnswer]) -> Iterator[_Work]:
        taken: set[SessionKey] = set()
        for index, step in enumerate(batch):
            session = self._kv.admit(step)
            refused = session if isinstance(session, TessellaError) else self._check(step, taken)
            if isinstance(session, TessellaError) or refused is not None:
                answers[index] = refused
                continue
            taken.add(step.session)
            yield _Work(index, step, session, self._match(step, session))

    def _match(self, step: StepInput, session: KvSession) -> PrefixHit | None:
        if self.is_tail and step.normed:  # of rows that the cache serves a tail keeps nothing
            return None
        return self._kv.match(session, step.rows, step.body, keep_last=step.sample is not None)

    def _check(self, step: StepInput, taken: set[SessionKey]) -> InvalidStep | None:
        if step.session in taken:
            return InvalidStep(f"two steps of session {step.session} in one batch")
        refused = check_body(self, step)
        if refused is not None:
            return refused
        if self.is_head:
            largest = int(np.frombuffer(step.body, "<u4").max())
            if largest >= self.config.vocabulary:
                return InvalidStep(f"token id {largest} is out of the vocabulary of {self.config.vocabulary}")
        elif not np.isfinite(np.frombuffer(step.body, "<f4")).all():
            return InvalidStep(f"hidden states of session {step.session} that are not finite")
        return None

    # ---- through ----

    def _compute(self, works: Sequence[_Work]) -> Floats:
        """[rows of all works, hidden] behind the last layer of this stage."""
        rows = 0
        for work in works:
            work.row = rows
            rows += work.rows
        x = self._rows_in(works, rows)
        for segments, first, end in _calls(works):
            self._kernels.forward(x[first:end], segments, self._arena)
        return x

    def _rows_in(self, works: Sequence[_Work], rows: int) -> Floats:
        if self.is_head:
            return self._kernels.embed(
                np.concatenate([np.frombuffer(work.body, "<u4") for work in works]).astype(np.uint32)
            )
        x = np.empty((rows, self.hidden_size), np.float32)
        for work in works:
            x[work.row : work.row + work.rows].reshape(-1)[:] = np.frombuffer(work.body, "<f4")
        return x

    # ---- out ----

    def _answer(self, works: Sequence[_Work], x: Floats, answers: list[StepAnswer]) -> None:
        finite = [bool(np.isfinite(x[work.row : work.row + work.rows]).all()) for work in works]
        body = x.reshape(-1).data.cast("B")
        row_bytes = self.hidden_size * self.wire_dtype.size
        drawn: list[_Work] = []
        for work, is_finite in zip(works, finite, strict=True):
            end = work.row + work.rows
            if not is_finite:
                answers[work.index] = self._overflowed(work)
            elif not self.is_tail:
                outputs = body[work.row * row_bytes : end * row_bytes]
                if work.rows:
                    self._kv.advance(work.session, work.rows, work.body, outputs)
                answers[work.index] = StepOutput(_joined(work.hit, outputs), self.wire_dtype)
            elif work.step.normed:
                self._kv.advance(work.session, work.rows, work.body)
                rows = self._kernels.normed(x[work.row : end])
                answers[work.index] = StepOutput(rows.reshape(-1).data.cast("B"), DType.F32)
            elif work.step.sample is not None:
                drawn.append(work)
            elif work.rows:
                self._kv.advance(work.session, work.rows, work.body)
        if drawn:
            logits = self._kernels.logits(x[[work.row + work.rows - 1 for work in drawn]], self.config.vocabulary)
            for work, row in zip(drawn, logits, strict=True):
                answers[work.index] = self._draw(work, row)

    def _draw(self, work: _Work, logits: Floats) -> StepAnswer:
        assert work.step.sample is not None
        if not np.isfinite(logits).all():
            return self._overflowed(work)
        self._kv.advance(work.session, work.rows, work.body)
        return work.step.sample.draw(logits, work.session.position)

    def _overflowed(self, work: _Work) -> InvalidStep:
        """Finite input whose output is not: the session stands where it stood, and what was written behind is never read."""
        self._kv.revert(work.session, work.hit)
        return InvalidStep(f"the step of session {work.step.session} at {work.step.position} has no finite result")


def _pages(max_sessions: int, max_positions: int, page_bytes: int, kv_bytes: int | None) -> int:
    """The KV budget in pages, what the prefix cache keeps beside each of them included: what is given, or room for every session at
    its longest.
    """
    most = max_sessions * -(-max_positions // PAGE_POSITIONS)
    if kv_bytes is None:
        return most
    if kv_bytes < page_bytes:
        raise ConfigurationError(
            f"a KV budget of {kv_bytes} bytes; one page of {PAGE_POSITIONS} positions takes {page_bytes}"
        )
    return min(most, kv_bytes // page_bytes)


def _calls(works: Sequence[_Work]) -> Iterator[tuple[npt.NDArray[np.void], int, int]]:
    """Cut the rows of ``works`` into calls of at most `_MAX_ROWS`: their segments, the first row and the end."""
    pieces: list[tuple[int, int, int]] = []
    first = row = 0
    for work in works:
        done = 0
        while done < work.rows:
            rows = min(work.rows - done, _MAX_ROWS - (row - first))
            pieces.append((work.session.position + done, rows, work.session.pages_address))
            done += rows
            row += rows
            if row - first == _MAX_ROWS:
                yield np.array(pieces, SEGMENT), first, row
                pieces, first = [], row
    if pieces:
        yield np.array(pieces, SEGMENT), first, row


def _joined(hit: PrefixHit | None, outputs: memoryview) -> Buffer:
    return outputs if hit is None else b"".join([*hit.outputs, outputs])
