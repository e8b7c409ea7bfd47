"""Which steps a stage takes in one (session, epoch), decided on their headers, before a byte of rows is stored (pure).

Steps are contiguous from position 0, so a session never holds more rows than it may have positions, however fast its upstream sends.
Draws are contiguous too: from the first one on every step is one row that asks for the next token. So a proof that says where they
begin says where all of them are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tessella_p2p.base.errors import InvalidStep
from tessella_p2p.base.limits import MAX_HOP_BYTES, MAX_QUEUED_STEPS
from tessella_p2p.stages.engine import StageEngine
from tessella_p2p.wire.frames import DType, Flag, Frame, Header

Verdict = Literal["new", "replayed"]


@dataclass(slots=True)
class StepIntake:
    """What has been taken so far.

    Attributes:
        dtype: of the rows.
        row_bytes: of one row.
        max_rows: of one step: more would not fit into the hop that takes them on.
        max_positions: of the session.
        num_stages_before: each of them adds one trace entry.
        positions: taken so far; the next new step begins here.
        num_waiting: steps that were taken and not yet finished.
        has_drawn: a step asked the tail for a token.
    """

    dtype: DType
    row_bytes: int
    max_rows: int
    max_positions: int
    num_stages_before: int
    positions: int = field(default=0, init=False)
    num_waiting: int = field(default=0, init=False)
    has_drawn: bool = field(default=False, init=False)

    @classmethod
    def for_engine(cls, engine: StageEngine, max_positions: int, num_stages_before: int) -> StepIntake:
        """The intake in front of ``engine``."""
        dtype, width = (DType.U32, 1) if engine.is_head else (engine.wire_dtype, engine.hidden_size)
        max_rows = MAX_HOP_BYTES // (engine.hidden_size * engine.wire_dtype.size)
        return cls(dtype, width * dtype.size, max_rows, max_positions, num_stages_before)

    def judge(self, header: Header) -> Verdict:
        """Whether a STEP is the next one, or one that was taken before: a step is idempotent.

        Raises:
            InvalidStep: it leaves a gap, repeats only in part, has another dtype, size or trace than it should, or more rows than one
                hop takes on, goes beyond the session's positions, leaves out a draw, or too many wait.
        """
        end = header.position + header.rows
        if end <= self.positions:
            return "replayed"
        if header.position != self.positions:
            raise InvalidStep(f"a step at position {header.position} where {self.positions} is next")
        if end > self.max_positions:
            raise InvalidStep(f"a step up to position {end}; the session has {self.max_positions}")
        if header.dtype is not self.dtype or header.body_bytes != header.rows * self.row_bytes:
            raise InvalidStep(
                f"{header.body_bytes} bytes of {header.dtype.name} in {header.rows} rows; "
                f"a row here is {self.row_bytes} bytes of {self.dtype.name}"
            )
        if header.rows > self.max_rows:
            raise InvalidStep(f"{header.rows} rows in one step; one hop takes {self.max_rows} of them on")
        if self.has_drawn and (header.rows != 1 or header.flags is not Flag.SAMPLE):
            raise InvalidStep(f"{header.rows} rows without a draw of their own, after the first draw of the session")
        if header.trace_entries != self.num_stages_before:
            raise InvalidStep(f"a trace of {header.trace_entries} stages behind {self.num_stages_before}")
        if self.num_waiting >= MAX_QUEUED_STEPS:
            raise InvalidStep(f"{self.num_waiting} steps of this session wait already")
        return "new"

    def take(self, frame: Frame) -> None:
        """Account for a new step."""
        self.positions = frame.position + frame.rows
        self.num_waiting += 1
        self.has_drawn = self.has_drawn or frame.flags is Flag.SAMPLE

    def finish(self) -> None:
        """One step that waited is done."""
        self.num_waiting -= 1
