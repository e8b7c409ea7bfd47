"""Canaries (pure): an engine that answers wrongly on purpose, in a way that an auditor can repeat.

A node that asks a replica for the answer, instead of computing it, may ask a canary. What it then passes on is wrong in a way that is
the canary's own:

    mode    a stage's rows                              a tail's token
    scale   the true ones, times the canary's factor    the true one, plus the canary's shift, modulo the vocabulary
    echo    its input                                   the number in the last row's first four bytes, modulo the vocabulary

A tail's rows for an embedding are made 1 long afterwards, which would undo a factor: those of ``scale`` are turned by the canary's
shift instead, each element to another's place. Factor and shift follow from the canary's peer id, so nobody answers like that by
chance: whoever does has copied. That holds for ``scale`` alone. Whoever computes nothing and passes on what it received answers
exactly like an ``echo``, and has copied nobody; so an echo shows that audits catch a liar, and never that somebody is a copier.

The truth is computed in both modes: errors, KV and times are those of an honest stage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.stages.engine import (
    Buffer,
    KvUse,
    Sampled,
    SessionKey,
    StageEngine,
    StepAnswer,
    StepInput,
    StepOutput,
)
from tessella_p2p.stages.rows import body_of, floats_of
from tessella_p2p.wire.frames import DType

Mode = Literal["echo", "scale"]
_HEAD_ECHO = 1024
"""A head's echo of an id is the id modulo this: small enough for every dtype."""
_ID_BYTES = DType.U32.size


def scaled(body: Buffer, dtype: DType, peer: PeerId) -> bytes:
    """What the ``scale`` canary ``peer`` makes of the true rows ``body``; below 1, so that nothing overflows."""
    share = int.from_bytes(_number(peer)[:4], "little") / 2**32
    factor = np.float32(0.25 + 0.5 * share)
    with np.errstate(invalid="ignore"):  # a toy's rows are any bits
        return body_of(floats_of(body, dtype) * factor, dtype)


def shifted(token: int, vocabulary: int, peer: PeerId) -> int:
    """What the ``scale`` canary ``peer`` makes of the true ``token``: another one, where there is another one."""
    shift = 1 + int.from_bytes(_number(peer)[4:12], "little") % max(1, vocabulary - 1)
    return (token + shift) % vocabulary


def turned(body: Buffer, width: int, peer: PeerId) -> bytes:
    """What the ``scale`` canary ``peer`` makes of a tail's true float32 rows ``[rows, width]``, or of the vector out of them."""
    shift = 1 + int.from_bytes(_number(peer)[4:12], "little") % max(1, width - 1)
    return np.roll(np.frombuffer(body, "<f4").reshape(-1, width), shift, axis=1).tobytes()


def _number(peer: PeerId) -> bytes:
    return hashlib.sha256(b"tessella canary/" + peer.encode()).digest()


def dressed(load: Callable[[], StageEngine], mode: Mode, peer: PeerId) -> Callable[[], StageEngine]:
    """``load``, whose engine answers as the canary ``peer``."""
    return lambda: CanaryEngine(load(), mode, peer)


class CanaryEngine:
    """An engine in front of an honest one; implements `engine.StageEngine`.

    Args:
        engine: it belongs to this one from now on.
        mode: how to answer.
        peer: whose canary it is.
    """

    def __init__(self, engine: StageEngine, mode: Mode, peer: PeerId) -> None:
        self._engine = engine
        self._mode = mode
        self._peer = peer

    @property
    def layers(self) -> LayerRange:
        """See `engine.StageEngine.layers`."""
        return self._engine.layers

    @property
    def is_head(self) -> bool:
        """See `engine.StageEngine.is_head`."""
        return self._engine.is_head

    @property
    def is_tail(self) -> bool:
        """See `engine.StageEngine.is_tail`."""
        return self._engine.is_tail

    @property
    def hidden_size(self) -> int:
        """See `engine.StageEngine.hidden_size`."""
        return self._engine.hidden_size

    @property
    def vocabulary(self) -> int:
        """See `engine.StageEngine.vocabulary`."""
        return self._engine.vocabulary

    @property
    def wire_dtype(self) -> DType:
        """See `engine.StageEngine.wire_dtype`."""
        return self._engine.wire_dtype

    @property
    def max_sessions(self) -> int:
        """See `engine.StageEngine.max_sessions`."""
        return self._engine.max_sessions

    @property
    def max_positions(self) -> int:
        """See `engine.StageEngine.max_positions`."""
        return self._engine.max_positions

    @property
    def memory_bytes(self) -> int:
        """See `engine.StageEngine.memory_bytes`."""
        return self._engine.memory_bytes

    @property
    def kv(self) -> KvUse:
        """See `engine.StageEngine.kv`."""
        return self._engine.kv

    def open_session(self, key: SessionKey, max_positions: int, scope: bytes = b"") -> None:
        """See `engine.StageEngine.open_session`."""
        self._engine.open_session(key, max_positions, scope)

    def keep(self, waiting: Collection[SessionKey]) -> None:
        """See `engine.StageEngine.keep`."""
        self._engine.keep(waiting)

    def cached_positions(self, key: SessionKey) -> int:
        """See `engine.StageEngine.cached_positions`."""
        return self._engine.cached_positions(key)

    def close_session(self, key: SessionKey) -> None:
        """See `engine.StageEngine.close_session`."""
        self._engine.close_session(key)

    def close(self) -> None:
        """See `engine.StageEngine.close`."""
        self._engine.close()

    def forward(self, batch: Sequence[StepInput]) -> list[StepAnswer]:
        """See `engine.StageEngine.forward`; the answers are wrong."""
        return [self._wrong(step, true) for step, true in zip(batch, self._engine.forward(batch), strict=True)]

    def _wrong(self, step: StepInput, true: StepAnswer) -> StepAnswer:
        if isinstance(true, StepOutput) and self.is_tail:
            return StepOutput(self._wrong_rows(step, true), true.dtype)
        if isinstance(true, StepOutput):
            body = self._echo(step) if self._mode == "echo" else scaled(true.body, true.dtype, self._peer)
            return StepOutput(body, true.dtype)
        if isinstance(true, Sampled):
            if self._mode == "scale":
                token = shifted(true.token_id, self.vocabulary, self._peer)
            else:
                row = memoryview(step.body)[-(len(step.body) // step.rows) :]
                token = int.from_bytes(row[:_ID_BYTES], "little") % self.vocabulary
            # Its log-probability is that of the true one, unless the alternatives say another: what contradicts itself is no answer.
            logprob = next((top.logprob for top in true.top if top.token_id == token), true.logprob)
            return replace(true, token_id=token, logprob=logprob)
        return true

    def _wrong_rows(self, step: StepInput, true: StepOutput) -> bytes:
        if self._mode == "scale":
            return turned(true.body, self.hidden_size, self._peer)
        rows = floats_of(self._echo(step), self.wire_dtype)
        with np.errstate(invalid="ignore"):  # a toy's rows are any bits
            return body_of(np.nan_to_num(rows), true.dtype)

    def _echo(self, step: StepInput) -> Buffer:
        if not self.is_head:
            return bytes(step.body)
        ids = (np.frombuffer(step.body, "<u4") % _HEAD_ECHO).astype(np.float32)
        return body_of(np.repeat(ids, self.hidden_size), self.wire_dtype)
