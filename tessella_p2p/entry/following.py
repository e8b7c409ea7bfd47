"""An entry follows what its orchestrator tells of the topology (shell), and finds out thereby whether it is there at all."""

from __future__ import annotations

from collections.abc import Callable

import structlog
import trio

from tessella_p2p.base.errors import TessellaError, TransportError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    FOLLOW_RETRY_S,
    FOLLOW_ROUTED_S,
    FOLLOW_S,
    FOLLOW_SOON_S,
    TOPOLOGY_RESUBSCRIBE_S,
)
from tessella_p2p.dht.service import Discovery
from tessella_p2p.entry.reach import Reach
from tessella_p2p.ledger.client import OrchestratorPort
from tessella_p2p.wire import messages as m

log = structlog.get_logger(__name__)


class Following:
    """Feeds the swarm view from the topology stream; from the list, where there is no stream to be had.

    Args:
        client: asks the orchestrator.
        discovery: takes what comes.
        manifest_root: the model.
        reach: learns whether it answers.
        is_routed: whether a complete route is known, so that a list is not urgent.
        spread: a random factor between 0.5 and 1.5, so that not all entries of a mesh come back at once.
    """

    def __init__(
        self,
        client: OrchestratorPort,
        discovery: Discovery,
        manifest_root: bytes,
        reach: Reach,
        *,
        is_routed: Callable[[], bool],
        spread: Callable[[], float],
    ) -> None:
        self._client = client
        self._discovery = discovery
        self._root = manifest_root
        self._reach = reach
        self._is_routed = is_routed
        self._spread = spread
        self._heard = False

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            self._heard = False
            try:
                await self._client.follow(m.Subscribe(manifest_root=self._root), self._take)
            except TransportError as error:
                if self._heard:  # it was there a moment ago: perhaps it, or another one, is again
                    await trio.sleep(FOLLOW_SOON_S * self._spread())
                    continue
                self._reach.lost()
                log.info("no orchestrator can be reached; routes come from the DHT", reason=str(error))
                await trio.sleep(FOLLOW_RETRY_S * self._spread())
            except TessellaError as error:
                log.warning("no topology stream; the list is asked for", code=error.code, reason=str(error))
                with trio.move_on_after(TOPOLOGY_RESUBSCRIBE_S * self._spread()):
                    await self._poll()

    def _take(self, news: m.Stages | m.Acknowledged) -> None:
        self._heard = True
        self._reach.reached(trio.current_time())
        if isinstance(news, m.Stages):
            if news.issuer is not None:  # the client saw to it that this is who answered
                self._discovery.revoke(
                    PeerId(news.issuer), {PeerId(each.peer_id): each.serial for each in news.revoked}
                )
            self._discovery.observe(news.records, "orchestrator")

    async def _poll(self) -> None:
        while True:
            try:
                self._take(await self._client.ask(m.ListStages(manifest_root=self._root), m.Stages))
            except TransportError as error:
                self._reach.lost()
                log.info("no orchestrator can be reached; routes come from the DHT", reason=str(error))
            except TessellaError as error:
                log.warning("the orchestrator's list is not accepted", code=error.code, reason=str(error))
            await trio.sleep(FOLLOW_ROUTED_S if self._is_routed() else FOLLOW_S)
