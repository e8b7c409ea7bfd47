"""Steps are judged on their headers: the next one is new, an old one is replayed, anything else is refused before it is read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import InvalidStep
from tessella_p2p.base.ids import LayerRange, SessionId
from tessella_p2p.base.limits import MAX_HOP_BYTES, MAX_QUEUED_STEPS
from tessella_p2p.stages.intake import StepIntake
from tessella_p2p.stages.toy import ToyEngine, ToyModel
from tessella_p2p.wire.frames import (
    HEADER_BYTES,
    DType,
    Flag,
    Frame,
    Header,
    Kind,
    TraceEntry,
    encode_frame,
    parse_header,
)

SESSION = SessionId(b"s" * 16)
ROW_BYTES = 32


def step(position: int, rows: int, **changes: Any) -> Frame:
    fields: dict[str, Any] = {
        "dtype": DType.F32,
        "trace": (TraceEntry(1, 2, 3),),
        "body": bytes(rows * ROW_BYTES),
    }
    return Frame(Kind.STEP, SESSION, 0, 0, position, rows, **(fields | changes))


def header(frame: Frame) -> Header:
    return parse_header(encode_frame(frame)[:HEADER_BYTES])


def intake(max_positions: int = 100) -> StepIntake:
    return StepIntake.for_engine(ToyEngine(ToyModel(6), LayerRange(2, 4)), max_positions, 1)


@given(st.lists(st.tuples(st.integers(0, 110), st.integers(1, 40)), max_size=30))
def test_only_contiguous_rows_within_the_session_are_new(steps: list[tuple[int, int]]) -> None:
    gate, taken = intake(), 0
    for position, rows in steps:
        frame = step(position, rows)
        if position == taken and position + rows <= 100:
            assert gate.judge(header(frame)) == "new"
            gate.take(frame)
            gate.finish()
            taken += rows
        elif position + rows <= taken:
            assert gate.judge(header(frame)) == "replayed"
        else:
            with pytest.raises(InvalidStep):
                gate.judge(header(frame))
    assert gate.positions == taken <= 100


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": DType.U32},
        {"dtype": DType.BF16},
        {"body": bytes(2 * ROW_BYTES + 8)},
        {"body": bytes(2 * ROW_BYTES - 8)},
        {"trace": ()},
        {"trace": (TraceEntry(0, 0, 0),) * 2},
    ],
    ids=["dtype", "narrow dtype", "wide rows", "short rows", "no trace", "a padded trace"],
)
def test_a_step_of_another_form_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidStep):
        intake().judge(header(step(0, 2, **changes)))


def test_from_the_first_draw_on_every_step_is_one_row_that_asks_for_the_next() -> None:
    gate = intake()
    gate.take(step(0, 2))
    gate.take(step(2, 3, flags=Flag.SAMPLE))
    for without in (step(5, 1), step(5, 2, flags=Flag.SAMPLE)):
        with pytest.raises(InvalidStep):
            gate.judge(header(without))
    assert gate.judge(header(step(5, 1, flags=Flag.SAMPLE))) == "new"
    assert gate.judge(header(step(0, 2))) == "replayed"


def test_a_head_takes_token_ids_without_a_trace() -> None:
    gate = StepIntake.for_engine(ToyEngine(ToyModel(6), LayerRange(0, 4)), 10, 0)
    assert gate.judge(header(step(0, 2, dtype=DType.U32, trace=(), body=bytes(8)))) == "new"
    with pytest.raises(InvalidStep):
        gate.judge(header(step(0, 2, trace=())))


def test_so_many_steps_wait_and_no_more() -> None:
    gate = intake(max_positions=1000)
    for position in range(MAX_QUEUED_STEPS):
        gate.take(step(position, 1))
    with pytest.raises(InvalidStep):
        gate.judge(header(step(MAX_QUEUED_STEPS, 1)))
    gate.finish()
    assert gate.judge(header(step(MAX_QUEUED_STEPS, 1))) == "new"


def test_more_rows_than_one_hop_takes_on_are_refused_at_the_head_that_got_them_as_few_bytes() -> None:
    wide = ToyEngine(ToyModel(6), LayerRange(0, 3))
    wide.hidden_size = 8192
    gate = StepIntake.for_engine(wide, 5000, 0)
    assert gate.max_rows == MAX_HOP_BYTES // (8192 * 4) == 2048
    fits, over = (step(0, rows, dtype=DType.U32, trace=(), body=bytes(4 * rows)) for rows in (2048, 2049))
    assert gate.judge(header(fits)) == "new"
    with pytest.raises(InvalidStep, match="2049 rows"):
        gate.judge(header(over))
