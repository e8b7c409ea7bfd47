"""One request over its epochs (shell): tokens in order, reroutes that the client does not see, text that may be shown."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Collection
from typing import Protocol

import structlog
import trio

from tessella_p2p.base.errors import (
    InvalidRequest,
    InvalidStep,
    NoRoute,
    Overloaded,
    RemoteProtocolError,
    TessellaError,
    TooManyHopBodies,
    TransportError,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import FULL_PATIENCE_S
from tessella_p2p.entry.api import (
    Delta,
    Finished,
    GenerateRequest,
    GenerationEvent,
    HopReport,
    Prepared,
    ScoredToken,
    TokenScores,
)
from tessella_p2p.entry.chain import REROUTABLE, Chain, GrammarRefused
from tessella_p2p.entry.codec import PromptCodec
from tessella_p2p.entry.plan import SessionPlan
from tessella_p2p.entry.report import Timing, hop_added_ms_p50, hop_reports
from tessella_p2p.entry.requests import Trail
from tessella_p2p.entry.routes import Route
from tessella_p2p.entry.text import AnswerText
from tessella_p2p.model.grammar import Constraint
from tessella_p2p.stages.engine import Sampled
from tessella_p2p.stages.pooling import Pooled

log = structlog.get_logger(__name__)

RECOVERY_S = 20.0
"""How long an answer that has begun waits for a new route."""
MAX_REROUTES = 8
_POLL_S = 0.25
_PROOF_S = 1.0
"""How often an answer that goes on is noted as a proof of its route."""
_LAST_PAUSE_S = 8.0


class SessionHost(Protocol):
    """What a session needs of its entry."""

    @property
    def codec(self) -> PromptCodec:
        """The model's text side."""
        ...

    @property
    def peer_id(self) -> PeerId:
        """The entry's own id."""
        ...

    def find_route(self, positions: int, recipe: str | None = None) -> Route:
        """The best route now that holds so many positions. Raises `NoRoute`."""
        ...

    def count_token(self) -> None:
        """One more token was sampled."""
        ...

    def note_answer(self, route: Route) -> None:
        """A token came over ``route``."""
        ...

    def punish(self, error: TessellaError, suspects: Collection[PeerId]) -> None:
        """Prefer other peers than the one at fault for a while, and a little than those who may be to blame as well."""
        ...

    def new_chain(self, plan: SessionPlan, epoch: int, route: Route) -> Chain:
        """One epoch, which waits for its tail's token stream from now on; `end_chain` it in any case."""
        ...

    def end_chain(self, chain: Chain) -> None:
        """Close an epoch on every stage. Idempotent; does not wait."""
        ...


class Session:
    """One request over its epochs; implements `entry.api.Generation`."""

    def __init__(
        self,
        host: SessionHost,
        plan: SessionPlan,
        prepared: Prepared,
        request: GenerateRequest,
        tier: str,
        trail: Trail,
        constraint: Constraint | None = None,
    ) -> None:
        self._host = host
        self._plan = plan
        self._prepared = prepared
        self._tier = tier
        self._trail = trail
        self._constraint = constraint  # behind the tokens so far: a tail that breaks the grammar is seen at once
        self._grammar_refusals = 0
        self._proved_at = -math.inf
        self._text = AnswerText(host.codec.decoder(), request.stop, host.codec.end_ids, prepared.max_tokens)
        self._sampled = self._text.token_ids  # it grows
        self._chain: Chain | None = None
        self._recipe = ""
        self._epoch = 0
        self._full_since: float | None = None  # since then only full stages were met
        self._full_pause_s = _POLL_S
        self._full_peers: set[PeerId] = set()
        self._failed_ahead: TessellaError | None = None
        self._timing = Timing(began=trio.current_time())

    @property
    def prepared(self) -> Prepared:
        """What was admitted."""
        return self._prepared

    async def begin(self, route: Route) -> None:
        """Open the first epoch.

        Raises:
            TessellaError: after as many reroutes as are allowed.
        """
        self._recipe = route.recipe
        error = await self._start(route, self._prepared.prompt_ids)
        if error is not None:
            await self._reroute(error)

    async def _start(self, route: Route, ids: tuple[int, ...], wait_s: float = 0.0) -> TessellaError | None:
        """Open an epoch, which waits for places so long; an error that another route may be free of is returned."""
        self._chain = self._host.new_chain(self._plan, self._epoch, route)
        self._trail.opened(self._epoch, self.route, trio.current_time())
        try:
            await self._chain.open(ids, wait_s)
        except REROUTABLE as error:
            return error
        return None

    def close(self) -> None:
        """Close the current epoch on every stage. Idempotent; does not wait."""
        if self._chain is not None:
            self._host.end_chain(self._chain)

    def route(self) -> tuple[HopReport, ...]:
        """The stages that work on it now, with what the last steps took them; before the first decode step, what the prompt took."""
        route, newest = self._chain.route if self._chain is not None else None, self._timing.newest
        return hop_reports(route, self._timing.recent(), self._host.peer_id, newest)

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Deltas, then one `Finished`."""
        while self._text.reason is None:
            sampled = await self._next()
            assert isinstance(sampled, Sampled)  # the chain takes nothing else
            text = self._text.push(sampled.token_id)
            if text is None:
                break
            self._host.count_token()
            if self._text.reason is None:
                await self._send_ahead()
            yield Delta(text, (sampled.token_id,), self._scores(sampled))
        rest, reason = self._text.end()
        if rest:
            yield Delta(rest, ())
        route = self._chain.route if self._chain is not None else None
        self._trail.end(reason, trio.current_time())
        self.close()  # before the client takes the last event, however long that takes
        yield Finished(
            reason=reason,
            prompt_ids=self._prepared.prompt_ids,
            token_ids=tuple(self._sampled),
            route=hop_reports(route, self._timing.decode, self._host.peer_id, self._timing.newest),
            ttft_ms=self._timing.ttft_ms,
            tokens_per_s=self._timing.tokens_per_s,
            tier=self._tier,
            paid=self._plan.ticket is not None,
            request_id=self._plan.request_id,
            hop_added_ms_p50=hop_added_ms_p50(route, self._timing.decode, self._host.peer_id),
        )

    def _scores(self, sampled: Sampled) -> tuple[TokenScores, ...]:
        """What is told of a draw's probabilities: nothing, unless it was asked for."""
        if sampled.logprob is None:
            return ()

        def scored(token_id: int, logprob: float) -> ScoredToken:
            return ScoredToken(token_id, self._host.codec.token_bytes(token_id), logprob)

        top = tuple(scored(each.token_id, each.logprob) for each in sampled.top)
        return (TokenScores(scored(sampled.token_id, sampled.logprob), top),)

    async def _send_ahead(self) -> None:
        """Send the newest token on before the client gets it: the stages need not wait for a slower connection."""
        assert self._chain is not None
        try:
            await self._chain.step(self._sampled[-1:], sample=True)
        except REROUTABLE as error:
            self._failed_ahead = error  # the client gets its token first

    async def vector(self) -> Pooled:
        """What a session that was planned as an embedding comes to, over reroutes. Raises `TessellaError`, as `events`."""
        pooled = await self._next()
        assert isinstance(pooled, Pooled)  # the chain takes nothing else
        return pooled

    async def _next(self) -> Sampled | Pooled:
        """The next draw, or the vector, over reroutes."""
        while True:
            assert self._chain is not None
            try:
                error, self._failed_ahead = self._failed_ahead, None
                if error is not None:
                    raise error
                if self._sampled and self._needs_step():
                    await self._chain.step(self._sampled[-1:], sample=True)
                token = await self._chain.next_token()
                self._check_drawn(token.drawn)
            except REROUTABLE as error:
                try:
                    await self._reroute(error)
                except TessellaError as final:  # the client may never let it out of the context that notes it
                    self._trail.fail(final, trio.current_time())
                    raise
                continue
            now = trio.current_time()
            self._timing.note(token, now)
            self._trail.token(now)
            if now >= self._proved_at + _PROOF_S:
                self._proved_at = now
                self._host.note_answer(self._chain.route)
            self._full_since = None
            return token.drawn

    def _check_drawn(self, drawn: Sampled | Pooled) -> None:
        """Follow the grammar with a draw. Raises `InvalidStep`, with the tail at fault, for one that does not."""
        if self._constraint is None or not isinstance(drawn, Sampled):
            return
        if not self._constraint.admits(drawn.token_id):
            assert self._chain is not None
            raise InvalidStep(f"a token that the grammar does not allow: {drawn.token_id}").blame(self._chain.tail)
        self._constraint.accept(drawn.token_id)

    def _check_refusal(self, error: TessellaError) -> None:
        """Raises `InvalidRequest` where a second stage refuses the grammar: one may be slow or lie, two are believed."""
        self._grammar_refusals += isinstance(error, GrammarRefused)
        if self._grammar_refusals > 1:
            raise InvalidRequest(f"two stages could not follow the grammar; the last one says: {error}", "grammar")

    def _needs_step(self) -> bool:
        """Whether the newest token has not been sent: a new epoch is opened with everything that is known."""
        assert self._chain is not None
        return self._chain.positions_sent < len(self._prepared.prompt_ids) + len(self._sampled)

    async def _reroute(self, error: TessellaError) -> None:
        """Restart on a new route of the same recipe, with the known tokens forced; the client sees no difference.

        Raises:
            TransportError, Overloaded, RemoteProtocolError: the reroutes are used up; says what happened last.
            TooManyHopBodies: there was no place in time.
            NoRoute: no route came in time.
            InvalidRequest: this entry, or a second stage, could not follow the grammar.
        """
        while True:
            self.close()
            if isinstance(error, GrammarRefused) and self._constraint is not None:
                # Raises where this entry cannot go on either: no stage is at fault for its client's grammar.
                self._constraint.allowed(self._plan.vocabulary)
            self._host.punish(error, self._chain.suspects if self._chain is not None else ())
            self._check_refusal(error)
            self._trail.rerouted(error, trio.current_time())
            self._proved_at = -math.inf
            self._timing.reroute()
            self._epoch += 1
            if self._epoch > MAX_REROUTES:
                raise _final(error)
            log.warning(
                "rerouting",
                request_id=self._plan.request_id,
                epoch=self._epoch,
                code=error.code,
                fault_of=error.peer,
                reason=str(error),
            )
            wait_s = 0.0
            if isinstance(error, TooManyHopBodies):
                await self._wait_for_room(error)
                route = await self._wait_for_route(None)
                wait_s = self._place_patience_s(route)
            else:
                self._full_since = None
                self._full_peers.clear()
                route = await self._wait_for_route(error.peer)
            again = await self._start(route, (*self._prepared.prompt_ids, *self._sampled), wait_s)
            if again is None:
                return
            error = again

    async def _wait_for_room(self, full: TooManyHopBodies) -> None:
        """Wait before anybody is asked again, each time twice as long: at once, every candidate would get the prompt in turn.

        Raises:
            TooManyHopBodies: that was long enough.
        """
        if self._full_since is None:
            self._full_since, self._full_pause_s = trio.current_time(), _POLL_S
        if full.peer is not None:
            self._full_peers.add(full.peer)
        left_s = self._full_patience_s()
        if left_s <= 0:
            raise full
        await trio.sleep(min(self._full_pause_s, left_s))
        self._full_pause_s = min(2 * self._full_pause_s, _LAST_PAUSE_S)

    def _full_patience_s(self) -> float:
        """How much longer full stages are waited for."""
        began = trio.current_time() if self._full_since is None else self._full_since
        return began + (RECOVERY_S if self._sampled else FULL_PATIENCE_S) - trio.current_time()

    def _place_patience_s(self, route: Route) -> float:
        """How long an open may wait at full stages: not at all, while there are others that have not said that they are full."""
        if not any(stage.peer_id in self._full_peers for stage in route.stages):
            return 0.0
        return max(0.0, self._full_patience_s())

    async def _wait_for_route(self, avoided: PeerId | None) -> Route:
        """A route without the peer at fault; any route, once waiting for another one has taken long enough."""
        began = trio.current_time()
        # The peer at fault may be back, or be slandered: after a while, each time a longer one, it gets another chance.
        pause_s = min(_POLL_S * 2 ** (self._epoch - 1), _LAST_PAUSE_S)
        while True:
            now = trio.current_time()
            try:
                route = self._host.find_route(self._plan.max_positions, self._recipe)
            except NoRoute:
                if now >= began + RECOVERY_S:
                    raise
            else:
                if now >= began + pause_s or all(stage.peer_id != avoided for stage in route.stages):
                    return route
            await trio.sleep(_POLL_S)


def _final(error: TessellaError) -> TessellaError:
    """What the client is told when every reroute failed; a stage's complaint about its peers is not the client's mistake."""
    if isinstance(error, TransportError | Overloaded):
        return error
    final = RemoteProtocolError(
        f"the session failed on {MAX_REROUTES} routes; the last time with {error.code}: {error}"
    )
    return final.blame(error.peer) if error.peer is not None else final
