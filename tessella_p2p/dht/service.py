"""Discovery: the swarm view of one node, kept up to date.

The DHT, gossip and whatever list the orchestrator gives feed one `SwarmView`. None of them is needed for the others to work, and
nothing here waits for the mesh before the node starts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog
import trio

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import (
    ConfigurationError,
    MalformedMessage,
    RefusalError,
    RemoteProtocolError,
    TransportError,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    BOOTSTRAP_RECHECK_S,
    BOOTSTRAP_RETRY_MAX_S,
    BOOTSTRAP_RETRY_MIN_S,
    HEARTBEAT_S,
    KAD_DIAL_S,
    KAD_LOOKUP_S,
    KAD_REFRESH_S,
    MAX_BOOTSTRAP,
    MAX_WATCHED,
    OUTAGE_GRACE_S,
    REPUBLISH_S,
    WATCH_RETRY_S,
)
from tessella_p2p.dht.gossip_streams import GossipStreams
from tessella_p2p.dht.kad_streams import KadStreams
from tessella_p2p.dht.keyspace import Contact, record_key
from tessella_p2p.dht.stage_records import VerifiedStage, signed_stage
from tessella_p2p.dht.swarm_view import Source, SwarmView
from tessella_p2p.net.network import Network
from tessella_p2p.wire.keys import public_key_of

log = structlog.get_logger(__name__)

_P2P = "/p2p/"


class Discovery:
    """What this node knows of the mesh, and what it tells the mesh.

    Args:
        network: this node's network.
        clock: the date.
        rng: the node's generator; everything random here comes from it.
        pins: orchestrators whose leases count; a bootstrap node needs none.
        bootstrap: multiaddrs that end in ``/p2p/<peer id>``.
        kademlia_enabled: False leaves gossip among connected peers and the orchestrator's list.
        outage_grace_s: how long an expired lease counts while no orchestrator can be reached.

    Raises:
        ConfigurationError: a bootstrap address without a peer id, or too many of them.
    """

    def __init__(
        self,
        network: Network,
        clock: WallClock,
        rng: random.Random,
        *,
        pins: frozenset[PeerId],
        bootstrap: Sequence[str] = (),
        kademlia_enabled: bool = True,
        outage_grace_s: float = OUTAGE_GRACE_S,
    ) -> None:
        for address in bootstrap:
            where, _, pin = address.rpartition(_P2P)
            try:
                public_key_of(PeerId(pin))
            except MalformedMessage as error:
                raise ConfigurationError(f"bootstrap address {address!r} has no /p2p/<peer id> at its end") from error
            if not where.startswith("/"):
                raise ConfigurationError(f"bootstrap address {address!r} is no multiaddr")
        if len(bootstrap) > MAX_BOOTSTRAP:
            raise ConfigurationError(f"{len(bootstrap)} bootstrap addresses; {MAX_BOOTSTRAP} at most")
        self.view = SwarmView(pins, outage_grace_s=outage_grace_s)
        self.kad = KadStreams(network, clock, random.Random(rng.getrandbits(64))) if kademlia_enabled else None
        self._gossip = GossipStreams(network, clock, random.Random(rng.getrandbits(64)), self._hear)
        self._network = network
        self._clock = clock
        self._rng = random.Random(rng.getrandbits(64))
        self._bootstrap = tuple(dict.fromkeys(bootstrap))
        self._make_record: Callable[[], bytes | None] | None = None
        self._root = b""
        self._watched: dict[bytes, trio.CancelScope] = {}
        self._running: trio.Nursery | None = None
        self._news = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Join, serve, publish and look up until cancelled.

        Started once this node answers others; joining goes on behind it, however many bootstrap nodes are dead.
        """
        async with trio.open_nursery() as nursery:
            await nursery.start(self._gossip.run)
            nursery.start_soon(self._beat)
            if self.kad is not None:
                await nursery.start(self.kad.run)
                for address in self._bootstrap:
                    nursery.start_soon(self._enter_through, address, self.kad)
                nursery.start_soon(self._refresh, self.kad)
                nursery.start_soon(self._republish, self.kad)
                self._running = nursery
                for root, watching in self._watched.items():
                    nursery.start_soon(self._keep_watching, root, watching)
            task_status.started()

    # ---- Telling ----

    def publish(self, make_record: Callable[[], bytes | None], root: bytes) -> None:
        """State a stage from now on, instead of the one before.

        Args:
            make_record: signs a new record, with a new sequence, each time it is called (every heartbeat, every republish); None
                for nothing to state now.
            root: the manifest root of the model.
        """
        self._make_record, self._root = make_record, root

    async def publish_now(self) -> None:
        """State the stage at once: when it is ready, and when its state changes.

        Returns when the record is stored at the closest peers, or after the lookup's deadline. Cancellation leaves the gossip said.
        """
        self._say()
        if self.kad is not None:
            await self._put(self.kad)

    def _make(self) -> bytes | None:
        raw = self._make_record() if self._make_record is not None else None
        if raw is not None:
            self._observe(raw, "own")
        return raw

    def _say(self) -> None:
        raw = self._make()
        if raw is not None:
            self._gossip.say(raw)

    async def _put(self, kad: KadStreams) -> None:
        raw = self._make()
        if raw is not None:
            outcome = await kad.put(record_key(self._root), raw)
            log.debug("stage_record_stored", peers=outcome.stored, messages=outcome.messages)

    async def _beat(self) -> None:
        await trio.sleep(self._rng.uniform(0, HEARTBEAT_S))
        while True:
            self._say()
            await trio.sleep(HEARTBEAT_S)

    async def _republish(self, kad: KadStreams) -> None:
        await trio.sleep(self._rng.uniform(0, REPUBLISH_S))
        while True:
            with trio.move_on_after(REPUBLISH_S) as period:
                await self._put(kad)
                await trio.sleep_until(period.deadline)

    # ---- Learning ----

    def observe(self, raws: Iterable[bytes], source: Source) -> None:
        """Take records from elsewhere (the orchestrator's list); invalid ones are counted in the log and dropped."""
        for raw in raws:
            self._observe(raw, source)

    def revoke(self, issuer: PeerId, serials: Mapping[PeerId, int]) -> None:
        """Take note of leases that their issuer took away, by peer up to which serial; see `SwarmView.revoke`."""
        if self.view.revoke(issuer, serials):
            log.info("leases_revoked", issuer=issuer, peers=sorted(serials))
            self._news.set()
            self._news = trio.Event()

    def orchestrator_reachable(self, reachable: bool) -> None:
        """Say whether leases can be renewed now; while they cannot, expired ones count for the outage grace."""
        self.view.orchestrator_reachable = reachable

    async def changed(self) -> None:
        """Wait until the view takes a record that is news, or a lease is taken away."""
        await self._news.wait()

    def _hear(self, raw: bytes) -> None:
        self._observe(raw, "gossip")

    def _observe(self, raw: bytes, source: Source) -> None:
        try:
            if source != "own" and signed_stage(raw).envelope.signer == self._network.peer_id:
                return  # an echo; after a restart, of a stage that this process does not serve
            stage = self.view.observe(raw, source, self._clock.unix_ms())
        except (RemoteProtocolError, RefusalError) as error:
            log.debug("stage_record_not_used", source=source, reason=str(error))
            return
        if stage is None:
            return
        if stage.peer_id != self._network.peer_id:
            self._network.add_addresses(stage.peer_id, stage.addresses)
        self._news.set()
        self._news = trio.Event()

    # ---- Looking up ----

    def watch(self, manifest_root: bytes) -> None:
        """Keep looking a model's records up; the longest-watched model makes room when there are too many."""
        if manifest_root in self._watched:
            return
        while len(self._watched) >= MAX_WATCHED:
            self._watched.pop(next(iter(self._watched))).cancel()
        watching = self._watched[manifest_root] = trio.CancelScope()
        if self._running is not None:
            self._running.start_soon(self._keep_watching, manifest_root, watching)

    async def find(self, manifest_root: bytes, deadline_s: float = KAD_LOOKUP_S) -> tuple[VerifiedStage, ...]:
        """Look a model up once.

        Returns:
            The live, ready stages that the view then has of it, at the latest after the deadline. Never raises for what peers do.
        """
        if self.kad is not None:
            outcome = await self.kad.get(record_key(manifest_root), deadline_s)
            self.observe(outcome.values, "dht")
        return self.view.stages(manifest_root, None, self._clock.unix_ms())

    async def _keep_watching(self, manifest_root: bytes, watching: trio.CancelScope) -> None:
        with watching:
            while True:
                found = await self.find(manifest_root)
                pause_s = REPUBLISH_S if found else WATCH_RETRY_S
                await trio.sleep(pause_s * self._rng.uniform(0.8, 1.0))

    # ---- Joining ----

    async def _enter_through(self, address: str, kad: KadStreams) -> None:
        """Join through one bootstrap node; again and again, so that it may come back and meshes that split meet again."""
        retry_s = BOOTSTRAP_RETRY_MIN_S
        while True:
            try:
                contact = await self._reach(address)
            except ConfigurationError as error:
                log.error("bootstrap_address_invalid", address=address, reason=str(error))
                return
            if contact is None:
                pause_s = retry_s
                retry_s = min(2 * retry_s, BOOTSTRAP_RETRY_MAX_S)
            else:
                retry_s = BOOTSTRAP_RETRY_MIN_S
                outcome = await kad.join((contact,))
                pause_s = BOOTSTRAP_RECHECK_S if outcome.hops else BOOTSTRAP_RETRY_MIN_S
                log.debug("mesh_joined", through=contact.peer_id, contacts=len(kad.machine.table))
            await trio.sleep(pause_s * self._rng.uniform(0.5, 1.0))

    async def _reach(self, address: str) -> Contact | None:
        try:
            with trio.fail_after(KAD_DIAL_S):
                peer = await self._network.connect(address)
        except (TransportError, RemoteProtocolError, trio.TooSlowError) as error:
            log.info("bootstrap_unreachable", address=address, reason=str(error) or "no answer in time")
            return None
        return None if peer == self._network.peer_id else Contact(peer, (address.rpartition(_P2P)[0],))

    async def _refresh(self, kad: KadStreams) -> None:
        while True:
            await trio.sleep(KAD_REFRESH_S * self._rng.uniform(0.75, 1.25))
            await kad.refresh()
