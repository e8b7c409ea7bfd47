"""From a request's body to its answer, streamed or not, for every surface that generates text.

A surface brings two things: how its body is read (`Reading`) and how it says a generation (`Dialect`). What they share is here: errors
before the first byte become a status, later ones an event; a client that leaves cancels its generation at once; a silent stream is kept
visible with pings; a client that reads slowly holds up nothing but its own generation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import LocalProtocolError, TessellaError
from tessella_p2p.base.limits import SSE_PING_S
from tessella_p2p.bridge.answers import DONE, PING, event
from tessella_p2p.bridge.errors import error_answer, sole_error
from tessella_p2p.bridge.metrics import BridgeMetrics, Outcome
from tessella_p2p.bridge.responses import logged_answer
from tessella_p2p.entry.api import Caller, Delta, Entry, Finished, GenerateRequest, Generation, Prepared, TokenScores


class Dialect(Protocol):
    """How one surface says one generation. Each method gives bytes as they go out; pure."""

    def first(self) -> bytes:
        """Events that open a stream; may be empty."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """Events for new text; empty where there is nothing to say."""
        ...

    def last(self, finished: Finished) -> bytes:
        """Events that close a stream, before ``[DONE]``."""
        ...

    def whole(self, text: str, scores: Sequence[TokenScores], finished: Finished) -> bytes:
        """The JSON of an answer that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """A body that was understood: what to ask of the entry, and how to answer (``created`` in Unix seconds)."""

    request: GenerateRequest
    stream: bool
    dialect: Callable[[Prepared, int], Dialect]


class GenerationEndpoint:
    """An ASGI app for one path that generates text."""

    def __init__(
        self,
        read: Callable[[bytes], Reading],
        entry: Entry,
        clock: WallClock,
        metrics: BridgeMetrics,
        ping_s: float = SSE_PING_S,
    ) -> None:
        self._read = read
        self._entry = entry
        self._clock = clock
        self._metrics = metrics
        self._ping_s = ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Cancellation closes the session, and then the connection.

        Raises:
            TessellaError: when nothing was sent yet; the app's handler turns it into an answer.
        """
        request = Request(scope, receive)
        reading = self._read(await request.body())
        caller: Caller = getattr(request.state, "caller", Caller())  # `authorising` sets it, where keys are asked for
        reading = replace(reading, request=replace(reading.request, caller=caller))
        watch = ClientWatch(receive)
        with self._metrics.generating() as outcome:
            if reading.stream:
                await self._stream(reading, watch, EventStream(send, self._ping_s), outcome)
            else:
                await self._whole(reading, watch, outcome, Reply(scope, receive, send))

    async def _whole(self, reading: Reading, watch: ClientWatch, outcome: Outcome, reply: Reply) -> None:
        sink = _Whole(reading, self._now())
        await watch.guard(lambda: self._generate(reading.request, watch, sink, outcome))
        if not watch.left:
            await reply(Response(sink.body, media_type="application/json"))

    async def _stream(self, reading: Reading, watch: ClientWatch, stream: EventStream, outcome: Outcome) -> None:
        sink = _Streamed(reading, self._now(), stream)
        try:
            await watch.guard(lambda: self._generate(reading.request, watch, sink, outcome), stream.ping_until_ended)
        except TessellaError as error:
            if not stream.started:
                raise
            outcome.code = error.code
            await stream.write(event(logged_answer(error).body) + DONE)
        except (
            Exception
        ):  # a bug: it goes on to the log, but the client must not take the broken stream for a short answer
            if stream.started:
                await stream.write(event(error_answer(LocalProtocolError()).body) + DONE)
                await stream.end()
            raise
        if not watch.left:
            await stream.end()

    async def _generate(self, request: GenerateRequest, watch: ClientWatch, sink: _Sink, outcome: Outcome) -> None:
        failure: TessellaError | None = None
        async with self._entry.generate(request) as generation:
            try:
                outcome.finished = await _pump(generation, sink)
            except (
                TessellaError
            ) as error:  # raised below: a nursery inside the entry's context would wrap it in a group
                failure = error
            watch.stand_down()
        if failure is not None:
            raise failure

    def _now(self) -> int:
        return self._clock.unix_ms() // 1000


@dataclass(frozen=True, slots=True)
class Reply:
    """Where a whole answer goes."""

    scope: Scope
    receive: Receive
    send: Send

    async def __call__(self, response: Response) -> None:
        """Send it."""
        await response(self.scope, self.receive, self.send)


class ClientWatch:
    """Cancels work when the client that asked for it leaves.

    The request's body must have been read: what `receive` gives next is then the client's departure.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watching = trio.CancelScope()
        self.left = False

    async def guard(self, work: Callable[[], Awaitable[None]], *beside: Callable[[], Awaitable[None]]) -> None:
        """Run ``work``, and the ``beside`` tasks until it ends; returns early, with ``left`` set, when the client leaves.

        Raises:
            TessellaError: what ``work`` raised.
        """
        failure: TessellaError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, nursery.cancel_scope)
            for task in beside:
                nursery.start_soon(task)
            try:
                await work()
            except TessellaError as error:
                failure = error
            except BaseExceptionGroup as group:
                failure = sole_error(group)
                if failure is None:
                    raise
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def stand_down(self) -> None:
        """The generation is over: from now on it closes undisturbed, even if the client leaves as soon as it has its answer."""
        self._watching.cancel()

    async def _watch(self, guarded: trio.CancelScope) -> None:
        with self._watching:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.left = True
            guarded.cancel()


class EventStream:
    """An answer of server-sent events. It begins with the first write, so an error before it still has a status of its own."""

    def __init__(self, send: Send, ping_s: float) -> None:
        self._send = send
        self._ping_s = ping_s
        self._lock = trio.Lock()
        self._last_write = trio.current_time()
        self._ended = False
        self.started = False

    async def write(self, data: bytes) -> None:
        """Send ``data``, at the pace of the client. A cancelled write ends the connection."""
        if self._lock.locked():
            await self._lock.acquire()
        else:
            self._lock.acquire_nowait()  # a checkpoint less for each token: the write is one
        try:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._last_write = trio.current_time()
        finally:
            self._lock.release()

    async def ping_until_ended(self) -> None:
        """Send a comment whenever nothing was sent for ``ping_s`` seconds."""
        while not self._ended:
            due = self._last_write + self._ping_s
            await trio.sleep_until(due)
            if self._last_write + self._ping_s <= due and not self._ended:
                await self.write(PING)

    def stop_pings(self) -> None:
        """What follows is the end."""
        self._ended = True

    async def end(self) -> None:
        """Complete the answer. Not while a `ClientWatch` guards: the server reports a complete answer as a disconnect, too."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies would wait for more
]


class _Sink(Protocol):
    async def begin(self, prepared: Prepared) -> None: ...

    async def delta(self, delta: Delta) -> None: ...

    async def finish(self, finished: Finished) -> None: ...


class _Whole:
    def __init__(self, reading: Reading, created: int) -> None:
        self._reading = reading
        self._created = created
        self._dialect: Dialect
        self._texts: list[str] = []
        self._scores: list[TokenScores] = []
        self.body = b""

    async def begin(self, prepared: Prepared) -> None:
        self._dialect = self._reading.dialect(prepared, self._created)

    async def delta(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._scores += delta.scores

    async def finish(self, finished: Finished) -> None:
        self.body = self._dialect.whole("".join(self._texts), self._scores, finished)


class _Streamed:
    def __init__(self, reading: Reading, created: int, stream: EventStream) -> None:
        self._reading = reading
        self._created = created
        self._stream = stream
        self._dialect: Dialect
        self._opening = b""

    async def begin(self, prepared: Prepared) -> None:
        self._dialect = self._reading.dialect(prepared, self._created)
        self._opening = self._dialect.first()

    async def delta(self, delta: Delta) -> None:
        data = self._opening + self._dialect.delta(delta)
        self._opening = b""
        if data:
            await self._stream.write(data)

    async def finish(self, finished: Finished) -> None:
        self._stream.stop_pings()
        await self._stream.write(self._opening + self._dialect.last(finished) + DONE)


async def _pump(generation: Generation, sink: _Sink) -> Finished:
    """Give every event to ``sink``; returns the last one."""
    await sink.begin(generation.prepared)
    finished: Finished | None = None
    async with aclosing(generation.events()) as events:
        async for each in events:
            if isinstance(each, Delta):
                await sink.delta(each)
            else:
                finished = each
                await sink.finish(each)
    if finished is None:
        raise LocalProtocolError(f"the events of {generation.prepared.request_id} ended without Finished")
    return finished
