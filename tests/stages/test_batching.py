"""Planning a turn: what fits, who goes first, and that nobody starves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.limits import MAX_PREFILL_ROWS_PER_TURN, PREFILL_ROWS_BESIDE_DECODES
from tessella_p2p.stages.batching import (
    SLACK_TURNS,
    Take,
    Waiting,
    plan_turn,
    singles_per_turn,
    singles_worth_waiting_for,
)
from tessella_p2p.wire.messages import Tier
from tests.stages.stage_runs import key_of

TIERS: tuple[Tier, ...] = ("VIP", "Standard", "Leech")
tiers = st.sampled_from(TIERS)


def waiting(*steps: tuple[int, int]) -> list[Waiting]:
    """Steps as (session, rows)."""
    return [Waiting(key_of(session), rows) for session, rows in steps]


def test_nothing_waits_and_nothing_runs() -> None:
    assert plan_turn([]) == []


def test_all_single_rows_run_together_with_a_bounded_part_of_a_prompt() -> None:
    takes = plan_turn(waiting((1, 1000), (2, 1), (3, 1)))
    assert sorted(takes, key=lambda take: take.index) == [
        Take(0, PREFILL_ROWS_BESIDE_DECODES),
        Take(1, 1),
        Take(2, 1),
    ]


def test_a_prompt_alone_gets_the_larger_bound() -> None:
    assert plan_turn(waiting((1, 1000))) == [Take(0, MAX_PREFILL_ROWS_PER_TURN)]


def test_a_session_whose_next_row_is_still_on_its_way_counts_as_decoding() -> None:
    assert plan_turn(waiting((1, 1000)), decoding=True) == [Take(0, PREFILL_ROWS_BESIDE_DECODES)]


def test_prompts_of_one_tier_share_a_turn_first_come_first_served() -> None:
    assert plan_turn(waiting((1, 100), (2, 100), (3, 7))) == [Take(0, 100), Take(1, 100), Take(2, 7)]


def test_a_prompt_that_does_not_fit_is_cut_to_whole_pages() -> None:
    rest = MAX_PREFILL_ROWS_PER_TURN - 128
    assert plan_turn(waiting((1, 100), (2, 5000), (3, 7))) == [Take(0, 100), Take(1, rest), Take(2, 7)]
    assert plan_turn(waiting((1, 200), (2, 5000))) == [Take(0, 200)]


def test_only_a_sessions_oldest_step_runs() -> None:
    assert plan_turn(waiting((1, 5000), (1, 1), (2, 1))) == [Take(2, 1), Take(0, PREFILL_ROWS_BESIDE_DECODES)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 600)), min_size=1, max_size=40))
def test_every_turn_makes_progress_within_its_bounds(steps: list[tuple[int, int]]) -> None:
    ready = waiting(*steps)
    takes = plan_turn(ready)
    assert takes
    assert all(1 <= take.rows <= ready[take.index].rows for take in takes)
    assert len({ready[take.index].session for take in takes}) == len(takes)
    assert sum(take.rows for take in takes if take.rows > 1) <= MAX_PREFILL_ROWS_PER_TURN
    heads = {step.session: step.rows for step in reversed(ready)}
    assert {key for key, rows in heads.items() if rows == 1} <= {ready[take.index].session for take in takes}


# ---- Groups ----


def test_a_stage_of_a_chain_runs_its_sessions_in_as_many_groups_as_there_are_stages() -> None:
    assert singles_per_turn([]) == 1
    assert singles_per_turn([1] * 8) == 8
    assert singles_per_turn([2] * 8) == 4
    assert singles_per_turn([3] * 8) == 3
    assert singles_per_turn([2]) == 1
    assert singles_per_turn([64] * 3) == 1


def test_a_turn_waits_for_a_full_group_only_where_there_are_two_of_at_least_two() -> None:
    assert singles_worth_waiting_for([]) == 1
    assert singles_worth_waiting_for([1] * 8) == 1
    assert singles_worth_waiting_for([2] * 3) == 1
    assert singles_worth_waiting_for([2] * 4) == 2
    assert singles_worth_waiting_for([2] * 9) == 4


@settings(deadline=None)
@given(st.lists(st.integers(1, 64), max_size=64))
def test_no_turn_waits_for_more_than_it_may_have(stages: list[int]) -> None:
    assert 1 <= singles_worth_waiting_for(stages) <= singles_per_turn(stages)


# ---- Tiers ----


def test_under_load_the_higher_tier_goes_first() -> None:
    order: tuple[Tier, ...] = ("Leech", "VIP", "Standard", "VIP")
    ready = [Waiting(key_of(number), 1, tier) for number, tier in enumerate(order)]
    assert plan_turn(ready, max_singles=2) == [Take(1, 1), Take(3, 1)]
    prompts = [replace(step, rows=1000) for step in ready]
    assert plan_turn(prompts) == [Take(1, MAX_PREFILL_ROWS_PER_TURN)]


def test_with_room_for_everybody_tiers_change_nothing() -> None:
    ready = [Waiting(key_of(number), 1, tier) for number, tier in enumerate(TIERS)]
    assert {take.index for take in plan_turn(ready, max_singles=3)} == {0, 1, 2}


def test_a_leech_that_is_due_goes_before_a_vip_that_has_just_come() -> None:
    ready = [Waiting(key_of(1), 1, "Leech", arrived=0), Waiting(key_of(2), 1, "VIP", arrived=SLACK_TURNS["Leech"])]
    assert plan_turn(ready, max_singles=1) == [Take(0, 1)]


def serve(
    sessions: Sequence[Tier], num_turns: int, *, max_singles: int | None, rows: Sequence[int], seed: int
) -> list[list[tuple[int, int]]]:
    """Sessions that hand in their next step at once; per session, (arrival, turn of the first row) of each step served."""
    rng = random.Random(seed)
    order = list(range(len(sessions)))
    rng.shuffle(order)
    queue = [(number, Waiting(key_of(number), rows[number], sessions[number])) for number in order]
    served: list[list[tuple[int, int]]] = [[] for _ in sessions]
    for turn in range(num_turns):
        takes = plan_turn([step for _, step in queue], max_singles=max_singles)
        left = []
        for index, (number, step) in enumerate(queue):
            taken = next((take.rows for take in takes if take.index == index), 0)
            if taken and step.rows == rows[number]:
                served[number].append((step.arrived, turn))
            if taken < step.rows:
                left.append((number, replace(step, rows=step.rows - taken) if taken else step))
        again = [take.index for take in takes if take.rows == queue[take.index][1].rows]
        rng.shuffle(again)
        back = [(queue[index][0], Waiting(key_of(queue[index][0]), rows[queue[index][0]])) for index in again]
        queue = left + [(n, replace(step, tier=sessions[n], arrived=turn + 1)) for n, step in back]
    for number, step in queue:
        if step.rows == rows[number]:
            served[number].append((step.arrived, num_turns))  # it waits still: as if it were served now
    return served


@settings(max_examples=40, deadline=None)
@given(st.lists(tiers, min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 1 << 32))
def test_every_single_row_is_served_within_the_stated_turns(sessions: list[Tier], max_singles: int, seed: int) -> None:
    served = serve(sessions, 40, max_singles=max_singles, rows=[1] * len(sessions), seed=seed)
    for tier, steps in zip(sessions, served, strict=True):
        bound = SLACK_TURNS[tier] + (len(sessions) - 1) // max_singles
        assert steps
        assert all(turn - arrived <= bound for arrived, turn in steps), (tier, bound, steps)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(tiers, st.integers(2, 700)), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 1 << 32),
)
def test_every_prompt_begins_within_the_stated_turns(prompts: list[tuple[Tier, int]], decodes: bool, seed: int) -> None:
    sessions: list[Tier] = [tier for tier, _ in prompts] + ["VIP"] * decodes
    rows = [count for _, count in prompts] + [1] * decodes
    served = serve(sessions, 60, max_singles=None, rows=rows, seed=seed)
    for (tier, count), steps in zip(prompts, served, strict=False):
        bound = (
            SLACK_TURNS[tier]
            + sum(-(-other // PREFILL_ROWS_BESIDE_DECODES) for other in rows)
            - (-(-count // PREFILL_ROWS_BESIDE_DECODES))
        )
        assert all(turn - arrived <= bound for arrived, turn in steps), (tier, bound, steps)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
def test_of_those_that_came_together_vips_are_served_before_leeches(vips: int, leeches: int, max_singles: int) -> None:
    sessions: list[Tier] = [TIERS[2]] * leeches + [TIERS[0]] * vips
    ready = [Waiting(key_of(number), 1, tier) for number, tier in enumerate(sessions)]
    order: list[Tier] = []
    while ready:
        takes = plan_turn(ready, max_singles=max_singles)
        order += [ready[take.index].tier for take in takes]
        ready = [step for index, step in enumerate(ready) if index not in {take.index for take in takes}]
    assert order == sessions[leeches:] + sessions[:leeches]
