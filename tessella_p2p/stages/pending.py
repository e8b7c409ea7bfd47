"""What waits at a stage: steps, opens and closes, each with the event that its caller waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from tessella_p2p.base.errors import TessellaError
from tessella_p2p.stages.batching import Waiting
from tessella_p2p.stages.engine import Buffer, SessionKey, StageEngine, StepAnswer, StepInput
from tessella_p2p.wire.messages import Tier


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of a step: its answer (an error value included), and its times at this stage.

    ``compute_us`` is the length of the turns that the step took part in, whoever shared them.
    """

    output: StepAnswer
    queue_us: int
    compute_us: int


@dataclass(slots=True, eq=False)
class PendingStep:
    """A step that waits or runs; ``arrived_turn`` counts turns, ``arrived_at`` is trio's time."""

    step: StepInput
    tier: Tier
    arrived_turn: int
    arrived_at: float
    done: trio.Event = field(default_factory=trio.Event)
    rows_done: int = 0
    bodies: list[Buffer] = field(default_factory=list)
    compute_s: float = 0.0
    result: StepResult | None = None
    started: bool = False
    """Some of its rows are in the KV, or are being computed."""
    running: bool = False
    """It takes part in the turn that runs."""
    abandoned: bool = False
    """Its session is closed, or its caller is gone: no further turn for it."""

    @property
    def rows_left(self) -> int:
        """Rows that no turn has computed yet."""
        return self.step.rows - self.rows_done

    @property
    def waiting(self) -> Waiting:
        """What the planning of a turn sees of it."""
        return Waiting(self.step.session, self.rows_left, self.tier, self.arrived_turn)

    def piece(self, rows: int) -> StepInput:
        """The next ``rows`` rows as a step of their own."""
        step = self.step
        if rows == step.rows:
            return step
        row_bytes = len(step.body) // step.rows
        start, end = self.rows_done, self.rows_done + rows
        body = memoryview(step.body)[start * row_bytes : end * row_bytes]
        sample = step.sample if end == step.rows else None
        return StepInput(step.session, step.position + start, rows, step.dtype, body, sample)


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What the service knows of a session that is open, or is to be."""

    max_positions: int
    num_stages: int
    tier: Tier
    scope: bytes


@dataclass(slots=True, eq=False)
class Command:
    """An open, or (``opens`` is None) a close, that waits for the next turn."""

    key: SessionKey
    opens: SessionTerms | None
    done: trio.Event = field(default_factory=trio.Event)
    error: TessellaError | None = None
    executed: bool = False
    """The engine has carried it out, or refused it with ``error``."""
    abandoned: bool = False
    """The caller of this open is gone."""

    def execute(self, engine: StageEngine) -> None:
        """Carry it out, on the engine's thread; a refusal becomes ``error``, any other exception is a crash and leaves."""
        try:
            if self.opens is None:
                engine.close_session(self.key)
            else:
                engine.open_session(self.key, self.opens.max_positions, self.opens.scope)
        except TessellaError as error:
            self.error = error
        self.executed = True


Loader = Callable[[], StageEngine]
"""Loads a stage's engine, anew each time; blocks for seconds, and may raise anything."""
