"""What a node sent and received of paid sessions, kept for auditors (pure).

Whoever recomputes a stage needs what its upstream peer sent it, and sometimes what its downstream peer received of it; so both keep
that for a while. It costs the step path an entry in a list: rows that were sent are kept as the frame's bytes, which left anyway, and
rows that came as the payload that came. Nothing is copied, and nobody waits.

A `Track` is one direction of one (session, epoch) between this node and the stage that may be audited: its ``input`` where this node is
upstream of it, its ``output`` where it is downstream. A tail's tokens are in no track: an auditor draws them again. All tracks of a
node share a budget of bytes; the oldest session makes room. What is shown to whom is the business of `worker.history_server`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from tessella_p2p.base.ids import PeerId, SessionId
from tessella_p2p.base.limits import (
    HISTORY_BYTES,
    HISTORY_FRAME_BYTES,
    HISTORY_TRACK_BYTES,
    HISTORY_TTL_S,
    MAX_HISTORY_READERS,
    MAX_HISTORY_READS,
    MAX_HISTORY_TRACKS,
)
from tessella_p2p.stages.engine import Buffer
from tessella_p2p.stages.opening import Opening
from tessella_p2p.wire.frames import TRACE_ENTRY_BYTES, DType, Flag, Frame, Kind
from tessella_p2p.wire.messages import HistorySide

_OWNERS = (bytes, bytearray)


@dataclass(frozen=True, slots=True)
class TrackKey:
    """Whose history it is: ``side`` of the stage ``audited`` in (session, epoch)."""

    session: SessionId
    epoch: int
    side: HistorySide
    audited: PeerId


class Track:
    """The steps of one direction, in order. Made by `History.begin`.

    A step costs one more reference and one more number: no object that a garbage collection would have to look at.

    Attributes:
        key: what it is.
        opened: the chain-open's envelope.
        num_bytes: what it keeps in memory.
        ended_at: when its session was over; None while it runs.
        receipt: the newest that the audited stage signed, of what it was sent; None while there is none.
        receipted: the positions that it covers.
    """

    __slots__ = (
        "_data",
        "_dtype",
        "_history",
        "_is_open",
        "_reads",
        "_row_bytes",
        "_rows",
        "ended_at",
        "key",
        "num_bytes",
        "opened",
        "receipt",
        "receipted",
    )

    def __init__(self, history: History, key: TrackKey, opened: bytes) -> None:
        self.key = key
        self.opened = opened
        self.num_bytes = 0
        self.ended_at: float | None = None
        self.receipt: bytes | None = None
        self.receipted = 0
        self._history = history
        self._reads: dict[PeerId, int] = {}
        self._data: list[Buffer] = []  # of each step, something that ends with its rows
        self._rows = array("i")  # of each step how many; negative where a draw follows
        self._row_bytes = 0
        self._dtype = DType.NONE
        self._is_open = True

    def note(self, frame: Frame, data: bytes | None = None) -> None:
        """Keep a step; constant time. Beyond the budget only the beginning is kept.

        Args:
            frame: the step.
            data: the frame's bytes, of one that left.
        """
        if not self._is_open:
            return
        kept, held_bytes = (data, len(data)) if data is not None else _held(frame)
        held_bytes += HISTORY_FRAME_BYTES
        if self.num_bytes + held_bytes > self._history.max_track_bytes or not self._history.make_room(self, held_bytes):
            self._is_open = False
            return
        if not self._rows:
            self._row_bytes, self._dtype = len(frame.body) // frame.rows, frame.dtype
        self.num_bytes += held_bytes
        self._data.append(kept)
        self._rows.append(-frame.rows if frame.flags is Flag.SAMPLE else frame.rows)

    def note_receipt(self, raw: bytes, positions: int) -> None:
        """Keep a receipt that was checked, in place of the one before; the last one comes after the end."""
        self.receipt, self.receipted = raw, positions

    def end(self, now: float) -> None:
        """The session is over at ``now`` (monotonic seconds); what was kept stays for a while."""
        self._is_open = False
        if self.ended_at is None:
            self.ended_at = now
        if not self._data:
            self._history.drop(self)

    def read_by(self, auditor: PeerId) -> bool:
        """Whether ``auditor`` may read it once more, which counts. Each has its own reads: nobody uses up those of the others."""
        reads = self._reads.get(auditor, 0)
        if reads >= MAX_HISTORY_READS or (not reads and len(self._reads) >= MAX_HISTORY_READERS):
            return False
        self._reads[auditor] = reads + 1
        return True

    def dropped(self) -> None:
        """It made room for others; nothing is kept any more."""
        self._is_open = False
        self._data, self._rows = [], array("i")
        self.num_bytes = 0

    def frames(self, positions: int) -> Iterator[Frame]:
        """The steps that were kept of positions ``[0, positions)``, without traces; the last one is cut where it goes beyond."""
        position, session, epoch = 0, self.key.session, self.key.epoch
        for kept, signed in zip(tuple(self._data), tuple(self._rows), strict=True):
            rows = min(abs(signed), positions - position)
            if rows <= 0:
                return
            begin = len(kept) - abs(signed) * self._row_bytes
            body = memoryview(kept)[begin : begin + rows * self._row_bytes]
            flags = Flag.SAMPLE if signed == -rows else Flag.NONE  # what is cut off takes the draw behind it along
            yield Frame(Kind.STEP, session, epoch, 0, position, rows, self._dtype, flags, (), body)
            position += rows

    def positions(self, most: int) -> int:
        """How far `frames` of ``most`` positions go."""
        return min(most, sum(map(abs, self._rows)))


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


def _held(frame: Frame) -> tuple[Buffer, int]:
    """What is to be kept of a frame that came, and what that keeps in memory: of a view, all that it is a view of.

    A short payload is an object of its own, which ends with the rows; keeping it spares the view.
    """
    body = frame.body
    if not isinstance(body, memoryview):
        return body, len(body)
    owner = body.obj
    if not isinstance(owner, _OWNERS):
        return body, len(body)
    held_bytes = len(owner)
    is_payload = held_bytes == len(body) + len(frame.trace) * TRACE_ENTRY_BYTES
    return (owner if is_payload else body), held_bytes
