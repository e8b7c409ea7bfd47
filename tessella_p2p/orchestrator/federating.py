"""Federation on the network (shell): this orchestrator shows its ledger to the others that it pins, and follows theirs.

Each other one is asked for what lies behind the cursor, page by page until its end, then again every `FEDERATION_PULL_S`. What it
answers is verified before anything of it counts (``ledger.federation``); one that deceived is asked no more, and the evidence stays on
disk. With its own head an orchestrator passes on the heads that others signed for it, so one that tells two stories is found out as
soon as its two listeners follow each other.

Credits stay where they were earned: nothing is moved between ledgers, and a ticket settles only at its minter. What an identity has
elsewhere counts here towards its tier, from each orchestrator up to a trust limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import structlog
import trio

from tessella_p2p.base.errors import (
    LocalProtocolError,
    NotAuthorized,
    RemoteProtocolError,
    StorageError,
    TessellaError,
    TransportError,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import FEDERATION_PULL_S, MAX_REASON_CHARS
from tessella_p2p.ledger.client import OrchestratorClient
from tessella_p2p.ledger.federation import Deceived
from tessella_p2p.ledger.mirrors import Mirror, Mirrors
from tessella_p2p.orchestrator.context import Handlers, OrchestratorContext
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import Message, peek_signer, seal

_LOG: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Followed:
    """One other orchestrator: where it is asked, what is kept of it, and how the last try went."""

    client: OrchestratorClient
    mirror: Mirror
    address: str | None
    lock: trio.Lock
    """One page, or one rumour, at a time; it outlives this entry, as the mirror does."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Of the following; cancelled once it is followed no more."""
    pulled_at: int | None = None
    trouble: str | None = None
    heard: dict[PeerId, bytes] = field(default_factory=dict)
    """The head of it that each of the others passed on last."""


class Federating:
    """Shows the ledger, and follows others.

    Args:
        mirrors: what is kept of the followed ones; closing them is the caller's. None where nobody is followed.
        addresses: where the followed ones are dialled.
        total_layers: layers of the served models, by manifest root; a live view.
    """

    def __init__(
        self,
        context: OrchestratorContext,
        mirrors: Mirrors | None,
        addresses: Mapping[PeerId, str | None],
        total_layers: Mapping[bytes, int],
    ) -> None:
        self._context = context
        self._mirrors = mirrors
        self._total_layers = total_layers
        self._nursery: trio.Nursery | None = None
        self._locks: dict[PeerId, trio.Lock] = {}
        # Replaced, not changed: whoever goes through it may wait meanwhile.
        self._followed: dict[PeerId, _Followed] = {}
        for issuer, mirror in {} if mirrors is None else mirrors.mirrors.items():
            self._followed[issuer] = self._entry(issuer, mirror, addresses.get(issuer))

    @property
    def peers(self) -> frozenset[PeerId]:
        """The orchestrators of the federation, without this one."""
        return frozenset(self._followed)

    def foreign_balance(self, peer: str) -> int:
        """Micro-credits that ``peer`` has elsewhere and that count here; it reads memory maps and does not wait."""
        return 0 if self._mirrors is None else self._mirrors.foreign(PeerId(peer))

    def handlers(self) -> Handlers:
        """What this part answers."""
        return {m.PullSnapshot: self._pulled, m.ReadFederation: self._read}

    def operator_handlers(self) -> Handlers:
        """What it answers the operator."""
        return {m.PullSnapshot: lambda _, request: self.page(request)}

    async def run(self) -> None:
        """Follow the others until cancelled."""
        async with trio.open_nursery() as self._nursery:
            for issuer, followed in self._followed.items():
                self._nursery.start_soon(self._follow, issuer, followed)
            await trio.sleep_forever()

    async def repin(self, addresses: Mapping[PeerId, str | None]) -> None:
        """Follow these orchestrators from now on, and no others; the others' mirrors stay on disk and count no more.

        Args:
            addresses: where each is dialled.

        Raises:
            StorageError: the mirror of a new one cannot be opened; those before it in ``addresses`` are followed.
        """
        mirrors = self._mirrors
        if mirrors is None:
            raise LocalProtocolError("there is no folder for mirrors")
        for issuer in self._followed.keys() - addresses.keys():
            self._drop(issuer)
            mirrors.leave(issuer)
        for issuer, address in addresses.items():
            before = self._followed.get(issuer)
            if before is not None and before.address == address:
                continue
            if before is not None:
                self._drop(issuer)
                mirror = before.mirror
            else:
                mirror = await self._context.run_blocking(partial(mirrors.follow, issuer))
            followed = self._entry(issuer, mirror, address)
            self._followed = {**self._followed, issuer: followed}
            if self._nursery is not None:
                self._nursery.start_soon(self._follow, issuer, followed)

    def _entry(self, issuer: PeerId, mirror: Mirror, address: str | None) -> _Followed:
        context = self._context
        client = OrchestratorClient(context.network, context.key, context.clock, context.sequencer, issuer, address)
        return _Followed(client, mirror, address, self._locks.setdefault(issuer, trio.Lock()))

    def _drop(self, issuer: PeerId) -> None:
        self._followed[issuer].scope.cancel()
        self._followed = {other: followed for other, followed in self._followed.items() if other != issuer}

    # ---- Showing ----

    async def page(self, request: m.PullSnapshot) -> m.SnapshotPage:
        """Sealed entries behind a cursor, and where the journal ends."""
        return await self._context.run_blocking(lambda: self._page(request))

    def _page(self, request: m.PullSnapshot) -> m.SnapshotPage:
        store = self._context.store
        head = store.head()
        entries: list[bytes] = []
        if request.chain == head.chain:
            for row in store.snapshot(request.since, request.limit):
                if row.sequence > head.sequence:
                    break  # written since: the next page has it
                entry = m.LedgerEntry(
                    chain=head.chain,
                    sequence=row.sequence,
                    previous=row.previous,
                    entry=row.entry,
                    proof=row.proof,
                )
                entries.append(self._sealed(m.LEDGER_ENTRY, entry))
        return m.SnapshotPage(
            chain=head.chain,
            head=head.sequence,
            head_hash=head.hash,
            entries=tuple(entries),
            signed_head=self._sealed(
                m.LEDGER_HEAD, m.LedgerHead(chain=head.chain, sequence=head.sequence, hash=head.hash)
            ),
            seen=() if self._mirrors is None else self._mirrors.heads(),
        )

    def _sealed(self, domain: str, message: Message) -> bytes:
        context = self._context
        now_ms = context.clock.unix_ms()
        return seal(context.key, domain, message, sequence=context.sequencer.next(domain, now_ms), now_ms=now_ms)

    async def _pulled(self, peer: PeerId, request: m.PullSnapshot) -> m.OrchestratorAnswer:
        if peer not in self._followed:
            raise NotAuthorized(
                f"{peer} is no orchestrator of this federation: pin it in `federation` to let it follow"
            )
        return await self.page(request)

    async def _read(self, _: PeerId, __: m.ReadFederation) -> m.OrchestratorAnswer:
        context = self._context
        head = await context.run_blocking(context.store.head)
        peers = [await self._standing(issuer, followed) for issuer, followed in self._followed.items()]
        return m.Federation(
            peer_id=context.key.peer_id,
            chain=head.chain,
            head=head.sequence,
            head_hash=head.hash,
            peers=tuple(peers),
        )

    async def _standing(self, issuer: PeerId, followed: _Followed) -> m.FederatedPeer:
        try:
            standing = await self._context.run_blocking(followed.mirror.standing)
        except StorageError:  # logged by whoever counts it; the others' standing is told all the same
            return m.FederatedPeer(
                peer_id=issuer, state="unreachable", chain=0, cursor=0, lag=0, reason="its mirror cannot be read here"
            )
        evidence = standing.evidence
        if evidence is not None:
            state, reason = "refused", str(Deceived(evidence))
        elif followed.trouble is not None:
            state, reason = "unreachable", followed.trouble
        else:
            state, reason = "new" if followed.pulled_at is None else "following", None
        return m.FederatedPeer.model_validate(
            {
                "peer_id": issuer,
                "state": state,
                "chain": standing.chain,
                "cursor": standing.cursor,
                "lag": standing.head - standing.cursor,
                "pulled_at": followed.pulled_at,
                "reason": None if reason is None else reason[:MAX_REASON_CHARS],
            }
        )

    # ---- Following ----

    async def _follow(self, issuer: PeerId, followed: _Followed) -> None:
        """Pull until cancelled, or until the other one has deceived."""
        with followed.scope:
            await self._pull_for_ever(issuer, followed)

    async def _pull_for_ever(self, issuer: PeerId, followed: _Followed) -> None:
        while followed.mirror.evidence is None:
            try:
                while await self._pull(issuer, followed):
                    pass
            except Deceived:
                pass  # logged where it was found
            except StorageError as error:
                followed.trouble = "what it tells cannot be written here"
                _LOG.error("mirror_unwritable", issuer=issuer, reason=str(error))
            except TessellaError as error:
                if followed.trouble is None:
                    _LOG.warning("federation_not_pulled", issuer=issuer, code=error.code, reason=str(error))
                # Anybody may read the status: where the other one is dialled is not for everybody.
                followed.trouble = error.code if isinstance(error, TransportError) else f"{error.code}: {error}"
            else:
                followed.trouble, followed.pulled_at = None, self._context.clock.unix_ms()
            await trio.sleep(FEDERATION_PULL_S)

    async def _pull(self, issuer: PeerId, followed: _Followed) -> bool:
        """Pull one page; whether there is more to ask for at once. Another chain waits: one could begin with each answer."""
        run_blocking, mirror = self._context.run_blocking, followed.mirror
        before = await run_blocking(lambda: mirror.cursor)
        page = await followed.client.ask(m.PullSnapshot(chain=before.chain, since=before.sequence), m.SnapshotPage)
        async with followed.lock:
            if mirror.evidence is not None:
                return False
            with _logged_deceit(issuer):
                more = await run_blocking(lambda: mirror.take(page.entries, page.signed_head, self._total_layers))
        after = await run_blocking(lambda: mirror.cursor)
        if after != before:
            _LOG.info("federation_pulled", issuer=issuer, chain=after.chain, cursor=after.sequence)
        elif more:
            raise RemoteProtocolError(f"{issuer} says that it has more entries, and shows none").blame(issuer)
        for head in page.seen:
            await self._hear(issuer, head)
        return more and after.chain == before.chain

    async def _hear(self, teller: PeerId, head: bytes) -> None:
        """Compare a head that another orchestrator showed to ``teller`` with what it shows here."""
        try:
            issuer = peek_signer(head)
            followed = self._followed.get(issuer)
            if followed is None or followed.mirror.evidence is not None or followed.heard.get(teller) == head:
                return
            async with followed.lock:
                with _logged_deceit(issuer):
                    await self._context.run_blocking(lambda: followed.mirror.hear(head))
            followed.heard[teller] = head
        except Deceived:
            pass  # logged where it was found
        except RemoteProtocolError as error:
            _LOG.warning("no_head", teller=teller, reason=str(error))


@contextmanager
def _logged_deceit(issuer: PeerId) -> Iterator[None]:
    """Log a deceit on its way."""
    try:
        yield
    except Deceived as error:
        _LOG.error("orchestrator_deceived", issuer=issuer, reason=str(error))
        raise
