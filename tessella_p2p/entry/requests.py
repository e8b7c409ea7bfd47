"""The requests of an entry: those in flight and the last ones, when each step of them was, over which stages, how they ended (pure).

Times are trio's, in seconds, on the way in; a record has Unix milliseconds for the beginning and milliseconds from there for the
rest. Nothing here holds a text or a token id: who may see that a request was made may not see what was asked.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal, TypedDict

from tessella_p2p.base.errors import NoRoute, TessellaError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_KEPT_REQUESTS
from tessella_p2p.entry.api import Caller, HopReport

_MAX_MODEL_CHARS = 256
RequestKind = Literal["answer", "embedding"]
CANCELLED = "cancelled"
"""The end of a request whose client did not wait for it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an epoch or a request ended early: an error's code, whose fault it is said to be, and the layers that nobody served."""

    code: str
    peer: PeerId | None = None
    missing: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One route of a request. Times count from the request's beginning; ``fault`` is None while it serves, or served to the end."""

    epoch: int
    route: tuple[HopReport, ...]
    opened_ms: float
    ended_ms: float | None = None
    num_tokens: int = 0
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What is known of one request. Times that end in ``_ms`` count from its beginning; None where it has not come so far.

    Attributes:
        request_id: as in its ticket, its answer and every log line about it.
        caller: the name of the key that asked, empty without one.
        trace_id: the trace that the client says it belongs to (W3C trace context).
        began_at_ms: Unix milliseconds.
        tokenised_ms: the prompt was rendered and counted.
        proven_ms: its stages had answered at some time, or did now.
        granted_ms: the orchestrator, or a held ticket, allowed it.
        placed_ms: it had its place among the requests of this entry.
        first_token_ms, last_token_ms: when they came from the tail.
        ended_ms: the answer was complete, or there is none.
        end: ``stop``, ``length``, `CANCELLED` or an error's code; None in flight.
        epochs: each route that it was opened on; more than one where stages were lost.
    """

    request_id: str
    kind: RequestKind
    model: str
    caller: str
    trace_id: str | None
    began_at_ms: int
    tokenised_ms: float | None = None
    proven_ms: float | None = None
    granted_ms: float | None = None
    placed_ms: float | None = None
    first_token_ms: float | None = None
    last_token_ms: float | None = None
    ended_ms: float | None = None
    prompt_tokens: int = 0
    max_tokens: int = 0
    num_tokens: int = 0
    tier: str | None = None
    paid: bool = False
    end: str | None = None
    fault: Fault | None = None
    epochs: tuple[EpochRecord, ...] = ()


@dataclass(slots=True)
class _OpenEpoch:
    """The newest route; it tells its times while it serves."""

    epoch: int
    route: Callable[[], tuple[HopReport, ...]]
    opened_ms: float
    num_tokens: int = 0

    def record(self, ended_ms: float | None = None, fault: Fault | None = None) -> EpochRecord:
        return EpochRecord(self.epoch, self.route(), self.opened_ms, ended_ms, self.num_tokens, fault)


class _TokensTold(TypedDict):
    """What is known of a request's tokens: put together when it is asked for, since they come often."""

    num_tokens: int
    first_token_ms: float | None
    last_token_ms: float | None


@dataclass(slots=True)
class Trail:
    """Follows one request; made by `RequestBook.begin`. Once it has ended, nothing is added."""

    _book: RequestBook
    _began: float
    _record: RequestRecord
    _past: list[EpochRecord] = field(default_factory=list)
    _epoch: _OpenEpoch | None = None
    _first_token_at: float | None = None
    _last_token_at: float | None = None

    @property
    def request_id(self) -> str:
        """Its id now: a ticket that was held for an outage brings its own."""
        return self._record.request_id

    def tokenised(self, prompt_tokens: int, max_tokens: int, now: float) -> None:
        """The prompt is known, and how much may follow."""
        self._note(prompt_tokens=prompt_tokens, max_tokens=max_tokens, tokenised_ms=self._ms(now))

    def proven(self, now: float) -> None:
        """Its stages are no strangers."""
        self._note(proven_ms=self._ms(now))

    def granted(self, request_id: str, tier: str, now: float, *, paid: bool) -> None:
        """It may start, under this id."""
        self._book.rename(self, request_id)
        self._note(request_id=request_id, tier=tier, paid=paid, granted_ms=self._ms(now))

    def placed(self, now: float) -> None:
        """It waits no longer for others of this entry."""
        self._note(placed_ms=self._ms(now))

    def opened(self, epoch: int, route: Callable[[], tuple[HopReport, ...]], now: float) -> None:
        """A chain is being opened; ``route`` tells its stages and their times whenever it is asked."""
        if self._record.end is None:
            self._epoch = _OpenEpoch(epoch, route, self._ms(now))

    def token(self, now: float) -> None:
        """One more token of the answer arrived; of an embedding the vector, which is none."""
        if self._first_token_at is None:
            self._first_token_at = now
        self._last_token_at = now
        if self._record.kind == "answer" and self._epoch is not None:
            self._epoch.num_tokens += 1

    def rerouted(self, error: TessellaError, now: float) -> None:
        """The newest chain is given up."""
        self._close_epoch(_fault_of(error), now)

    def fail(self, error: TessellaError, now: float) -> None:
        """It ended with an error, which is given its id. The first end counts: behind it an error may be another request's already."""
        if self._record.end is None or error.request_id is None:
            error.request_id = self._record.request_id
        self._end(error.code, _fault_of(error), now)

    def end(self, how: str, now: float) -> None:
        """It ended so. The first end counts."""
        self._end(how, None, now)

    def snapshot(self) -> RequestRecord:
        """The record as of now."""
        if self._record.end is not None:
            return self._record
        return replace(self._record, **self._tokens_told(), epochs=self._epochs())

    def _end(self, how: str, fault: Fault | None, now: float) -> None:
        if self._record.end is not None:
            return
        self._close_epoch(fault, now)
        self._record = replace(
            self._record,
            **self._tokens_told(),
            epochs=self._epochs(),
            end=how,
            fault=fault,
            ended_ms=self._ms(now),
        )
        self._book.close(self)

    def _tokens_told(self) -> _TokensTold:
        first, last = self._first_token_at, self._last_token_at
        return {
            "num_tokens": sum(epoch.num_tokens for epoch in self._past)
            + (self._epoch.num_tokens if self._epoch else 0),
            "first_token_ms": None if first is None else self._ms(first),
            "last_token_ms": None if last is None else self._ms(last),
        }

    def _epochs(self) -> tuple[EpochRecord, ...]:
        return tuple(self._past) if self._epoch is None else (*self._past, self._epoch.record())

    def _close_epoch(self, fault: Fault | None, now: float) -> None:
        if self._epoch is not None:
            self._past.append(self._epoch.record(self._ms(now), fault))
            self._epoch = None

    def _note(self, **changes: object) -> None:
        if self._record.end is None:
            self._record = replace(self._record, **changes)  # type: ignore[arg-type]

    def _ms(self, now: float) -> float:
        return round((now - self._began) * 1000, 3)


class RequestBook:
    """The requests of one entry. Those in flight are as many as its callers have open; of those that ended the last ``kept``.

    Room in a full book is made by the caller that has the most of it, while that is over a quarter: a thousand vectors are a thousand
    records, and those of others stay.
    """

    def __init__(self, kept: int = MAX_KEPT_REQUESTS) -> None:
        self._kept = kept
        self._open: dict[str, Trail] = {}
        self._ended: OrderedDict[str, RequestRecord] = OrderedDict()
        # Of each caller, oldest first: which in the book's order, and its id.
        self._ended_of: dict[str, deque[tuple[int, str]]] = {}
        self._num_ended = 0
        self.num_begun = 0
        """Requests so far, those that were refused included."""

    def begin(
        self, request_id: str, kind: RequestKind, model: str, caller: Caller, *, now: float, now_unix_ms: int
    ) -> Trail:
        """Follow a new request; `Trail.end` or `Trail.fail` has to come."""
        model = model[:_MAX_MODEL_CHARS]  # whatever the client wrote
        record = RequestRecord(request_id, kind, model, caller.name, caller.trace_id, now_unix_ms)
        trail = self._open[request_id] = Trail(self, now, record)
        self.num_begun += 1
        return trail

    def find(self, request_id: str) -> RequestRecord | None:
        """The request with this id; None where it never was, or has been forgotten."""
        trail = self._open.get(request_id)
        return trail.snapshot() if trail is not None else self._ended.get(request_id)

    def in_flight(self) -> tuple[RequestRecord, ...]:
        """Those that have not ended, oldest first."""
        return tuple(trail.snapshot() for trail in self._open.values())

    def recent(self, limit: int = MAX_KEPT_REQUESTS, caller: str | None = None) -> tuple[RequestRecord, ...]:
        """The last ones that ended, newest first: of one caller, or of all."""
        return tuple(islice(self._newest(caller), limit))

    def _newest(self, caller: str | None) -> Iterator[RequestRecord]:
        return (record for record in reversed(self._ended.values()) if caller is None or record.caller == caller)

    def rename(self, trail: Trail, request_id: str) -> None:
        """For `Trail` alone: the request goes by another id from now on."""
        if self._open.pop(trail.request_id, None) is not None:
            self._open[request_id] = trail

    def close(self, trail: Trail) -> None:
        """For `Trail` alone: the request has ended."""
        self._open.pop(trail.request_id, None)
        record = self._ended[trail.request_id] = trail.snapshot()
        self._num_ended += 1
        self._ended_of.setdefault(record.caller, deque()).append((self._num_ended, record.request_id))
        if len(self._ended) > self._kept:
            most = max(self._ended_of.values(), key=lambda ended: (len(ended), -ended[0][0]))
            oldest = most[0][1] if 4 * len(most) > self._kept else next(iter(self._ended))
            self._forget(self._ended.pop(oldest))

    def _forget(self, record: RequestRecord) -> None:
        ended = self._ended_of[record.caller]
        ended.popleft()
        if not ended:
            del self._ended_of[record.caller]


def _fault_of(error: TessellaError) -> Fault:
    return Fault(error.code, error.peer, error.missing if isinstance(error, NoRoute) else ())
