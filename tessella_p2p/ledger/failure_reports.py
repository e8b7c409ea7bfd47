"""What a node tells the orchestrator of peers that failed it (shell): seldom, late, and never on the path of a request.

Only what the node met itself is reported: the loss or the silence of a neighbour, or a rule that it broke. What one peer says of
another is no report of ours, and what a peer refuses, because it is full or lost a cache, is no failure. The orchestrator counts
reports and judges nobody by them.
"""

from __future__ import annotations

from collections import OrderedDict

import structlog
import trio

from tessella_p2p.base.errors import RemoteProtocolError, TessellaError, TransportError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_WAITING_REPORTS, REPORT_PERIOD_S
from tessella_p2p.ledger.client import OrchestratorPort
from tessella_p2p.wire import messages as m

log = structlog.get_logger(__name__)


class FailureReports:
    """Collects failures, and reports each peer at most once in `REPORT_PERIOD_S`, with the newest code.

    Args:
        client: asks the orchestrator.
    """

    def __init__(self, client: OrchestratorPort) -> None:
        self._client = client
        self._waiting: OrderedDict[PeerId, str] = OrderedDict()
        self._news = trio.Event()
        self.num_sent = 0

    def note(self, peer: PeerId, error: TessellaError) -> None:
        """``peer`` failed this node itself. Does not wait; errors that are no failures are passed over."""
        if not isinstance(error, TransportError | RemoteProtocolError):
            return
        self._waiting[peer] = error.code
        self._waiting.move_to_end(peer)
        if len(self._waiting) > MAX_WAITING_REPORTS:
            self._waiting.popitem(last=False)
        self._news.set()

    async def run(self) -> None:
        """Report until cancelled. What the orchestrator does not take is forgotten: a report is worth no second try."""
        while True:
            await self._news.wait()
            await trio.sleep(REPORT_PERIOD_S)
            self._news = trio.Event()
            waiting, self._waiting = self._waiting, OrderedDict()
            for peer, code in waiting.items():
                try:
                    await self._client.ask(m.ReportFailure(peer_id=peer, code=code), m.Acknowledged)
                except TessellaError as error:
                    log.info("failures are not reported", peers=len(waiting), code=error.code, reason=str(error))
                    break
                self.num_sent += 1
