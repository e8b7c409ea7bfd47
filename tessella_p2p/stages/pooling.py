"""A session's vector out of the hidden states of all its positions (pure): their mean, made 1 long.

A tail that was opened for an embedding gets the rows of each step behind the model's last norm, and adds them up as they come. The
sum is taken in float64, row after row, and the length by a sum whose order does not matter; so the vector has the same bits however
the positions were cut into steps and the layers into stages, and an auditor who repeats the work signs for the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tessella_p2p.base.errors import InvalidStep, RemoteProtocolError
from tessella_p2p.stages.engine import Buffer, StepAnswer, StepOutput
from tessella_p2p.wire.frames import DType

VECTOR_DTYPE = DType.F32
_LENGTH_TOLERANCE = 1e-3
"""How far from 1 an honest vector's length may be: it is rounded to float32."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """A vector, ``[width]`` float32, little-endian: what a tail sends for an embedding."""

    body: Buffer

    @property
    def vector(self) -> tuple[float, ...]:
        """Its numbers."""
        return tuple(np.frombuffer(self.body, "<f4").tolist())


class Pool:
    """The running sum of one session.

    Args:
        width: elements of a row.
    """

    __slots__ = ("_num_rows", "_sum", "_width")

    def __init__(self, width: int) -> None:
        self._width = width
        self._sum = np.zeros(width, np.float64)
        self._num_rows = 0

    def add(self, rows: Buffer) -> None:
        """Take the next rows, ``[rows, width]`` float32, little-endian."""
        with np.errstate(invalid="ignore"):  # what is not finite shows in the sum
            for row in np.frombuffer(rows, "<f4").reshape(-1, self._width):
                self._sum += row
                self._num_rows += 1

    def pooled(self) -> Pooled:
        """The vector of all rows so far.

        Raises:
            InvalidStep: there is none: the rows are not finite, or their mean is zero.
        """
        mean = self._sum / max(1, self._num_rows)
        length = math.sqrt(math.fsum((mean * mean).tolist())) if np.isfinite(mean).all() else math.nan
        if not 0.0 < length < math.inf:
            raise InvalidStep(f"{self._num_rows} positions have no mean with a direction")
        return Pooled((mean / length).astype("<f4").tobytes())

    def fold(self, answer: StepAnswer, *, draws: bool) -> StepAnswer | Pooled:
        """What an engine's answer to a step comes to: nothing yet; with ``draws`` the vector; an error, which may be the vector's."""
        if not isinstance(answer, StepOutput):
            return answer
        self.add(answer.body)
        if not draws:
            return None
        try:
            return self.pooled()
        except InvalidStep as error:
            return error


def parse_pooled(body: Buffer) -> Pooled:
    """The vector that a peer sends, of the width that it owes.

    Raises:
        RemoteProtocolError: a number that is none, or another length than 1.
    """
    numbers = np.frombuffer(body, "<f4")
    is_finite = bool(np.isfinite(numbers).all())
    if not is_finite or abs(math.hypot(*numbers.tolist()) - 1.0) > _LENGTH_TOLERANCE:
        raise RemoteProtocolError("a vector that is not 1 long")
    return Pooled(bytes(body))
