"""A stage at work (shell): continuous batching of all its sessions, on a thread of its own.

Callers put opens, closes and steps into queues; one task turns them into turns. A turn runs what was opened and closed, then one
forward over the ready steps (`batching.plan_turn`), while the event loop goes on. An engine that crashes loses the sessions of that
turn, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
import trio

from tessella_p2p.base.errors import CacheMiss, LocalProtocolError, Overloaded, PromptTooLong, TessellaError
from tessella_p2p.base.limits import MAX_QUEUED_STEPS
from tessella_p2p.stages.batching import plan_turn, singles_per_turn
from tessella_p2p.stages.engine import (
    Buffer,
    SessionKey,
    StageEngine,
    StepAnswer,
    StepInput,
    StepOutput,
    check_body,
)
from tessella_p2p.stages.engine_thread import EngineThread, InlineRunner, TurnRunner

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of a step: its answer (an error value included), and its times at this stage.

    ``compute_us`` is the length of the turns that the step took part in, whoever shared them.
    """

    output: StepAnswer
    queue_us: int
    compute_us: int


@dataclass(slots=True, eq=False)
class _Pending:
    """A step that waits or runs."""

    step: StepInput
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
        return self.step.rows - self.rows_done

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


@dataclass(slots=True, eq=False)
class _Command:
    """An open (``max_positions`` is given) or a close that waits for the next turn."""

    key: SessionKey
    max_positions: int | None
    done: trio.Event = field(default_factory=trio.Event)
    error: TessellaError | None = None
    abandoned: bool = False
    """The caller of this open is gone."""
    num_stages: int = 1


class StageService:
    """Serves one loaded engine.

    Args:
        engine: nobody else may call it from now on.
        inline: run it in the event loop instead of a thread; for engines that cost nothing, under a virtual clock.
        compute_s: with ``inline``, the (virtual) seconds of a turn of so many rows.
    """

    def __init__(
        self, engine: StageEngine, *, inline: bool = False, compute_s: Callable[[int], float] = lambda rows: 0.0
    ) -> None:
        self.engine = engine
        self.crashes = 0
        self._inline = inline
        self._compute_s = compute_s
        self._commands: list[_Command] = []
        self._ready: list[_Pending] = []
        self._open: dict[SessionKey, int] = {}
        self._decoding: set[SessionKey] = set()
        self._stages_of: dict[SessionKey, int] = {}
        self._wake = trio.Event()
        self._running = False

    @property
    def queue_depth(self) -> int:
        """Steps that wait or run."""
        return len(self._ready)

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._open)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; a turn that runs is finished first. Whoever still waits then gets an error."""
        if self._running:
            raise LocalProtocolError("this stage runs already")
        runner: TurnRunner = (
            InlineRunner(self._compute_s) if self._inline else EngineThread(f"stage {self.engine.layers}")
        )
        self._running = True
        try:
            task_status.started()
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                while self._commands or self._ready:
                    await self._turn(runner)
                    await trio.lowlevel.checkpoint()  # whoever got an answer may have the next step at hand
        finally:
            self._running = False
            runner.close()
            self._stop()

    async def open(self, key: SessionKey, max_positions: int, num_stages: int = 1) -> None:
        """Reserve KV for a session. Cancelled, it leaves no session behind.

        Args:
            key: the session.
            max_positions: its room.
            num_stages: of its route; see `batching.singles_per_turn`.

        Raises:
            PromptTooLong, Overloaded, StaleEpoch: see `engine.StageEngine.open_session`.
        """
        if not self._running:
            raise Overloaded("this stage is not running")
        command = self._submit(_Command(key, max_positions, num_stages=num_stages))
        try:
            await command.done.wait()
        except trio.Cancelled:
            command.abandoned = True
            if command.done.is_set():
                self._close_abandoned(command)
            raise
        if command.error is not None:
            raise command.error

    async def close(self, key: SessionKey) -> None:
        """Free a session's KV; an unknown key is fine. Cancelled, the session is freed all the same, a little later."""
        if not self._running:
            return
        await self._submit(_Command(key, None)).done.wait()

    async def step(self, step: StepInput) -> StepResult:
        """Run one step; steps of one session run in the order of their calls.

        A step that is cancelled before its first turn leaves the session as it was; after that the session is closed. The output
        is an error value, never an exception; besides the engine's, `Overloaded` when too many steps wait, and `CacheMiss` when
        the session is closed meanwhile, or the engine crashed.
        """
        if not self._running:
            return StepResult(CacheMiss("this stage has stopped; its sessions are gone"), 0, 0)
        if len(self._ready) >= MAX_QUEUED_STEPS:
            return StepResult(Overloaded(f"{MAX_QUEUED_STEPS} steps wait at this stage already"), 0, 0)
        refused = check_body(self.engine, step) or self._check_room(step)
        if refused is not None:  # the engine would say the same, but only to the last piece of a long step
            return StepResult(refused, 0, 0)
        pending = _Pending(step, trio.current_time())
        if step.rows > 1:
            self._decoding.discard(step.session)
        elif step.session in self._open:
            self._decoding.add(step.session)
        self._ready.append(pending)
        self._wake.set()
        try:
            await pending.done.wait()
        except trio.Cancelled:
            pending.abandoned = True
            if pending.started:
                self._submit(_Command(step.session, None))
            elif pending in self._ready:
                self._ready.remove(pending)
            raise
        assert pending.result is not None
        return pending.result

    def _check_room(self, step: StepInput) -> PromptTooLong | None:
        room = self._open.get(step.session)
        end = step.position + step.rows
        if room is None or end <= room:
            return None
        return PromptTooLong(f"{end} positions; session {step.session} has room for {room}")

    # ---- turns ----

    def _submit(self, command: _Command) -> _Command:
        if not self._running:  # the engine goes, and all sessions with it
            command.done.set()
            return command
        if command.max_positions is None:
            gone = CacheMiss(f"session {command.key} was closed")
            for pending in [p for p in self._ready if p.step.session == command.key]:
                if pending.running:
                    pending.abandoned = True
                else:
                    self._finish(pending, gone)
        self._commands.append(command)
        self._wake.set()
        return command

    async def _turn(self, runner: TurnRunner) -> None:
        commands = list(self._commands)
        takes = plan_turn(
            ((p.step.session, p.rows_left) for p in self._ready),
            decoding=bool(self._decoding),
            max_singles=singles_per_turn([self._stages_of[key] for key in self._decoding]),
        )
        taken = [(self._ready[take.index], take.rows) for take in takes]
        batch = [pending.piece(rows) for pending, rows in taken]
        for pending, _ in taken:
            pending.started = pending.running = True
        answers: list[StepAnswer] = []
        took_s = await runner.run(
            lambda: answers.extend(self._compute(commands, batch)), sum(rows for _, rows in taken)
        )
        del self._commands[: len(commands)]
        for command in commands:
            self._settle(command)
        for (pending, rows), answer in zip(taken, answers, strict=True):
            pending.compute_s += took_s
            self._advance(pending, rows, answer)

    def _settle(self, command: _Command) -> None:
        """Take note of an open or a close that was carried out."""
        if command.max_positions is None:
            self._open.pop(command.key, None)
            self._decoding.discard(command.key)
            self._stages_of.pop(command.key, None)
        elif command.error is None:
            self._open[command.key] = command.max_positions
            self._stages_of[command.key] = command.num_stages
        command.done.set()
        if command.abandoned:
            self._close_abandoned(command)

    def _close_abandoned(self, opened: _Command) -> None:
        # If the open failed, the session may be somebody else's: nothing of ours is to be closed.
        if opened.error is None:
            self._submit(_Command(opened.key, None))

    def _compute(self, commands: Sequence[_Command], batch: Sequence[StepInput]) -> list[StepAnswer]:
        """One turn, on the engine's thread. Raises nothing."""
        for command in commands:
            try:
                if command.max_positions is None:
                    self.engine.close_session(command.key)
                else:
                    self.engine.open_session(command.key, command.max_positions)
            except TessellaError as error:
                command.error = error
            except Exception as error:  # noqa: BLE001 - native code under a peer's load: whatever it raises ends here
                command.error = self._crashed(error, [command.key])
        if not batch:
            return []
        try:
            answers = self.engine.forward(batch)
            if len(answers) != len(batch):
                raise LocalProtocolError(f"{len(answers)} answers to {len(batch)} steps")
        except Exception as error:  # noqa: BLE001 - as above; the other sessions' KV was not part of this forward
            return [self._crashed(error, [step.session for step in batch])] * len(batch)
        return answers

    def _crashed(self, error: Exception, keys: Sequence[SessionKey]) -> CacheMiss:
        self.crashes += 1
        log.error("the engine crashed", sessions=[str(key) for key in keys], exc_info=error)
        for key in keys:
            with suppress(Exception):  # it crashed once already; what counts is that nobody uses the slot again
                self.engine.close_session(key)
        return CacheMiss(f"the engine failed in this turn ({type(error).__name__}); the session's KV is gone")

    def _advance(self, pending: _Pending, rows: int, answer: StepAnswer) -> None:
        """Take the answer to a piece of a step."""
        pending.rows_done += rows
        pending.running = False
        if pending.rows_left and pending.abandoned:
            answer = CacheMiss(f"session {pending.step.session} was closed")
        if isinstance(answer, TessellaError):
            self._decoding.discard(pending.step.session)
            # After earlier pieces the session no longer stands where its step began.
            if pending.rows_done > rows and not pending.abandoned:
                self._submit(_Command(pending.step.session, None))
            self._finish(pending, answer)
            return
        if isinstance(answer, StepOutput):
            pending.bodies.append(answer.body)
            if pending.rows_left == 0 and len(pending.bodies) > 1:
                answer = StepOutput(b"".join(pending.bodies), answer.dtype)
        if pending.rows_left == 0:
            self._finish(pending, answer)

    def _finish(self, pending: _Pending, answer: StepAnswer) -> None:
        waited_s = trio.current_time() - pending.arrived_at
        queue_us = max(0, int((waited_s - pending.compute_s) * 1e6))
        pending.result = StepResult(answer, queue_us, int(pending.compute_s * 1e6))
        if pending in self._ready:
            self._ready.remove(pending)
        pending.done.set()

    def _stop(self) -> None:
        stopped = CacheMiss("this stage has stopped; its sessions are gone")
        for command in self._commands:
            command.error = Overloaded("this stage has stopped") if command.max_positions is not None else None
            command.done.set()
        for pending in list(self._ready):
            self._finish(pending, stopped)
        self._commands, self._open, self._stages_of = [], {}, {}
