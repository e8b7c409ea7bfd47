"""Proves routes (shell): one unpaid token, where no request has shown lately that tokens come back.

A route is tried when the node starts, when its stages change, and when somebody asks and the last answer is long ago. Nobody asks an
idle node, so it leaves its stages asleep.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import structlog
import trio

from tessella_p2p.base.errors import HopTimeout, NoRoute, TessellaError, TooManyHopBodies
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_PROBED_PATHS, PROBE_RETRY_MAX_S, PROBE_RETRY_S, PROBE_S
from tessella_p2p.dht.service import Discovery
from tessella_p2p.entry.chain import Chain
from tessella_p2p.entry.plan import SessionPlan
from tessella_p2p.entry.readiness import Path, PathStage, Readiness, path_of
from tessella_p2p.entry.routes import Route

log = structlog.get_logger(__name__)

_SETTLE_S = 1.0
"""Records come in bursts: how long they are let come before routes are looked at."""
_PROBE_IDS = (0,)
"""The shortest prompt there is; what it means does not matter."""


class ProvingHost(Protocol):
    """What proving needs of its entry."""

    def find_route(self) -> Route:
        """The best route now. Raises `NoRoute`."""
        ...

    def serving(self) -> Collection[PathStage]:
        """Every stage that says that it serves."""
        ...

    def probe_plan(self, num_prompt: int) -> SessionPlan:
        """A session of one token behind a prompt, which nobody is paid for."""
        ...

    def new_chain(self, plan: SessionPlan, epoch: int, route: Route) -> Chain:
        """One epoch; `end_chain` it in any case."""
        ...

    def end_chain(self, chain: Chain) -> None:
        """Close an epoch on every stage."""
        ...

    def punish(self, error: TessellaError, suspects: Collection[PeerId]) -> None:
        """Prefer other peers than those at fault for a while."""
        ...


@dataclass(slots=True)
class _Attempt:
    """What everybody who asks meanwhile waits for."""

    done: trio.Event = field(default_factory=trio.Event)
    refusal: Callable[[], NoRoute] | None = None


class Proving:
    """Proves the routes of one entry.

    Args:
        host: finds routes and opens chains.
        readiness: what is known; requests that are answered add to it.
        discovery: says when stages come and go.
    """

    def __init__(self, host: ProvingHost, readiness: Readiness, discovery: Discovery) -> None:
        self._host = host
        self._readiness = readiness
        self._discovery = discovery
        self._nursery: trio.Nursery | None = None
        self._attempt: _Attempt | None = None

    async def run(self) -> None:
        """Prove what is new, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                while True:
                    with suppress(NoRoute):  # whoever asks is told
                        await self.admit()
                    await self._until_news()
            finally:
                self._nursery = None

    async def _until_news(self) -> None:
        """Wait until stages have come or gone; longer each time that a try failed, for a broken route is nothing new."""
        await self._discovery.changed()
        failures = min(self._readiness.failures, 16)
        await trio.sleep(min(PROBE_RETRY_S * 2.0**failures, PROBE_RETRY_MAX_S) if failures else _SETTLE_S)

    async def admit(self) -> bool:
        """See to it that the stages there are have answered at some time. Cancelled, the attempt goes on for others.

        Returns:
            Whether that took an attempt, and the best route may be another one now.

        Raises:
            NoRoute: as `check`.
        """
        if self._standing() != "unproven":
            return False
        await self.check()
        return True

    async def check(self) -> None:
        """See to it that a route has answered lately. Cancelled, the attempt goes on for others.

        Raises:
            NoRoute: there is none, it does not answer, or it did not a moment ago.
        """
        route = self._host.find_route()
        if self._standing() == "ready":
            return
        refusal = self._readiness.refusal(path_of(route.stages), trio.current_time())
        if refusal is not None:
            raise refusal
        if self._nursery is None:
            raise NoRoute("this node is not up yet, or is leaving; try again in a moment")
        attempt = self._attempt
        if attempt is None:
            attempt = self._attempt = _Attempt()
            self._nursery.start_soon(self._prove, attempt)
        await attempt.done.wait()
        if attempt.refusal is not None:
            raise attempt.refusal()

    def _standing(self) -> str:
        return self._readiness.standing(self._host.serving(), trio.current_time())

    async def _prove(self, attempt: _Attempt) -> None:
        try:
            await self._try_routes(attempt)
        finally:
            self._attempt = None
            attempt.done.set()

    async def _try_routes(self, attempt: _Attempt) -> None:
        """Try the best route, and while there is another one, that."""
        tried: set[Path] = set()
        reason, missing = "", ()  # type: str, tuple[tuple[int, int], ...]
        for _ in range(MAX_PROBED_PATHS):
            try:
                route = self._host.find_route()
            except NoRoute as error:
                reason, missing = str(error), error.missing
                break
            path = path_of(route.stages)
            if path in tried:
                break
            tried.add(path)
            failure = await self._try(route)
            now = trio.current_time()
            if failure is None:
                self._readiness.prove(path, now)
                return
            missing = _silent(route, failure.peer)
            words = ", ".join(f"{start}–{end}" for start, end in missing)
            reason = (
                f"layers {words} do not answer, though a peer says that it serves them ({failure.code}); try again soon"
            )
            log.warning("a route does not answer", code=failure.code, fault_of=failure.peer, reason=str(failure))
        self._readiness.fail(tried, reason, missing, trio.current_time())
        attempt.refusal = lambda: NoRoute(reason, missing, retry_after_s=PROBE_RETRY_S)

    async def _try(self, route: Route) -> TessellaError | None:
        """Ask ``route`` for a token; what went wrong, or None: it came, or a stage is full, and so at work."""
        chain = self._host.new_chain(self._host.probe_plan(len(_PROBE_IDS)), 0, route)
        try:
            with trio.move_on_after(PROBE_S):
                await chain.open(_PROBE_IDS)
                await chain.next_token()
                return None
            failure: TessellaError = HopTimeout(f"no token for {PROBE_S:g} s")
            suspects = tuple(stage.peer_id for stage in route.stages)
        except TooManyHopBodies:
            return None
        except TessellaError as error:
            failure, suspects = error, chain.suspects
        finally:
            self._host.end_chain(chain)
        self._host.punish(failure, suspects)
        return failure


def _silent(route: Route, accused: PeerId | None) -> tuple[tuple[int, int], ...]:
    """The layers that did not answer: those of the peer at fault, or, where that is not known, of any."""
    named = tuple(stage.layers.as_tuple() for stage in route.stages if stage.peer_id == accused)
    return named or tuple(stage.layers.as_tuple() for stage in route.stages)
