"""This node's outbound hop streams (shell): one per neighbour carries every session between the two.

A link is opened on demand and stays for the next session. Downstream go opens, steps and closes; what comes back is receipts and
errors, and nothing else: a neighbour that sends steps upstream is not heard.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

import structlog
import trio

from tessella_p2p.base.errors import InvalidStep, MalformedMessage, Overloaded, StaleEpoch, StreamReset, TessellaError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import HOP_TIMEOUT_S, MAX_HOP_LINKS
from tessella_p2p.net.network import Network
from tessella_p2p.stages.frame_link import FrameLink, LinkKey, Unread
from tessella_p2p.wire import protocols
from tessella_p2p.wire.frames import Frame, Header, Kind

log = structlog.get_logger(__name__)


class Receiver(Protocol):
    """A session, as its downstream neighbour reaches it. No method may block or raise."""

    def returned(self, frame: Frame) -> None:
        """A receipt or an error."""
        ...

    def lost(self, reason: TessellaError) -> None:
        """The link is gone, or the neighbour broke a rule on it."""
        ...


@dataclass(slots=True)
class _Neighbour:
    """One outbound link and the sessions on it; handles what comes back."""

    link: FrameLink
    receivers: dict[LinkKey, Receiver] = field(default_factory=dict)

    def wants(self, header: Header) -> bool:
        if header.kind not in (Kind.RECEIPT, Kind.ERROR):
            raise MalformedMessage(f"{self.link.peer} sent a {header.kind.name} frame upstream")
        return (header.session, header.epoch) in self.receivers

    def take(self, frame: Frame) -> None:
        receiver = self.receivers.get((frame.session, frame.epoch))
        if receiver is not None:
            receiver.returned(frame)

    def skipped(self, unread: Unread) -> None:
        receiver = self.receivers.get((unread.header.session, unread.header.epoch))
        if receiver is not None:
            receiver.lost(InvalidStep(f"a damaged {unread.header.kind.name} frame").blame(self.link.peer))


class HopLinks:
    """At most one link per neighbour, shared by all sessions of this node.

    Args:
        network: opens the streams.
        hop_timeout_s: a neighbour that takes nothing for so long loses its link.
        max_links: an idle link makes room for a new one.
    """

    def __init__(
        self, network: Network, hop_timeout_s: float = HOP_TIMEOUT_S, *, max_links: int = MAX_HOP_LINKS
    ) -> None:
        self._network = network
        self._hop_timeout_s = hop_timeout_s
        self._max_links = max_links
        self._neighbours: OrderedDict[PeerId, _Neighbour] = OrderedDict()  # least recently attached first
        self._dialling: dict[PeerId, trio.Lock] = {}
        self._nursery: trio.Nursery | None = None

    def __len__(self) -> int:
        return len(self._neighbours)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the streams until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = None

    async def attach(self, peer: PeerId, key: LinkKey, receiver: Receiver) -> FrameLink:
        """The link to ``peer``, with ``receiver`` for what comes back for ``key``; `detach` it in the end.

        Cancelled, nothing is attached. The deadline is the caller's.

        Raises:
            DialError, VersionMismatch, StreamReset: no stream could be opened, or this node is leaving.
            Overloaded: every link is in use.
            StaleEpoch: ``key`` has a receiver there already.
        """
        lock = self._dialling.setdefault(peer, trio.Lock())
        try:
            async with lock:
                neighbour = self._neighbours.get(peer)
                if neighbour is None or neighbour.link.lost:
                    neighbour = await self._open(peer)
        finally:
            if not lock.statistics().locked:
                self._dialling.pop(peer, None)
        self._neighbours.move_to_end(peer)
        if neighbour.receivers.setdefault(key, receiver) is not receiver:
            raise StaleEpoch("another session of this node has that name and epoch already")
        return neighbour.link

    async def _open(self, peer: PeerId) -> _Neighbour:
        self._make_room()
        stream = await self._network.open_stream(peer, protocols.HOP)
        if self._nursery is None:
            await stream.reset()
            raise StreamReset("this node is leaving")
        neighbour = self._neighbours[peer] = _Neighbour(FrameLink(stream, self._hop_timeout_s))
        self._nursery.start_soon(self._run_link, neighbour)
        return neighbour

    def _make_room(self) -> None:
        if len(self._neighbours) + len(self._dialling) <= self._max_links:
            return
        for peer, neighbour in self._neighbours.items():
            if not neighbour.receivers:
                neighbour.link.end()
                del self._neighbours[peer]
                return
        raise Overloaded(f"this node has {len(self._neighbours)} neighbours that it sends to already")

    def detach(self, peer: PeerId, key: LinkKey, receiver: Receiver) -> None:
        """Stop delivering for ``key``; the stream stays for the next session."""
        neighbour = self._neighbours.get(peer)
        if neighbour is not None and neighbour.receivers.get(key) is receiver:
            del neighbour.receivers[key]

    async def _run_link(self, neighbour: _Neighbour) -> None:
        peer = neighbour.link.peer
        reason: TessellaError = StreamReset(f"{peer} ended the hop stream")
        try:
            await neighbour.link.run(neighbour)
        except TessellaError as error:
            reason = error
        except Exception as error:  # whatever a peer's frames set off ends its link, not the node
            log.error("a hop stream failed", peer=peer, exc_info=error)
        finally:
            if self._neighbours.get(peer) is neighbour:
                del self._neighbours[peer]
            log.info("hop stream ended", peer=peer, sessions=len(neighbour.receivers), reason=str(reason))
            for receiver in list(neighbour.receivers.values()):
                receiver.lost(reason)
