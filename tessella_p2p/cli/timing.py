"""What ``--timing`` shows of an answer: its speed, and its way through the mesh. What the node says is shown, never trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from tessella_p2p.base.limits import MAX_STAGES
from tessella_p2p.cli.asking import Answer
from tessella_p2p.cli.status import short_peer_id
from tessella_p2p.cli.tables import console
from tessella_p2p.cli.terminal import printable

_COLUMNS = ("stage", "layers", "hop ms", "compute ms", "cached")


def show_timing(answer: Answer) -> None:
    """Print the times of an answer to standard error; standard output is the answer's alone."""
    to = console(stderr=True)
    to.print(Text(summary(answer)), soft_wrap=True)
    hops = answer.report.get("route")
    if not isinstance(hops, list) or not hops:
        return
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for hop in hops[:MAX_STAGES]:
        if isinstance(hop, dict):
            table.add_row(*(Text(cell) for cell in _row(hop, answer)))
    to.print(table)


def summary(answer: Answer) -> str:
    """One line: time to the first token, speed, counts, and whose credits it was."""
    times = answer.report.get("timings")
    times = times if isinstance(times, dict) else {}
    paid, tier = answer.report.get("paid"), answer.report.get("tier")
    terms = "paid" if paid is True else "unpaid" if paid is False else ""
    parts = (
        f"first token {_number(times.get('ttft_ms'), 0)} ms",
        f"{_number(times.get('tokens_per_s'), 1)} tokens/s",
        f"{_count(answer.usage, 'prompt_tokens')} + {_count(answer.usage, 'completion_tokens')} tokens",
        f"{printable(str(tier))[:16]} {terms}".strip() if tier else "",
        printable(str(answer.report.get("request_id", "")))[:64],
    )
    return " · ".join(part for part in parts if part)


def _row(hop: Mapping[str, Any], answer: Answer) -> tuple[str, ...]:
    layers, cached = hop.get("layers"), hop.get("cached")
    is_range = isinstance(layers, list) and len(layers) == 2
    return (
        short_peer_id(printable(str(hop.get("peer_id")))),
        f"{_number(layers[0], 0)}–{_number(layers[1], 0)}" if is_range and layers is not None else "–",
        _number(hop.get("hop_ms"), 2),
        _number(hop.get("compute_ms"), 2),
        _cached(cached, answer.usage.get("prompt_tokens")),
    )


def _cached(cached: object, prompt: object) -> str:
    """Positions that a stage had; a route in the middle of an answer begins with more than the prompt."""
    is_part = isinstance(cached, int) and isinstance(prompt, int) and cached <= prompt
    return f"{_number(cached, 0)} of {_number(prompt, 0)}" if is_part else _number(cached, 0)


def _count(counts: Mapping[str, Any], name: str) -> str:
    return _number(counts.get(name), 0)


def _number(value: object, digits: int) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–"
    return f"{value:.{digits}f}"
