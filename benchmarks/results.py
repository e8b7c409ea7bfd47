"""One measurement, as it is computed and written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from tessella_p2p.base.errors import TessellaError


class BenchmarkError(TessellaError):
    """Something that a benchmark needs is missing or failed; the message says what to do."""

    code = "benchmark_error"


@dataclass(frozen=True, slots=True)
class Result:
    """A median over runs. ``note`` says what was measured, and its limit where there is one."""

    name: str
    value: float
    unit: str
    runs: tuple[float, ...]
    note: str


def of_runs(name: str, unit: str, runs: Sequence[float], note: str) -> Result:
    """The median of ``runs``."""
    return Result(name, round(median(runs), 4), unit, tuple(round(run, 4) for run in runs), note)


def ratio_of_runs(name: str, above: Sequence[float], below: Sequence[float], note: str) -> Result:
    """The median of the ratios of neighbouring runs: what the machine did meanwhile cancels out."""
    return of_runs(name, "ratio", [a / b for a, b in zip(above, below, strict=True)], note)


def write_json(results: Sequence[Result], path: Path) -> None:
    """A list of objects for scripts."""
    path.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
