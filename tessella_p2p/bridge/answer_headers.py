"""The headers that every generated answer has: which request it was, and who worked for it (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tessella_p2p.entry.api import HopReport

REQUEST_ID: Final = "x-request-id"
ROUTE: Final = "x-tessella-route"
_MOST_MS = 99_999_999.0
"""What a decimal of RFC 9651 surely holds."""


def answer_headers(request_id: str, route: Sequence[HopReport]) -> dict[str, str]:
    """The headers of an answer that ``route`` gave."""
    headers = {REQUEST_ID: request_id}
    if route:
        headers[ROUTE] = route_list(route)
    return headers


def route_list(route: Sequence[HopReport]) -> str:
    """A list of RFC 9651: each stage's peer id, its half-open range of layers, and the milliseconds of its hop once they are known.

    A peer id begins with a digit, which a token of the RFC may not, so it is a string.
    """
    return ", ".join(_member(hop) for hop in route)


def _member(hop: HopReport) -> str:
    ms = f";ms={min(hop.hop_ms, _MOST_MS):.3f}" if hop.hop_ms > 0 else ""
    return f'"{hop.peer_id}";layers="{hop.layers.start}-{hop.layers.end}"{ms}'
