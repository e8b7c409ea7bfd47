"""What a client is told about its route (pure): times, from the traces that came with the tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from tessella_p2p.base.ids import PeerId
from tessella_p2p.entry.api import HopReport
from tessella_p2p.entry.plan import Token
from tessella_p2p.entry.routes import Route

_STEPS_KEPT = 4096
_RECENT_STEPS = 32


@dataclass(slots=True)
class Timing:
    """Times of one request, in seconds of trio's clock.

    ``decode`` holds the first decode steps on its newest route, ``newest`` the last token of it, if there is one.
    """

    began: float
    first_token_at: float | None = None
    last_token_at: float = 0.0
    newest: Token | None = None
    _is_decode: bool = False
    decode: list[Token] = field(default_factory=list)
    _recent: deque[Token] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    num_tokens: int = 0

    def note(self, token: Token, now: float) -> None:
        """A token arrived."""
        if self.first_token_at is None:
            self.first_token_at = now
        elif self._is_decode:
            self._recent.append(token)
            if len(self.decode) < _STEPS_KEPT:
                self.decode.append(token)
        self._is_decode = True
        self.newest = token
        self.num_tokens += 1
        self.last_token_at = now

    def reroute(self) -> None:
        """What follows comes over other stages, and begins with everything known computed anew: no decode step."""
        self.decode.clear()
        self._recent.clear()
        self._is_decode = False
        self.newest = None

    def recent(self) -> list[Token]:
        """The steps that tell how long each hop takes now; before the first decode step, the one that computed the prompt."""
        if self._recent:
            return list(self._recent)
        return [self.newest] if self.newest is not None else []

    @property
    def ttft_ms(self) -> float:
        """From admission to the first token; 0 without a token."""
        return (self.first_token_at - self.began) * 1000 if self.first_token_at is not None else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed after the first token; 0 with fewer than two tokens."""
        span_s = self.last_token_at - self.first_token_at if self.first_token_at is not None else 0.0
        return (self.num_tokens - 1) / span_s if span_s > 0 else 0.0


def _path(route: Route, entry: PeerId) -> list[PeerId]:
    return [entry, *(stage.peer_id for stage in route.stages), entry]


def _transfers(route: Route, entry: PeerId) -> int:
    """Hops between two different peers, on the way from the entry over every stage back to the entry."""
    return sum(a != b for a, b in pairwise(_path(route, entry)))


def hop_added_ms_p50(route: Route | None, steps: Sequence[Token], entry: PeerId) -> float | None:
    """What the network and the queues add to a step, per transfer: the median of (wall − sum of stage compute) / transfers."""
    transfers = _transfers(route, entry) if route is not None else 0
    if not transfers or not steps:
        return None
    added_us = [max(token.wall_us - sum(stage.compute_us for stage in token.trace), 0) for token in steps]
    return round(median(added_us) / transfers / 1000, 3)


def hop_reports(
    route: Route | None, steps: Sequence[Token], entry: PeerId, newest: Token | None
) -> tuple[HopReport, ...]:
    """The route, with the median milliseconds of each hop: the stage's own time, and its share of the transfers.

    Args:
        route: the stages; None gives nothing.
        steps: whose times count.
        entry: where the route begins and ends.
        newest: the last token that came over it: its trace says what was cached.
    """
    if route is None:
        return ()
    transfers = _transfers(route, entry)
    shares = [
        max(token.wall_us - sum(stage.total_us for stage in token.trace), 0) / max(transfers, 1) for token in steps
    ]
    share_us = median(shares) if shares else 0.0
    reports = []
    for index, (previous, stage) in enumerate(zip(_path(route, entry), route.stages, strict=False)):
        own = [token.trace[index] for token in steps]
        total_us = median(entry.total_us for entry in own) if own else 0.0
        compute_us = median(entry.compute_us for entry in own) if own else 0.0
        remote_us = share_us if previous != stage.peer_id else 0.0
        reports.append(
            HopReport(
                peer_id=stage.peer_id,
                layers=stage.layers,
                hop_ms=round((total_us + remote_us) / 1000, 3),
                compute_ms=round(compute_us / 1000, 3),
                cached=newest.trace[index].cached_positions if newest is not None else None,
            )
        )
    return tuple(reports)
