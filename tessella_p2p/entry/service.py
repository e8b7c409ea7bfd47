"""The entry role (shell): admit a request, find a route, drive the session over reroutes, turn tokens into text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
import trio

from tessella_p2p.base.errors import (
    InvalidRequest,
    NoRoute,
    PromptTooLong,
    RemoteProtocolError,
    TessellaError,
    TransportError,
    UnknownModel,
)
from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.dht.service import Discovery
from tessella_p2p.dht.stage_records import VerifiedStage
from tessella_p2p.entry.api import GenerateRequest, Prepared
from tessella_p2p.entry.chain import Chain, EntryContext, SessionPlan, TokenTable
from tessella_p2p.entry.codec import PromptCodec
from tessella_p2p.entry.routes import Route, choose_route, no_route
from tessella_p2p.entry.session import Session
from tessella_p2p.ledger.client import OrchestratorClient
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import open_envelope

log = structlog.get_logger(__name__)

FOLLOW_S = 5.0
"""How often the orchestrator's list is read."""
PENALTY_S = 30.0
_PENALTY = 100.0
_GRANT_TIMEOUT_S = 3.0
_CLOSE_S = 6.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that this entry speaks for."""

    model_id: str
    codec: PromptCodec
    manifest_root: bytes
    recipes: tuple[str, ...]
    """In order of preference."""


class EntryService:
    """Implements `entry.api.Entry` over a swarm view."""

    def __init__(
        self, context: EntryContext, model: ServedModel, discovery: Discovery, client: OrchestratorClient | None
    ) -> None:
        self._context = context
        self._model = model
        self._discovery = discovery
        self._client = client
        self._table = TokenTable()
        self._failures: dict[PeerId, float] = {}  # trio time of each peer's last failure
        self.peer_failures: dict[PeerId, int] = {}
        self._open_sessions = 0
        self._idle = trio.Event()
        self._idle.set()
        self.requests = 0
        self.tokens = 0

    @property
    def codec(self) -> PromptCodec:
        """The model's text side."""
        return self._model.codec

    @property
    def peer_id(self) -> PeerId:
        """This node."""
        return self._context.network.peer_id

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept token streams and follow the orchestrator's list until cancelled."""
        self._context.network.serve(protocols.TOKENS, self._table.serve)
        self._discovery.watch(self._model.manifest_root)
        task_status.started()
        if self._client is None:
            await trio.sleep_forever()
        else:
            await self._follow(self._client)

    async def _follow(self, client: OrchestratorClient) -> None:
        while True:
            try:
                answer = await client.ask(m.ListStages(manifest_root=self._model.manifest_root), m.Stages)
                self._discovery.observe(answer.records, "orchestrator")
                self._discovery.orchestrator_reachable(True)
            except TransportError as error:
                self._discovery.orchestrator_reachable(False)
                log.info("the orchestrator cannot be reached; routes come from the DHT", reason=str(error))
            except TessellaError as error:
                log.warning("the orchestrator's list is not accepted", code=error.code, reason=str(error))
            await trio.sleep(FOLLOW_S)

    # ---- routes ----

    def _stages(self, recipe: str) -> tuple[VerifiedStage, ...]:
        return self._discovery.view.stages(self._model.manifest_root, recipe, self._context.clock.unix_ms())

    def _penalties(self) -> Mapping[PeerId, float]:
        now = trio.current_time()
        self._failures = {peer: at for peer, at in self._failures.items() if now - at < PENALTY_S}
        return {peer: _PENALTY * (1 - (now - at) / PENALTY_S) for peer, at in self._failures.items()}

    def find_route(self, recipe: str | None = None) -> Route:
        """The best route now; of ``recipe`` alone when the session began on one.

        Raises:
            NoRoute: names the missing layers.
        """
        total = self._model.codec.total_layers
        for name in self._model.recipes if recipe is None else (recipe,):
            route = choose_route(self._stages(name), total, self._penalties(), self._context.network.peer_id)
            if route is not None:
                return route
        raise no_route(self._model.model_id, self._stages(recipe or self._model.recipes[0]), total)

    def model_ids(self) -> tuple[str, ...]:
        """The model, while a complete route serves it."""
        try:
            self.find_route()
        except NoRoute:
            return ()
        return (self._model.model_id,)

    def count_token(self) -> None:
        """One more token was sampled."""
        self.tokens += 1

    async def idle(self) -> None:
        """Wait until no session is open."""
        await self._idle.wait()

    def punish(self, error: TessellaError) -> None:
        """Prefer other peers than the one at fault for a while."""
        if error.peer is not None and error.peer != self._context.network.peer_id:
            self._failures[error.peer] = trio.current_time()
            self.peer_failures[error.peer] = self.peer_failures.get(error.peer, 0) + 1

    # ---- requests ----

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Session]:
        """See `entry.api.Entry.generate`."""
        ids = self._tokenise(request)
        route = self.find_route()
        max_tokens = self._budget(request, len(ids), route)
        request_id = f"req-{self._context.random_bytes(12).hex()}"
        seed = request.seed if request.seed is not None else int.from_bytes(self._context.random_bytes(8), "big")
        if not 0 <= seed < 2**64:
            raise InvalidRequest("seed is from 0 to 2**64 - 1", "seed")
        tier, ticket = await self._grant(request_id, route.recipe, len(ids) + max_tokens)
        plan = SessionPlan(
            session=SessionId(self._context.random_bytes(16)),
            request_id=request_id,
            model_id=self._model.model_id,
            manifest_root=self._model.manifest_root,
            vocabulary=self._model.codec.vocabulary,
            max_positions=len(ids) + max_tokens,
            sampling=m.Sampling(temperature=request.temperature, seed=seed),
            digest_key=self._context.random_bytes(32),
            ticket=ticket,
        )
        self.requests += 1
        if not self._open_sessions:
            self._idle = trio.Event()
        self._open_sessions += 1
        session = Session(self, plan, Prepared(request_id, self._model.model_id, ids, max_tokens), request, tier)
        try:
            await session.begin(route)
            yield session
        finally:
            with trio.move_on_after(_CLOSE_S, shield=True):
                await session.aclose()
            self._open_sessions -= 1
            if not self._open_sessions:
                self._idle.set()

    def _tokenise(self, request: GenerateRequest) -> tuple[int, ...]:
        if request.model != self._model.model_id:
            raise UnknownModel(
                f"the model {request.model!r} is not served here; this node serves {self._model.model_id!r}"
            )
        given = [part for part in (request.messages, request.prompt, request.prompt_ids) if part is not None]
        if len(given) != 1:
            raise InvalidRequest("exactly one of messages, prompt and prompt_ids is needed", "prompt")
        codec = self._model.codec
        if request.messages is not None:
            ids = codec.encode_chat(request.messages)
        elif request.prompt is not None:
            ids = codec.encode_prompt(request.prompt)
        else:
            ids = list(request.prompt_ids or ())
            if any(not 0 <= token < codec.vocabulary for token in ids):
                raise InvalidRequest(f"token ids are from 0 to {codec.vocabulary - 1}", "prompt_ids")
        if not ids:
            raise InvalidRequest("the prompt is empty", "prompt")
        return tuple(ids)

    def _budget(self, request: GenerateRequest, prompt_tokens: int, route: Route) -> int:
        room = route.max_positions - prompt_tokens
        wanted = request.max_tokens
        if room < 1 or (wanted is not None and wanted > room):
            asked = "at least one more" if wanted is None else f"{wanted} more"
            raise PromptTooLong(
                f"this route holds {route.max_positions} tokens; the prompt has {prompt_tokens} and {asked} are asked for"
            )
        if wanted is not None and wanted < 1:
            raise InvalidRequest("max_tokens is 1 or more", "max_tokens")
        return room if wanted is None else wanted

    async def _grant(self, request_id: str, recipe: str, positions: int) -> tuple[str, bytes | None]:
        """One round trip; when the orchestrator cannot be reached the request is served unpaid, and says so."""
        if self._client is None:
            return "Leech", None
        ask = m.SessionGrant(
            request_id=request_id,
            model_id=self._model.model_id,
            manifest_root=self._model.manifest_root,
            recipe=recipe,
            max_positions=positions,
        )
        try:
            answer = await self._client.ask(ask, m.Granted, _GRANT_TIMEOUT_S)
        except TransportError as error:
            log.warning("no ticket: this request is served unpaid", request_id=request_id, reason=str(error))
            return "Leech", None
        envelope = open_envelope(
            answer.ticket, m.TICKET, now_ms=self._context.clock.unix_ms(), signer=self._client.orchestrator
        )
        ticket = envelope.message(m.Ticket)
        if (ticket.request_id, ticket.requester) != (request_id, self._context.key.peer_id):
            raise RemoteProtocolError("the orchestrator's ticket is for another request")
        return answer.tier, answer.ticket

    async def start_chain(self, plan: SessionPlan, epoch: int, route: Route, ids: tuple[int, ...]) -> Chain:
        """Open one epoch and send it everything that is known.

        Raises:
            TransportError: the head cannot be reached.
        """
        chain = Chain(self._context, plan, epoch, route)
        self._table.chains[chain.key] = chain
        try:
            await chain.open(ids)
        except BaseException:
            await self.end_chain(chain)
            raise
        return chain

    async def end_chain(self, chain: Chain) -> None:
        """Close an epoch on every stage. Idempotent; bounded in time."""
        try:
            with trio.move_on_after(_CLOSE_S, shield=True):
                await chain.close()
        finally:
            self._table.chains.pop(chain.key, None)
