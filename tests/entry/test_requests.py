"""The book of requests: what it tells of one, in flight and afterwards, and what it forgets."""

from __future__ import annotations

from tessella_p2p.base.errors import HopTimeout, NoRoute, Overloaded
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.entry.api import Caller, HopReport
from tessella_p2p.entry.requests import CANCELLED, Fault, RequestBook, Trail

HEAD, TAIL = PeerId("head"), PeerId("tail")


def hops(ms: float) -> tuple[HopReport, ...]:
    return (HopReport(HEAD, LayerRange(0, 4), ms, ms / 2), HopReport(TAIL, LayerRange(4, 6), ms, ms / 2))


def begin(book: RequestBook, request_id: str = "req-1", caller: str = "", now: float = 10.0) -> Trail:
    return book.begin(request_id, "answer", "toy", Caller(caller, trace_id="ab" * 16), now=now, now_unix_ms=5_000)


def test_a_request_is_told_step_by_step() -> None:
    book = RequestBook()
    trail = begin(book, caller="key-1")
    trail.tokenised(5, 8, 10.001)
    trail.granted("req-1", "Standard", 10.003, paid=True)
    trail.placed(10.004)
    trail.opened(0, lambda: hops(1.5), 10.005)
    trail.token(10.050)
    trail.token(10.070)
    (seen,) = book.in_flight()
    assert seen == book.find("req-1")
    assert (seen.caller, seen.trace_id, seen.began_at_ms, seen.end) == ("key-1", "ab" * 16, 5_000, None)
    assert (seen.tokenised_ms, seen.granted_ms, seen.placed_ms) == (1.0, 3.0, 4.0)
    assert (seen.first_token_ms, seen.last_token_ms, seen.num_tokens) == (50.0, 70.0, 2)
    assert [(epoch.epoch, epoch.opened_ms, epoch.route, epoch.num_tokens) for epoch in seen.epochs] == [
        (0, 5.0, hops(1.5), 2)
    ]
    trail.end("stop", 10.080)
    assert book.in_flight() == ()
    (ended,) = book.recent()
    assert (ended.end, ended.ended_ms, ended.fault, ended.epochs[0].ended_ms) == ("stop", 80.0, None, 80.0)


def test_a_route_tells_its_times_as_they_are_while_it_serves_and_as_they_were_afterwards() -> None:
    book, ms = RequestBook(), [1.0]
    trail = begin(book)
    trail.opened(0, lambda: hops(ms[0]), 10.0)
    ms[0] = 2.0
    assert trail.snapshot().epochs[0].route == hops(2.0)
    trail.end("length", 11.0)
    ms[0] = 3.0
    assert book.recent()[0].epochs[0].route == hops(2.0)


def test_each_reroute_is_an_epoch_with_its_cause() -> None:
    book = RequestBook()
    trail = begin(book)
    trail.opened(0, lambda: hops(1.0), 10.0)
    trail.rerouted(HopTimeout("late").blame(TAIL), 10.5)
    trail.opened(1, lambda: hops(2.0), 10.6)
    trail.token(10.7)
    trail.end("stop", 10.8)
    (record,) = book.recent()
    first, second = record.epochs
    assert (first.fault, first.ended_ms, first.num_tokens) == (Fault("hop_timeout", TAIL), 500.0, 0)
    assert (second.fault, second.epoch, second.num_tokens) == (None, 1, 1)


def test_an_error_is_the_end_with_its_code_and_the_missing_layers() -> None:
    book = RequestBook()
    begin(book).fail(NoRoute("nobody", ((4, 6),)), 10.1)
    (record,) = book.recent()
    assert (record.end, record.fault) == ("no_route", Fault("no_route", None, ((4, 6),)))


def test_the_first_end_counts_and_nothing_comes_after_it() -> None:
    book = RequestBook()
    trail = begin(book)
    trail.fail(Overloaded("full"), 10.1)
    trail.end(CANCELLED, 10.2)
    trail.token(10.3)
    trail.opened(3, lambda: hops(1.0), 10.4)
    (record,) = book.recent()
    assert (record.end, record.ended_ms, record.num_tokens, record.epochs) == ("overloaded", 100.0, 0, ())


def test_a_held_ticket_renames_its_request() -> None:
    book = RequestBook()
    trail = begin(book, "req-1")
    trail.granted("req-held", "Leech", 10.1, paid=True)
    assert book.find("req-1") is None
    found = book.find("req-held")
    assert found is not None
    assert found.request_id == trail.request_id == "req-held"
    trail.end("stop", 10.2)
    assert [record.request_id for record in book.recent()] == ["req-held"]


def test_only_the_last_ones_are_kept_newest_first_and_by_caller() -> None:
    book = RequestBook(kept=3)
    for number in range(5):
        begin(book, f"req-{number}", "even" if number % 2 == 0 else "odd").end("stop", 11.0)
    assert [record.request_id for record in book.recent()] == ["req-4", "req-3", "req-2"]
    assert [record.request_id for record in book.recent(caller="even")] == ["req-4", "req-2"]
    assert [record.request_id for record in book.recent(1)] == ["req-4"]
    assert book.find("req-0") is None
    assert book.num_begun == 5


def test_a_caller_of_very_many_requests_drives_nobody_elses_out() -> None:
    book = RequestBook(kept=8)
    for number, caller in enumerate(["a", "b", *["many"] * 100, "c"]):
        begin(book, f"req-{number}", caller).end("stop", 11.0)
    callers = [record.caller for record in book.recent()]
    assert callers == ["c", *["many"] * 5, "b", "a"]
    assert [record.request_id for record in book.recent(caller="many")] == [f"req-{n}" for n in range(101, 96, -1)]
    for number in range(200, 300):
        begin(book, f"req-{number}", f"caller-{number}").end("stop", 11.0)
    assert [record.request_id for record in book.recent()] == [f"req-{n}" for n in range(299, 291, -1)]


def test_a_vector_is_no_token() -> None:
    book = RequestBook()
    trail = book.begin("req-1", "embedding", "toy", Caller(), now=10.0, now_unix_ms=0)
    trail.opened(0, lambda: hops(1.0), 10.0)
    trail.token(10.1)
    trail.end("stop", 10.2)
    (record,) = book.recent()
    assert (record.num_tokens, record.first_token_ms, record.epochs[0].num_tokens) == (0, 100.0, 0)
