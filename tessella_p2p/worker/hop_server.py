"""The hop protocol's serving side (shell): inbound streams, and which session each frame belongs to."""

from __future__ import annotations

from functools import partial

import structlog
import trio

from tessella_p2p.base.errors import InvalidStep, MalformedMessage, Overloaded, StaleEpoch, TessellaError
from tessella_p2p.base.ids import SessionId
from tessella_p2p.base.limits import MAX_SESSIONS_PER_STAGE
from tessella_p2p.net.network import Stream
from tessella_p2p.stages.hop_links import FrameLink
from tessella_p2p.stages.opening import EpochFence, StageIdentity, verify_open
from tessella_p2p.stages.service import StageService
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import decode_message
from tessella_p2p.wire.frames import Frame, Kind
from tessella_p2p.worker.stage_session import StageContext, StageSession, error_frame

log = structlog.get_logger(__name__)


class HopServer:
    """Serves one stage at a time to any number of upstream peers."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._fence = EpochFence()
        self._sessions: dict[tuple[SessionId, int], StageSession] = {}
        self._stage: tuple[StageService, StageIdentity] | None = None
        self._idle = trio.Event()
        self._idle.set()
        self._nursery: trio.Nursery | None = None
        self.sessions_served = 0

    @property
    def open_sessions(self) -> int:
        """Sessions that hold KV right now."""
        return len(self._sessions)

    def attach(self, stage: StageService, identity: StageIdentity) -> None:
        """Serve ``stage`` from now on."""
        self._stage = (stage, identity)

    async def drain(self, grace_s: float) -> None:
        """Admit no session any more; wait for the open ones, then cancel what is left after ``grace_s``."""
        self._stage = None
        with trio.move_on_after(grace_s):
            await self._idle.wait()
        for session in list(self._sessions.values()):
            session.cancel()
        await self._idle.wait()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; then every session frees its KV and writes its proof."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._context.network.serve(protocols.HOP, self._serve_upstream)
            task_status.started()
            await trio.sleep_forever()

    async def _serve_upstream(self, stream: Stream) -> None:
        link = FrameLink(stream)
        try:
            await link.run(partial(self._on_frame, link))
        finally:
            for session in list(self._sessions.values()):
                if session.upstream is link:
                    session.cancel()

    def _on_frame(self, link: FrameLink, frame: Frame) -> None:
        if frame.kind is Kind.OPEN:
            self._open(link, frame)
            return
        if frame.kind not in (Kind.STEP, Kind.CLOSE):
            raise MalformedMessage(f"{link.peer} sent a {frame.kind.name} frame downstream")
        session = self._sessions.get((frame.session, frame.epoch))
        if session is None or session.upstream is not link:
            if frame.kind is Kind.STEP:  # a CLOSE of what is over is no fault
                self._refuse(link, frame, StaleEpoch("this session and epoch are not open here"))
            return
        try:
            session.deliver(frame)
        except InvalidStep as error:
            self._refuse(link, frame, error.blame(link.peer))
            session.cancel()

    def _open(self, link: FrameLink, frame: Frame) -> None:
        assert self._nursery is not None
        try:
            if self._stage is None:
                raise Overloaded("this node serves no stage right now: it is loading or draining")
            if len(self._sessions) >= MAX_SESSIONS_PER_STAGE:
                raise Overloaded(f"this stage serves {len(self._sessions)} sessions already")
            stage, identity = self._stage
            opening = verify_open(
                decode_message(m.OpenFrame, bytes(frame.body)),
                identity,
                upstream=link.peer,
                now_ms=self._context.clock.unix_ms(),
            )
            if opening.key != (frame.session, frame.epoch):
                raise MalformedMessage("an OPEN frame whose header and body name different sessions")
            self._fence.admit(*opening.key, opening.entry)
        except TessellaError as error:
            log.info("session refused", peer=link.peer, code=error.code, reason=str(error))
            self._refuse(link, frame, error)
            return
        for (session_id, epoch), older in list(self._sessions.items()):
            if session_id == frame.session and epoch < frame.epoch:
                older.cancel()
        session = StageSession(self._context, stage, opening, link)
        self._sessions[opening.key] = session
        self._idle = trio.Event() if self._idle.is_set() else self._idle
        self._nursery.start_soon(self._run_session, session)

    async def _run_session(self, session: StageSession) -> None:
        try:
            await session.run()
        finally:
            del self._sessions[session.opening.key]
            self.sessions_served += 1
            if not self._sessions:
                self._idle.set()

    def _refuse(self, link: FrameLink, frame: Frame, error: TessellaError) -> None:
        link.send_nowait(error_frame(error, self._context.key.peer_id, frame.session, frame.epoch))
