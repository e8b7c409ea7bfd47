"""The port of everything that computes: a range of layers with per-session KV, bytes in and bytes out.

An engine is synchronous and is driven by one thread at a time; `service.StageService` gives it that thread, batches the ready steps
of all sessions and keeps the event loop free. What a peer sends is checked here: a step that breaks a rule gives an error value for
its own session, and the rest of the batch goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tessella_p2p.base.errors import InvalidStep, TessellaError
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
class SampleAt:
    """How the tail draws the token that follows a step's last row.

    The draw depends on the logits, ``seed`` and the position of the new token alone, so a resumed run draws the same token.

    Args:
        temperature: 0 is greedy.
        seed: 64 bits.

    Raises:
        ValueError: a value out of range; messages are validated before one is made, so this is our own bug.
    """

    temperature: float
    seed: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf") or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"no sampling at temperature {self.temperature} with seed {self.seed}")


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
    sample: SampleAt | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Hidden states ``[rows, hidden_size]`` of ``dtype``, little-endian, row-major."""

    body: Buffer
    dtype: DType


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token that a tail drew."""

    token_id: int


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
        """Weights, and KV with every slot full."""
        ...

    @property
    def drift_class(self) -> str:
        """Engines with equal classes give the same bits for the same steps: recipe, library build and instruction set."""
        ...

    def open_session(self, key: SessionKey, max_positions: int) -> None:
        """Reserve KV for a session.

        Raises:
            PromptTooLong: ``max_positions`` is over the engine's.
            Overloaded: every slot is taken.
            StaleEpoch: this (session, epoch) is open already, or a newer epoch of the session is.
        """
        ...

    def close_session(self, key: SessionKey) -> None:
        """Free a session's KV; an unknown key is fine."""
        ...

    def forward(self, batch: Sequence[StepInput]) -> list[StepAnswer]:
        """Run one step of each of several sessions; answers are in the order of ``batch``.

        A step's answer has the same bits alone, in any batch and in any split of its rows into steps. Error values:
        `CacheMiss` (no such session), `PromptTooLong` (over the session's positions), `InvalidStep` (wrong dtype, length, position
        or token id; a value that is not finite; a second step of one session in the batch). After an error the session stands
        where it stood before.
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
