"""`KvPages` under random opens, closes, batches, failures and pauses, against the real histories of all sessions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tessella_p2p.base.errors import CacheMiss, InvalidStep, Overloaded, PromptTooLong, StaleEpoch, TessellaError
from tessella_p2p.base.limits import KV_IDLE_S
from tessella_p2p.stages.engine import SessionKey, StepInput
from tessella_p2p.stages.kv_pages import PAGE_POSITIONS, KvSession
from tessella_p2p.wire.frames import DType
from tests.stages.kv_model import ROW_BYTES_OUT, ModelEngine, Sent, key, new_pages, outputs_of, states_after

NUM_PAGES = 7
MAX_SESSIONS = 5
NUM_KEYS = 7

KEYS = st.integers(1, NUM_KEYS).map(key)
SCOPES = st.sampled_from([b"A", b"A", b"A", b"B", b""])
LETTERS = st.sampled_from([b"a", b"a", b"a", b"b"])
ROWS = st.builds(bytes.__mul__, LETTERS, st.sampled_from([64, 128, 65, 63, 200, 1, 2]))
STEPS = st.lists(
    st.tuples(st.integers(0, MAX_SESSIONS - 1), ROWS, st.booleans(), st.sampled_from([False, False, False, True])),
    min_size=1,
    max_size=MAX_SESSIONS,
    unique_by=lambda step: step[0],
)


class KvMachine(RuleBasedStateMachine):
    """The model knows the rows, the scope and the last turn of every session, and what each scope ever computed."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = new_pages(NUM_PAGES, MAX_SESSIONS)
        self.engine = ModelEngine.over(self.kv)
        self.sessions: dict[SessionKey, KvSession] = {}
        self.scopes: dict[SessionKey, bytes] = {}
        self.used: dict[SessionKey, tuple[int, float]] = {}
        self.evicted: dict[SessionKey, int] = {}
        self.computed: dict[bytes, set[bytes]] = defaultdict(set)
        self.now = 0.0
        self.turn = 0
        self.num_evicted = 0
        self.positions_hit = 0

    # ---- rules ----

    @rule(
        session=KEYS, max_positions=st.sampled_from([64, 200, 448, 449]), scope=st.sampled_from([b"", b"A", b"A", b"B"])
    )
    def open(self, session: SessionKey, max_positions: int, scope: bytes) -> None:
        wanted: type[TessellaError] | None = None
        if max_positions > NUM_PAGES * PAGE_POSITIONS:
            wanted = PromptTooLong
        elif session in self.sessions:
            wanted = StaleEpoch
        elif len(self.sessions) == MAX_SESSIONS:
            wanted = Overloaded
        if wanted is not None:
            with pytest.raises(wanted):
                self.engine.open(session, max_positions, scope)
            return
        opened = self.engine.open(session, max_positions, scope)
        assert opened.slot not in {other.slot for other in self.sessions.values()}
        assert 0 <= opened.slot < MAX_SESSIONS
        self.sessions[session], self.scopes[session], self.used[session] = opened, scope, (0, 0.0)
        self.evicted.pop(session, None)

    @rule(session=KEYS)
    def close(self, session: SessionKey) -> None:
        self.engine.close(session)
        self.evicted.pop(session, None)
        self._forget(session)

    @rule(pause=st.sampled_from([0.1, KV_IDLE_S / 2, KV_IDLE_S]))
    def pause(self, pause: float) -> None:
        self.now += pause

    @rule(session=KEYS, off=st.sampled_from([-1, 1, 64]))
    def step_at_a_wrong_position(self, session: SessionKey, off: int) -> None:
        position = len(self.engine.histories.get(session, b"")) + off
        answer = self.kv.admit(StepInput(session, position, 1, DType.U32, b"a"))
        assert isinstance(answer, InvalidStep if session in self.sessions else CacheMiss)

    @rule(session=KEYS, rows=ROWS)
    def step_of_a_session_that_is_not_open(self, session: SessionKey, rows: bytes) -> None:
        if session not in self.sessions:
            self._turn([(session, rows, False, False)])

    @precondition(lambda self: len(self.sessions) < MAX_SESSIONS)
    @rule(session=KEYS, scope=SCOPES, rows=ROWS, pause=st.sampled_from([0.1, KV_IDLE_S]))
    def open_and_prompt(self, session: SessionKey, scope: bytes, rows: bytes, pause: float) -> None:
        self.open(session, 448, scope)
        self.now += pause
        self._turn([(session, rows, True, False)])

    @precondition(lambda self: self.sessions)
    @rule(steps=STEPS)
    def run_a_turn(self, steps: list[tuple[int, bytes, bool, bool]]) -> None:
        keys = list(self.sessions)
        self._turn([(keys[index], rows, last, fails) for index, rows, last, fails in steps if index < len(keys)])

    # ---- what they check ----

    def _turn(self, steps: Sequence[tuple[SessionKey, bytes, bool, bool]]) -> None:
        admitted: list[tuple[Sent, bool]] = []
        for session, rows, keep_last, fails in steps:
            answer = self._admit(session, rows, keep_last)
            if answer is not None:
                admitted.append((answer, fails))
        self.turn += 1
        if not admitted:
            return
        before = {session: opened.held for session, opened in self.sessions.items()}
        for sent, _ in admitted:
            self.used[sent.key] = (self.turn, self.now)
        refused = self.kv.grow([(sent.session, sent.position + len(sent.rows)) for sent, _ in admitted], self.now)
        evicted = self._find_evicted()
        self._check_victims(evicted, before)
        if len(admitted) == 1 and refused[0]:
            assert not evicted
        for (sent, _), error in zip(admitted, refused, strict=True):
            if error is not None:
                self._check_lack(sent)
        for (sent, fails), error in zip(admitted, refused, strict=True):
            if error is not None or fails:
                self.kv.revert(sent.session, sent.hit)
                assert sent.session.position == sent.position
            else:
                self._compute(sent)

    def _admit(self, session: SessionKey, rows: bytes, keep_last: bool) -> Sent | None:
        answer = self.engine.admit(session, rows, keep_last=keep_last)
        if session not in self.sessions:
            assert isinstance(answer, CacheMiss)
            if session in self.evicted:
                assert f"position {self.evicted[session]}," in str(answer)
            return None
        position = len(self.engine.histories[session])
        if position + len(rows) > self.sessions[session].max_positions:
            assert isinstance(answer, PromptTooLong)
            return None
        assert isinstance(answer, Sent)
        if answer.hit is not None:
            self._check_hit(answer, keep_last)
        return answer

    def _check_hit(self, sent: Sent, keep_last: bool) -> None:
        hit = sent.hit
        assert hit is not None
        assert self.scopes[sent.key]
        assert sent.position % PAGE_POSITIONS == hit.rows % PAGE_POSITIONS == 0
        assert 0 < hit.rows <= len(sent.rows) - keep_last
        history = self.engine.histories[sent.key] + sent.rows[: hit.rows]
        for end in range(sent.position + PAGE_POSITIONS, len(history) + 1, PAGE_POSITIONS):
            assert history[:end] in self.computed[self.scopes[sent.key]]
        assert b"".join(hit.outputs) == outputs_of(states_after(history))[-hit.rows * ROW_BYTES_OUT :]
        assert sent.session.position == sent.position + hit.rows

    def _compute(self, sent: Sent) -> None:
        outputs = self.engine.compute(sent)
        history = self.engine.histories[sent.key]
        assert outputs == outputs_of(self.engine.states[sent.key][sent.position :])
        self.positions_hit += sent.hit.rows if sent.hit else 0
        if self.scopes[sent.key]:
            for end in range(PAGE_POSITIONS, len(history) + 1, PAGE_POSITIONS):
                self.computed[self.scopes[sent.key]].add(history[:end])

    def _find_evicted(self) -> set[SessionKey]:
        gone = set()
        for session in self.sessions:
            position = self.sessions[session].position
            if isinstance(self.kv.admit(StepInput(session, position, 1, DType.U32, b"a")), CacheMiss):
                gone.add(session)
        return gone

    def _check_victims(self, evicted: set[SessionKey], before: dict[SessionKey, list[int]]) -> None:
        """Only idle ones go, and no survivor was used longer ago, unless others that stay hold all its pages."""
        for session in evicted:
            turn, at = self.used[session]
            assert turn != self.turn
            assert self.now - at >= KV_IDLE_S
            assert before[session]
        stay = {session: pages for session, pages in before.items() if session not in evicted}
        for session, pages in stay.items():
            if pages and evicted and self.used[session] < max(self.used[other] for other in evicted):
                others = {page for other, held in stay.items() if other != session for page in held}
                assert set(pages) <= others
        for session in evicted:
            self.evicted[session] = len(self.engine.histories[session])
            self.engine.forget(session)
            self._forget(session)
        self.num_evicted += len(evicted)

    def _check_lack(self, sent: Sent) -> None:
        """There was no room, even if all idle sessions had gone."""
        stay = {page for other in self.sessions.values() if not self._is_idle(other.key) for page in other.held}
        missing = -(-(sent.position + len(sent.rows)) // PAGE_POSITIONS) - sent.session.num_pages
        assert missing > NUM_PAGES - len(stay)

    def _is_idle(self, session: SessionKey) -> bool:
        turn, at = self.used[session]
        return turn != self.turn and self.now - at >= KV_IDLE_S

    def _forget(self, session: SessionKey) -> None:
        for table in (self.sessions, self.scopes, self.used):
            table.pop(session, None)

    # ---- invariants ----

    @invariant()
    def every_session_reads_its_own_history(self) -> None:
        for session, opened in self.sessions.items():
            history = self.engine.histories[session]
            assert opened.position == len(history)
            assert opened.num_pages * PAGE_POSITIONS >= opened.position
            assert self.engine.read(opened) == self.engine.states[session]

    @invariant()
    def pages_are_shared_where_histories_and_scopes_are_equal(self) -> None:
        users: dict[int, list[tuple[SessionKey, int]]] = defaultdict(list)
        for session, opened in self.sessions.items():
            for index, page in enumerate(opened.held):
                users[page].append((session, index))
        for shared in users.values():
            (first, index), *others = shared
            end = (index + 1) * PAGE_POSITIONS
            for session, other_index in others:
                assert (other_index, self.scopes[session]) == (index, self.scopes[first])
                assert self.scopes[session]
                assert self.engine.histories[session][:end] == self.engine.histories[first][:end]
            if others:  # nobody will write into it
                assert all(self.sessions[session].position >= end for session, _ in shared)

    @invariant()
    def counts_are_exact(self) -> None:
        use = self.kv.use
        assert use.pages_used == len({page for opened in self.sessions.values() for page in opened.held})
        assert 0 <= use.pages_cached <= NUM_PAGES - use.pages_used
        assert use.sessions_evicted == self.num_evicted
        assert use.prefix_positions_hit == self.positions_hit
        assert self.kv.outputs_bytes <= self.kv.max_outputs_bytes == NUM_PAGES * PAGE_POSITIONS * ROW_BYTES_OUT
        assert len(self.kv) == len(self.sessions) <= MAX_SESSIONS

    def teardown(self) -> None:
        for session in list(self.sessions):
            self.close(session)
        assert self.kv.use.pages_used == 0
        last = key(NUM_KEYS + 1)
        self.engine.open(last, NUM_PAGES * PAGE_POSITIONS)
        assert self.engine.run(last, b"z" * NUM_PAGES * PAGE_POSITIONS, self.now) == 0
        assert (self.kv.use.pages_used, self.kv.use.pages_cached) == (NUM_PAGES, 0)
        self.engine.close(last)
        assert (self.kv.use.pages_used, self.kv.use.pages_cached, self.kv.outputs_bytes) == (0, 0, 0)


TestKvPages = KvMachine.TestCase
TestKvPages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
