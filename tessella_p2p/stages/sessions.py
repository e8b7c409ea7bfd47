"""Which sessions a stage has, where each stands and which slot of the KV arena is its own (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from tessella_p2p.base.errors import CacheMiss, InvalidStep, Overloaded, PromptTooLong, StaleEpoch, TessellaError
from tessella_p2p.stages.engine import SessionKey, StepInput


@dataclass(slots=True)
class OpenSession:
    """One session on this stage.

    Attributes:
        slot: index of its KV in the arena.
        max_positions: positions that it may have.
        position: the next one; everything before it is in the KV.
        written: end of what a step has put into the slot, or has begun to; the slot is cleared up to here.
    """

    slot: int
    max_positions: int
    position: int = 0
    written: int = 0


class SessionTable:
    """Open sessions and free slots.

    Args:
        max_sessions: slots.
        max_positions: positions of one slot.
    """

    def __init__(self, max_sessions: int, max_positions: int) -> None:
        self.max_sessions = max_sessions
        self.max_positions = max_positions
        self._open: dict[SessionKey, OpenSession] = {}
        # The lowest slot is handed out first: neighbours in the arena let a batch use it without a copy.
        self._free = list(range(max_sessions - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._open)

    def open(self, key: SessionKey, max_positions: int) -> OpenSession:
        """Take a slot for a session.

        Raises:
            PromptTooLong, Overloaded, StaleEpoch: see `engine.StageEngine.open_session`.
        """
        if not 1 <= max_positions <= self.max_positions:
            raise PromptTooLong(f"{max_positions} positions; this stage accepts 1 to {self.max_positions}")
        for other in self._open:
            if other.session == key.session and other.epoch >= key.epoch:
                raise StaleEpoch(f"session {key} is open here already, at epoch {other.epoch}")
        if not self._free:
            raise Overloaded(f"all {self.max_sessions} sessions of this stage are taken; try another one")
        session = OpenSession(self._free.pop(), max_positions)
        self._open[key] = session
        return session

    def close(self, key: SessionKey) -> OpenSession | None:
        """Give a session's slot back; None when there is no such session."""
        session = self._open.pop(key, None)
        if session is not None:
            self._free.append(session.slot)
            self._free.sort(reverse=True)
        return session

    def admit(self, step: StepInput) -> OpenSession | TessellaError:
        """The session that ``step`` continues, or the error that its sender gets."""
        session = self._open.get(step.session)
        if session is None:
            return CacheMiss(f"this stage has no KV of session {step.session}")
        if step.position != session.position:
            return InvalidStep(f"a step at position {step.position}; session {step.session} is at {session.position}")
        if step.position + step.rows > session.max_positions:
            return PromptTooLong(
                f"{step.position + step.rows} positions; session {step.session} has room for {session.max_positions}"
            )
        return session
