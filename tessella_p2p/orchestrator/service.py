"""The orchestrator on the network: the only module of its role that does I/O.

It serves ``/tessella/orchestrator/1``: one request envelope a stream, one answer envelope. In this order a request is judged: size,
form, signer = the stream's authenticated peer, admission (M-REG-2: before a signature is verified), signature and times, replay,
content. Every refusal is a signed `Refused` that carries the error's code.

What it receives are claims, digests, counts and signatures: no prompt, no token, no tensor (M-INV-1).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import structlog
import trio

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import (
    InvalidRequest,
    InvalidSignature,
    LocalProtocolError,
    NotAuthorized,
    Overloaded,
    RefusalError,
    RemoteProtocolError,
    StorageError,
    TessellaError,
)
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import (
    HEARTBEAT_S,
    MAX_ENVELOPE_BYTES,
    MAX_MEMBERS,
    ORCHESTRATOR_REQUEST_S,
    REPORT_BURST,
    REPORT_RATE_PER_S,
)
from tessella_p2p.dht.rate_limit import RateLimit
from tessella_p2p.ledger.assignments import Assignment
from tessella_p2p.ledger.blocking import RunBlocking, in_thread
from tessella_p2p.ledger.evidence import SettlementTerms
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.model.coverage import Coverage
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.network import Network, Stream
from tessella_p2p.orchestrator.grants import Grants, GrantTerms, tier_of
from tessella_p2p.orchestrator.member import (
    Announced,
    Deregistered,
    KeepAssignment,
    Loaded,
    Member,
    MemberEffect,
    MemberEvent,
    RaiseSerialFloor,
    Registered,
    SendAnswer,
    TimePassed,
    TopologyChanged,
)
from tessella_p2p.orchestrator.members import Members
from tessella_p2p.orchestrator.terms import ServedModel
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import ReplayGuard, Sequencer, open_envelope, peek_sequence, peek_signer, seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import (
    ANSWER,
    REQUEST,
    TICKET,
    Acknowledged,
    Announce,
    AnswerBody,
    Credits,
    Deregister,
    ListStages,
    OrchestratorAnswer,
    OrchestratorRequest,
    ReadCredits,
    Ready,
    Refused,
    Register,
    ReportFailure,
    RequestBody,
    SessionGrant,
    Stages,
    WorkDone,
    WorkSettled,
)

_LOG: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)
_MAX_REASON_CHARS = 1024


class Orchestrator:
    """Admits workers, splits models, mints tickets and keeps the ledger.

    Args:
        network: where it is asked; its identity is ``key``'s.
        key: signs leases, tickets and answers.
        clock: the date.
        store: the ledger; closing it is the caller's.
        models: what may be served.
        min_stages: how many workers have to register before one is listed, and into how many stages a model is split at least.
        allow: the peers of a private mesh; None admits everybody.
        recipe: whose coverage `ListStages` answers with.
        sequencer: numbers answers and tickets.
        grant_terms: bounds on tickets.
        issuance_per_day: micro-credits that one requester's tickets may bring into being in a day; None for the default.
        run_blocking: how the ledger is called; ``in_place`` under virtual time.
    """

    def __init__(
        self,
        network: Network,
        key: NodeKey,
        clock: WallClock,
        store: LedgerStore,
        *,
        models: Sequence[ServedModel],
        recipe: str,
        sequencer: Sequencer,
        min_stages: int = 1,
        allow: frozenset[PeerId] | None = None,
        grant_terms: GrantTerms | None = None,
        issuance_per_day: int | None = None,
        run_blocking: RunBlocking = in_thread,
    ) -> None:
        self._network = network
        self._key = key
        self._clock = clock
        self._store = store
        self._models = tuple(models)
        self._recipe = recipe
        self._sequencer = sequencer
        self._allow = allow
        self._run_blocking = run_blocking
        self._guard = ReplayGuard()
        self._grants = Grants(key, models, grant_terms)
        self._members = Members(key, models, min_stages=min_stages, serial_floor=store.serial_floor())
        # Effects of one event run before the next event: an assignment and its serial are durable before the lease leaves.
        self._members_lock = trio.Lock()
        self._owed: dict[PeerId, Assignment | None] = {}
        self._owed_floor = 0
        layers = {model.manifest_root: model.total_layers for model in models}
        self._settlement = SettlementTerms(key.peer_id, layers)
        if issuance_per_day is not None:
            self._settlement = SettlementTerms(key.peer_id, layers, issuance_per_day)
        self.outcomes: Counter[str] = Counter()
        """How many requests were answered, by ``kind`` or ``kind:code``; and proofs, by ``proof:status``."""
        self.reported_failures: Counter[PeerId] = Counter()
        """How often each worker was reported as failing, by others: a counter, not a verdict."""
        self._reports: RateLimit[PeerId] = RateLimit(REPORT_RATE_PER_S, REPORT_BURST)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take up the assignments of the process before, then serve until cancelled.

        Requests that are being served end with their streams, durable changes stay whole.

        Raises:
            StorageError: the assignments cannot be read.
        """
        await self._restore()
        self._network.serve(protocols.ORCHESTRATOR, self._serve)
        task_status.started()
        while True:
            await trio.sleep(HEARTBEAT_S)
            try:
                await self._member_event(TimePassed())
                await self._run_blocking(lambda: self._store.expire(self._clock.unix_ms()))
            except StorageError as error:
                # Requests that need the disk are refused meanwhile.
                _LOG.error("ledger_unwritable", reason=str(error))

    # ---- What it knows ----

    def members(self) -> tuple[Member, ...]:
        """Every worker that is remembered."""
        return self._members.members()

    def coverage(self, manifest_root: bytes, recipe: str | None = None) -> Coverage:
        """The walk over the healthy stages of a model.

        Raises:
            UnknownModel: it is not served here.
        """
        return self._members.coverage(manifest_root, recipe or self._recipe)

    # ---- Streams ----

    async def _serve(self, stream: Stream) -> None:
        """Answer one request. Ends quietly when the peer sends nothing or nothing in time."""
        with trio.move_on_after(ORCHESTRATOR_REQUEST_S):
            try:
                raw = await receive_message(stream, MAX_ENVELOPE_BYTES)
            except RemoteProtocolError as error:
                await send_message(stream, self._sealed(stream.peer, 0, _refused(error)))
                return
            if raw is not None:
                await send_message(stream, await self.answer(stream.peer, raw))

    async def answer(self, peer: PeerId, raw: bytes) -> bytes:
        """The sealed answer to the sealed request ``raw`` of the authenticated ``peer``.

        Raises:
            LocalProtocolError: our own bug.
        """
        sequence = 0
        try:
            signer, sequence = peek_signer(raw), peek_sequence(raw)
            if signer != peer:
                raise InvalidSignature(f"a request signed by {signer} on a stream of {peer}")
            if self._allow is not None and peer not in self._allow:
                raise NotAuthorized(f"worker_not_authorized: {peer} is not on the allow-list of this private mesh")
            now_ms = self._clock.unix_ms()
            envelope = open_envelope(raw, REQUEST, now_ms=now_ms, audience=self._key.peer_id, signer=peer)
            self._guard.check(envelope, now_ms)
            request = envelope.message(RequestBody).body
        except (RemoteProtocolError, RefusalError) as error:
            return self._refuse(peer, sequence, "request", error)
        try:
            body = await self._dispatch(peer, request)
        except LocalProtocolError:
            raise
        except StorageError as error:
            _LOG.error("ledger_unwritable", reason=str(error))
            # Its words name a folder of this machine: not for the peer.
            return self._refuse(
                peer, sequence, request.kind, Overloaded("the ledger cannot be written: try again later")
            )
        except TessellaError as error:
            return self._refuse(peer, sequence, request.kind, error)
        self.outcomes[request.kind] += 1
        return self._sealed(peer, sequence, body)

    def _refuse(self, peer: PeerId, sequence: int, kind: str, error: TessellaError) -> bytes:
        self.outcomes[f"{kind}:{error.code}"] += 1
        _LOG.info("request_refused", peer=peer, kind=kind, code=error.code, reason=str(error))
        return self._sealed(peer, sequence, _refused(error))

    def _sealed(self, peer: PeerId, to: int, body: OrchestratorAnswer) -> bytes:
        now_ms = self._clock.unix_ms()
        return seal(
            self._key,
            ANSWER,
            AnswerBody(to=to, body=body),
            sequence=self._sequencer.next(ANSWER, now_ms),
            now_ms=now_ms,
            audience=peer,
        )

    # ---- Requests ----

    async def _dispatch(self, peer: PeerId, request: OrchestratorRequest) -> OrchestratorAnswer:
        match request:
            case Register() | Ready() | Announce() | Deregister():
                return await self._member_event(_event(peer, request))
            case SessionGrant():
                return await self._grant(peer, request)
            case WorkDone():
                return await self._settle(peer, request)
            case ListStages():
                return self._stages(request)
            case ReadCredits():
                return await self._credits(peer)
            case ReportFailure():
                return self._report_failure(peer, request)

    async def _member_event(self, event: MemberEvent) -> OrchestratorAnswer:
        answer: OrchestratorAnswer = Acknowledged()
        async with self._members_lock:
            await self._write_owed()
            effects = self._members.handle(event, self._clock.unix_ms())
            self._owe(effects)
            await self._write_owed()
            for effect in effects:
                match effect:
                    case SendAnswer(body):
                        answer = body
                    case TopologyChanged():
                        _LOG.info("member_changed", peer=effect.peer, before=effect.before, after=effect.after)
        return answer

    async def _restore(self) -> None:
        assignments = await self._run_blocking(self._store.assignments)
        async with self._members_lock:
            self._owe(self._members.restore(assignments, self._clock.unix_ms()))
        if assignments:
            _LOG.info("members_restored", known=len(self._members.members()), forgotten=len(self._owed))

    def _owe(self, effects: Sequence[MemberEffect]) -> None:
        """Note what has to be durable before any of the effects counts; the core counts on it from here on."""
        for effect in effects:
            match effect:
                case RaiseSerialFloor(value):
                    self._owed_floor = value
                case KeepAssignment(peer, assignment):
                    self._owed[peer] = assignment

    async def _write_owed(self) -> None:
        """Make durable what is owed, in one transaction; what could not be written stays owed, and no answer leaves before it is."""
        if not self._owed and not self._owed_floor:
            return
        with trio.CancelScope(shield=True):
            await self._run_blocking(lambda: self._store.keep_assignments(self._owed, self._owed_floor))
        self._owed, self._owed_floor = {}, 0

    async def _grant(self, peer: PeerId, request: SessionGrant) -> OrchestratorAnswer:
        account = await self._run_blocking(lambda: self._store.account(peer))
        now_ms = self._clock.unix_ms()
        return self._grants.grant(
            peer,
            request,
            micro_credits=account.micro_credits,
            sequence=self._sequencer.next(TICKET, now_ms),
            now_ms=now_ms,
        )

    async def _settle(self, peer: PeerId, request: WorkDone) -> OrchestratorAnswer:
        now_ms = self._clock.unix_ms()
        judged = await self._run_blocking(lambda: self._store.settle(request.proofs, self._settlement, now_ms))
        for one in judged:
            self.outcomes[f"proof:{one.settled.status}"] += 1
            _LOG.log(
                logging.INFO if one.settled.status in ("settled", "duplicate") else logging.WARNING,
                "proof_judged",
                worker=one.worker,
                uploader=peer,
                status=one.settled.status,
                micro_credits=one.settled.micro_credits,
                code=one.settled.code,
                reason=one.settled.reason,
            )
        return WorkSettled(results=tuple(one.settled for one in judged))

    def _stages(self, request: ListStages) -> OrchestratorAnswer:
        root = request.manifest_root
        if root is None:
            if len(self._models) != 1:
                raise InvalidRequest("several models are served here: name one", param="manifest_root")
            root = self._models[0].manifest_root
        coverage = self.coverage(root)
        return Stages(
            records=self._members.listed(root, self._clock.unix_ms()),
            health=coverage.health,
            missing=tuple(LayerRange.as_tuple(hole) for hole in coverage.holes),
        )

    async def _credits(self, peer: PeerId) -> OrchestratorAnswer:
        account = await self._run_blocking(lambda: self._store.account(peer))
        return Credits(
            micro_credits=account.micro_credits,
            tier=tier_of(account.micro_credits),
            settled_proofs=account.settled_proofs,
        )

    def _report_failure(self, peer: PeerId, request: ReportFailure) -> OrchestratorAnswer:
        """Count a report; nothing else follows from it, for anybody can make it up. What is no worker here takes no room."""
        if not self._reports.allows(peer, trio.current_time()):
            raise Overloaded("you report failures faster than they are counted: wait")
        failed = PeerId(request.peer_id)
        if failed == peer or self._members.get(failed) is None:
            return Acknowledged()
        if failed not in self.reported_failures and len(self.reported_failures) >= MAX_MEMBERS:
            for gone in [each for each in self.reported_failures if self._members.get(each) is None]:
                del self.reported_failures[gone]
        self.reported_failures[failed] += 1
        _LOG.info("failure_reported", peer=failed, by=peer, code=request.code)
        return Acknowledged()


def _refused(error: TessellaError) -> Refused:
    return Refused(code=error.code, reason=str(error)[:_MAX_REASON_CHARS])


def _event(peer: PeerId, request: Register | Ready | Announce | Deregister) -> MemberEvent:
    match request:
        case Register():
            return Registered(peer, request)
        case Ready():
            return Loaded(peer, request)
        case Announce():
            return Announced(peer, request)
        case Deregister():
            return Deregistered(peer, request)
