"""The mesh as a picture in characters: who holds which layers, where nobody does, what is on its way; pure.

It is anonymous: peers are numbered in the order in which they were seen, and no id, name or address is shown. Nothing is told by colour
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from textual.content import Content

from tessella_p2p.cli.tui.picture import Coverage, Flight, Layers, Picture, Stage
from tessella_p2p.cli.tui.words import holes_of, layers_of, number, shown, verdict

_BARS: Final = " ▁▂▃▄▅▆▇█"
_HOLE: Final = "·"
_LABEL: Final = 14
_MIN_MAP: Final = 10
_MAX_MAP: Final = 60
_NARROWEST: Final = 35
"""As far as the milliseconds: what is behind them is left out where it does not fit."""
_MAX_RATES: Final = 40
_STATUS: Final[Mapping[str, tuple[str, str]]] = {
    "Healthy": ("healthy", "$text-success"),
    "Saturated": ("full", "$text-warning"),
    "Draining": ("draining", "$text-warning"),
    "PendingLoad": ("loading", "$text-warning"),
    "Stale": ("silent", "$text-error"),
    "Offline": ("offline", "$text-error"),
}
_ENDS: Final = {"stop": "finished", "length": "at its length", "cancelled": "left by its client"}
_MAX_NUMBERED: Final = 1 << 16
"""A node that invents peers fills no memory."""
_FILL: Final = {"Healthy": "█", "Saturated": "▓", "Draining": "▒", "PendingLoad": "░"}


class Numbers:
    """Numbers of peers in place of their names; a peer keeps its own as long as the UI runs, and fewer than 65,536 were seen."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, peer_id: str) -> int:
        """The peer's number, from 1."""
        if len(self._numbers) >= _MAX_NUMBERED and peer_id not in self._numbers:
            self._numbers.clear()
        return self._numbers.setdefault(peer_id, len(self._numbers) + 1)


def swarm_picture(picture: Picture, width: int, numbers: Numbers) -> Content:
    """The whole picture, in lines of at most ``width`` cells where that is enough for its columns."""
    for stage in sorted(picture.stages, key=lambda each: each.layers):
        numbers.of(stage.peer_id)
    total = max(picture.model.total_layers, 1)
    span = max(width - _LABEL, _MIN_MAP)
    lines = [*_head(picture, width), Content("")]
    lines.append(Content.assemble((f"{'layers':<{_LABEL}}", "bold"), _axis(total, span)))
    for coverage in picture.coverage:
        lines += _coverage(coverage, total, span)
    lines += [Content(""), *_stages(picture, total, width, numbers), Content(""), *_requests(picture, numbers)]
    return Content("\n").join(lines)


def _head(picture: Picture, width: int) -> list[Content]:
    holes = picture.coverage[0].holes if picture.coverage else ()
    model, state = picture.model, picture.model.readiness.state
    style = {"ready": "$text-success bold", "failed": "$text-error bold", "no_route": "$text-error bold"}.get(
        state, "bold"
    )
    healthy = sum(stage.status == "Healthy" for stage in picture.stages)
    rates = picture.tokens_per_s
    recent = rates.history[-min(_MAX_RATES, max(width - 44, 0)) or len(rates.history) :]
    ago = model.readiness.proven_ago_s
    proven = f", proven {number(ago, 0)} s ago" if ago is not None else ""
    return [
        Content.assemble((f"{shown(model.id or 'the model')} {verdict(model, holes)}", style), proven),
        Content(
            f"{healthy} of {picture.num_stages} stages healthy · {number(rates.now)} tokens a second {spark(recent)}"
        ),
    ]


def spark(values: Sequence[float]) -> str:
    """Numbers as a row of bars, the highest one as high as a line; it begins where there is something."""
    highest = max(values, default=0.0)
    if highest <= 0:
        return ""
    return "".join(_BARS[round(max(value, 0.0) / highest * (len(_BARS) - 1))] for value in values).lstrip()


def _axis(total: int, span: int) -> str:
    left, right = "0", str(total)
    return left + " " * max(span - len(left) - len(right), 1) + right


def _cells(layers: Layers, total: int, span: int) -> tuple[int, int]:
    """The cells of a stretch of layers; never none."""
    start = min(layers[0] * span // total, span - 1)
    return start, min(max(-(-layers[1] * span // total), start + 1), span)


def _coverage(coverage: Coverage, total: int, span: int) -> list[Content]:
    """How many replicas hold each stretch, as digits; a hole is dots, and said in words."""
    row = [_HOLE] * span
    for segment in sorted(coverage.segments, key=lambda each: -each.replicas):  # a hole too narrow for a cell is seen
        start, end = _cells(segment.layers, total, span)
        mark = _HOLE if segment.replicas == 0 else str(segment.replicas) if segment.replicas < 10 else "+"
        row[start:end] = mark * (end - start)
    text = "".join(row)
    label = f"{shown(coverage.recipe or 'replicas', _LABEL - 2):<{_LABEL}}"
    parts = [(part, "$text-error bold" if part == _HOLE else "$text-success") for part in text]
    lines = [Content.assemble(label, *parts)]
    if coverage.holes:
        lines.append(
            Content.assemble(" " * _LABEL, (f"hole: nobody serves {holes_of(coverage.holes)}", "$text-error bold"))
        )
    return lines


def _stages(picture: Picture, total: int, width: int, numbers: Numbers) -> list[Content]:
    hops = {
        hop.peer_id: hop.hop_ms
        for flight in reversed((*picture.flights, *picture.ended))
        for hop in flight.route
        if hop.hop_ms > 0
    }
    if not picture.stages:
        return [Content("no stage is known yet")]
    head = f"{'peer':<9}{'layers':>8}  {'state':<9}{'hop ms':>7}{'queue':>7}  "
    span = min(max(width - len(head), 0), _MAX_MAP)
    head = head[: max(width, _NARROWEST)] if span < _MIN_MAP else head
    lines = [Content.styled(head, "bold")]
    for stage in sorted(picture.stages, key=lambda each: (each.layers, numbers.of(each.peer_id))):
        line = _stage(stage, hops.get(stage.peer_id), total, max(span, _MIN_MAP), numbers)
        lines.append(line if span >= _MIN_MAP else line[: len(head)])
    if picture.num_stages > len(picture.stages):
        lines.append(Content(f"and {picture.num_stages - len(picture.stages)} more"))
    return lines


def _stage(stage: Stage, hop_ms: float | None, total: int, span: int, numbers: Numbers) -> Content:
    word, style = _STATUS.get(stage.status, (shown(stage.status, 8), ""))
    start, end = _cells(stage.layers, total, span)
    name = f"{numbers.of(stage.peer_id)}{' (you)' if stage.own else ' canary' if stage.canary else ''}"
    fill = _FILL.get(stage.status, "-") * (end - start)
    return Content.assemble(
        f"{name:<9}{layers_of(stage.layers):>8}  ",
        (f"{word:<9}", style),
        f"{number(hop_ms):>7}{stage.queue_depth:>7}  {_HOLE * start}",
        (fill, style),
        _HOLE * (span - end),
    )


def _requests(picture: Picture, numbers: Numbers) -> list[Content]:
    lines = [Content.styled(f"{'requests':<10}{picture.num_flights} under way through this node", "bold")]
    lines += [_request(flight, numbers) for flight in picture.flights]
    lines += [_request(flight, numbers) for flight in picture.ended[:3]]
    return lines


def _request(flight: Flight, numbers: Numbers) -> Content:
    word = shown(flight.state, 12) if flight.end is None else _ENDS.get(flight.end, f"failed: {shown(flight.end, 24)}")
    rate = "" if flight.tokens_per_s is None else f", {number(flight.tokens_per_s)}/s"
    again = f", rerouted {flight.reroutes}×" if flight.reroutes else ""
    way = " › ".join(str(numbers.of(hop.peer_id)) for hop in flight.route[:32])
    return Content(f"  {word}, {flight.tokens} tokens{rate}{again}{f' · peers {way}' if way else ''}")
