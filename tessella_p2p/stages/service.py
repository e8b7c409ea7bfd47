"""A stage at work (shell): continuous batching of all its sessions, on a thread of its own.

Callers put opens, closes and steps into queues; one task turns them into turns. A turn runs what was opened and closed, then one
forward over the ready steps (`batching.plan_turn`), while the event loop goes on. An engine that crashes or runs out of memory is
loaded again, and its sessions are lost, each with a typed error; nothing else is. An idle one sleeps (`engine_life`).

The task is what everything goes through, but for the one case that an answer's speed hangs on: single rows as many as a turn takes,
and nothing else to do. Such a turn begins within the `submit` that made it full, or as the turn before it ends, and its results are
delivered as trio hears from the engine's thread; the task learns of it later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Self

import structlog
import trio

from tessella_p2p.base.errors import (
    CacheMiss,
    LocalProtocolError,
    Overloaded,
    PromptTooLong,
    TessellaError,
    TooManyHopBodies,
)
from tessella_p2p.base.limits import MAX_QUEUED_STEPS, MAX_WAITING_OPENS
from tessella_p2p.net.corking import corked
from tessella_p2p.stages.batching import plan_turn, singles_per_turn, singles_worth_waiting_for
from tessella_p2p.stages.engine import (
    KvUse,
    SessionKey,
    StageEngine,
    StepAnswer,
    StepInput,
    StepOutput,
    check_body,
)
from tessella_p2p.stages.engine_life import EngineLife, StageRules, StageState
from tessella_p2p.stages.engine_thread import EngineThread, InlineRunner, TurnRunner
from tessella_p2p.stages.pending import Command, Loader, PendingStep, SessionTerms, StepResult, Turn, WaitingOpens
from tessella_p2p.stages.tier_queue import SHARES
from tessella_p2p.wire.messages import Tier

log = structlog.get_logger(__name__)


class StageService:
    """Serves one loaded engine, and closes it in the end.

    Args:
        engine: nobody else may call it from now on.
        load: loads it again after a crash and after sleep; it is called on the engine's thread. None: the engine never sleeps, and
            after a crash it goes on without the sessions of that turn.
        rules: what it does when idle, busy or in trouble.
        runner: where ``engine`` was loaded, and is to be called; None for a thread of its own.
        inline: run it in the event loop instead of a thread; for engines that cost nothing, under a virtual clock.
        compute_s: with ``inline``, the (virtual) seconds of a turn of so many rows.
    """

    def __init__(
        self,
        engine: StageEngine,
        *,
        load: Loader | None = None,
        rules: StageRules | None = None,
        runner: TurnRunner | None = None,
        inline: bool = False,
        compute_s: Callable[[int], float] = lambda rows: 0.0,
    ) -> None:
        self._rules = rules or StageRules()
        self._life = EngineLife(engine, load, self._rules)
        self._runner = InlineRunner(compute_s) if inline else runner
        self._commands: list[Command] = []
        self._waiting = WaitingOpens()
        self._ready: list[PendingStep] = []
        self._open: dict[SessionKey, SessionTerms] = {}
        self._decoding: set[SessionKey] = set()
        self._wake = trio.Event()
        self._turns = 0
        self._running = False
        self._thread: EngineThread | None = None  # while this runs, unless it runs inline
        self._resting = False  # the task has nothing to do, and nothing to tell it
        self._begun: Turn | None = None  # a turn that began without the task
        self._turn_of_task: Turn | None = None  # the one that the task waits for
        self._held: list[tuple[PendingStep, StepResult]] | None = None  # results of a turn that is being taken apart
        self._bug: Exception | None = None  # what this node's own code raised over a result

    @classmethod
    async def loaded(cls, load: Loader, *, rules: StageRules | None = None, cpus: Sequence[int] = ()) -> Self:
        """The service of an engine that is loaded on the thread that will call it, so that its own threads inherit ``cpus``.

        Args:
            load: see the constructor.
            rules: see the constructor.
            cpus: the cores of that thread; none for every one. See `engine_thread.EngineThread`.

        Raises:
            what ``load`` raises. It cannot be cancelled.
        """
        runner = EngineThread("stage engine", cpus)
        loaded: list[StageEngine] = []
        errors: list[Exception] = []

        def first_load() -> None:
            try:
                loaded.append(load())
            except Exception as error:  # noqa: BLE001 - it is raised below, where the caller is
                errors.append(error)

        try:
            await runner.run(first_load, 0)
            if errors:
                raise errors[0]
            return cls(loaded[0], load=load, rules=rules, runner=runner)
        except BaseException:  # whatever ended the load: the thread goes with it
            runner.close()
            raise

    # ---- what it says of itself ----

    @property
    def engine(self) -> StageEngine:
        """The engine; what does not change (layers, widths, limits) may be asked of it at any time, and of nothing else."""
        return self._life.engine

    @property
    def state(self) -> StageState:
        """See `engine_life.StageState`."""
        return self._life.state(trio.current_time())

    @property
    def accepts(self) -> bool:
        """Whether it takes new sessions."""
        return self._life.refusal(trio.current_time()) is None

    @property
    def changed(self) -> trio.Event:
        """The event of the next change of state; the end of a saturation is not one, for nothing happens then."""
        return self._life.changed

    @property
    def crashes(self) -> int:
        """Failures of the engine, since it was loaded first."""
        return self._life.crashes

    @property
    def recent_failures(self) -> int:
        """Failures within the window that decides about saturation."""
        return self._life.recent_failures(trio.current_time())

    @property
    def kv(self) -> KvUse:
        """What the KV holds."""
        return self._life.kv

    @property
    def memory_bytes(self) -> int:
        """Weights, and KV with every page in use; 0 while it sleeps."""
        return self._life.memory_bytes

    @property
    def queue_depth(self) -> int:
        """Steps that wait or run, and sessions that wait for a place."""
        return len(self._ready) + len(self._waiting)

    @property
    def num_waiting(self) -> Mapping[Tier, int]:
        """Steps that wait for a turn, by tier."""
        waiting: Counter[Tier] = Counter(p.tier for p in self._ready if not p.running)
        return waiting

    @property
    def num_waiting_opens(self) -> int:
        """Sessions that wait for a place."""
        return len(self._waiting)

    @property
    def most_sessions(self) -> int:
        """Sessions that have a place or wait for one, at most."""
        return self.engine.max_sessions + MAX_WAITING_OPENS * len(SHARES)

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._open)

    # ---- what callers do ----

    async def open(
        self,
        key: SessionKey,
        max_positions: int,
        num_stages: int = 1,
        tier: Tier = "Leech",
        scope: bytes = b"",
        *,
        wait_s: float = 0.0,
    ) -> None:
        """Enter a session; an engine that sleeps or is being loaded again is waited for. Cancelled, it leaves no session behind.

        Args:
            key: the session.
            max_positions: its room.
            num_stages: of its route; see `batching.singles_per_turn`.
            tier: decides who goes first when not everybody can.
            scope: whose cached prefixes it may use; see `engine.StageEngine.open_session`.
            wait_s: how long it waits for a place where the stage is full, in the order of the tiers; see `tier_queue`.

        Raises:
            PromptTooLong, Overloaded, StaleEpoch: see `engine.StageEngine.open_session`.
            TooManyHopBodies: it is full, or was so for ``wait_s``.
            Overloaded: besides, when the stage is saturated, its engine does not load, ``patience_s`` has passed, or too many wait.
            CacheMiss: the engine crashed over it.
        """
        if not self._running:
            raise Overloaded("this stage is not running")
        refusal = self._life.refusal(trio.current_time())
        if refusal is not None:
            raise refusal
        terms = SessionTerms(max_positions, num_stages, tier, scope)
        began = trio.current_time()
        command = Command(key, terms, wait_until=began + wait_s)
        self._waiting.put(command, tier)
        self._give_places()
        try:
            if command in self._waiting:
                with trio.move_on_at(command.wait_until):
                    await command.done.wait()
            if command not in self._waiting:
                with trio.move_on_at(max(began + self._rules.patience_s, command.wait_until)):
                    await command.done.wait()
        except trio.Cancelled:
            self._abandon(command)
            raise
        if not command.done.is_set():
            is_full = command in self._waiting
            self._abandon(command)
            if is_full:
                raise TooManyHopBodies(f"this stage was full for {wait_s:g} s: it is not broken")
            what = "loading its weights" if self.state == "loading" else "busy"
            raise Overloaded(f"this stage is {what}: the session could not be opened in {self._rules.patience_s:.0f} s")
        if command.error is not None:
            raise command.error

    def waits(self, key: SessionKey) -> bool:
        """Whether a session waits for a place."""
        return self._waiting.has(key)

    def _abandon(self, opening: Command) -> None:
        """Nobody waits for this open any more; what it has opened, or will have, is closed."""
        opening.abandoned = True
        if self._waiting.drop(opening):
            opening.done.set()
        # If the open failed, the session may be somebody else's: nothing of ours is to be closed.
        elif opening.done.is_set() and opening.executed and opening.error is None:
            self._submit(Command(opening.key, None))

    def _give_places(self) -> None:
        """Let in who is next, as many as there are places, and refuse who does not want to wait."""
        if not self._waiting:
            return
        now = trio.current_time()
        let_in = self._waiting.take(self._free_places(), now)
        if let_in:
            self._commands.extend(let_in)
            self._wake.set()
        for command in self._waiting.impatient(now):
            command.error = TooManyHopBodies(
                f"this stage serves {len(self._open)} sessions of {self.engine.max_sessions}, and "
                f"{len(self._waiting)} wait: it is full, not broken"
            )
            command.done.set()

    def _free_places(self) -> int:
        """Places that nobody has, or is about to get; those of sessions that are about to be closed are free."""
        opening = sum(command.opens is not None for command in self._commands)
        closing = {command.key for command in self._commands if command.opens is None}
        return self.engine.max_sessions - opening - len(self._open.keys() - closing)

    async def close(self, key: SessionKey) -> None:
        """Free a session's KV; an unknown key is fine. Cancelled, the session is freed all the same, a little later."""
        if not self._running:
            return
        await self._submit(Command(key, None)).done.wait()

    async def step(self, step: StepInput) -> StepResult:
        """Run one step; steps of one session run in the order of their calls.

        A step that is cancelled before its first turn leaves the session as it was; after that the session is closed. The output
        is an error value, never an exception; besides the engine's, `Overloaded` when too many steps wait, and `CacheMiss` when
        the session is closed meanwhile, or the engine crashed.
        """
        results: list[StepResult] = []
        done = trio.Event()

        def deliver(result: StepResult) -> None:
            results.append(result)
            done.set()

        pending = self.submit(step, deliver)
        if pending is not None:
            try:
                await done.wait()
            except trio.Cancelled:
                pending.abandoned = True
                if pending.started:
                    self._submit(Command(step.session, None))
                elif pending in self._ready:
                    self._ready.remove(pending)
                raise
        return results[0]

    def submit(self, step: StepInput, deliver: Callable[[StepResult], None]) -> PendingStep | None:
        """`step` without a task that waits: ``deliver`` takes the result, once, in the event loop; it may neither block nor raise.

        None if the result was delivered already, an error.
        """
        refused = self._judge(step)
        if refused is not None:
            deliver(StepResult(refused, 0, 0))
            return None
        pending = PendingStep(step, self._open[step.session].tier, self._turns, trio.current_time(), deliver)
        if step.rows > 1:
            self._decoding.discard(step.session)
        else:
            self._decoding.add(step.session)
        self._ready.append(pending)
        if self._resting and not self._wake.is_set():
            self._begin_at_once(singles_per_turn)
        self._wake.set()
        return pending

    def _judge(self, step: StepInput) -> TessellaError | None:
        """Why a step may not wait for a turn. The engine would say the same, but only to the last piece of a long step."""
        if not self._running:
            return CacheMiss("this stage has stopped; its sessions are gone")
        if len(self._ready) >= MAX_QUEUED_STEPS:
            return Overloaded(f"{MAX_QUEUED_STEPS} steps wait at this stage already")
        malformed = check_body(self.engine, step)
        if malformed is not None:
            return malformed
        terms = self._open.get(step.session)
        if terms is None:
            return CacheMiss(f"this stage has no KV of session {step.session}")
        end = step.position + step.rows
        if end > terms.max_positions:
            return PromptTooLong(f"{end} positions; session {step.session} has room for {terms.max_positions}")
        return None

    def _submit(self, command: Command) -> Command:
        if not self._running:  # the engine goes, and all sessions with it
            command.done.set()
            return command
        if command.opens is None:
            gone = CacheMiss(f"session {command.key} was closed")
            for pending in [p for p in self._ready if p.step.session == command.key]:
                if pending.running:
                    pending.abandoned = True
                else:
                    self._finish(pending, gone)
        self._commands.append(command)
        self._wake.set()
        self._waiting.retry_at = -inf
        self._give_places()
        return command

    # ---- the task ----

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; a turn that runs is finished first. Whoever still waits then gets an error."""
        if self._running:
            raise LocalProtocolError("this stage runs already")
        runner = self._runner or EngineThread(f"stage {self.engine.layers}")
        self._thread = runner if isinstance(runner, EngineThread) else None
        self._running = True
        try:
            task_status.started()
            while True:
                await self._rest(runner)
                while self._commands or self._ready:
                    await trio.lowlevel.checkpoint()  # what arrived together, or follows an answer, shares the turn
                    await self._gather()
                    await self._turn(runner)
        finally:
            self._thread = None  # no turn begins any more
            with trio.CancelScope(shield=True):
                for turn in (self._turn_of_task, self._begun):
                    if turn is not None:
                        await turn.done.wait()
            self._running = False
            self._stop()
            if self._life.is_loaded:
                await self._life.close(runner)
            runner.close()

    async def _rest(self, runner: TurnRunner) -> None:
        """Wait for work; meanwhile fall asleep, or try again to load what did not load."""
        while not (self._commands or self._ready):
            if self._bug is not None:
                raise self._bug
            deadline = inf
            if self._life.retry_at is not None:
                deadline = self._life.retry_at
            elif self._waiting:
                deadline = self._waiting.retry_at if self._waiting.retry_at > trio.current_time() else inf
            elif self._rules.sleep_after_s is not None and self._may_sleep():
                deadline = trio.current_time() + self._rules.sleep_after_s
            self._resting = True
            try:
                with trio.move_on_at(deadline) as scope:
                    await self._wake.wait()
            finally:
                self._resting = False
            if self._wake.is_set():
                self._wake = trio.Event()
            elif scope.cancelled_caught and self._life.retry_at is not None:
                await self._life.load(runner)
            elif scope.cancelled_caught and self._waiting:
                self._give_places()
            elif scope.cancelled_caught:
                await self._life.sleep(runner)

    def _may_sleep(self) -> bool:
        return self._life.is_loaded and self._life.can_reload and not self._open

    async def _gather(self) -> None:
        """Give a group of decoding sessions a moment to be complete; see `batching`."""
        full = singles_worth_waiting_for(self._stages_of_decoding())
        deadline = trio.current_time() + self._rules.gather_s
        while (
            not self._begun
            and not self._commands
            and 0 < len(self._ready) < full
            and all(p.step.rows == 1 for p in self._ready)
        ):
            with trio.move_on_at(deadline) as scope:
                await self._wake.wait()
            if scope.cancelled_caught:
                return
            self._wake = trio.Event()

    def _stages_of_decoding(self) -> list[int]:
        return [self._open[key].num_stages for key in self._decoding]

    async def _turn(self, runner: TurnRunner) -> None:
        turn, self._begun = self._begun, None
        if turn is None:
            self._give_places()
            commands = [command for command in self._commands if not self._settle_without_engine(command)]
            if commands and not self._life.is_loaded:
                await self._wake_up(runner)
                return
            turn = self._planned(commands)
            if self._thread is not None:
                self._thread.start(turn.compute, partial(self._ended, turn))
            else:
                self._ended(turn, await runner.run(turn.compute, turn.rows))
        self._turn_of_task = turn
        await turn.done.wait()
        self._turn_of_task = None
        if self._bug is not None:
            raise self._bug
        if turn.crash is not None:
            await self._recover(runner, turn.crash, turn.commands, turn.taken)

    def _planned(self, commands: list[Command]) -> Turn:
        takes = plan_turn(
            [p.waiting for p in self._ready],
            decoding=bool(self._decoding),
            max_singles=singles_per_turn(self._stages_of_decoding()),
        )
        taken = {take.index for take in takes}
        waiting = [pending.step.session for index, pending in enumerate(self._ready) if index not in taken]
        return Turn(self.engine, commands, [(self._ready[take.index], take.rows) for take in takes], waiting)

    def _begin_at_once(self, enough: Callable[[Collection[int]], int]) -> None:
        """Begin a turn here and now if ``enough`` single rows wait, nothing else does, and no turn runs."""
        if self._thread is None or self._begun is not None or self._commands or not self._life.is_loaded:
            return
        if not self._ready or any(pending.step.rows > 1 for pending in self._ready):
            return
        if len(self._ready) == 1 and len(self._decoding) <= 1:  # alone: there is nothing to plan
            turn = Turn(self.engine, [], [(self._ready[0], 1)])
        elif len(self._ready) >= enough(self._stages_of_decoding()):
            turn = self._planned([])
        else:
            return
        self._begun = turn
        self._thread.start(turn.compute, partial(self._ended, turn))

    def _ended(self, turn: Turn, took_s: float) -> None:
        """Take a turn's answers apart; the next one, if it is full, begins before they are delivered. A crash is left to the task."""
        self._turns += 1
        for pending, _ in turn.taken:
            pending.compute_s += took_s
        try:
            if turn.crash is None:
                held: list[tuple[PendingStep, StepResult]] = []
                self._held = held
                for command in self._without_room(turn.commands):
                    turn.commands.remove(command)
                for command in turn.commands:
                    self._settle(command)
                for (pending, rows), answer in zip(turn.taken, turn.answers, strict=True):
                    self._advance(pending, rows, answer)
                self._held = None
                if self._begun is None or self._begun is turn:
                    self._begun = None
                    self._begin_at_once(singles_worth_waiting_for)
                with corked():  # what goes to one neighbour arrives there together, and shares a turn again
                    for pending, result in held:
                        pending.deliver(result)
        except Exception as error:  # noqa: BLE001 - trio would end the whole program; the task raises it where it belongs
            self._bug = error
            self._wake.set()
        finally:
            self._held = None
            turn.done.set()

    # ---- opens and closes ----

    def _settle_without_engine(self, command: Command) -> bool:
        """Settle what needs no engine: opens whose callers are gone, and closes while it sleeps."""
        if not command.abandoned and (command.opens is not None or self._life.is_loaded):
            return False
        self._settle(command)
        return True

    def _settle(self, command: Command) -> None:
        """Take note of an open or a close that was carried out, or is not to be."""
        self._commands.remove(command)
        if command.opens is None:
            self._open.pop(command.key, None)
            self._decoding.discard(command.key)
        elif command.executed and command.error is None:
            self._open[command.key] = command.opens
        command.done.set()
        if command.abandoned:
            self._abandon(command)

    def _without_room(self, commands: Sequence[Command]) -> list[Command]:
        """Opens that the engine had no room for, and that can wait: each is back in its place in the queue."""
        now = trio.current_time()
        waiting = [
            command
            for command in reversed(commands)  # who was taken last goes back first
            if isinstance(command.error, TooManyHopBodies) and not command.abandoned and command.wait_until > now
        ]
        for command in waiting:
            assert command.opens is not None
            command.error, command.executed = None, False
            self._commands.remove(command)
            self._waiting.put_back(command, command.opens.tier, now)
        return waiting

    async def _wake_up(self, runner: TurnRunner) -> None:
        """Load an engine that sleeps, or is not there since a crash; when it does not load, whoever waits is told."""
        if self._life.retry_at is None:
            await self._life.load(runner)
        refusal = self._life.refusal(trio.current_time())
        if refusal is None:
            return
        for command in [command for command in self._commands if command.opens is not None]:
            command.error = refusal
            self._settle(command)
        for command in self._waiting.clear():
            command.error = refusal
            command.done.set()

    # ---- crashes ----

    async def _recover(
        self,
        runner: TurnRunner,
        crash: Exception,
        commands: Sequence[Command],
        taken: Sequence[tuple[PendingStep, int]],
    ) -> None:
        """After a crash: its sessions are lost, whoever waits is told, and the engine is loaded again."""
        gone = CacheMiss(f"the engine failed in this turn ({type(crash).__name__}); the session's KV is gone")
        lost = list(self._open) if self._life.can_reload else [pending.step.session for pending, _ in taken]
        log.error("the engine crashed", sessions=[str(key) for key in lost], exc_info=crash)
        self._life.crashed(crash, trio.current_time())
        culprit = next((command for command in commands if not command.executed), None)
        for command in commands:
            if command is culprit:
                command.error = gone
                self._settle(command)
            elif command.executed and (command.opens is None or command.error is not None or not self._life.can_reload):
                self._settle(command)
            else:
                command.executed = False  # the next engine is asked again
        for pending, _ in taken:
            pending.running = False
        for key in lost:
            self._open.pop(key, None)
            self._decoding.discard(key)
        for pending in [p for p in self._ready if p.step.session in lost]:
            self._finish(pending, gone)
        self._waiting.retry_at = -inf
        self._give_places()
        if self._life.can_reload:
            await self._wake_up(runner)
            return
        abandoned = [*lost, *([culprit.key] if culprit is not None and culprit.opens is not None else [])]

        def drop() -> None:
            for key in abandoned:
                with suppress(Exception):  # it crashed once already; what counts is that nobody uses the KV again
                    self.engine.close_session(key)

        await runner.run(drop, 0)

    # ---- steps ----

    def _advance(self, pending: PendingStep, rows: int, answer: StepAnswer) -> None:
        """Take the answer to a piece of a step."""
        pending.rows_done += rows
        pending.running = False
        if pending.rows_left and pending.abandoned:
            answer = CacheMiss(f"session {pending.step.session} was closed")
        if isinstance(answer, TessellaError):
            self._decoding.discard(pending.step.session)
            self._finish(pending, answer)
            # After earlier pieces the session no longer stands where its step began.
            if pending.rows_done > rows and not pending.abandoned:
                self._submit(Command(pending.step.session, None))
            return
        if isinstance(answer, StepOutput):
            pending.bodies.append(answer.body)
            if pending.rows_left == 0 and len(pending.bodies) > 1:
                answer = StepOutput(b"".join(pending.bodies), answer.dtype)
        if pending.rows_left == 0:
            self._finish(pending, answer)

    def _finish(self, pending: PendingStep, answer: StepAnswer) -> None:
        waited_s = trio.current_time() - pending.arrived_at
        queue_us = max(0, int((waited_s - pending.compute_s) * 1e6))
        cached = self.engine.cached_positions(pending.step.session)
        result = StepResult(answer, queue_us, int(pending.compute_s * 1e6), cached)
        if pending not in self._ready:
            return  # nobody waits for it any more
        self._ready.remove(pending)
        if self._held is None:
            pending.deliver(result)
        else:
            self._held.append((pending, result))

    def _stop(self) -> None:
        stopped = CacheMiss("this stage has stopped; its sessions are gone")
        for command in (*self._commands, *self._waiting.clear()):
            command.error = Overloaded("this stage has stopped") if command.opens is not None else None
            command.done.set()
        for pending in list(self._ready):
            self._finish(pending, stopped)
        self._commands, self._open = [], {}
