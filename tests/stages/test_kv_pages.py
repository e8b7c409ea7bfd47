"""The rules of `KvPages`, one by one, and what a requester might try against them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import CacheMiss, InvalidStep, Overloaded, PromptTooLong, StaleEpoch, TooManyHopBodies
from tessella_p2p.base.limits import KV_IDLE_S, KV_OVERCOMMIT, MAX_EVICTED_REMEMBERED
from tessella_p2p.stages.engine import StepInput
from tessella_p2p.stages.kv_pages import PAGE_POSITIONS, KvPages
from tessella_p2p.wire.frames import DType
from tests.stages.kv_model import ROW_BYTES_OUT, SECRET, ModelEngine, Sent, key, new_pages

PAGE = bytes(range(PAGE_POSITIONS))
OTHER_PAGE = PAGE[::-1]


def engine(num_pages: int = 8, max_sessions: int = 5) -> ModelEngine:
    return ModelEngine.over(new_pages(num_pages, max_sessions))


def prompted(model: ModelEngine, number: int, rows: bytes, *, scope: bytes = b"", now: float = 0.0) -> int:
    """Open a session and run its prompt; how many rows the cache served."""
    model.open(key(number), model.kv.use.pages_total * PAGE_POSITIONS, scope)
    answer = model.run(key(number), rows, now, keep_last=True)
    assert isinstance(answer, int)
    return answer


# ---- sessions ----


def test_a_session_that_is_open_is_not_opened_again_nor_under_an_older_epoch() -> None:
    kv = new_pages()
    kv.open(key(1, epoch=2), 64)
    for epoch in (1, 2):
        with pytest.raises(StaleEpoch):
            kv.open(key(1, epoch), 64)
    kv.open(key(1, epoch=3), 64)
    assert len(kv) == 2


@pytest.mark.parametrize("positions", [-1, 0, 8 * PAGE_POSITIONS + 1])
def test_a_session_longer_than_the_budget_is_refused(positions: int) -> None:
    with pytest.raises(PromptTooLong):
        new_pages(num_pages=8, max_positions=10_000).open(key(1), positions)


def test_a_session_longer_than_the_stage_allows_is_refused() -> None:
    with pytest.raises(PromptTooLong):
        new_pages(num_pages=8, max_positions=100).open(key(1), 101)


def test_sessions_are_counted_even_without_pages() -> None:
    kv = new_pages(max_sessions=2)
    slots = {kv.open(key(number), 64).slot for number in (1, 2)}
    assert slots == {0, 1}
    with pytest.raises(TooManyHopBodies):
        kv.open(key(3), 64)
    kv.close(key(1))
    assert kv.open(key(3), 64).slot == 0


def test_a_step_continues_its_session_where_it_stands() -> None:
    model = engine()
    model.open(key(1), 100)
    assert model.run(key(1), b"x" * 70) == 0
    for position, rows, wanted in (
        (69, 1, InvalidStep),
        (71, 1, InvalidStep),
        (0, 70, InvalidStep),
        (70, 31, PromptTooLong),
    ):
        assert isinstance(model.kv.admit(StepInput(key(1), position, rows, DType.U32, b"")), wanted)
    assert isinstance(model.kv.admit(StepInput(key(2), 70, 1, DType.U32, b"")), CacheMiss)
    assert model.run(key(1), b"x" * 30) == 0


def test_closing_gives_the_pages_back_and_closing_again_is_fine() -> None:
    model = engine()
    prompted(model, 1, b"x" * 200)
    assert model.kv.use.pages_used == 4
    model.close(key(1))
    model.close(key(1))
    assert (model.kv.use.pages_used, model.kv.use.pages_cached) == (0, 0)


def test_the_table_of_a_session_never_moves() -> None:
    model = engine()
    session = model.open(key(1), 500)
    address, table = session.pages_address, session.pages
    for _ in range(100):
        assert model.run(key(1), b"xyz") == 0
    assert session.pages is table
    assert session.pages.ctypes.data == address == session.pages_address


# ---- promises ----


def strict(num_pages: int, max_sessions: int = 20) -> ModelEngine:
    """As a stage has it: no page is promised twice to sessions at work."""
    return ModelEngine.over(new_pages(num_pages, max_sessions, overcommit=KV_OVERCOMMIT))


def test_a_newcomer_waits_for_pages_that_others_will_need_later_in_their_answers() -> None:
    model = strict(num_pages=4)
    model.open(key(1), 192)
    assert model.run(key(1), b"x") == 0  # holds one page, and was promised three
    with pytest.raises(TooManyHopBodies, match="3 of the 4 KV pages"):
        model.open(key(2), 128)
    assert len(model.kv) == 1
    model.open(key(3), 64)
    assert model.run(key(3), b"z" * 64) == 0
    assert model.run(key(1), b"x" * 191) == 0
    model.close(key(1))
    model.open(key(2), 128)


def test_who_idles_keeps_nobody_out_and_its_pages_until_they_are_needed() -> None:
    model = strict(num_pages=3)
    model.open(key(1), 128)
    assert model.run(key(1), b"x" * 65) == 0
    with pytest.raises(TooManyHopBodies):
        model.open(key(2), 192, now=KV_IDLE_S - 0.1)
    model.open(key(2), 192, now=KV_IDLE_S)
    assert model.run(key(2), b"z" * 64, KV_IDLE_S) == 0
    assert model.kv.use.sessions_evicted == 0
    assert model.run(key(2), b"z", KV_IDLE_S) == 0
    assert isinstance(model.run(key(1), b"x", KV_IDLE_S), CacheMiss)


def test_who_waits_for_its_turn_does_not_idle() -> None:
    model = strict(num_pages=3)
    model.open(key(1), 128)
    assert model.run(key(1), b"x" * 65) == 0
    model.kv.keep([key(1), key(9)], KV_IDLE_S)
    with pytest.raises(TooManyHopBodies):
        model.open(key(2), 192, now=2 * KV_IDLE_S - 0.1)
    assert model.run(key(1), b"x" * 63, 2 * KV_IDLE_S) == 0


def test_a_session_that_was_just_opened_counts_before_its_first_step() -> None:
    model = strict(num_pages=2)
    model.open(key(1), 128, now=100.0)
    with pytest.raises(TooManyHopBodies):
        model.open(key(2), 64, now=100.0 + KV_IDLE_S / 2)
    model.open(key(2), 64, now=100.0 + KV_IDLE_S)


@given(
    st.lists(st.tuples(st.sampled_from(["open", "step", "close"]), st.integers(1, 8), st.integers(1, 300)), max_size=60)
)
@settings(max_examples=60, deadline=None)
def test_a_session_at_work_gets_every_page_that_it_was_promised(events: list[tuple[str, int, int]]) -> None:
    model = strict(num_pages=7)
    room: dict[int, int] = {}
    for what, number, positions in events:
        if what == "open" and number not in room:
            try:
                model.open(key(number), positions)
            except TooManyHopBodies:
                assert sum(-(-each // PAGE_POSITIONS) for each in (*room.values(), positions)) > 7
            else:
                room[number] = positions
        elif what == "step" and number in room:
            left = room[number] - len(model.histories[key(number)])
            if left:
                assert model.run(key(number), b"r" * min(left, positions)) == 0
        elif what == "close":
            model.close(key(number))
            room.pop(number, None)
    for number, positions in room.items():
        rest = positions - len(model.histories[key(number)])
        assert not rest or model.run(key(number), b"r" * rest) == 0


# ---- room ----


def test_the_least_recently_used_idle_session_makes_room_and_is_told_so() -> None:
    model = engine(num_pages=4)
    prompted(model, 1, b"x" * 65, now=0.0)
    prompted(model, 2, b"y" * 65, now=1.0)
    assert model.run(key(1), b"x", 2.0) == 0
    now = 2.0 + KV_IDLE_S
    prompted(model, 3, b"z" * 65, now=now)
    answer = model.run(key(2), b"y", now)
    assert isinstance(answer, CacheMiss)
    assert "position 65" in str(answer)
    assert model.run(key(1), b"x", now) == 0
    assert model.kv.use.sessions_evicted == 1


def test_a_burst_of_newcomers_evicts_nobody_who_decodes() -> None:
    model = engine(num_pages=4, max_sessions=20)
    prompted(model, 1, b"x" * 130)
    prompted(model, 2, b"y" * 10)
    for number in range(3, 20):
        now = number * KV_IDLE_S / 2
        assert model.run(key(1), b"x", now) == 0
        assert model.run(key(2), b"y", now) == 0
        model.open(key(number), 64)
        assert isinstance(model.run(key(number), b"z", now), Overloaded)
    assert model.kv.use.sessions_evicted == 0


def test_nobody_is_evicted_where_that_would_not_be_enough() -> None:
    model = engine(num_pages=4)
    prompted(model, 1, b"x" * 65, now=0.0)
    prompted(model, 2, b"y" * 65, now=KV_IDLE_S)
    model.open(key(3), 256)
    assert isinstance(model.run(key(3), b"z" * 192, KV_IDLE_S), Overloaded)
    assert model.kv.use.sessions_evicted == 0
    assert model.run(key(3), b"z" * 128, KV_IDLE_S) == 0
    assert isinstance(model.run(key(1), b"x", KV_IDLE_S), CacheMiss)


def test_an_idle_session_in_the_batch_is_not_evicted_for_it() -> None:
    model = engine(num_pages=2)
    prompted(model, 1, b"x" * 64)
    model.open(key(2), 128)
    sent = [model.admit(key(number), rows) for number, rows in ((2, b"z" * 128), (1, b"x"))]
    steps = [step for step in sent if isinstance(step, Sent)]
    refused = model.kv.grow([(step.session, step.position + len(step.rows)) for step in steps], 10 * KV_IDLE_S)
    assert isinstance(refused[0], Overloaded)
    assert refused[1] is None
    assert model.kv.use.sessions_evicted == 0


def test_the_eldest_of_a_batch_gets_the_last_page() -> None:
    model = engine(num_pages=3)
    prompted(model, 1, b"x" * 64)
    prompted(model, 2, b"y" * 64)
    model.open(key(3), 64)
    sent = [model.admit(key(number), b"z") for number in (3, 2, 1)]
    refused = model.kv.grow([(step.session, step.position + 1) for step in sent if isinstance(step, Sent)], 1.0)
    assert [error is None for error in refused] == [False, False, True]


def test_a_session_whose_pages_all_stay_with_others_is_spared() -> None:
    model = engine(num_pages=4)
    prompted(model, 1, PAGE, scope=b"s", now=0.0)
    prompted(model, 2, OTHER_PAGE, now=1.0)
    assert prompted(model, 3, PAGE + b"x", scope=b"s", now=2.0 + KV_IDLE_S) == PAGE_POSITIONS
    prompted(model, 4, b"z" * 128, now=2.0 + KV_IDLE_S)
    assert model.run(key(1), b"", 2.0 + KV_IDLE_S) == 0
    assert isinstance(model.run(key(2), b"y", 2.0 + KV_IDLE_S), CacheMiss)


def test_two_idle_sessions_that_share_a_page_both_go_where_it_is_needed() -> None:
    model = engine(num_pages=2)
    prompted(model, 1, PAGE, scope=b"s")
    model.open(key(2), 128, b"s")
    assert model.run(key(2), PAGE) == PAGE_POSITIONS
    prompted(model, 3, b"z" * 128, now=KV_IDLE_S)
    for number in (1, 2):
        assert isinstance(model.run(key(number), b"x", KV_IDLE_S), CacheMiss)


def test_the_memory_of_evicted_sessions_is_bounded() -> None:
    model = engine(num_pages=1)
    for number in range(1, MAX_EVICTED_REMEMBERED + 3):
        prompted(model, number, b"x", now=number * KV_IDLE_S)
    assert "any more" not in str(model.run(key(1), b"x"))
    assert "any more" in str(model.run(key(2), b"x"))
    model.close(key(2))
    assert "any more" not in str(model.run(key(2), b"x"))


# ---- cached prefixes ----


def test_the_same_rows_in_the_same_scope_are_served_from_the_cache_once_computed() -> None:
    model = engine()
    prompt = PAGE + OTHER_PAGE + b"tail"
    assert prompted(model, 1, prompt, scope=b"s") == 0
    assert prompted(model, 2, prompt, scope=b"s") == 2 * PAGE_POSITIONS
    use = model.kv.use
    assert (use.pages_used, use.prefix_positions_hit) == (4, 2 * PAGE_POSITIONS)
    for number in (1, 2):
        model.close(key(number))
    assert (model.kv.use.pages_used, model.kv.use.pages_cached) == (0, 2)
    assert prompted(model, 3, prompt, scope=b"s") == 2 * PAGE_POSITIONS


@given(
    splits=st.tuples(
        *[st.lists(st.integers(1, 300), min_size=1, max_size=8).filter(lambda rows: sum(rows) <= 500) for _ in range(2)]
    )
)
@settings(max_examples=50, deadline=None)
def test_any_split_into_steps_gives_the_same_pages(splits: tuple[list[int], list[int]]) -> None:
    model, text = engine(num_pages=16), bytes(index % 251 for index in range(512))
    for number, split in enumerate(splits, 1):
        model.open(key(number), 512, b"s")
        start = 0
        for rows in [*split, 512 - sum(split)]:
            assert isinstance(model.run(key(number), text[start : start + rows]), int)
            start += rows
    model.open(key(3), 512, b"s")
    assert model.run(key(3), text) == 512


@pytest.mark.parametrize(
    ("first", "second"),
    [(b"alice", b"bob"), (b"alice", b"alice2"), (b"alice", b""), (b"", b"alice"), (b"", b""), (b"a" * 200, b"a" * 201)],
)
def test_scopes_never_share_and_without_a_scope_nothing_is(first: bytes, second: bytes) -> None:
    model = engine()
    prompted(model, 1, PAGE + b"x", scope=first)
    assert prompted(model, 2, PAGE + b"x", scope=second) == 0
    assert model.kv.use.pages_used == 4


def _flip_last(rows: bytes) -> bytes:
    return rows[:-1] + bytes([rows[-1] ^ 1])


@pytest.mark.parametrize(
    "twin",
    [
        lambda prompt: b"\xff" + prompt[1:],
        lambda prompt: _flip_last(prompt[:PAGE_POSITIONS]) + prompt[PAGE_POSITIONS:],
        lambda prompt: prompt[PAGE_POSITIONS : 2 * PAGE_POSITIONS] + prompt[:PAGE_POSITIONS] + prompt[-1:],
        lambda prompt: prompt[1:] + prompt[:1],
        lambda prompt: prompt[PAGE_POSITIONS:],
    ],
    ids=["first row", "last row of a page", "pages swapped", "shifted", "the second page alone"],
)
def test_a_prompt_that_differs_is_computed(twin: Callable[[bytes], bytes]) -> None:
    model = engine()
    prompt = PAGE + OTHER_PAGE + b"x"
    prompted(model, 1, prompt, scope=b"s")
    assert prompted(model, 2, twin(prompt), scope=b"s") == 0


def test_a_prompt_is_served_up_to_the_page_where_it_differs() -> None:
    model = engine()
    prompted(model, 1, PAGE + OTHER_PAGE + PAGE + b"x", scope=b"s")
    assert prompted(model, 2, PAGE + _flip_last(OTHER_PAGE) + PAGE + b"x", scope=b"s") == PAGE_POSITIONS


def test_a_row_from_which_a_token_is_drawn_is_computed_in_any_case() -> None:
    model = engine()
    prompted(model, 1, PAGE + OTHER_PAGE, scope=b"s")
    assert prompted(model, 2, PAGE + OTHER_PAGE, scope=b"s") == PAGE_POSITIONS
    model.open(key(3), 200, b"s")
    assert model.run(key(3), PAGE + OTHER_PAGE, keep_last=False) == 2 * PAGE_POSITIONS
    assert model.run(key(3), b"next") == 0


def test_in_the_midst_of_a_page_rows_are_computed_and_the_next_boundary_hits_again() -> None:
    model = engine()
    prompted(model, 1, PAGE + OTHER_PAGE + PAGE, scope=b"s")
    model.open(key(2), 500, b"s")
    assert model.run(key(2), PAGE[:30]) == 0
    assert model.run(key(2), PAGE[30:] + OTHER_PAGE) == 0
    assert model.run(key(2), PAGE) == PAGE_POSITIONS


def test_pages_computed_twice_at_once_stay_private_and_later_ones_are_shared() -> None:
    model = engine()
    for number in (1, 2):
        model.open(key(number), 500, b"s")
    for number in (1, 2):
        assert model.run(key(number), PAGE[:40]) == 0
    for number in (1, 2):
        assert model.run(key(number), PAGE[40:]) == 0
    assert model.kv.use.pages_used == 2
    assert model.run(key(1), OTHER_PAGE) == 0
    assert model.run(key(2), OTHER_PAGE) == PAGE_POSITIONS
    model.close(key(2))
    model.close(key(1))
    assert model.kv.use.pages_cached == 2


def test_a_step_that_fails_after_a_hit_leaves_its_session_where_it_stood() -> None:
    model = engine()
    prompted(model, 1, PAGE + OTHER_PAGE + b"x", scope=b"s")
    session = model.open(key(2), 200, b"s")
    sent = model.admit(key(2), PAGE + OTHER_PAGE + b"x")
    assert isinstance(sent, Sent)
    assert model.kv.grow([(session, 129)], 0.0) == [None]
    model.kv.revert(session, sent.hit)
    assert (session.position, session.num_pages, model.kv.use.prefix_positions_hit) == (0, 0, 0)
    assert model.run(key(2), b"another start") == 0
    assert model.run(key(1), b"x") == 0


def test_rows_that_follow_a_failed_step_are_known_by_what_came_before_them_in_truth() -> None:
    model = engine()
    prompted(model, 1, PAGE + b"x", scope=b"s")
    session = model.open(key(2), 200, b"s")
    sent = model.admit(key(2), PAGE)
    assert isinstance(sent, Sent)
    assert sent.hit is not None
    model.kv.revert(session, sent.hit)
    assert model.run(key(2), OTHER_PAGE) == 0
    assert prompted(model, 3, PAGE + OTHER_PAGE + b"x", scope=b"s") == PAGE_POSITIONS
    assert prompted(model, 4, OTHER_PAGE + b"x", scope=b"s") == PAGE_POSITIONS


def test_pages_that_a_failed_step_left_behind_make_way_for_a_hit() -> None:
    model = engine()
    prompted(model, 1, PAGE + b"x", scope=b"s")
    session = model.open(key(2), 200, b"s")
    assert model.kv.grow([(session, 200)], 0.0) == [None]  # and then the step fails
    assert (session.position, session.num_pages) == (0, 4)
    assert model.run(key(2), PAGE) == PAGE_POSITIONS
    assert (session.num_pages, model.kv.use.pages_used) == (1, 2)


def test_cached_pages_make_way_for_sessions_the_longest_unused_first_and_a_prefix_from_its_end() -> None:
    model = engine(num_pages=4)
    for number, first in ((1, b"a"), (2, b"b")):
        prompted(model, number, first * 128, scope=b"s")
        model.close(key(number))
    assert model.kv.use.pages_cached == 4
    prompted(model, 3, b"z")
    model.close(key(3))
    assert prompted(model, 4, b"a" * 128 + b"x", scope=b"s") == PAGE_POSITIONS
    assert model.kv.use.sessions_evicted == 0


def test_one_scope_that_fills_the_cache_takes_nothing_from_sessions() -> None:
    model = engine(num_pages=6)
    prompted(model, 1, b"x" * 65)
    for number in range(2, 40):
        prompted(model, number, bytes([number]) * 128, scope=b"greedy", now=KV_IDLE_S * number)
        model.close(key(number))
    assert model.kv.use.sessions_evicted == 0
    assert model.kv.use.pages_cached == 4
    assert model.run(key(1), b"x") == 0


def test_cached_outputs_go_with_their_pages() -> None:
    model = engine(num_pages=4)
    page_bytes = PAGE_POSITIONS * ROW_BYTES_OUT
    prompted(model, 1, PAGE + OTHER_PAGE + b"x", scope=b"s")
    assert model.kv.outputs_bytes == 3 * page_bytes
    model.close(key(1))
    assert model.kv.outputs_bytes == 2 * page_bytes
    prompted(model, 2, b"z" * 256)
    assert (model.kv.outputs_bytes, model.kv.max_outputs_bytes) == (0, 4 * page_bytes)


def test_a_tail_caches_pages_without_outputs() -> None:
    kv = KvPages(num_pages=8, page_bytes=1, max_sessions=2, max_positions=256, secret=SECRET, row_bytes_out=0)
    first, second = (kv.open(key(number), 256, b"s") for number in (1, 2))
    assert kv.grow([(first, 64)], 0.0) == [None]
    kv.advance(first, 64, PAGE)
    hit = kv.match(second, 65, PAGE + b"x", keep_last=True)
    assert hit is not None
    assert (hit.rows, [bytes(output) for output in hit.outputs]) == (64, [b""])
    assert kv.outputs_bytes == kv.max_outputs_bytes == 0


@pytest.mark.parametrize("secret", [b"", b"short", bytes(65)])
def test_a_secret_that_is_no_key_is_refused(secret: bytes) -> None:
    with pytest.raises(ValueError, match="secret"):
        KvPages(num_pages=4, page_bytes=1, max_sessions=2, max_positions=256, secret=secret, row_bytes_out=0)
