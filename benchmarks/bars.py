"""What the figures are to reach, and the table that says whether they do (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from benchmarks.results import Result

Verdict = Literal["reached", "aim reached", "NOT reached"]


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure is to reach.

    Attributes:
        bar: what it must reach.
        aim: what it should reach, or None where the bar is all that is asked.
        at_least: whether more is better.
    """

    bar: float
    aim: float | None = None
    at_least: bool = True

    def verdict(self, value: float) -> Verdict:
        """Where ``value`` stands; a figure that is exactly the bar has reached it."""
        if self.aim is not None and self._holds(value, self.aim):
            return "aim reached"
        return "reached" if self._holds(value, self.bar) else "NOT reached"

    def _holds(self, value: float, wanted: float) -> bool:
        return value >= wanted if self.at_least else value <= wanted

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{sign} {self.bar:g}" + (f" (aim {self.aim:g})" if self.aim is not None else "")


BARS: Final[Mapping[str, Bar]] = MappingProxyType(
    {
        "engine.prefill512_vs_llamacpp": Bar(2.0, 3.0),
        "engine.decode_b1_vs_llamacpp": Bar(0.8, 1.0),
        "engine.decode_b8_vs_llamacpp": Bar(1.5, 2.0),
        "engine.peak_memory_vs_bytes": Bar(1.3, at_least=False),
        "chain.ttft512_vs_rpc": Bar(3.0),
        "chain.decode_1_vs_rpc": Bar(1.0),
        "chain.decode_8_vs_rpc_8": Bar(3.0, 4.0),
        "chain.decode_8_vs_best_local": Bar(1.0, 1.2),
        "chain.two_stage_1_vs_solo": Bar(0.85),
        "chain.two_stage_3_vs_solo": Bar(1.15),
        "chain.two_stage_8_vs_solo": Bar(1.5, 1.77),
        "chain.hop_added_ms_p50": Bar(0.5, at_least=False),
        "net.hop_added_ms_p50": Bar(0.5, at_least=False),
        "net.throughput_vs_tcp": Bar(0.3, 0.4),
        "http.first_chunk_ms_p50": Bar(50.0, at_least=False),
        "http.cpu_us_per_chunk": Bar(150.0, at_least=False),
        "http.streams_200_added_ms_p99": Bar(500.0, at_least=False),
        "orchestrator.grants_per_s": Bar(200.0),
        "ledger.settlements_batched_per_s": Bar(2000.0),
        "ledger.open_10m_s": Bar(5.0, at_least=False),
        "ledger.page_10m_ms": Bar(50.0, at_least=False),
    }
)
"""By name. `engine.bit_identity_price` has none: it is a price, and is only reported."""


def barred_names(groups: Collection[str]) -> list[str]:
    """The names with a bar that ``groups`` measure."""
    return [name for name in BARS if name.partition(".")[0] in groups]


def table(results: Sequence[Result], groups: Collection[str]) -> Iterator[str]:
    """Lines for people: every figure with its spread, bar and verdict; then what has a bar and was not measured.

    Args:
        results: what was measured.
        groups: what was asked for.
    """
    rows = [("", "median", "", "runs", "bar", "", "")]
    for result in results:
        bar = BARS.get(result.name)
        low, high = min(result.runs), max(result.runs)
        spread = f"{low:.3g}–{high:.3g}" if len(result.runs) > 1 else "one run"
        verdict = bar.verdict(result.value) if bar is not None else ""
        rows.append((result.name, f"{result.value:.4g}", result.unit, spread, str(bar or ""), verdict, result.note))
    measured = {result.name for result in results}
    rows += [
        (name, "—", "", "", str(BARS[name]), "NOT measured", "")
        for name in barred_names(groups)
        if name not in measured
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
