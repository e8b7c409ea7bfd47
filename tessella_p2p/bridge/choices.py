"""The generations that one request asks for, side by side: each is a choice of its answer.

A surface brings two things: how its body is read (`Reading`) and how it says its choices (`Dialect`). `Choices` runs them, a few at a
time, and hands what comes to a `Sink`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

import trio

from tessella_p2p.base.errors import InvalidRequest, LocalProtocolError, TessellaError
from tessella_p2p.base.limits import MAX_CONCURRENT_CHOICES, SHARED_PROMPT_TOKENS
from tessella_p2p.bridge.errors import sole_error
from tessella_p2p.bridge.metrics import BridgeMetrics
from tessella_p2p.entry.api import Delta, Entry, Finished, GenerateRequest, Generation, Prepared, TokenScores


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of an answer that is not streamed."""

    text: str
    scores: Sequence[TokenScores]
    finished: Finished


class Dialect(Protocol):
    """How one surface says the choices of one answer, by their index. Each method gives bytes as they go out; no I/O."""

    def first(self, index: int) -> bytes:
        """Events that open a choice; may be empty. All are opened at once, so perhaps before this one is admitted."""
        ...

    def delta(self, index: int, delta: Delta) -> bytes:
        """Events for new text; empty where there is nothing to say."""
        ...

    def ended(self, index: int, finished: Finished) -> bytes:
        """Events that close a choice."""
        ...

    def last(self, finished: Sequence[Finished]) -> bytes:
        """Events that close the stream, before ``[DONE]``; may be empty. ``finished`` is in the order of the choices."""
        ...

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """The JSON of an answer that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """A body that was understood.

    Attributes:
        requests: what to ask of the entry, for each choice.
        stream: whether the answer is.
        dialect: how to answer, made of the first choice that was admitted and the time (Unix seconds).
        params: what this surface calls a field that the entry may find fault with, where it has another name for it.
    """

    requests: tuple[GenerateRequest, ...]
    stream: bool
    dialect: Callable[[Prepared, int], Dialect]
    params: Mapping[str, str] = field(default_factory=dict)


def name_param(error: TessellaError, params: Mapping[str, str]) -> None:
    """Let an error say the field at fault as a surface's clients know it; see `Reading.params`."""
    if isinstance(error, InvalidRequest) and error.param is not None:
        error.param = params.get(error.param, error.param)


def numbered(request: GenerateRequest, n: int) -> tuple[GenerateRequest, ...]:
    """``n`` choices of one request: each draws with a seed of its own, the first with the one that was given."""
    if request.seed is None:
        return (request,) * n
    return tuple(replace(request, seed=(request.seed + index) % 2**64) for index in range(n))


class Sink(Protocol):
    """Where what comes of the choices goes."""

    async def begin(self, index: int, generation: Generation) -> None:
        """A choice was admitted."""
        ...

    async def delta(self, index: int, delta: Delta) -> None:
        """New text of a choice."""
        ...

    async def finish(self, index: int, finished: Finished) -> None:
        """A choice is complete."""
        ...


async def generated(entry: Entry, request: GenerateRequest, pump: Callable[[Generation], Awaitable[None]]) -> None:
    """Have ``request`` generated, while ``pump`` takes what comes; after it the session is closed.

    Raises:
        TessellaError: of either, as it is: a nursery of the entry's would wrap it in a group.
    """
    failure: TessellaError | None = None
    try:
        async with entry.generate(request) as generation:
            try:
                await pump(generation)
            except TessellaError as error:
                failure = error
    except BaseExceptionGroup as group:
        failure = sole_error(group)
        if failure is None:
            raise
    if failure is not None:
        raise failure


class Choices:
    """Runs the choices of one request.

    Args:
        entry: generates them.
        metrics: counts each.
        requests: one for each choice.
        sink: gets what comes.
        over: is called when nothing more will come, before the last session is closed.
    """

    def __init__(
        self,
        entry: Entry,
        metrics: BridgeMetrics,
        requests: Sequence[GenerateRequest],
        sink: Sink,
        over: Callable[[], None],
    ) -> None:
        self._entry = entry
        self._metrics = metrics
        self._requests = requests
        self._sink = sink
        self._over = over
        self._num_left = len(requests)
        self._first_with = _first_with_each_prompt(requests)
        self._is_read = [trio.Event() for _ in requests]
        """Of the choices that others wait for: whether the stages have read its prompt, or it is not worth waiting for."""

    async def run(self) -> None:
        """Generate every choice, at most `MAX_CONCURRENT_CHOICES` at a time. Cancelled, it closes their sessions.

        Side by side each would have the stages compute the whole of a prompt that they share, before any is in their prefix caches:
        the first one goes ahead, and the others follow its first token.

        Raises:
            TessellaError: the first failure; the other choices are cancelled.
        """
        if len(self._requests) == 1:
            await self._generate(0)
            return
        failure: TessellaError | None = None
        places = trio.Semaphore(MAX_CONCURRENT_CHOICES)

        async def work(index: int) -> None:
            nonlocal failure
            if self._first_with[index] != index:
                await self._is_read[self._first_with[index]].wait()
            try:
                async with places:
                    await self._generate(index)
            except TessellaError as error:
                failure = failure or error
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for index in range(len(self._requests)):
                nursery.start_soon(work, index)
        if failure is not None:
            raise failure

    async def _generate(self, index: int) -> None:
        async def pump(generation: Generation) -> None:
            try:
                outcome.finished = await self._pump(index, generation)
            except TessellaError:
                self._over()
                raise
            self._num_left -= 1
            if not self._num_left:
                self._over()

        with self._metrics.generating() as outcome:
            await generated(self._entry, self._requests[index], pump)

    async def _pump(self, index: int, generation: Generation) -> Finished:
        """Give every event to the sink; returns the last one."""
        if len(generation.prepared.prompt_ids) < SHARED_PROMPT_TOKENS:
            self._is_read[index].set()
        await self._sink.begin(index, generation)
        finished: Finished | None = None
        async with aclosing(generation.events()) as events:
            async for each in events:
                self._is_read[index].set()
                if isinstance(each, Delta):
                    await self._sink.delta(index, each)
                else:
                    finished = each
                    await self._sink.finish(index, each)
        if finished is None:
            raise LocalProtocolError(f"the events of {generation.prepared.request_id} ended without Finished")
        return finished


def _first_with_each_prompt(requests: Sequence[GenerateRequest]) -> list[int]:
    """For each request the place of the first one with its prompt."""
    firsts: list[int] = []
    for index, request in enumerate(requests):
        before = requests[firsts[-1]] if firsts else None
        firsts.append(firsts[-1] if before is not None and _has_prompt_of(before, request) else index)
    return firsts


def _has_prompt_of(one: GenerateRequest, other: GenerateRequest) -> bool:
    """Whether both were made of one prompt: the same object, so that no text is compared."""
    return (
        one.messages is other.messages
        and one.prompt is other.prompt
        and one.prompt_ids is other.prompt_ids
        and one.gap is other.gap
    )
