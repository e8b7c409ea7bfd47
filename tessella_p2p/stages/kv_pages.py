"""The book-keeping of a stage's KV: sessions, their pages, and the prefixes that they share (pure).

An engine keeps keys and values in an arena of pages of `PAGE_POSITIONS` positions; here it learns which pages are whose. One turn of
`StageEngine.forward`, for each step of its batch::

    session = kv.admit(step)                              # or the error that its sender gets
    hit = kv.match(session, rows, body, keep_last=...)    # the leading rows that need no computing; often None
    refused = kv.grow([(session, end), ...], now)         # once for the batch: pages up to each end
    ... compute the rows from session.position on ...
    kv.advance(session, rows, inputs, outputs)            # the rows are in the KV now

A step that fails before `advance` leaves its session where it stood, provided that ``kv.revert(session, hit)`` follows where there
was a hit. Pages that it was given stay with it; what was written behind `KvSession.position` is overwritten by the next step.

**Promises.** An open session was promised the pages of its ``max_positions``. `open` refuses a newcomer where those of the sessions
that are not idle (a step within `KV_IDLE_S`, or just opened) would come to more than ``overcommit`` times the budget. At 1, the
default, a session that goes on stepping never lacks a page, whoever comes after it; but one that was idle and comes back may have
to do without, or make a younger one do so.

**Room.** `grow` takes free pages, then cached ones, then those of whole sessions: of the least recently used that are not in the
batch, have had no step for `KV_IDLE_S` and have none in the queue. So those who decode lose nothing to a burst of newcomers, who get
`Overloaded` instead, as does a batch's youngest session where its elder needs the same page. The clock is the caller's: any that
never goes back.

**Cached prefixes.** A page's digest is BLAKE2b, keyed by this stage's own secret, over the digest of the page before it and its rows
as this stage received them; before the first page stands the digest of the session's scope. A full page is published under its digest,
and a session that would compute the same rows after the same history in the same scope holds it instead: a position's bits depend
on its history alone. A hit shows in a step's time, and so tells a scope what it sent before, but nothing of other scopes. Without a
scope nothing is published or shared. A session writes at its position only, and the pages that are shared end before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tessella_p2p.base.errors import Overloaded, TessellaError, TooManyHopBodies
from tessella_p2p.base.limits import KV_IDLE_S, KV_OVERCOMMIT
from tessella_p2p.stages.engine import Buffer, KvUse, SessionKey, StepInput
from tessella_p2p.stages.page_pool import PagePool
from tessella_p2p.stages.sessions import PAGE_POSITIONS, KvSession, SeenRows, SessionTable, pages_of

__all__ = ["PAGE_POSITIONS", "KvPages", "KvSession", "PrefixHit"]

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Rows at the head of a step that cached pages serve.

    Attributes:
        rows: how many, a multiple of `PAGE_POSITIONS`.
        outputs: what the stage sent on for them, page by page; empty at a tail.
    """

    rows: int
    outputs: tuple[Buffer, ...]
    _position: int = field(repr=False)
    _digest: bytes = field(repr=False)


class KvPages:
    """Sessions and pages of one stage. One call at a time; `use` may be read meanwhile.

    Args:
        num_pages: the budget.
        page_bytes: of one page, over all layers of the stage.
        max_sessions: sessions that may be open at once.
        max_positions: positions that one session may have.
        secret: 16 to 64 random bytes, new for every engine; the key of all digests.
        row_bytes_out: of a row that the stage sends on; 0 at a tail.
        overcommit: pages that may be promised to sessions that are not idle, over ``num_pages``.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_bytes: int,
        max_sessions: int,
        max_positions: int,
        secret: bytes,
        row_bytes_out: int,
        overcommit: float = KV_OVERCOMMIT,
    ) -> None:
        if num_pages < 1 or not 16 <= len(secret) <= hashlib.blake2b.MAX_KEY_SIZE:
            raise ValueError(f"{num_pages} pages and a secret of {len(secret)} bytes")
        self._page_bytes = page_bytes
        self._secret = secret
        self._row_bytes_out = row_bytes_out
        self._most_promised = int(num_pages * overcommit)
        self._pool = PagePool(num_pages)
        self._sessions = SessionTable(max_sessions, min(max_positions, num_pages * PAGE_POSITIONS))
        self._turn = 0
        self._positions_hit = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def use(self) -> KvUse:
        """What the pages hold now."""
        pool = self._pool
        cached = pool.num_cached
        return KvUse(
            page_positions=PAGE_POSITIONS,
            page_bytes=self._page_bytes,
            pages_total=pool.num_pages,
            pages_used=max(0, pool.num_pages - pool.num_free - cached),  # another thread may move a page meanwhile
            pages_cached=cached,
            prefix_positions_hit=self._positions_hit,
            sessions_evicted=self._sessions.num_evicted,
        )

    @property
    def max_outputs_bytes(self) -> int:
        """The most that cached outputs take beside the pages: at most one page of rows for each page."""
        return self._pool.num_pages * PAGE_POSITIONS * self._row_bytes_out

    @property
    def outputs_bytes(self) -> int:
        """What they take now, those of pages that are not full yet included."""
        filling = sum(session.seen is not None and session.seen.outputs is not None for session in self._sessions)
        return (self._pool.num_published + filling) * PAGE_POSITIONS * self._row_bytes_out

    # ---- sessions ----

    def open(self, key: SessionKey, max_positions: int, scope: bytes = b"", now: float = 0.0) -> KvSession:
        """Enter a session; it holds no page yet.

        Args:
            key: the session.
            max_positions: the most that it may have.
            scope: whose cached prefixes it may use and adds to.
            now: as for `grow`.

        Raises:
            PromptTooLong, TooManyHopBodies, StaleEpoch: see `engine.StageEngine.open_session`.
        """
        promised = sum(pages_of(other.max_positions) for other in self._sessions if not _is_idle(other, now))
        session = self._sessions.open(key, max_positions)
        if promised + pages_of(max_positions) > self._most_promised:
            self._sessions.close(key)
            raise TooManyHopBodies(
                f"{promised} of the {self._pool.num_pages} KV pages of this stage are promised to sessions at work; "
                f"{max_positions} positions take {pages_of(max_positions)}: it is full, not broken"
            )
        session.used_at = now
        if scope:
            session.seen = SeenRows(self._hash(b"tessella scope", scope))
        return session

    def close(self, key: SessionKey) -> KvSession | None:
        """Let go of a session and its pages; those that are published stay as cached ones. None when there is no such session."""
        session = self._sessions.close(key)
        if session is not None:
            self._pool.release(session.held)
        return session

    def keep(self, waiting: Iterable[SessionKey], now: float) -> None:
        """Sessions with steps in the queue are not idle, however long their turn is in coming; unknown keys are fine."""
        for key in waiting:
            session = self._sessions.find(key)
            if session is not None:
                session.used_at = now

    def cached_positions(self, key: SessionKey) -> int:
        """See `engine.StageEngine.cached_positions`."""
        session = self._sessions.find(key)
        return session.num_cached if session is not None else 0

    def admit(self, step: StepInput) -> KvSession | TessellaError:
        """The session that ``step`` continues, or the error that its sender gets."""
        return self._sessions.admit(step)

    def advance(self, session: KvSession, rows: int, inputs: Buffer = b"", outputs: Buffer = b"") -> None:
        """Take note that ``rows`` rows from the session's position on are in its KV, and publish the pages that they fill.

        Args:
            session: admitted; it holds pages for the rows.
            rows: at least 1, in any split.
            inputs: as this stage received them; not looked at in a session without a scope.
            outputs: as it sends them on; likewise.
        """
        if session.seen is not None:
            self._learn(session, session.seen, rows, inputs, outputs)
        session.position += rows

    # ---- room ----

    def grow(self, ends: Sequence[tuple[KvSession, int]], now: float) -> list[Overloaded | None]:
        """Begin a turn: see to it that each session of a batch holds the pages of its positions up to its end.

        Args:
            ends: admitted sessions, each once, those that need no page included; ends are at most their ``max_positions``.
            now: seconds by a clock that never goes back.

        Returns:
            For each, None or the error that its sender gets. A session that is refused keeps what it held.
        """
        self._turn += 1
        missing = 0
        for session, end in ends:
            session.used_turn = self._turn
            session.used_at = now
            if end > session.num_pages * PAGE_POSITIONS:
                missing += pages_of(end) - session.num_pages
        refused: list[Overloaded | None] = [None] * len(ends)
        if not missing:
            return refused
        if missing <= self._pool.num_available:
            for session, end in ends:
                self._extend(session, end)
            return refused
        # The eldest first: no newcomer takes the page without which somebody's answer would break off.
        for index in sorted(range(len(ends)), key=lambda index: ends[index][0].opened):
            session, end = ends[index]
            if self._make_room(pages_of(end) - session.num_pages, now):
                self._extend(session, end)
            else:
                refused[index] = Overloaded(
                    f"the {self._pool.num_pages} KV pages of this stage are in use; session {session.key} got no room "
                    f"for {end} positions"
                )
        return refused

    def _extend(self, session: KvSession, end: int) -> None:
        for index in range(session.num_pages, pages_of(end)):
            session.pages[index] = self._pool.take()
            session.num_pages = index + 1

    def _make_room(self, num_pages: int, now: float) -> bool:
        """Evict as many idle sessions as it takes until ``num_pages`` are available; none if all of them would not do."""
        missing = num_pages - self._pool.num_available
        if missing <= 0:
            return True
        # Those of the batch were used just now.
        idle = [session for session in self._sessions if session.num_pages and _is_idle(session, now)]
        idle.sort(key=lambda session: session.used_turn)
        let_go: dict[int, int] = {}
        victims: list[KvSession] = []
        for session in idle:
            victims.append(session)
            for page in session.held:
                let_go[page] = let_go.get(page, 0) + 1
                missing -= let_go[page] == self._pool.holders(page)
            if missing <= 0:
                break
        else:
            return False
        given = {page for page, count in let_go.items() if count == self._pool.holders(page)}
        for session in victims:
            if not given.isdisjoint(session.held):  # whoever shares all its pages with those who stay is spared
                self._sessions.evict(session)
                self._pool.release(session.held)
        return True

    # ---- cached prefixes ----

    def match(self, session: KvSession, rows: int, inputs: Buffer, *, keep_last: bool) -> PrefixHit | None:
        """Serve whole pages of rows at the head of a step from the cache, as many as there are; the session moves on behind them.

        Only a session with a scope that stands on a page's boundary can have a hit; in the midst of a page its rows are computed.

        Args:
            session: admitted.
            rows: of the step.
            inputs: the step's body; its rows have one length.
            keep_last: the last row is to be computed in any case, because a token is drawn from it.
        """
        seen = session.seen
        num_pages = (rows - keep_last) // PAGE_POSITIONS
        if seen is None or num_pages < 1 or session.position % PAGE_POSITIONS or not self._pool.num_published:
            return None
        page_bytes = len(inputs) // rows * PAGE_POSITIONS
        view = memoryview(inputs)
        position, digest = session.position, seen.digest
        outputs: list[Buffer] = []
        for start in range(0, num_pages * page_bytes, page_bytes):
            found = self._hash(b"tessella page", seen.digest, view[start : start + page_bytes])
            page = self._pool.share(found)
            if page is None:
                break
            self._cut(session)
            session.pages[session.num_pages] = page
            session.num_pages += 1
            session.position += PAGE_POSITIONS
            seen.digest = found
            published = self._pool.published(page)
            assert published is not None
            outputs.append(published.outputs)
        if not outputs:
            return None
        hit_rows = session.position - position
        self._positions_hit += hit_rows
        session.num_cached += hit_rows
        return PrefixHit(hit_rows, tuple(outputs), position, digest)

    def revert(self, session: KvSession, hit: PrefixHit | None) -> None:
        """Undo a `match`, because the rest of its step failed; a session without a hit stands where it stood anyway."""
        if hit is None:
            return
        assert session.seen is not None
        assert session.position == hit._position + hit.rows
        session.position = hit._position
        session.seen.digest = hit._digest
        self._cut(session)
        self._positions_hit -= hit.rows
        session.num_cached -= hit.rows

    def _cut(self, session: KvSession) -> None:
        """Let go of the pages behind a session's position, which is a page's boundary: a failed step may have left some."""
        keep = session.position // PAGE_POSITIONS
        behind = session.held[keep:]
        session.num_pages = keep
        self._pool.release(behind)

    def _learn(self, session: KvSession, seen: SeenRows, rows: int, inputs: Buffer, outputs: Buffer) -> None:
        assert len(outputs) == rows * self._row_bytes_out
        position = session.position
        filled = position % PAGE_POSITIONS
        if filled + rows < PAGE_POSITIONS:
            seen.keep(filled, rows, inputs, outputs)
            return
        inputs, outputs = memoryview(inputs), memoryview(outputs)
        bytes_in, bytes_out = len(inputs) // rows, self._row_bytes_out
        start = 0
        while start < rows:
            end = min(rows, start + PAGE_POSITIONS - filled)
            seen.keep(
                filled,
                end - start,
                inputs[start * bytes_in : end * bytes_in],
                outputs[start * bytes_out : end * bytes_out],
            )
            if filled + end - start == PAGE_POSITIONS:
                self._publish(int(session.pages[(position + start) // PAGE_POSITIONS]), seen)
            start, filled = end, 0

    def _publish(self, page: int, seen: SeenRows) -> None:
        assert seen.inputs is not None
        assert seen.outputs is not None
        seen.digest = self._hash(b"tessella page", seen.digest, seen.inputs)
        self._pool.publish(page, seen.digest, memoryview(seen.outputs).toreadonly())
        seen.outputs = None

    def _hash(self, purpose: bytes, first: Buffer, then: Buffer = b"") -> bytes:
        running = hashlib.blake2b(first, key=self._secret, digest_size=_DIGEST_BYTES, person=purpose)
        running.update(then)
        return running.digest()


def _is_idle(session: KvSession, now: float) -> bool:
    return now - session.used_at >= KV_IDLE_S
