"""What waits at a stage: steps with what takes their results, opens and closes with the event that their caller waits for.

Opens that find no place wait in `WaitingOpens`, whose order is that of the tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import trio

from tessella_p2p.base.errors import LocalProtocolError, TessellaError
from tessella_p2p.base.limits import MAX_WAITING_OPENS, PLACE_RETRY_S
from tessella_p2p.stages.batching import Waiting
from tessella_p2p.stages.engine import Buffer, SessionKey, StageEngine, StepAnswer, StepInput
from tessella_p2p.stages.tier_queue import TierQueue
from tessella_p2p.wire.messages import Tier


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of a step: its answer (an error value included), and its times at this stage.

    ``compute_us`` is the length of the turns that the step took part in, whoever shared them; ``cached_positions`` are those of its
    session so far that the prefix cache served.
    """

    output: StepAnswer
    queue_us: int
    compute_us: int
    cached_positions: int = 0


@dataclass(slots=True, eq=False)
class PendingStep:
    """A step that waits or runs; ``arrived_turn`` counts turns, ``arrived_at`` is trio's time."""

    step: StepInput
    tier: Tier
    arrived_turn: int
    arrived_at: float
    deliver: Callable[[StepResult], None]
    """Takes the result, once, in the event loop; it may neither block nor raise."""
    rows_done: int = 0
    bodies: list[Buffer] = field(default_factory=list)
    compute_s: float = 0.0
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
        return StepInput(step.session, step.position + start, rows, step.dtype, body, sample, step.normed)


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
    wait_until: float = 0.0
    """How long this open waits for a place (trio's clock), where the stage is full."""

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


@dataclass(slots=True, eq=False)
class Turn:
    """One run of the engine: opens and closes, then one forward over pieces of steps, each with how many rows of it."""

    engine: StageEngine
    commands: list[Command]
    taken: list[tuple[PendingStep, int]]
    waiting: Sequence[SessionKey] = ()
    """Sessions of the steps that are left for later turns."""
    batch: list[StepInput] = field(init=False)
    answers: list[StepAnswer] = field(default_factory=list)
    crash: Exception | None = None
    done: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.batch = [pending.piece(rows) for pending, rows in self.taken]
        for pending, _ in self.taken:
            pending.started = pending.running = True

    @property
    def rows(self) -> int:
        """Rows of the forward."""
        return sum(rows for _, rows in self.taken)

    def compute(self) -> None:
        """Carry it out, on the engine's thread. Raises nothing."""
        try:
            if self.waiting:
                self.engine.keep(self.waiting)
            for command in self.commands:
                command.execute(self.engine)
            if self.batch:
                self.answers.extend(self.engine.forward(self.batch))
                if len(self.answers) != len(self.batch):
                    raise LocalProtocolError(f"{len(self.answers)} answers to {len(self.batch)} steps")
        except Exception as error:  # noqa: BLE001 - native code under a peer's load: whatever it raises ends here
            self.crash = error


class WaitingOpens:
    """Opens that wait for a place, and who of them gets the next one: see `tier_queue`."""

    def __init__(self) -> None:
        self._queue: TierQueue[Command] = TierQueue(MAX_WAITING_OPENS)
        self.retry_at = -inf
        """While it lies ahead, the engine has no room for whoever is next, though it has a place: nobody goes before that one."""

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, command: Command) -> bool:
        return any(command is waiting for waiting in self._queue)

    def has(self, key: SessionKey) -> bool:
        """Whether a session is among them."""
        return any(command.key == key for command in self._queue)

    def put(self, command: Command, tier: Tier) -> None:
        """Wait. Raises `Overloaded` where too many of the tier do."""
        self._queue.put(command, tier)
        if self._queue.peek() is command:
            self.retry_at = -inf  # for this one there may be room

    def take(self, places: int, now: float) -> list[Command]:
        """Those who get a place now."""
        taken: list[Command] = []
        while len(taken) < places and now >= self.retry_at:
            command = self._queue.take()
            if command is None:
                break
            taken.append(command)
        return taken

    def put_back(self, command: Command, tier: Tier, now: float) -> None:
        """The engine had no room for it: it is the next again, when something has changed, or the time may have changed something."""
        self._queue.put_back(command, tier)
        self.retry_at = now + PLACE_RETRY_S

    def impatient(self, now: float) -> list[Command]:
        """Take out those who wait no longer."""
        over = [command for command in self._queue if command.wait_until <= now]
        for command in over:
            self._queue.drop(command)
        return over

    def drop(self, command: Command) -> bool:
        """Wait no longer; whether it did."""
        return self._queue.drop(command)

    def clear(self) -> list[Command]:
        """Nobody waits any more; whoever did."""
        return self.impatient(inf)


Loader = Callable[[], StageEngine]
"""Loads a stage's engine, anew each time; blocks for seconds, and may raise anything."""
