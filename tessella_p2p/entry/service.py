"""The entry role (shell): admit a request, find a route, drive the session over reroutes, turn tokens into text."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Literal

import structlog
import trio

from tessella_p2p.base.errors import (
    InvalidRequest,
    LocalProtocolError,
    NoRoute,
    Overloaded,
    TessellaError,
)
from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.base.limits import FINAL_RECEIPT_S, OUTAGE_GRACE_S
from tessella_p2p.dht.service import Discovery
from tessella_p2p.entry.admission import Admission
from tessella_p2p.entry.api import Caller, Embedded, EmbedRequest, GenerateRequest, ModelFeatures, Prepared
from tessella_p2p.entry.blame import Blame
from tessella_p2p.entry.chain import Chain
from tessella_p2p.entry.codec import PromptCodec
from tessella_p2p.entry.embedding import embed_each, input_ids
from tessella_p2p.entry.finding import RouteFinder, ServedModel
from tessella_p2p.entry.following import Following
from tessella_p2p.entry.granting import Granting
from tessella_p2p.entry.plan import EntryContext, SessionPlan, check_history, check_hop_body, sampling_of
from tessella_p2p.entry.prompting import check_model, checked_ids, prompt_ids
from tessella_p2p.entry.proving import Proving
from tessella_p2p.entry.reach import Reach
from tessella_p2p.entry.readiness import ModelReadiness, PathStage, Readiness, path_of
from tessella_p2p.entry.requests import CANCELLED, RequestBook, RequestKind, Trail
from tessella_p2p.entry.routes import Route
from tessella_p2p.entry.session import Session
from tessella_p2p.entry.token_streams import TokenTable
from tessella_p2p.ledger.client import OrchestratorPort
from tessella_p2p.ledger.failure_reports import FailureReports
from tessella_p2p.model.grammar import Constraint
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols

log = structlog.get_logger(__name__)


class EntryService:
    """Implements `entry.api.Entry` over a swarm view.

    Args:
        client: asks for grants and the topology; without one every request is served unpaid.
        max_input_tokens: the longest prompt that is accepted; None for what the route holds.
        reports: of peers that failed this entry itself; None where nobody is told.
        outage_grace_s: how long requests are served while no orchestrator answers.
        admission: how many requests are open and wait; None for the bounds of `base.limits`.
        prove_routes: a route has to have answered lately to be offered; False where what stages say of themselves is enough.
    """

    def __init__(
        self,
        context: EntryContext,
        model: ServedModel,
        discovery: Discovery,
        client: OrchestratorPort | None,
        *,
        max_input_tokens: int | None = None,
        reports: FailureReports | None = None,
        outage_grace_s: float = OUTAGE_GRACE_S,
        admission: Admission | None = None,
        prove_routes: bool = True,
    ) -> None:
        self._context = context
        self._model = model
        self._discovery = discovery
        self._blame = Blame()
        self._routes = RouteFinder(model, discovery, context.clock, self._blame, context.network.peer_id)
        self._reach = Reach(trio.current_time(), outage_grace_s, discovery.orchestrator_reachable)
        self._granting = Granting(context, client, self._reach, model.model_id, model.manifest_root, self.find_route)
        self._following: Following | None = None
        if client is not None:
            self._following = Following(
                client,
                discovery,
                model.manifest_root,
                self._reach,
                is_routed=self.has_route,
                spread=lambda: 0.5 + int.from_bytes(context.random_bytes(2), "big") / 2**16,
            )
        self._admission = admission or Admission()
        self._max_input_tokens = max_input_tokens
        self._reports = reports
        self._table = TokenTable(context.checkpoint_s)
        self._readiness = Readiness()
        self._proving = Proving(self, self._readiness, discovery) if prove_routes else None
        self._scope_secret = context.random_bytes(32)
        self._nursery: trio.Nursery | None = None
        self._idle = trio.Event()
        self._idle.set()
        self.requests = RequestBook()
        self.tokens = 0

    @property
    def codec(self) -> PromptCodec:
        """The model's text side."""
        return self._model.codec

    @property
    def peer_id(self) -> PeerId:
        """This node."""
        return self._context.network.peer_id

    @property
    def outage_s(self) -> float:
        """How long no orchestrator has answered; 0 while one does."""
        return self._reach.outage_s(trio.current_time())

    @property
    def tickets_held(self) -> int:
        """Unspent tickets for an outage."""
        return self._granting.num_held

    @property
    def peer_failures(self) -> Mapping[PeerId, int]:
        """How often each peer was named as at fault for the end of a session."""
        return self._blame.failures

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept token streams, follow the topology and hold tickets for an outage until cancelled."""
        self._context.network.serve(protocols.TOKENS, self._table.serve)
        self._discovery.watch(self._model.manifest_root)
        task_status.started()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._granting.run)
            if self._following is not None:
                nursery.start_soon(self._following.run)
            if self._proving is not None:
                nursery.start_soon(self._proving.run)
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    # ---- routes ----

    def find_route(self, positions: int = 1, recipe: str | None = None) -> Route:
        """See `finding.RouteFinder.find`."""
        return self._routes.find(positions, recipe)

    def known_models(self) -> tuple[str, ...]:
        """The model."""
        return (self._model.model_id,)

    def model_ids(self) -> tuple[str, ...]:
        """The model, while a complete route serves it, and one has answered lately."""
        if not self.has_route():
            return ()
        is_ready = self._proving is None or self.readiness().state == "ready"
        return (self._model.model_id,) if is_ready else ()

    def has_route(self) -> bool:
        """Whether stages that say that they serve cover the whole model; none of them needs to have answered."""
        return self._routes.exists()

    # ---- readiness ----

    def readiness(self) -> ModelReadiness:
        """How the model stands now, from memory."""
        try:
            self.find_route()
        except NoRoute as error:
            return ModelReadiness("no_route", None, error.missing)
        return self._readiness.report(self.serving(), trio.current_time())

    async def check_ready(self) -> None:
        """See `entry.api.Entry.check_ready`."""
        if self._proving is not None:
            await self._proving.check()
        else:
            self.find_route()

    def serving(self) -> Collection[PathStage]:
        """See `finding.RouteFinder.serving`."""
        return self._routes.serving()

    def note_answer(self, route: Route) -> None:
        """A token came over ``route``."""
        self._readiness.prove(path_of(route.stages), trio.current_time())

    def probe_plan(self, num_prompt: int) -> SessionPlan:
        """A session of one token behind a prompt, which nobody is paid for."""
        model, random_bytes = self._model, self._context.random_bytes
        return SessionPlan(
            session=SessionId(random_bytes(16)),
            request_id=self._granting.new_request_id(),
            model_id=model.model_id,
            manifest_root=model.manifest_root,
            vocabulary=model.codec.vocabulary,
            num_prompt=num_prompt,
            max_positions=num_prompt + 1,
            sampling=sampling_of(GenerateRequest(model.model_id), 0, model.codec.vocabulary),
            output="tokens",
            cache_scope=random_bytes(32),
            digest_key=random_bytes(32),
            ticket=None,
        )

    def features(self, model: str) -> ModelFeatures:
        """See `entry.api.Entry.features`."""
        check_model(model, self._model.model_id)
        return self._model.codec.features

    def text_of(self, token_ids: Sequence[int]) -> str:
        """See `entry.api.Entry.text_of`. Raises `InvalidRequest` for an id outside of the vocabulary."""
        codec = self._model.codec
        return b"".join(map(codec.token_bytes, checked_ids(token_ids, codec.vocabulary, "prompt"))).decode(
            "utf-8", "replace"
        )

    def count_token(self) -> None:
        """One more token was sampled."""
        self.tokens += 1

    async def idle(self) -> None:
        """Wait until no session is open, and every tail has its last receipt."""
        await self._idle.wait()
        await self._table.idle()

    def punish(self, error: TessellaError, suspects: Collection[PeerId]) -> None:
        """Prefer other peers than the one at fault for a while, and a little than those who may be to blame as well.

        This node itself is at fault as a stage of the route, which may be loading another range, and never as the entry.
        """
        own = self._context.network.peer_id
        accused = error.peer if error.peer != own or own in suspects else None
        is_failure = not isinstance(error, Overloaded)
        self._blame.note(accused, suspects, trio.current_time(), is_failure=is_failure)
        if is_failure:
            self._readiness.doubt(suspects if accused is None else (accused,))
        # Where others passed the story on it is theirs; each stage reports its own neighbour.
        if self._reports is not None and accused is not None and accused != own and not set(suspects) - {accused}:
            self._reports.note(accused, error)

    # ---- requests ----

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Session]:
        """See `entry.api.Entry.generate`."""
        trail = self._begin("answer", request.model, request.caller)
        with self._followed(trail):
            async with self._generating(request, trail) as session:
                yield session

    async def embed(self, request: EmbedRequest) -> tuple[Embedded, ...]:
        """See `entry.api.Entry.embed`. Each input is a request in the book; what is refused as a whole is the first one's."""
        first = self._begin("embedding", request.model, request.caller)
        with self._followed(first):
            inputs = await self._admit_inputs(request)
            waiting = iter((first,))

            async def embed_one(ids: tuple[int, ...]) -> Embedded:
                trail = next(waiting, None) or self._begin("embedding", request.model, request.caller)
                with self._followed(trail):
                    return await self._embed_one(request, ids, trail)

            return await embed_each(inputs, embed_one)

    async def _admit_inputs(self, request: EmbedRequest) -> list[tuple[int, ...]]:
        """The ids of each input, once all can be served."""
        self._reach.check(trio.current_time())
        check_model(request.model, self._model.model_id)
        inputs = await input_ids(self._model.codec, request.inputs, self._max_input_tokens)
        longest = max(map(len, inputs))
        self._routes.holding(longest, 0)
        if self._proving is not None and await self._proving.admit():
            self._routes.holding(longest, 0)
        check_hop_body(self._model.hidden_size, longest)
        return inputs

    async def _embed_one(self, request: EmbedRequest, ids: tuple[int, ...], trail: Trail) -> Embedded:
        route = self._routes.holding(len(ids), 0)
        trail.tokenised(len(ids), 0, trio.current_time())
        trail.proven(trio.current_time())
        asked = GenerateRequest(request.model, prompt_ids=ids, caller=request.caller)
        async with self._placed(asked, trail, ids, 0, m.Sampling(), "embedding", route) as session:
            if request.admitted is not None:
                request.admitted(len(ids))
            pooled = await session.vector()
            trail.end("stop", trio.current_time())
            return Embedded(pooled.vector, len(ids), session.prepared.request_id, session.route())

    def _begin(self, kind: RequestKind, model: str, caller: Caller) -> Trail:
        """A new request in the book; `_followed` has to come."""
        return self.requests.begin(
            self._granting.new_request_id(),
            kind,
            model,
            caller,
            now=trio.current_time(),
            now_unix_ms=self._context.clock.unix_ms(),
        )

    @contextmanager
    def _followed(self, trail: Trail) -> Iterator[None]:
        """Note whatever ends a request."""
        try:
            yield
        except TessellaError as error:
            trail.fail(error, trio.current_time())
            raise
        except Exception:  # a bug, which goes on to whoever called: it was not the client that ended this
            trail.end(LocalProtocolError.code, trio.current_time())
            raise
        finally:
            trail.end(CANCELLED, trio.current_time())

    @asynccontextmanager
    async def _generating(self, request: GenerateRequest, trail: Trail) -> AsyncIterator[Session]:
        self._reach.check(trio.current_time())
        ids = await self._tokenise(request)
        route, max_tokens = self._admit(request, len(ids))
        trail.tokenised(len(ids), max_tokens, trio.current_time())
        seed = request.seed if request.seed is not None else int.from_bytes(self._context.random_bytes(8), "big")
        if not 0 <= seed < 2**64:
            raise InvalidRequest("seed is from 0 to 2**64 - 1", "seed")
        sampling = sampling_of(request, seed, self._model.codec.vocabulary)
        check_history(sampling, ids, max_tokens)
        grammar = sampling.grammar
        constraint = None if grammar is None else await self._model.codec.check_grammar(grammar)
        check_hop_body(self._model.hidden_size, len(ids) + (request.max_tokens or 1))
        if self._proving is not None and await self._proving.admit():
            route, max_tokens = self._admit(request, len(ids))
        trail.proven(trio.current_time())
        output: Literal["tokens", "logprobs"] = "logprobs" if request.logprobs else "tokens"
        async with self._placed(request, trail, ids, max_tokens, sampling, output, route, constraint) as session:
            yield session

    @asynccontextmanager
    async def _placed(
        self,
        request: GenerateRequest,
        trail: Trail,
        ids: tuple[int, ...],
        max_tokens: int,
        sampling: m.Sampling,
        output: Literal["tokens", "logprobs", "embedding"],
        route: Route,
        constraint: Constraint | None = None,
    ) -> AsyncIterator[Session]:
        """A session that is granted, has its place, and is open."""
        grant = await self._granting.grant(trail.request_id, route.recipe, len(ids) + max_tokens, request.caller)
        trail.granted(grant.request_id, grant.tier, trio.current_time(), paid=grant.ticket is not None)
        async with self._place(grant.tier) as has_waited:
            trail.placed(trio.current_time())
            if has_waited:
                route = self.find_route(len(ids) + max_tokens, route.recipe)
            plan = SessionPlan(
                session=SessionId(self._context.random_bytes(16)),
                request_id=grant.request_id,
                model_id=self._model.model_id,
                manifest_root=self._model.manifest_root,
                vocabulary=self._model.codec.vocabulary,
                num_prompt=len(ids),
                max_positions=len(ids) + max_tokens,
                sampling=sampling,
                output=output,
                cache_scope=self._cache_scope(request.caller.name),
                digest_key=self._context.random_bytes(32),
                ticket=grant.ticket,
                ticket_open_before=grant.open_before,
                hidden_size=self._model.hidden_size,
            )
            prepared = Prepared(grant.request_id, self._model.model_id, ids, max_tokens)
            session = Session(self, plan, prepared, request, grant.tier, trail, constraint)
            try:
                await session.begin(route)
                yield session
            finally:
                session.close()

    def _cache_scope(self, requester: str) -> bytes:
        """A name of the requester that stages can tell from others, and learn nothing else from."""
        return hashlib.blake2b(requester.encode("utf-8", "replace"), key=self._scope_secret, digest_size=32).digest()

    @asynccontextmanager
    async def _place(self, tier: m.Tier) -> AsyncIterator[bool]:
        """A place for one more request, for as long as it lasts; says whether the request had to wait for it.

        Raises:
            Overloaded: there is none, or was none in time.
        """
        has_waited = await self._admission.enter(tier)
        if self._idle.is_set():
            self._idle = trio.Event()
        try:
            yield has_waited
        finally:
            self._admission.leave()
            if not self._admission.num_open:
                self._idle.set()

    async def _tokenise(self, request: GenerateRequest) -> tuple[int, ...]:
        check_model(request.model, self._model.model_id)
        return await prompt_ids(self._model.codec, request, self._max_input_tokens)

    def _admit(self, request: GenerateRequest, prompt_tokens: int) -> tuple[Route, int]:
        """The route of a request, and how many tokens it may have."""
        wanted = request.max_tokens
        if wanted is not None and wanted < 1:
            raise InvalidRequest("max_tokens is 1 or more", "max_tokens")
        route = self._routes.holding(prompt_tokens, wanted or 1)
        return route, route.max_positions - prompt_tokens if wanted is None else wanted

    # ---- chains ----

    def new_chain(self, plan: SessionPlan, epoch: int, route: Route) -> Chain:
        """One epoch, which waits for its tail's token stream from now on; `end_chain` it in any case."""
        chain = Chain(self._context, plan, epoch, route)
        self._table.chains[chain.key] = chain
        return chain

    def end_chain(self, chain: Chain) -> None:
        """Close an epoch on every stage. Idempotent; does not wait."""
        self._table.chains.pop(chain.key, None)
        if chain.ended.is_set():
            return
        chain.end()
        if chain.signed.is_set() or self._nursery is None:
            chain.release()
        else:
            self._nursery.start_soon(self._await_last_receipt, chain)

    async def _await_last_receipt(self, chain: Chain) -> None:
        """A head signs for the last steps when the chain is closed; who does not is not to be trusted with more."""
        with trio.move_on_after(FINAL_RECEIPT_S):
            await chain.signed.wait()
        error = chain.release()
        if error is not None:
            log.warning("a head gave no last receipt", peer=error.peer)
            self.punish(error, ())
