"""What a node sent and received of paid sessions, kept for auditors (pure).

Whoever recomputes a stage needs what its upstream peer sent it, and sometimes what its downstream peer received of it; so both keep
that for a while. It costs the step path an entry in a list: rows that were sent are kept as the frame's bytes, which left anyway, and
rows that came as the frame that came. Nothing is copied, and nobody waits.

A `Track` is one direction of one (session, epoch) between this node and the stage that may be audited: its ``input`` where this node is
upstream of it, its ``output`` where it is downstream. A tail's tokens are in no track: an auditor draws them again. All tracks of a
node share a budget of bytes; the oldest session makes room. What is shown to whom is the business of `worker.history_server`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.base.limits import (
    HISTORY_BYTES,
    HISTORY_FRAME_BYTES,
    HISTORY_TRACK_BYTES,
    HISTORY_TTL_S,
    MAX_HISTORY_TRACKS,
)
from tessella_p2p.stages.opening import Opening
from tessella_p2p.wire.frames import HEADER_BYTES, Flag, Frame, parse_header, parse_payload
from tessella_p2p.wire.messages import HistorySide


@dataclass(frozen=True, slots=True)
class TrackKey:
    """Whose history it is: ``side`` of the stage ``audited`` in (session, epoch)."""

    session: SessionId
    epoch: int
    side: HistorySide
    audited: PeerId


class Track:
    """The steps of one direction, in order. Made by `History.begin`.

    Attributes:
        key: what it is.
        opened: the chain-open's envelope.
        num_reads: how often it was shown.
        num_bytes: what it keeps in memory.
        ended_at: when its session was over; None while it runs.
    """

    __slots__ = ("_frames", "_history", "_is_open", "ended_at", "key", "num_bytes", "num_reads", "opened")

    def __init__(self, history: History, key: TrackKey, opened: bytes) -> None:
        self.key = key
        self.opened = opened
        self.num_reads = 0
        self.num_bytes = 0
        self.ended_at: float | None = None
        self._history = history
        self._frames: list[Frame | bytes] = []
        self._is_open = True

    def note(self, kept: Frame | bytes) -> None:
        """Keep a frame that came, or the bytes of one that left; constant time. Beyond the budget only the beginning is kept."""
        if not self._is_open:
            return
        num_bytes = HISTORY_FRAME_BYTES + (len(kept) if isinstance(kept, bytes) else _held_bytes(kept))
        if self.num_bytes + num_bytes > self._history.max_track_bytes or not self._history.make_room(self, num_bytes):
            self._is_open = False
            return
        self.num_bytes += num_bytes
        self._frames.append(kept)

    def end(self, now: float) -> None:
        """The session is over at ``now`` (monotonic seconds); what was kept stays for a while."""
        self._is_open = False
        if self.ended_at is None:
            self.ended_at = now
        if not self._frames:
            self._history.drop(self)

    def dropped(self) -> None:
        """It made room for others; nothing is kept any more."""
        self._is_open = False
        self._frames = []
        self.num_bytes = 0

    def frames(self, positions: int) -> Iterator[Frame]:
        """The steps that were kept of positions ``[0, positions)``, without traces; the last one is cut where it goes beyond."""
        for kept in tuple(self._frames):
            frame = _parsed(kept) if isinstance(kept, bytes) else kept
            if frame.position >= positions:
                return
            yield _cut(frame, positions - frame.position)

    def positions(self, most: int) -> int:
        """How far `frames` of ``most`` positions go: frames are contiguous."""
        if not self._frames:
            return 0
        last = self._frames[-1]
        if isinstance(last, bytes):
            last = _parsed(last)
        return min(most, last.position + last.rows)


class History:
    """All tracks of one node.

    Args:
        max_bytes: of all of them together.
        max_track_bytes: of each.
        ttl_s: how long one is kept after its end.
    """

    def __init__(
        self,
        max_bytes: int = HISTORY_BYTES,
        max_track_bytes: int = HISTORY_TRACK_BYTES,
        ttl_s: float = HISTORY_TTL_S,
    ) -> None:
        self.max_track_bytes = min(max_bytes, max_track_bytes)
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._tracks: dict[TrackKey, Track] = {}  # oldest first
        self._bytes = 0

    @property
    def num_bytes(self) -> int:
        """What all tracks keep in memory."""
        return self._bytes

    @property
    def num_tracks(self) -> int:
        """How many there are."""
        return len(self._tracks)

    def begin(self, key: TrackKey, opened: bytes) -> Track:
        """A new track; one of the same key ends."""
        before = self._tracks.get(key)
        if before is not None:
            self.drop(before)
        while len(self._tracks) >= MAX_HISTORY_TRACKS:
            self.drop(next(iter(self._tracks.values())))
        self._tracks[key] = track = Track(self, key, opened)
        return track

    def find(self, key: TrackKey) -> Track | None:
        """The track, unless it was never begun, made room for others, or its time is over."""
        return self._tracks.get(key)

    def expire(self, now: float) -> None:
        """Forget whatever ended long enough before ``now`` (monotonic seconds)."""
        over = [t for t in self._tracks.values() if t.ended_at is not None and t.ended_at + self._ttl_s <= now]
        for track in over:
            self.drop(track)

    def make_room(self, track: Track, num_bytes: int) -> bool:
        """Count ``num_bytes`` more of ``track``; older tracks go for them. False when no other one is left to go."""
        while self._bytes + num_bytes > self._max_bytes:
            oldest = next(iter(self._tracks.values()))
            if oldest is track:
                return False
            self.drop(oldest)
        self._bytes += num_bytes
        return True

    def drop(self, track: Track) -> None:
        """Forget a track."""
        if self._tracks.get(track.key) is track:
            del self._tracks[track.key]
            self._bytes -= track.num_bytes
        track.dropped()


@dataclass(frozen=True, slots=True)
class StageTracks:
    """What a stage keeps of one session: ``received`` is the output of the stage before it, ``sent`` the input of the next one.

    None where nobody is audited: an entry's token ids, a tail's tokens, and sessions that nobody is paid for.
    """

    received: Track | None = None
    sent: Track | None = None

    @classmethod
    def begin(cls, history: History | None, opening: Opening) -> StageTracks:
        """The tracks of a session that begins."""
        if history is None or opening.ticket is None:
            return cls()
        session, epoch = opening.key
        opened = opening.envelope.raw
        received = None if opening.index == 0 else TrackKey(session, epoch, "output", opening.upstream)
        sent = None if opening.is_tail else TrackKey(session, epoch, "input", opening.downstream)
        return cls(
            None if received is None else history.begin(received, opened),
            None if sent is None else history.begin(sent, opened),
        )

    def end(self, now: float) -> None:
        """The session is over."""
        for track in (self.received, self.sent):
            if track is not None:
                track.end(now)


def _held_bytes(frame: Frame) -> int:
    """What keeping ``frame`` keeps in memory: of a view, all that it is a view of."""
    body = frame.body
    if isinstance(body, memoryview) and isinstance(body.obj, bytes | bytearray):
        return len(body.obj)
    return len(body)


def _parsed(data: bytes) -> Frame:
    header = parse_header(memoryview(data)[:HEADER_BYTES])
    return parse_payload(header, memoryview(data)[HEADER_BYTES:])


def _cut(frame: Frame, rows: int) -> Frame:
    """The first ``rows`` rows of a step; what is cut off takes the draw behind it along."""
    if frame.rows <= rows:
        return replace(frame, trace=())
    body = memoryview(frame.body)[: len(frame.body) // frame.rows * rows]
    return replace(frame, rows=rows, body=body, flags=Flag.NONE, trace=())
