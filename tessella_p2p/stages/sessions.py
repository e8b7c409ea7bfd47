"""Which sessions a stage has, where each stands and which pages of the KV it holds (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessella_p2p.base.errors import CacheMiss, InvalidStep, PromptTooLong, StaleEpoch, TessellaError, TooManyHopBodies
from tessella_p2p.base.limits import MAX_EVICTED_REMEMBERED
from tessella_p2p.stages.engine import Buffer, SessionKey, StepInput

PAGE_POSITIONS = 64


def pages_of(positions: int) -> int:
    """Pages that hold so many positions."""
    return -(-positions // PAGE_POSITIONS)


@dataclass(slots=True)
class SeenRows:
    """What a session with a scope has seen: whole pages in ``digest``, and the rows of the page that it fills.

    Those are hashed at once when the page is full: row by row, `hashlib` would let go of the interpreter's lock at each.
    """

    digest: bytes
    inputs: bytearray | None = None
    outputs: bytearray | None = None

    def keep(self, filled: int, rows: int, inputs: Buffer, outputs: Buffer) -> None:
        """Put rows behind the ``filled`` ones of the page."""
        if self.inputs is None:  # is used for one page after the other
            self.inputs = bytearray(len(inputs) // rows * PAGE_POSITIONS)
        if self.outputs is None:  # goes to the cache with its page
            self.outputs = bytearray(len(outputs) // rows * PAGE_POSITIONS)
        for page, new in ((self.inputs, inputs), (self.outputs, outputs)):
            start = len(page) // PAGE_POSITIONS * filled
            page[start : start + len(new)] = new


@dataclass(slots=True, eq=False)
class KvSession:
    """One session on this stage. Under `kv_pages.KvPages` an engine reads it only.

    Attributes:
        key: its name.
        slot: a number below the stage's ``max_sessions`` that no other open session has.
        max_positions: positions that it may have.
        pages: [pages of max_positions] int32; the first ``num_pages`` are its own. It is never moved, so C code may keep its address.
        pages_address: of its first element.
        opened: how many were opened before it.
        position: the next one; everything before it is in the KV.
        num_pages: pages that it holds; they may reach behind its position.
        num_cached: positions that the prefix cache served.
        used_turn: the last turn that it took part in; 0 before the first.
        used_at: when that was, in seconds.
        seen: for the prefix cache; None in a session without a scope.
        written: end of what steps have put into its slot, for an engine that keeps KV by slots and clears them.
    """

    key: SessionKey
    slot: int
    max_positions: int
    pages: npt.NDArray[np.int32]
    pages_address: int
    opened: int
    position: int = 0
    num_pages: int = 0
    num_cached: int = 0
    used_turn: int = 0
    used_at: float = 0.0
    seen: SeenRows | None = None
    written: int = 0

    @property
    def held(self) -> list[int]:
        """Its pages, in the order of their positions."""
        held: list[int] = self.pages[: self.num_pages].tolist()
        return held


class SessionTable:
    """Open sessions, free slots, and the memory of who was evicted.

    Args:
        max_sessions: slots.
        max_positions: the most that one session may have.
    """

    def __init__(self, max_sessions: int, max_positions: int) -> None:
        self.max_sessions = max_sessions
        self.max_positions = max_positions
        self.num_evicted = 0
        self._open: dict[SessionKey, KvSession] = {}
        # The lowest slot is handed out first: neighbours in an arena let a batch use it without a copy.
        self._free_slots = list(range(max_sessions - 1, -1, -1))
        self._num_opened = 0
        self._evicted: dict[SessionKey, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[KvSession]:
        return iter(self._open.values())

    def open(self, key: SessionKey, max_positions: int) -> KvSession:
        """Take a slot for a session; it holds no page yet.

        Raises:
            PromptTooLong, TooManyHopBodies, StaleEpoch: see `engine.StageEngine.open_session`.
        """
        if not 1 <= max_positions <= self.max_positions:
            raise PromptTooLong(f"{max_positions} positions; this stage accepts 1 to {self.max_positions}")
        for other in self._open:
            if other.session == key.session and other.epoch >= key.epoch:
                raise StaleEpoch(f"session {key} is open here already, at epoch {other.epoch}")
        if not self._free_slots:
            raise TooManyHopBodies(f"all {self.max_sessions} sessions of this stage are taken: it is full, not broken")
        pages = np.zeros(pages_of(max_positions), np.int32)
        session = KvSession(key, self._free_slots.pop(), max_positions, pages, pages.ctypes.data, self._num_opened)
        self._num_opened += 1
        self._evicted.pop(key, None)
        self._open[key] = session
        return session

    def close(self, key: SessionKey) -> KvSession | None:
        """Give a session's slot back; None when there is no such session."""
        self._evicted.pop(key, None)
        session = self._open.pop(key, None)
        if session is not None:
            self._free_slots.append(session.slot)
            self._free_slots.sort(reverse=True)
        return session

    def find(self, key: SessionKey) -> KvSession | None:
        """An open session."""
        return self._open.get(key)

    def evict(self, session: KvSession) -> None:
        """Close an open session whose KV others get; its next step is told so, unless very many are evicted meanwhile."""
        self.close(session.key)
        self.num_evicted += 1
        self._evicted[session.key] = session.position
        if len(self._evicted) > MAX_EVICTED_REMEMBERED:
            del self._evicted[next(iter(self._evicted))]

    def admit(self, step: StepInput) -> KvSession | TessellaError:
        """The session that ``step`` continues, or the error that its sender gets."""
        session = self._open.get(step.session)
        if session is None:
            stood = self._evicted.get(step.session)
            why = "" if stood is None else f" any more: it was idle at position {stood}, and others needed the room"
            return CacheMiss(f"this stage has no KV of session {step.session}{why}")
        if step.position != session.position:
            return InvalidStep(f"a step at position {step.position}; session {step.session} is at {session.position}")
        if step.position + step.rows > session.max_positions:
            return PromptTooLong(
                f"{step.position + step.rows} positions; session {step.session} has room for {session.max_positions}"
            )
        return session
