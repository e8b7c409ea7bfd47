"""The orchestrator on the network (shell): it judges requests, and its parts answer them.

It serves ``/tessella/orchestrator/1``: one request envelope a stream, one answer envelope. In this order a request is judged: size,
form, signer = the stream's authenticated peer, admission (M-REG-2: before a signature is verified), how often it asks (`rates`),
signature and times, replay, content. Every refusal is a signed `Refused` that carries the error's code.

What it receives are claims, digests, counts and signatures: no prompt, no token, no tensor (M-INV-1).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import structlog
import trio

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import (
    InvalidRequest,
    InvalidSignature,
    LocalProtocolError,
    Overloaded,
    RemoteProtocolError,
    Replayed,
    StorageError,
    TessellaError,
    WorkerNotAuthorized,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_ENVELOPE_BYTES, ORCHESTRATOR_REQUEST_S, REPAIR_AFTER_S, REQUEST_TTL_MS
from tessella_p2p.ledger.blocking import RunBlocking, in_thread
from tessella_p2p.ledger.evidence import SettlementTerms
from tessella_p2p.ledger.mirrors import Mirrors
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.network import Network, Stream
from tessella_p2p.orchestrator.accounting import Accounting
from tessella_p2p.orchestrator.admission import MemberRules
from tessella_p2p.orchestrator.auditing import Auditing, AuditPolicy
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.context import Handler, OrchestratorContext, refused
from tessella_p2p.orchestrator.federating import Federating
from tessella_p2p.orchestrator.grants import Grants, GrantTerms
from tessella_p2p.orchestrator.members import Members
from tessella_p2p.orchestrator.membership import Membership
from tessella_p2p.orchestrator.operating import Operating
from tessella_p2p.orchestrator.operator_log import OperatorLog
from tessella_p2p.orchestrator.orders import Orders
from tessella_p2p.orchestrator.publishing import Publishing
from tessella_p2p.orchestrator.rates import RequestRates
from tessella_p2p.orchestrator.reading import Reading
from tessella_p2p.orchestrator.resharding import Resharding
from tessella_p2p.orchestrator.settling import Settling
from tessella_p2p.orchestrator.terms import ServedModel
from tessella_p2p.orchestrator.topology import Topology
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import (
    Message,
    ReplayGuard,
    Sequencer,
    open_envelope,
    peek_sequence,
    peek_signer,
    seal,
)
from tessella_p2p.wire.keys import NodeKey

_LOG: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Asked:
    """What is asked, once that is known."""

    kind: str


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
        rules: what is asked of workers besides.
        repair_after_s: how long a hole stays before a replica is moved to it; None moves nobody unasked.
        recipe: whose coverage `ListStages` answers with.
        sequencer: numbers answers and tickets.
        grant_terms: bounds on tickets.
        issuance_per_day: micro-credits that one requester's tickets may bring into being in a day; None for the default.
        requester_pays: whether a requester pays for its tickets out of its own account, and nothing is brought into being.
        operator_log: where the operator's actions are written down; closing it is the caller's.
        mirrors: what is kept of the followed orchestrators; closing them is the caller's. None where nobody is followed.
        federation: where those are dialled; their leases count, and they may follow this one.
        audits: how much settled work is recomputed; None audits nothing.
        rng: secret choices of what is audited and by whom; None takes the system's.
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
        rules: MemberRules | None = None,
        repair_after_s: float | None = REPAIR_AFTER_S,
        grant_terms: GrantTerms | None = None,
        issuance_per_day: int | None = None,
        requester_pays: bool = False,
        operator_log: OperatorLog | None = None,
        mirrors: Mirrors | None = None,
        federation: Mapping[PeerId, str | None] = MappingProxyType({}),
        audits: AuditPolicy | None = None,
        rng: random.Random | None = None,
        run_blocking: RunBlocking = in_thread,
    ) -> None:
        context = OrchestratorContext(network, key, clock, store, sequencer, recipe, run_blocking)
        self._context = context
        self.allow = allow
        """The allow-list; it may be replaced while the orchestrator runs."""
        self._guard = ReplayGuard()
        self._rates = RequestRates()
        self._began_ms = clock.unix_ms()
        rules = rules or MemberRules()
        self.catalogue = Catalogue(models, min_claim_mb=rules.min_claim_mb)
        layers = self.catalogue.total_layers
        self.federating = Federating(context, mirrors, federation, layers)
        settlement = SettlementTerms(
            key.peer_id, layers, lease_issuers=self.federating.peers, requester_pays=requester_pays
        )
        if issuance_per_day is not None:
            settlement = replace(settlement, issuance_per_day=issuance_per_day)
        core = Members(
            key,
            self.catalogue,
            min_stages=min_stages,
            rules=rules,
            serial_floor=store.serial_floor(),
            lease_issuers=self.federating.peers,
        )
        self.membership = Membership(context, self.catalogue, core)
        settlement = replace(settlement, revoked=core.revocations.by_peer)
        self.settling = Settling(context, Grants(key, self.catalogue, grant_terms), settlement)
        self.settling.foreign_balance = self.federating.foreign_balance
        self.topology = Topology(self.membership, self._subscription, self._sealed)
        accounting = Accounting(context, self.membership.exclude, self.federating.foreign_balance)
        self._publishing = Publishing(context, self.catalogue, self._roots_in_use)
        self.orders = Orders(context)
        self.resharding = Resharding(context, self.catalogue, self.membership, self.orders, repair_after_s)
        operator_handlers = {
            **self.resharding.operator_handlers(),
            **accounting.handlers(),
            **self._publishing.handlers(),
            **self.federating.operator_handlers(),
        }
        self.reading = Reading(context, self.catalogue, self.membership)
        self.operating = Operating(context, operator_handlers, operator_log)
        self.auditing: Auditing | None = None
        if audits is not None:
            members = self.membership.members
            rng = rng or random.SystemRandom()
            self.auditing = Auditing(
                context,
                self.catalogue,
                members,
                self.orders,
                self.membership.exclude,
                self.settling.proven,
                audits,
                rng,
            )
            self.settling.observers.append(self.auditing.judged)
        self._handlers: dict[type[Message], Handler] = {
            **self.membership.handlers(),
            **self.settling.handlers(),
            **self.reading.handlers(),
            **self.operating.handlers(),
            **self.federating.handlers(),
        }

    @property
    def outcomes(self) -> Counter[str]:
        """How many requests were answered; see `OrchestratorContext`."""
        return self._context.outcomes

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take up what was published and assigned before, then serve until cancelled.

        Requests that are being served end with their streams, durable changes stay whole.

        Raises:
            StorageError: they cannot be read.
        """
        await self._publishing.restore()
        await self.membership.restore()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.membership.run)
            nursery.start_soon(self.resharding.run)
            nursery.start_soon(self.settling.run)
            nursery.start_soon(self.federating.run)
            if self.auditing is not None:
                nursery.start_soon(self.auditing.run)
            self._context.network.serve(protocols.ORCHESTRATOR, self._serve)
            self._context.network.serve(protocols.TOPOLOGY, self.topology.serve)
            task_status.started()

    # ---- Who is in ----

    async def admit_only(self, allow: frozenset[PeerId] | None) -> None:
        """Replace the allow-list; members that are not on it leave at once. None admits everybody.

        Raises:
            StorageError: the ledger cannot be written; the list counts, and who is not on it is refused.
        """
        self.allow = allow
        for member in self.membership.members():
            if allow is not None and member.peer_id not in allow:
                await self.membership.exclude(member.peer_id)

    async def repin(self, federation: Mapping[PeerId, str | None]) -> None:
        """Replace the orchestrators of the federation: whose ledgers are followed, whose leases count, who may follow this one.

        Raises:
            StorageError: what is kept of a new one cannot be opened.
        """
        await self.federating.repin(federation)
        self.membership.core.trust_leases_of(self.federating.peers)
        self.settling.trust_leases_of(self.federating.peers)

    def _roots_in_use(self) -> frozenset[bytes]:
        return frozenset(member.manifest_root for member in self.membership.members())

    # ---- Streams ----

    async def _serve(self, stream: Stream) -> None:
        """Answer one request. Ends quietly when the peer sends nothing or nothing in time."""
        with trio.move_on_after(ORCHESTRATOR_REQUEST_S):
            try:
                raw = await receive_message(stream, MAX_ENVELOPE_BYTES)
            except RemoteProtocolError as error:
                await send_message(stream, self._sealed(stream.peer, 0, refused(error)))
                return
            if raw is not None:
                await send_message(stream, await self.answer(stream.peer, raw))

    async def answer(self, peer: PeerId, raw: bytes) -> bytes:
        """The sealed answer to the sealed request ``raw`` of the authenticated ``peer``.

        Raises:
            LocalProtocolError: our own bug.
        """
        try:
            sequence = peek_sequence(raw)
        except RemoteProtocolError:
            sequence = 0
        try:
            body = await self.handle(raw, peer)
        except LocalProtocolError:
            raise
        except TessellaError as error:
            return self._sealed(peer, sequence, refused(error))
        return self._sealed(peer, sequence, body)

    def _sealed(self, peer: PeerId, to: int, body: m.OrchestratorAnswer) -> bytes:
        context = self._context
        now_ms = context.clock.unix_ms()
        return seal(
            context.key,
            m.ANSWER,
            m.AnswerBody(to=to, body=body),
            sequence=context.sequencer.next(m.ANSWER, now_ms),
            now_ms=now_ms,
            audience=peer,
        )

    # ---- Requests ----

    async def handle(
        self, raw: bytes, peer: PeerId | None, check: Callable[[m.OrchestratorRequest], None] | None = None
    ) -> m.OrchestratorAnswer:
        """Judge and answer a sealed request.

        Args:
            raw: the envelope.
            peer: who the transport authenticated; None where it authenticates nobody (HTTP), and the signature alone counts.
            check: raises for a request that is not accepted where it came in; None accepts every one.

        Raises:
            TessellaError: what it is refused with.
            LocalProtocolError: our own bug.
        """
        with self._counted(peer) as asked:
            signer, request = self._verified(raw, peer)
            asked.kind = request.kind
            if check is not None:
                check(request)
            if isinstance(request, m.AuditReport) and self.auditing is not None:
                return self.auditing.report(signer, request, raw)  # kept as it was sealed, where it is evidence
            return await self._dispatch(signer, request)

    async def operate(self, token: str, request: m.OperatorRequest, *, where: str = "http") -> m.OperatorAnswer:
        """Answer what comes beside a bearer token.

        Args:
            token: what is said to be the admin token.
            request: what is asked.
            where: where it comes from, for the operator's log: ``http 127.0.0.1``.

        Raises:
            NotOperator: another token, or this orchestrator has none.
            TessellaError: what it is refused with.
        """
        with self._counted(None, "operate"):
            return await self.operating.operate(token, request, where)

    async def read(self, request: m.PublicRequest) -> m.PublicAnswer:
        """Answer a public read that nobody signed.

        Raises:
            RefusalError: what it is refused with.
        """
        with self._counted(None, request.kind):
            # The handler of a public request gives a public answer.
            return await self._dispatch(self._context.key.peer_id, request)  # type: ignore[return-value]

    def _subscription(self, raw: bytes, peer: PeerId) -> m.Subscribe:
        with self._counted(peer, "subscribe"):
            _, request = self._verified(raw, peer)
            if not isinstance(request, m.Subscribe):
                raise InvalidRequest(f"a request of the kind {request.kind} is not answered here", param="kind")
            return request

    def _verified(self, raw: bytes, peer: PeerId | None) -> tuple[PeerId, m.OrchestratorRequest]:
        signer = peek_signer(raw)
        if peer is not None and signer != peer:
            raise InvalidSignature(f"a request signed by {signer} on a stream of {peer}")
        if self.allow is not None and signer not in self.allow and signer not in self.federating.peers:
            raise WorkerNotAuthorized(f"{signer} is not on the allow-list of this private mesh")
        context = self._context
        now, now_ms = trio.current_time(), context.clock.unix_ms()
        if peer is None:
            self._rates.check_unknown(now)
        else:
            self._rates.check_peer(peer, now)
        self.outcomes["signatures_verified"] += 1  # here and nowhere before: who is not admitted costs no verification
        envelope = open_envelope(raw, m.REQUEST, now_ms=now_ms, audience=context.key.peer_id, signer=signer)
        if peer is None and 0 < self._began_ms - envelope.issued_at <= REQUEST_TTL_MS:
            # The guard forgets at a restart. A stream has its signer at the other end; here anybody may show what he recorded. What is
            # older than that has expired, unless the clock was set back since.
            raise Replayed(f"a request of {signer} from before this orchestrator began: sign it again")
        self._guard.check(envelope, now_ms)
        if peer is None:
            self._rates.check_peer(
                signer, now
            )  # not before: what somebody else recorded and shows again is not the signer's asking
        request = envelope.message(m.RequestBody).body
        self._rates.check_content(signer, request, now)
        return signer, request

    async def _dispatch(self, signer: PeerId, request: m.OrchestratorRequest) -> m.OrchestratorAnswer:
        handler = self._handlers.get(type(request))
        if handler is None:
            raise InvalidRequest(f"{request.kind} is not answered here", param="kind")
        return await handler(signer, request)

    @contextmanager
    def _counted(self, peer: PeerId | None, kind: str = "request") -> Iterator[_Asked]:
        """Count how a request ends, and keep this machine's own troubles from whoever asks."""
        asked = _Asked(kind)
        try:
            yield asked
        except LocalProtocolError:
            raise
        except StorageError as error:
            _LOG.error("ledger_unwritable", reason=str(error))
            # Its words name a folder of this machine: not for the peer.
            refusal = Overloaded("the ledger cannot be written: try again later")
            raise self._noted(peer, asked.kind, refusal) from error
        except TessellaError as error:
            raise self._noted(peer, asked.kind, error)  # noqa: B904 - it is the same error
        self.outcomes[asked.kind] += 1

    def _noted(self, peer: PeerId | None, kind: str, error: TessellaError) -> TessellaError:
        self.outcomes[f"{kind}:{error.code}"] += 1
        _LOG.info("request_refused", peer=peer, kind=kind, code=error.code, reason=str(error))
        return error
