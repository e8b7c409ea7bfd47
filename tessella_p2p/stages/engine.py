"""The port of everything that computes: a range of layers with per-session KV, bytes in and bytes out.

An engine is synchronous and is driven by one thread at a time; `service.StageService` gives it that thread, batches the ready steps
of all sessions and keeps the event loop free. What a peer sends is checked here: a step that breaks a rule gives an error value for
its own session, and the rest of the batch goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tessella_p2p.base.errors import InvalidRequest, InvalidStep, TessellaError
from tessella_p2p.base.ids import LayerRange, SessionId
from tessella_p2p.wire.frames import DType

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class SessionKey:
    """One session under one epoch: what KV belongs to."""

    session: SessionId
    epoch: int

    def __str__(self) -> str:
        return f"{self.session.hex()[:8]}/{self.epoch}"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability, as the model gives it: before penalties, temperature and truncation."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token that a tail drew.

    Attributes:
        token_id: the token.
        logprob: its own log-probability; None unless the session asked for logprobs.
        top: the most likely tokens, likeliest first; as many as the session asked for.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class TokenSampler(Protocol):
    """Draws the tokens of one session from its tail's logits.

    A draw depends on the logits, the session's parameters, the tokens before ``position`` and (seed, position) alone, so a resumed
    or replayed run draws the same tokens. Called on the engine's thread, one call at a time.
    """

    def draw(self, logits: npt.NDArray[np.float32], position: int) -> Sampled | InvalidRequest:
        """The token at ``position``; an error value where what the entry asks for leaves none, which ends the session.

        Args:
            logits: [vocabulary], finite; read only.
            position: of the token that is drawn.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepInput:
    """One forward of one session: ``rows`` consecutive positions from ``position`` on.

    ``body`` is what came over the wire, unchecked: little-endian u32 token ids ``[rows]`` for a head, hidden states
    ``[rows, hidden_size]`` in the recipe's wire dtype for any other stage.
    """

    session: SessionKey
    position: int
    rows: int
    dtype: DType
    body: Buffer
    sample: TokenSampler | None = None
    """Asks the tail for the token that follows the last row."""
    normed: bool = False
    """Asks the tail for all rows behind the model's last norm instead: `StepOutput` of float32."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Hidden states ``[rows, hidden_size]`` of ``dtype``, little-endian, row-major; a tail's are those that were asked for normed."""

    body: Buffer
    dtype: DType


@dataclass(frozen=True, slots=True)
class KvUse:
    """What a stage's KV holds, for ``/status`` and for admission.

    Attributes:
        page_positions: positions of one page.
        page_bytes: bytes of one page, over all layers of the stage.
        pages_total: the budget.
        pages_used: pages of open sessions; a shared page counts once.
        pages_cached: pages that only the prefix cache keeps; they make room when a session needs it.
        prefix_positions_hit: positions that the prefix cache served since the engine was loaded.
        sessions_evicted: sessions whose KV was given to others since then.
    """

    page_positions: int
    page_bytes: int
    pages_total: int
    pages_used: int = 0
    pages_cached: int = 0
    prefix_positions_hit: int = 0
    sessions_evicted: int = 0


StepAnswer = StepOutput | Sampled | TessellaError | None
"""What became of a step. None: a tail that was not asked to sample has nothing to send."""


class StageEngine(Protocol):
    """A loaded range of layers. Not thread-safe: one call at a time."""

    @property
    def layers(self) -> LayerRange:
        """The range."""
        ...

    @property
    def is_head(self) -> bool:
        """Whether steps carry token ids."""
        ...

    @property
    def is_tail(self) -> bool:
        """Whether steps end in logits, and a token where one is asked for."""
        ...

    @property
    def hidden_size(self) -> int:
        """Elements of one row of hidden states (``d_model``)."""
        ...

    @property
    def vocabulary(self) -> int:
        """Token ids are below this; a tail's logits are as many."""
        ...

    @property
    def wire_dtype(self) -> DType:
        """Dtype of hidden states, in and out."""
        ...

    @property
    def max_sessions(self) -> int:
        """Sessions that may be open at once."""
        ...

    @property
    def max_positions(self) -> int:
        """Positions that one session may have."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Weights, and KV with every page in use."""
        ...

    @property
    def kv(self) -> KvUse:
        """What the KV holds. May be read from another thread while a call runs."""
        ...

    def open_session(self, key: SessionKey, max_positions: int, scope: bytes = b"") -> None:
        """Enter a session. Its KV grows with its positions, in pages.

        Args:
            key: the session.
            max_positions: the most that it may have.
            scope: whose cached prefixes it may use and adds to; empty for none.

        Raises:
            PromptTooLong: ``max_positions`` is over the engine's, or over its whole KV budget.
            TooManyHopBodies: as many sessions as the engine has are open, or their KV is promised to others.
            StaleEpoch: this (session, epoch) is open already, or a newer epoch of the session is.
        """
        ...

    def keep(self, waiting: Collection[SessionKey]) -> None:
        """Take note that steps of these sessions wait for a later turn: whoever waits is not idle, and keeps its KV."""
        ...

    def cached_positions(self, key: SessionKey) -> int:
        """Positions of a session that the prefix cache served; 0 for an unknown one. May be asked from another thread."""
        ...

    def close_session(self, key: SessionKey) -> None:
        """Free a session's KV, but for what the prefix cache keeps; an unknown key is fine."""
        ...

    def close(self) -> None:
        """Let go of the weights and the KV; nothing else may be called afterwards."""
        ...

    def forward(self, batch: Sequence[StepInput]) -> list[StepAnswer]:
        """Run one step of each of several sessions; answers are in the order of ``batch``.

        A step's answer has the same bits alone, in any batch and in any split of its rows into steps. Error values: `CacheMiss` (no
        such session: never opened, closed, or evicted because it was the least recently used of those that are not in ``batch``),
        `Overloaded` (the KV budget does not hold the batch), `PromptTooLong` (over the session's positions), `InvalidStep` (wrong
        dtype, length, position or token id; a value that is not finite; a second step of one session in the batch), after each of which
        the session stands where it stood before; and `InvalidRequest`, of a draw alone, see `TokenSampler.draw`.
        """
        ...


def check_body(engine: StageEngine, step: StepInput) -> InvalidStep | None:
    """The error for a step whose rows, dtype or number of bytes are not what ``engine`` takes."""
    dtype, width = (DType.U32, 1) if engine.is_head else (engine.wire_dtype, engine.hidden_size)
    wanted_bytes = step.rows * width * dtype.size
    if step.rows < 1 or step.dtype is not dtype or len(step.body) != wanted_bytes:
        return InvalidStep(
            f"{len(step.body)} bytes of {step.dtype.name} in {step.rows} rows; this stage takes rows of {width} {dtype.name}"
        )
    return None
