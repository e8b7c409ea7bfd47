"""From a request's body to its answer, streamed or not, for every surface that generates text.

What a surface brings is in ``choices.py``. What all share is here: errors before the first byte become a status, later ones an event;
a client that leaves cancels its generations at once; a silent stream is kept visible with pings; a client that reads slowly holds up
nothing but its own generations.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import LocalProtocolError, Overloaded, TessellaError
from tessella_p2p.base.limits import KIB, SSE_PING_S
from tessella_p2p.bridge.answer_headers import answer_headers
from tessella_p2p.bridge.answers import DONE, PING, event
from tessella_p2p.bridge.callers import caller_of
from tessella_p2p.bridge.choices import Answer, Choices, Dialect, Reading, name_param
from tessella_p2p.bridge.errors import error_answer, sole_error
from tessella_p2p.bridge.metrics import BridgeMetrics
from tessella_p2p.bridge.responses import logged_answer
from tessella_p2p.entry.api import Delta, Entry, Finished, Generation, TokenScores
from tessella_p2p.ledger.blocking import in_thread

_LAST_WORDS_S = 0.5
"""How long a stream that the server breaks off may still take to say so."""
_READ_IN_PLACE_BYTES = 64 * KIB
"""Of a body: such a one takes up to 15 ms, the largest half a second, in which no other answer would go on."""
_Read = TypeVar("_Read")


async def understood(request: Request, read: Callable[[bytes], _Read]) -> _Read:
    """What ``read`` makes of a request's body, on a thread where that may take long.

    Raises:
        TessellaError: what ``read`` raises.
    """
    body = await request.body()
    return read(body) if len(body) <= _READ_IN_PLACE_BYTES else await in_thread(lambda: read(body))


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
        reading = await understood(request, self._read)
        caller = caller_of(request.scope)
        reading = replace(reading, requests=tuple(replace(each, caller=caller) for each in reading.requests))
        watch = ClientWatch(receive)
        try:
            if reading.stream:
                await self._stream(reading, watch, EventStream(send, self._ping_s))
            else:
                await self._whole(reading, watch, Reply(scope, receive, send))
        except TessellaError as error:
            name_param(error, reading.params)
            raise

    async def _whole(self, reading: Reading, watch: ClientWatch, reply: Reply) -> None:
        sink = _Whole(reading, self._now())
        choices = Choices(self._entry, self._metrics, reading.requests, sink, watch.stand_down)
        await watch.guard(choices.run)
        if not watch.left:
            await reply(Response(sink.body(), media_type="application/json", headers=sink.headers()))

    async def _stream(self, reading: Reading, watch: ClientWatch, stream: EventStream) -> None:
        sink = _Streamed(reading, self._now(), stream)
        choices = Choices(self._entry, self._metrics, reading.requests, sink, watch.stand_down)
        await stream.guarded(choices.run, watch, reading.params, DONE)

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
        self.generation: Generation | None = None
        """Whose route the headers tell, as it is when the stream begins: after its first token, or its first silence."""

    async def guarded(
        self, work: Callable[[], Awaitable[None]], watch: ClientWatch, params: Mapping[str, str], last: bytes = b""
    ) -> None:
        """Run ``work``, which writes the answer, until the client leaves. Whatever ends an answer that has begun is told in it.

        Args:
            work: generates.
            watch: of the client.
            params: see `Reading.params`.
            last: what follows an event that tells a failure.

        Raises:
            TessellaError: when nothing was sent yet.
        """
        try:
            await self._guarded(work, watch, params, last)
        except Exception:  # was told where it could be
            raise
        except BaseException:  # the server stops: this is not to look like an answer that is complete
            if not watch.left:
                await self._break_off(event(error_answer(Overloaded("this node stops")).body) + last)
            raise

    async def _guarded(
        self, work: Callable[[], Awaitable[None]], watch: ClientWatch, params: Mapping[str, str], last: bytes
    ) -> None:
        try:
            await watch.guard(work, self.ping_until_ended)
        except TessellaError as error:
            if not self.started:
                raise
            name_param(error, params)
            await self.write(event(logged_answer(error).body) + last)
        except Exception:  # a bug, for the log; but the client must not take the broken stream for a short answer
            if self.started:
                await self.write(event(error_answer(LocalProtocolError()).body) + last)
                await self.end()
            raise
        if not watch.left:
            await self.end()

    async def write(self, data: bytes) -> None:
        """Send ``data``, at the pace of the client. A cancelled write ends the connection."""
        if self._lock.locked():
            await self._lock.acquire()
        else:
            self._lock.acquire_nowait()  # a checkpoint less for each token: the write is one
        try:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers()})
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

    def _headers(self) -> list[tuple[bytes, bytes]]:
        if self.generation is None:
            return _SSE_HEADERS
        told = answer_headers(self.generation.prepared.request_id, self.generation.route())
        return [*_SSE_HEADERS, *((name.encode("ascii"), value.encode("ascii")) for name, value in told.items())]

    def stop_pings(self) -> None:
        """What follows is the end."""
        self._ended = True

    async def end(self) -> None:
        """Complete the answer. Not while a `ClientWatch` guards: the server reports a complete answer as a disconnect, too."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _break_off(self, data: bytes) -> None:
        """End an answer that has begun with ``data``, although this task is cancelled: briefly, and only if the client still reads."""
        if self.started:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _LAST_WORDS_S):
                await self.write(data)
                await self.end()


_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies would wait for more
]


class _Whole:
    """The sink of an answer in one piece."""

    def __init__(self, reading: Reading, created: int) -> None:
        self._reading = reading
        self._created = created
        self._dialect: Dialect | None = None
        self._texts: list[list[str]] = [[] for _ in reading.requests]
        self._scores: list[list[TokenScores]] = [[] for _ in reading.requests]
        self._finished: dict[int, Finished] = {}

    async def begin(self, index: int, generation: Generation) -> None:
        if index == 0:  # whose headers the answer has, too
            self._dialect = self._reading.dialect(generation.prepared, self._created)

    async def delta(self, index: int, delta: Delta) -> None:
        self._texts[index].append(delta.text)
        self._scores[index] += delta.scores

    async def finish(self, index: int, finished: Finished) -> None:
        self._finished[index] = finished

    def headers(self) -> dict[str, str]:
        """Those that tell of the first choice."""
        first = self._finished[0]
        return answer_headers(first.request_id, first.route)

    def body(self) -> bytes:
        """The JSON, once every choice is complete."""
        assert self._dialect is not None
        return self._dialect.whole(
            [
                Answer("".join(texts), scores, self._finished[index])
                for index, (texts, scores) in enumerate(zip(self._texts, self._scores, strict=True))
            ]
        )


class _Streamed:
    """The sink of an answer that is streamed.

    What opens it waits for the first text, so that an earlier error has a status. All choices are opened then, in their order: the
    stream helper of OpenAI's SDK knows a choice only when it has those before it.
    """

    def __init__(self, reading: Reading, created: int, stream: EventStream) -> None:
        self._reading = reading
        self._created = created
        self._stream = stream
        self._dialect: Dialect | None = None
        self._is_open = False
        self._finished: dict[int, Finished] = {}

    async def begin(self, index: int, generation: Generation) -> None:
        if self._dialect is None:
            self._dialect = self._reading.dialect(generation.prepared, self._created)
            self._stream.generation = generation

    async def delta(self, index: int, delta: Delta) -> None:
        assert self._dialect is not None
        data = self._dialect.delta(index, delta)
        if not self._is_open:
            data = self._opening() + data
        if data:
            await self._stream.write(data)

    async def finish(self, index: int, finished: Finished) -> None:
        assert self._dialect is not None
        self._finished[index] = finished
        data = self._dialect.ended(index, finished)
        if not self._is_open:
            data = self._opening() + data
        if len(self._finished) == len(self._reading.requests):
            self._stream.stop_pings()
            data += self._dialect.last([self._finished[each] for each in sorted(self._finished)]) + DONE
        await self._stream.write(data)

    def _opening(self) -> bytes:
        assert self._dialect is not None
        self._is_open = True
        return b"".join(map(self._dialect.first, range(len(self._reading.requests))))
