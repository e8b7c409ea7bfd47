"""The hop protocol's serving side (shell): inbound streams, and which session each frame belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import structlog
import trio

from tessella_p2p.base.errors import (
    MalformedMessage,
    Overloaded,
    RemoteProtocolError,
    StaleEpoch,
    StorageError,
    TessellaError,
    TooManyHopBodies,
)
from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.base.limits import MAX_HOP_SESSIONS, MAX_HOP_STREAMS_PER_PEER, OPEN_BURST, OPENS_PER_S
from tessella_p2p.dht.rate_limit import RateLimit
from tessella_p2p.net.network import Stream
from tessella_p2p.stages.faults import error_frame
from tessella_p2p.stages.frame_link import FrameLink, LinkKey, Unread
from tessella_p2p.stages.opening import EpochFence, Opening, StageIdentity, verify_open
from tessella_p2p.stages.service import StageService
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import decode_message
from tessella_p2p.wire.frames import Frame, Header, Kind
from tessella_p2p.worker.context import StageContext
from tessella_p2p.worker.stage_session import StageSession

log = structlog.get_logger(__name__)


class HopServer:
    """Serves one stage to any number of upstream peers. Where another one takes its place, open sessions end on the old one."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        journal = context.opens
        self._fence = EpochFence(() if journal is None else journal.remembered(context.clock.unix_ms()))
        self._sessions: dict[LinkKey, StageSession] = {}
        self._session_over = trio.Event()
        self._streams: Counter[PeerId] = Counter()
        self._opens: RateLimit[PeerId] = RateLimit(OPENS_PER_S, OPEN_BURST)  # each costs up to three signatures
        self._stage: tuple[StageService, StageIdentity] | None = None
        self._idle = trio.Event()
        self._idle.set()
        self._nursery: trio.Nursery | None = None
        self.sessions_served = 0

    @property
    def open_sessions(self) -> int:
        """Sessions that hold KV right now, or wait for it."""
        return sum(not session.freed.is_set() for session in self._sessions.values())

    @property
    def serving(self) -> tuple[StageService, StageIdentity] | None:
        """The stage that sessions are opened on, and as what; None while there is none."""
        return self._stage

    def attach(self, stage: StageService, identity: StageIdentity) -> None:
        """Open sessions on ``stage`` from now on; those that are open on another one stay there, see `retire`."""
        self._stage = (stage, identity)

    async def drain(self, grace_s: float) -> None:
        """Admit no session any more; wait for the open ones, then end what is left after ``grace_s``."""
        self._stage = None
        with trio.move_on_after(grace_s):
            await self._idle.wait()
        for session in list(self._sessions.values()):
            session.stop(_leaving())
        await self._idle.wait()

    async def retire(self, stage: StageService, grace_s: float) -> None:
        """Wait for the sessions of a stage that another one has taken the place of; end what is left of them after ``grace_s``."""
        with trio.move_on_after(grace_s):
            await self._until_free(stage)
        for session in self._sessions_of(stage):
            session.stop(_leaving())
        await self._until_free(stage)

    async def _until_free(self, stage: StageService) -> None:
        while self._sessions_of(stage):
            await self._session_over.wait()

    def _sessions_of(self, stage: StageService) -> list[StageSession]:
        return [session for session in self._sessions.values() if session.stage is stage]

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; then every session tells its neighbours, frees its KV and writes its proof."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._context.network.serve(protocols.HOP, self._serve_upstream)
            try:
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = self._stage = None

    # ---- streams ----

    async def _serve_upstream(self, stream: Stream) -> None:
        """Handle one inbound stream; what a peer does wrong ends it, and with it its sessions."""
        peer = stream.peer
        if self._streams[peer] >= MAX_HOP_STREAMS_PER_PEER:
            log.info("hop stream refused", peer=peer, streams=self._streams[peer])
            await stream.reset()
            return
        self._streams[peer] += 1
        link = FrameLink(stream, self._context.hop_timeout_s)
        try:
            await link.run(_Upstream(self, link))
        except TessellaError as error:
            log.info("hop stream ended", peer=peer, code=error.code, reason=str(error))
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]
            for session in list(self._sessions.values()):
                if session.upstream is link:
                    session.close()

    def find(self, link: FrameLink, session: SessionId, epoch: int) -> StageSession | None:
        """The session that a frame on ``link`` is for."""
        found = self._sessions.get((session, epoch))
        return found if found is not None and found.upstream is link else None

    # ---- sessions ----

    def open(self, link: FrameLink, frame: Frame) -> None:
        """Take an OPEN: verify it, then serve it in a task of its own, or refuse it with an ERROR."""
        try:
            if self._stage is None or self._nursery is None:
                raise Overloaded("this node serves no stage right now: it is loading or draining")
            stage, identity = self._stage
            older = self._older(frame.session, frame.epoch)
            self._check_quota(stage, older)
            if not self._opens.allows(link.peer, trio.current_time()):
                raise Overloaded(f"over {OPENS_PER_S:.0f} opens a second")
            opening = self._verified(link, frame, identity)
        except TessellaError as error:
            log.info("session refused", peer=link.peer, code=error.code, reason=str(error))
            self.refuse(link, frame.session, frame.epoch, error)
            return
        for session in older:
            session.stop(StaleEpoch(f"epoch {frame.epoch} of this session was opened"))
        session = StageSession(self._context, stage, opening, link, older)
        self._sessions[opening.key] = session
        self._idle = trio.Event() if self._idle.is_set() else self._idle
        self._nursery.start_soon(self._run_session, session)

    def _older(self, session_id: SessionId, epoch: int) -> list[StageSession]:
        """The session's earlier epochs, which a newer one ends."""
        return [
            session for (other, before), session in self._sessions.items() if other == session_id and before < epoch
        ]

    def _check_quota(self, stage: StageService, older: Sequence[StageSession]) -> None:
        """Refuse what would have no room even to wait in, before anything is verified.

        A session has one body at a time in the engine, so the quota of hop bodies is that of sessions with KV, which the stage itself
        gives out, by tier; who only waits for a last receipt is not counted, nor are the ``older`` epochs that this one ends.

        Raises:
            TooManyHopBodies: as many sessions as the stage serves, and as many as may wait for a place, are there.
        """
        here = sum(not each.freed.is_set() for each in self._sessions_of(stage) if each not in older)
        if here >= stage.most_sessions:
            raise TooManyHopBodies(
                f"{here} sessions are served by this stage or wait for a place: it is full, not broken"
            )
        if len(self._sessions) >= MAX_HOP_SESSIONS:
            raise TooManyHopBodies(f"{len(self._sessions)} sessions of this stage wait for their last receipts: wait")

    def _verified(self, link: FrameLink, frame: Frame, identity: StageIdentity) -> Opening:
        try:
            opening = verify_open(
                decode_message(m.OpenFrame, bytes(frame.body)),
                identity,
                upstream=link.peer,
                now_ms=self._context.clock.unix_ms(),
            )
            if opening.key != (frame.session, frame.epoch):
                raise MalformedMessage("an OPEN frame whose header and body name different sessions")
        except RemoteProtocolError as error:
            raise error.blame(link.peer) from None
        self._fence.admit(opening)
        if self._context.opens is not None and opening.ticket is not None:
            try:
                self._context.opens.note(*opening.key, opening.opened_at)
            except StorageError as error:
                log.error("an open could not be noted", reason=str(error))
                raise Overloaded("this node cannot write down what it opens: try another one") from error
        return opening

    async def _run_session(self, session: StageSession) -> None:
        try:
            await session.run()
        except Exception as error:  # whatever a peer's frames set off ends its session, not the node
            log.error("a session failed", request_id=session.opening.body.request_id, exc_info=error)
        finally:
            session.freed.set()
            del self._sessions[session.opening.key]
            self._session_over.set()
            self._session_over = trio.Event()
            self.sessions_served += 1
            if not self._sessions:
                self._idle.set()

    def refuse(self, link: FrameLink, session: SessionId, epoch: int, error: TessellaError) -> None:
        """Answer with an ERROR."""
        link.post(error_frame(error, self._context.key.peer_id, session, epoch))


def _leaving() -> Overloaded:
    return Overloaded("this stage is leaving, or changes its layers")


class _Upstream:
    """What arrives on one inbound stream."""

    def __init__(self, server: HopServer, link: FrameLink) -> None:
        self._server = server
        self._link = link

    def wants(self, header: Header) -> bool:
        if header.kind not in (Kind.OPEN, Kind.STEP, Kind.CLOSE):
            raise MalformedMessage(f"{self._link.peer} sent a {header.kind.name} frame downstream")
        if header.kind is not Kind.STEP:
            return True
        session = self._server.find(self._link, header.session, header.epoch)
        return session is not None and session.wants(header)

    def take(self, frame: Frame) -> None:
        session = self._server.find(self._link, frame.session, frame.epoch)
        if frame.kind is Kind.OPEN:
            self._server.open(self._link, frame)
        elif frame.kind is Kind.CLOSE:  # a CLOSE of what is over is no fault
            if session is not None:
                session.close()
        elif session is not None:
            session.deliver(frame)

    def skipped(self, unread: Unread) -> None:
        header = unread.header
        session = self._server.find(self._link, header.session, header.epoch)
        if unread.damaged and header.kind is not Kind.STEP:
            raise MalformedMessage(f"{self._link.peer} sent a damaged {header.kind.name} frame")
        if session is None:
            over = StaleEpoch("this session and epoch are not open here")
            self._server.refuse(self._link, header.session, header.epoch, over)
        elif unread.damaged:
            session.damaged(unread)
