"""Planning a turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.limits import MAX_PREFILL_ROWS_PER_TURN, PREFILL_ROWS_BESIDE_DECODES
from tessella_p2p.stages.batching import Take, plan_turn, singles_per_turn
from tests.stages.stage_runs import key_of


def test_nothing_waits_and_nothing_runs() -> None:
    assert plan_turn([]) == []


def test_all_single_rows_run_together_with_a_bounded_part_of_a_prompt() -> None:
    takes = plan_turn([(key_of(1), 1000), (key_of(2), 1), (key_of(3), 1)])
    assert sorted(takes, key=lambda take: take.index) == [
        Take(0, PREFILL_ROWS_BESIDE_DECODES),
        Take(1, 1),
        Take(2, 1),
    ]


def test_a_prompt_alone_gets_the_larger_bound() -> None:
    assert plan_turn([(key_of(1), 1000)]) == [Take(0, MAX_PREFILL_ROWS_PER_TURN)]


def test_a_session_whose_next_row_is_still_on_its_way_counts_as_decoding() -> None:
    assert plan_turn([(key_of(1), 1000)], decoding=True) == [Take(0, PREFILL_ROWS_BESIDE_DECODES)]


def test_prompts_share_a_turn_first_come_first_served() -> None:
    rest = MAX_PREFILL_ROWS_PER_TURN - 100
    assert plan_turn([(key_of(1), 100), (key_of(2), 5000), (key_of(3), 7)]) == [Take(0, 100), Take(1, rest)]


def test_only_a_sessions_oldest_step_runs() -> None:
    assert plan_turn([(key_of(1), 5000), (key_of(1), 1), (key_of(2), 1)]) == [
        Take(2, 1),
        Take(0, PREFILL_ROWS_BESIDE_DECODES),
    ]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 600)), min_size=1, max_size=40))
def test_every_turn_makes_progress_within_its_bounds(waiting: list[tuple[int, int]]) -> None:
    ready = [(key_of(session), rows) for session, rows in waiting]
    takes = plan_turn(ready)
    assert takes
    assert all(1 <= take.rows <= ready[take.index][1] for take in takes)
    assert len({ready[take.index][0] for take in takes}) == len(takes)
    assert sum(take.rows for take in takes if take.rows > 1) <= MAX_PREFILL_ROWS_PER_TURN
    singles = {key for key, rows in reversed(ready) if rows == 1}
    heads = dict(reversed(ready))
    assert {key for key in singles if heads[key] == 1} <= {ready[take.index][0] for take in takes}


def test_a_stage_of_a_chain_runs_its_sessions_in_as_many_groups_as_there_are_stages() -> None:
    assert singles_per_turn([]) == 1
    assert singles_per_turn([1] * 8) == 8
    assert singles_per_turn([2] * 8) == 4
    assert singles_per_turn([3] * 8) == 3
    assert singles_per_turn([2]) == 1
    assert singles_per_turn([64] * 3) == 1


@given(st.integers(1, 12), st.integers(1, 5))
def test_every_single_row_gets_its_turn_oldest_first(sessions: int, max_singles: int) -> None:
    waiting = [key_of(number) for number in range(sessions)]
    done = []
    while waiting:
        takes = plan_turn([(key, 1) for key in waiting], max_singles=max_singles)
        assert 0 < len(takes) <= max_singles
        done += [waiting[take.index] for take in takes]
        waiting = [key for key in waiting if key not in done]
    assert done == [key_of(number) for number in range(sessions)]
