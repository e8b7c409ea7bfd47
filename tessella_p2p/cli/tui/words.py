"""What the terminal UI says of nodes, answers and errors; pure. Everything that came from elsewhere goes through `shown`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tessella_p2p.base.errors import (
    ApiKeyRefused,
    MalformedMessage,
    NoRoute,
    OrchestratorUnreachable,
    Overloaded,
    PromptTooLong,
    RateLimited,
    TessellaError,
    TransportError,
    UnknownModel,
)
from tessella_p2p.cli.asking import Answer
from tessella_p2p.cli.terminal import printable
from tessella_p2p.cli.tui.picture import Model, Picture

_MAX_NAME_CHARS = 64
_MAX_HOPS = 64
_MAX_HOLES = 8

_ADVICE: Final[Sequence[tuple[type[TessellaError], str]]] = (
    (ApiKeyRefused, "/connect asks for a key; its operator makes one with `tessella-p2p keys api add`"),
    (RateLimited, "wait a little, and ask again"),
    (NoRoute, "/swarm shows which layers are missing; it can be asked again as soon as somebody serves them"),
    (OrchestratorUnreachable, "the node waits for its orchestrator; /status shows for how long"),
    (Overloaded, "wait a little, and ask again; /connect chooses another node"),
    (PromptTooLong, "/new begins a new conversation"),
    (UnknownModel, "/model lists what can be asked"),
    (TransportError, "ask again; /connect chooses another node"),
    (MalformedMessage, "/connect chooses another node"),
)
"""What to do about an error; the first class that fits."""

_READINESS: Final[Mapping[str, str]] = {
    "ready": "answers",
    "old": "answered a while ago",
    "unproven": "has not been tried yet",
    "failed": "does not answer",
    "no_route": "does not answer",
}


def shown(value: object, max_chars: int = _MAX_NAME_CHARS) -> str:
    """A name or a word from elsewhere: one line, nothing that drives a terminal, and no longer than a name is."""
    text = " ".join(printable(str(value)[: 4 * max_chars]).split())
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def explained(error: TessellaError) -> str:
    """An error, and what to do about it."""
    advice = next((words for kind, words in _ADVICE if isinstance(error, kind)), None)
    said = shown(error, 600)
    return said if advice is None else f"{said}\n{advice}"


def number(value: object, digits: int = 1) -> str:
    """A number of a node, or a dash where it gave none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–"
    return f"{value:,.{digits}f}" if abs(value) < 1e15 else "–"


def layers_of(layers: object) -> str:
    """A half-open range: ``0–12``."""
    is_range = isinstance(layers, list | tuple) and len(layers) == 2
    return f"{number(layers[0], 0)}–{number(layers[1], 0)}" if is_range else "–"  # type: ignore[index]


def listed(words: Sequence[str]) -> str:
    """Words as a sentence has them."""
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)


def holes_of(ranges: Iterable[object]) -> str:
    """Layer ranges as a sentence has them; of many the first ones."""
    words = [layers_of(each) for each in ranges]
    more = len(words) - _MAX_HOLES
    return listed(words if more <= 0 else [*words[:_MAX_HOLES], f"{more} more"])


def verdict(model: Model, holes: Sequence[object] = ()) -> str:
    """Whether the model answers, in a few words."""
    readiness = model.readiness
    word = _READINESS.get(readiness.state, shown(readiness.state, 24))
    missing = holes_of(readiness.missing or holes) if readiness.state in ("failed", "no_route") else ""
    return f"{word}: layers {missing} are missing" if missing else word


def answer_line(answer: Answer, model: str) -> str:
    """What an answer was: its model, whose credits, its speed."""
    times = answer.report.get("timings")
    times = times if isinstance(times, dict) else {}
    paid, tier = answer.report.get("paid"), answer.report.get("tier")
    terms = "" if paid is None else " paid" if paid is True else " unpaid"
    parts = (
        shown(model, 32),
        f"{shown(tier, 16)}{terms}" if tier else "",
        f"{number(times.get('tokens_per_s'))} tok/s" if times else "",
        f"first {number(times.get('ttft_ms'), 0)} ms" if times else "",
    )
    return " · ".join(part for part in parts if part)


def way_line(answer: Answer) -> str:
    """How long an answer is, and its route: each hop's layers and milliseconds, and nobody's name."""
    hops = answer.report.get("route")
    hops = hops if isinstance(hops, list) else []
    count = f"{number(answer.usage.get('completion_tokens'), 0)} tokens" if answer.usage else ""
    words = [
        f"{layers_of(hop.get('layers'))} {number(hop.get('hop_ms'))} ms"
        for hop in hops[:_MAX_HOPS]
        if isinstance(hop, dict)
    ]
    return " over ".join(part for part in (count, " › ".join(words)) if part)


def mesh_line(picture: Picture) -> str:
    """The mesh in one line, while nothing is asked."""
    parts = [f"{number(picture.tokens_per_s.now)} tok/s in the mesh through this node"]
    if picture.credits is not None:
        parts.append(f"{number(picture.credits.credits, 1)} credits, {shown(picture.credits.tier, 16)}")
    return " · ".join(parts)


def status_text(status: Mapping[str, Any], api_url: str) -> str:
    """``/status``: what a person asks a node about."""
    orchestrator = _part(status, "orchestrator")
    device = _part(status, "device")
    ranges = status.get("layer_ranges")
    ranges = [layers_of(each) for each in ranges] if isinstance(ranges, list) else []
    readiness = _part(status, "readiness")
    missing = readiness.get("missing_layers")
    reachable = (
        "answers"
        if orchestrator.get("reachable") is True
        else f"silent for {number(orchestrator.get('outage_secs'), 0)} s"
    )
    rows = {
        "node": f"{shown(status.get('state'))}, version {shown(status.get('version'))}, {api_url}",
        "peer id": shown(status.get("peer_id")),
        "model": f"{shown(status.get('model'))}, {_READINESS.get(str(readiness.get('state')), 'readiness unknown')}",
        "missing layers": holes_of(missing) if isinstance(missing, list) and missing else "none",
        "serves": f"layers {listed(ranges[:_MAX_HOLES])} in {shown(status.get('recipe'))}" if ranges else "no layers",
        "device": f"{shown(device.get('kind'), 16)}, {'healthy' if device.get('healthy') is True else 'failing'}",
        "sessions": f"{number(status.get('queue_depth'), 0)} of {number(status.get('max_concurrent_hop_bodies'), 0)}",
        "longest prompt": f"{number(status.get('max_input_tokens'), 0)} tokens",
        "orchestrator": reachable,
        "its peer id": shown(orchestrator.get("peer_id")),
    }
    return _table(rows) + "\n`tessella-p2p status` tells all of it."


def credits_text(status: Mapping[str, Any]) -> str:
    """``/credits``: balance, tier, proofs."""
    balance, proofs, orchestrator = _part(status, "credits"), _part(status, "proofs"), _part(status, "orchestrator")
    count = {name: number(proofs.get(name), 0) for name in ("open", "pending", "settled", "held", "refused")}
    rows = {
        "credits": number(balance.get("credits"), 3) if balance else "the orchestrator has told no balance yet",
        "tier": shown(balance.get("tier"), 16) if balance else "–",
        "proofs": f"{count['settled']} settled, {count['open']} open, {count['pending']} on their way, "
        f"{count['held']} held back, {count['refused']} refused",
        "tickets": f"{number(orchestrator.get('tickets_held'), 0)} held for an outage",
    }
    return _table(rows)


def _table(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _part(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = status.get(name)
    return value if isinstance(value, dict) else {}
