"""Whether a model can be offered: which routes have answered, and how long ago (pure). Times are trio's, in seconds.

That stages say that they serve is one thing, that a token comes back is another: a stage may be frozen, unreachable from here, or lie.
So a model counts as ready while a complete route has answered lately. A proof belongs to the stages of its route: it falls when one of
them is gone, serves other layers, or failed since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from tessella_p2p.base.errors import NoRoute
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import MAX_PROVEN_PATHS, PROBE_RETRY_S, READY_S
from tessella_p2p.dht.stage_records import VerifiedStage

Standing = Literal["ready", "old", "unproven"]
"""``ready``: a route of these stages answered lately; ``old``: it did, and nobody has asked for a while; ``unproven``: none has."""


@dataclass(frozen=True, slots=True)
class PathStage:
    """What makes a stage the same one as before."""

    peer_id: PeerId
    layers: LayerRange
    recipe: str


Path = tuple[PathStage, ...]
"""The stages of a route, from the first layer to the last."""


def path_of(stages: Iterable[VerifiedStage]) -> Path:
    """The path that a route takes."""
    return tuple(PathStage(stage.peer_id, stage.layers, stage.recipe) for stage in stages)


@dataclass(frozen=True, slots=True)
class ModelReadiness:
    """What an entry tells of its model.

    Attributes:
        state: a `Standing`; ``failed`` where the last try proved nothing, ``no_route`` where no stages cover the model.
        proven_ago_s: since a route of the stages that serve now answered; None where none has.
        missing: half-open layer ranges that nobody serves, or that do not answer.
    """

    state: Literal["ready", "old", "unproven", "failed", "no_route"]
    proven_ago_s: float | None = None
    missing: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Failed:
    """The last attempt that proved nothing."""

    paths: frozenset[Path]
    at: float
    reason: str
    missing: tuple[tuple[int, int], ...]


class Readiness:
    """What an entry knows of its routes by having used them.

    Args:
        ready_s: how long a proof is recent.
        retry_s: how long a path that failed is not tried again.
    """

    def __init__(self, ready_s: float = READY_S, retry_s: float = PROBE_RETRY_S) -> None:
        self._ready_s = ready_s
        self._retry_s = retry_s
        self._proven: OrderedDict[Path, float] = OrderedDict()
        self._failed: _Failed | None = None
        self.failures = 0
        """Attempts in a row that proved nothing."""

    def prove(self, path: Path, now: float) -> None:
        """``path`` answered."""
        self._proven[path] = now
        self._proven.move_to_end(path)
        if len(self._proven) > MAX_PROVEN_PATHS:
            self._proven.popitem(last=False)
        self._failed, self.failures = None, 0

    def doubt(self, peers: Collection[PeerId]) -> None:
        """One of ``peers`` failed: what was proven over it counts no more."""
        for path in [path for path in self._proven if any(stage.peer_id in peers for stage in path)]:
            del self._proven[path]

    def fail(self, paths: Iterable[Path], reason: str, missing: tuple[tuple[int, int], ...], now: float) -> None:
        """An attempt over ``paths`` proved nothing.

        Args:
            paths: what was tried, one after the other.
            reason: for whoever asks.
            missing: the half-open layer ranges that did not answer.
            now: the time.
        """
        self._failed = _Failed(frozenset(paths), now, reason, missing)
        self.failures += 1

    def standing(self, serving: Collection[PathStage], now: float) -> Standing:
        """How the model stands while ``serving`` are the stages that say that they serve."""
        proven_at = self.proven_at(serving)
        if proven_at is None:
            return "unproven"
        return "ready" if now < proven_at + self._ready_s else "old"

    def proven_at(self, serving: Collection[PathStage]) -> float | None:
        """When a path of ``serving`` answered last; None where none of them did."""
        return max((at for path, at in self._proven.items() if all(stage in serving for stage in path)), default=None)

    def report(self, serving: Collection[PathStage], now: float) -> ModelReadiness:
        """How the model stands, for people."""
        proven_at = self.proven_at(serving)
        if proven_at is not None:
            return ModelReadiness(self.standing(serving, now), now - proven_at)
        return (
            ModelReadiness("unproven") if self._failed is None else ModelReadiness("failed", None, self._failed.missing)
        )

    def refusal(self, path: Path, now: float) -> NoRoute | None:
        """Why nothing is sent over ``path`` now: it failed a moment ago. A new error each time, for it is raised."""
        failed = self._failed
        if failed is None or path not in failed.paths or now >= failed.at + self._retry_s:
            return None
        return NoRoute(failed.reason, failed.missing, retry_after_s=failed.at + self._retry_s - now)
