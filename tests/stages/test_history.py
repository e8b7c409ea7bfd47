"""What is kept for auditors: references, within a budget, cut at any position, forgotten in time."""

from __future__ import annotations

import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.base.limits import HISTORY_FRAME_BYTES, MAX_HISTORY_TRACKS
from tessella_p2p.stages.history import History, StageTracks, Track, TrackKey
from tessella_p2p.wire.frames import (
    HEADER_BYTES,
    TRACE_ENTRY_BYTES,
    DType,
    Flag,
    Frame,
    Kind,
    TraceEntry,
    encode_frame,
    parse_header,
    parse_payload,
)
from tests.stages.openings import STAGES, opened, ticket

ROW = 8
PAYLOAD = TRACE_ENTRY_BYTES + ROW
"""Of one row, with its trace."""
SESSION = SessionId(bytes(16))
AUDITED = PeerId(STAGES[0].peer_id)


def key_of(number: int, **changes: Any) -> TrackKey:
    fields: dict[str, Any] = {
        "session": SessionId(number.to_bytes(16, "big")),
        "epoch": 0,
        "side": "input",
        "audited": AUDITED,
    }
    return TrackKey(**(fields | changes))


def step(position: int, rows: int, *, draws: bool = False) -> Frame:
    """A step as it comes: its rows are the end of a payload."""
    body = b"".join((position + index).to_bytes(ROW, "little") for index in range(rows))
    flags = Flag.SAMPLE if draws else Flag.NONE
    trace = (TraceEntry(1, 2, 3),)
    data = encode_frame(Frame(Kind.STEP, SESSION, 0, 3, position, rows, DType.F32, flags, trace, body))
    return parse_payload(parse_header(data[:HEADER_BYTES]), data[HEADER_BYTES:])


def noted(track: Track, cuts: list[int], *, encoded: bool) -> int:
    position = 0
    for rows in cuts:
        frame = step(position, rows, draws=True)
        track.note(frame, encode_frame(frame) if encoded else None)
        position += rows
    return position


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.booleans(), st.data())
def test_what_was_kept_comes_back_cut_at_any_position(cuts: list[int], encoded: bool, data: st.DataObject) -> None:
    track = History().begin(key_of(1), b"open")
    total = noted(track, cuts, encoded=encoded)
    asked = data.draw(st.integers(0, total + 5))
    frames = list(track.frames(asked))
    shown = min(asked, total)
    assert track.positions(asked) == shown == sum(frame.rows for frame in frames)
    assert b"".join(frame.body for frame in frames) == b"".join(n.to_bytes(ROW, "little") for n in range(shown))
    assert all(frame.trace == () and frame.step == 0 for frame in frames), "a trace is nobody's business"
    ends = {sum(cuts[: index + 1]) for index in range(len(cuts))}
    for frame in frames:
        assert (frame.flags is Flag.SAMPLE) == (frame.position + frame.rows in ends), (
            "a draw stands behind its row alone"
        )


def test_nothing_is_copied_and_no_object_is_made_for_a_step() -> None:
    track, frame = History().begin(key_of(1), b"open"), step(0, 2)
    data = encode_frame(frame)
    assert isinstance(frame.body, memoryview)
    payload = frame.body.obj
    before = [sys.getrefcount(payload), sys.getrefcount(data), sys.getrefcount(frame)]
    track.note(frame)
    track.note(frame, data)
    after = [sys.getrefcount(payload), sys.getrefcount(data), sys.getrefcount(frame)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 0]


def test_a_view_of_a_packet_is_kept_as_it_is_and_costs_what_it_keeps_in_memory() -> None:
    history = History()
    track = history.begin(key_of(1), b"open")
    packet = bytes(range(200)) * 5
    track.note(Frame(Kind.STEP, SESSION, 0, 0, 0, 1, DType.F32, body=memoryview(packet)[10 : 10 + ROW]))
    assert history.num_bytes == track.num_bytes == 1000 + HISTORY_FRAME_BYTES
    assert [bytes(frame.body) for frame in track.frames(1)] == [packet[10 : 10 + ROW]]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=60))
def test_the_budget_holds_whatever_is_noted_and_the_oldest_makes_room(notes: list[tuple[int, int]]) -> None:
    history = History(max_bytes=3000, max_track_bytes=2000)
    tracks: dict[int, Track] = {}
    ends: dict[int, int] = {}
    for number, rows in notes:
        if number not in tracks:
            tracks[number], ends[number] = history.begin(key_of(number), b"open"), 0
        tracks[number].note(step(ends[number], rows))
        ends[number] += rows
        kept = [track for track in tracks.values() if history.find(track.key) is track]
        assert history.num_bytes == sum(track.num_bytes for track in kept) <= 3000
        assert all(track.num_bytes <= 2000 for track in kept)
        for track in kept:
            frames = list(track.frames(1 << 20))
            assert [frame.position for frame in frames] == [sum(f.rows for f in frames[:i]) for i in range(len(frames))]


def test_of_what_is_too_long_the_beginning_is_kept() -> None:
    history = History(max_bytes=10_000, max_track_bytes=2 * (HISTORY_FRAME_BYTES + PAYLOAD) + 1)
    track = history.begin(key_of(1), b"open")
    assert noted(track, [1, 1, 1, 1], encoded=False) == 4
    assert track.positions(100) == 2


def test_an_older_session_makes_room_even_while_it_runs_and_is_not_shown_in_part() -> None:
    history = History(max_bytes=2 * (HISTORY_FRAME_BYTES + PAYLOAD), max_track_bytes=1 << 20)
    old, new = history.begin(key_of(1), b"open"), history.begin(key_of(2), b"open")
    old.note(step(0, 1))
    new.note(step(0, 1))
    new.note(step(1, 1))
    assert history.find(old.key) is None
    old.note(step(1, 1))
    assert (old.positions(10), new.positions(10)) == (0, 2)


def test_a_session_is_forgotten_some_time_after_its_end_and_not_before() -> None:
    history = History(ttl_s=900.0)
    track, running = history.begin(key_of(1), b"open"), history.begin(key_of(2), b"open")
    track.note(step(0, 1))
    running.note(step(0, 1))
    track.end(100.0)
    history.expire(999.0)
    assert history.find(track.key) is track
    history.expire(1000.0)
    assert history.find(track.key) is None
    assert history.find(running.key) is running
    assert history.num_bytes == running.num_bytes


def test_a_session_that_kept_nothing_leaves_nothing_and_after_the_end_nothing_is_added() -> None:
    history = History()
    empty, track = history.begin(key_of(1), b"open"), history.begin(key_of(2), b"open")
    track.note(step(0, 1))
    for each in (empty, track):
        each.end(5.0)
    track.note(step(1, 1))
    assert history.num_tracks == 1
    assert track.positions(10) == 1


def test_there_are_so_many_tracks_and_no_more() -> None:
    history = History()
    for number in range(MAX_HISTORY_TRACKS + 3):
        history.begin(key_of(number), b"open")
    assert history.num_tracks == MAX_HISTORY_TRACKS
    assert history.find(key_of(0)) is None


def test_a_stage_keeps_what_concerns_its_neighbour_stages_and_only_where_somebody_is_paid() -> None:
    history = History()
    assert StageTracks.begin(None, opened(1, ticket=ticket())) == StageTracks()
    assert StageTracks.begin(history, opened(1)) == StageTracks(), "unpaid"
    kept = [StageTracks.begin(history, opened(index, ticket=ticket())) for index in range(3)]
    keys = [[None if t is None else (t.key.side, t.key.audited) for t in (s.received, s.sent)] for s in kept]
    first, second, third = (PeerId(stage.peer_id) for stage in STAGES)
    assert keys == [[None, ("input", second)], [("output", first), ("input", third)], [("output", second), None]]
    for each in kept:
        each.end(1.0)
    assert history.num_tracks == 0
