"""An engine without arithmetic on top of `KvPages`: its KV holds, for each position, a checksum of the rows up to there."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tessella_p2p.base.errors import TessellaError
from tessella_p2p.base.ids import SessionId
from tessella_p2p.stages.engine import SessionKey, StepInput
from tessella_p2p.stages.kv_pages import PAGE_POSITIONS, KvPages, KvSession, PrefixHit
from tessella_p2p.wire.frames import DType

ROW_BYTES_OUT = 4
SECRET = bytes(range(32))


def key(number: int, epoch: int = 1) -> SessionKey:
    return SessionKey(SessionId(number.to_bytes(16, "big")), epoch)


def new_pages(num_pages: int = 8, max_sessions: int = 5, max_positions: int = 1024, overcommit: float = 8.0) -> KvPages:
    """Pages that are promised so often over that what happens without room can be seen."""
    return KvPages(
        num_pages=num_pages,
        page_bytes=1000,
        max_sessions=max_sessions,
        max_positions=max_positions,
        secret=SECRET,
        row_bytes_out=ROW_BYTES_OUT,
        overcommit=overcommit,
    )


def states_after(rows: bytes, state: int = 0) -> list[int]:
    """A row is one byte; the state behind each."""
    states = []
    for index in range(len(rows)):
        state = zlib.crc32(rows[index : index + 1], state)
        states.append(state)
    return states


def outputs_of(states: list[int]) -> bytes:
    return b"".join(state.to_bytes(ROW_BYTES_OUT, "little") for state in states)


@dataclass(slots=True)
class Sent:
    """A step of the model engine that is under way."""

    key: SessionKey
    rows: bytes
    session: KvSession
    position: int
    hit: PrefixHit | None


@dataclass(slots=True)
class ModelEngine:
    """What every engine does with `KvPages`, with its arena in the open."""

    kv: KvPages
    arena: npt.NDArray[np.uint32]
    """[pages, positions of a page]: states."""
    histories: dict[SessionKey, bytes] = field(default_factory=dict)
    """The rows of each session that is open, by what was sent."""
    states: dict[SessionKey, list[int]] = field(default_factory=dict)
    """The state behind each of them."""

    @classmethod
    def over(cls, kv: KvPages) -> ModelEngine:
        return cls(kv, np.zeros((kv.use.pages_total, PAGE_POSITIONS), np.uint32))

    def open(self, session: SessionKey, max_positions: int, scope: bytes = b"", now: float = 0.0) -> KvSession:
        opened = self.kv.open(session, max_positions, scope, now)
        self.histories[session], self.states[session] = b"", []
        return opened

    def close(self, session: SessionKey) -> None:
        self.kv.close(session)
        self.forget(session)

    def forget(self, session: SessionKey) -> None:
        self.histories.pop(session, None)
        self.states.pop(session, None)

    def admit(self, session: SessionKey, rows: bytes, *, keep_last: bool = False) -> Sent | TessellaError:
        position = len(self.histories.get(session, b""))
        step = StepInput(session, position, len(rows), DType.U32, rows)
        admitted = self.kv.admit(step)
        if isinstance(admitted, TessellaError):
            return admitted
        hit = self.kv.match(admitted, len(rows), rows, keep_last=keep_last)
        return Sent(session, rows, admitted, position, hit)

    def compute(self, sent: Sent) -> bytes:
        """Write and attend as an engine does, and answer with the outputs of all rows of the step."""
        session, done = sent.session, sent.hit.rows if sent.hit else 0
        rows = sent.rows[done:]
        state = self.read(session)[-1] if session.position else 0
        states = states_after(rows, state)
        for position, new in enumerate(states, session.position):
            self.arena[session.pages[position // PAGE_POSITIONS], position % PAGE_POSITIONS] = new
        computed = outputs_of(states)
        if rows:
            self.kv.advance(session, len(rows), rows, computed)
        self.histories[sent.key] += sent.rows
        self.states[sent.key] += states_after(sent.rows, (self.states[sent.key] or [0])[-1])
        return b"".join(sent.hit.outputs if sent.hit else ()) + computed

    def run(
        self, session: SessionKey, rows: bytes, now: float = 0.0, *, keep_last: bool = False
    ) -> int | TessellaError:
        """One step alone: the rows that the cache served, or the error."""
        sent = self.admit(session, rows, keep_last=keep_last)
        if isinstance(sent, TessellaError):
            return sent
        [refused] = self.kv.grow([(sent.session, sent.position + len(rows))], now)
        if refused is not None:
            self.kv.revert(sent.session, sent.hit)
            return refused
        outputs = self.compute(sent)
        assert outputs == outputs_of(self.states[session][sent.position :])
        assert self.read(sent.session) == self.states[session]
        return sent.hit.rows if sent.hit else 0

    def read(self, session: KvSession) -> list[int]:
        """The states of all positions, out of the session's pages."""
        states: list[int] = self.arena[session.held].ravel()[: session.position].tolist()
        return states
