"""One request as a picture of bars over time (pure): what a node told of it, row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from tessella_p2p.base.limits import MAX_STAGES

BAR_CHARS = 32
_MAX_EPOCHS = 64
_MAX_UNIX_MS = 253_402_300_799_999
"""The last millisecond of the year 9999, where calendars here end."""
_SHORTEST_MS = 0.5
"""What took less is no wait that anybody asks about."""


class _Told(BaseModel):
    """Out of a node's JSON: of a shape that is known, with fields of newer nodes ignored."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class Blame(_Told):
    """Why something ended early."""

    code: str
    peer_id: str | None = None
    missing_layers: tuple[tuple[int, int], ...] = ()


class Hop(_Told):
    """One stage of a route."""

    peer_id: str
    layers: tuple[int, int]
    hop_ms: float
    compute_ms: float
    cached: int | None = None


class Epoch(_Told):
    """One route of the request; times count from the request's beginning."""

    epoch: int
    opened_ms: float
    ended_ms: float | None
    num_tokens: int
    fault: Blame | None
    route: tuple[Hop, ...] = Field(max_length=MAX_STAGES)


class Told(_Told):
    """One request, as ``GET /requests/{request_id}`` tells it."""

    request_id: str
    kind: str
    model: str
    trace_id: str | None
    began_at_ms: int = Field(ge=0, le=_MAX_UNIX_MS)
    tokenised_ms: float | None
    proven_ms: float | None
    granted_ms: float | None
    placed_ms: float | None
    first_token_ms: float | None
    last_token_ms: float | None
    ended_ms: float | None
    prompt_tokens: int
    max_tokens: int
    num_tokens: int
    tier: str | None
    paid: bool
    end: str | None
    fault: Blame | None
    epochs: tuple[Epoch, ...] = Field(max_length=_MAX_EPOCHS)


@dataclass(frozen=True, slots=True)
class Row:
    """What took the request from ``start_ms`` to ``end_ms`` since its beginning."""

    what: str
    start_ms: float
    end_ms: float


def rows_of(told: Told) -> list[Row]:
    """What a request did, one after the other; what took no time is left out."""
    rows, at = [], 0.0
    for what, until in (
        ("prompt rendered and counted", told.tokenised_ms),
        ("stages tried out", told.proven_ms),
        ("leave of the orchestrator", told.granted_ms),
        ("wait for a place here", told.placed_ms),
    ):
        if until is not None:
            rows.append(Row(what, at, until))
            at = until
    for epoch in told.epochs:
        if epoch.opened_ms > at:
            rows.append(Row("wait for a route", at, epoch.opened_ms))
        at = last_ms(told) if epoch.ended_ms is None else epoch.ended_ms
        rows.extend(_epoch_rows(told, epoch, at))
    return [row for row in rows if row.end_ms - row.start_ms >= _SHORTEST_MS]


def _epoch_rows(told: Told, epoch: Epoch, until: float) -> Iterator[Row]:
    first_ms = told.first_token_ms
    if first_ms is not None and epoch.opened_ms <= first_ms <= until:
        yield Row(f"route {epoch.epoch}: to the first token", epoch.opened_ms, first_ms)
        yield Row(f"route {epoch.epoch}: {max(epoch.num_tokens - 1, 0)} tokens more", first_ms, until)
    else:
        yield Row(f"route {epoch.epoch}: {epoch.num_tokens} tokens", epoch.opened_ms, until)


def last_ms(told: Told) -> float:
    """The newest time that is known."""
    times = (told.ended_ms, told.last_token_ms, told.placed_ms, told.granted_ms, told.proven_ms, told.tokenised_ms)
    return max(
        (time for time in (*times, *(epoch.opened_ms for epoch in told.epochs)) if time is not None), default=0.0
    )


def bar(row: Row, span_ms: float, width: int = BAR_CHARS) -> str:
    """The row's part of the request's time; at least one cell, so that nothing disappears."""
    if span_ms <= 0:
        return "█" + " " * (width - 1)
    start, end = (min(max(at / span_ms, 0.0), 1.0) * width for at in (row.start_ms, row.end_ms))
    first = min(math.floor(start), width - 1)
    last = max(math.ceil(end), first + 1)
    return " " * first + "█" * (last - first) + " " * (width - last)


def verdict(told: Told) -> str:
    """How it ended, in one sentence."""
    if told.end is None:
        return f"still answering: {told.num_tokens} tokens so far"
    reason = {
        "stop": f"complete after {told.num_tokens} tokens",
        "length": f"cut at the {told.max_tokens} tokens that were asked for",
        "cancelled": f"the client left after {told.num_tokens} tokens",
    }.get(told.end)
    return reason if reason is not None else f"failed: {blamed(told.fault) if told.fault is not None else told.end}"


def blamed(fault: Blame) -> str:
    """An error's code, the layers that were missing, and whose fault it was said to be."""
    parts = [fault.code]
    if fault.missing_layers:
        parts.append("of layers " + ", ".join(f"{start}–{end}" for start, end in fault.missing_layers[:MAX_STAGES]))
    if fault.peer_id is not None:
        parts.append(f"by {fault.peer_id}")
    return " ".join(parts)


def slowest(hops: Sequence[Hop]) -> Hop | None:
    """The stage that the others wait for, where any time is known."""
    timed = [hop for hop in hops if hop.hop_ms > 0]
    return max(timed, key=lambda hop: hop.hop_ms, default=None)
