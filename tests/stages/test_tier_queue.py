"""The fair queue over the tiers: shares, order, bounds on how long anybody waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import Overloaded
from tessella_p2p.stages.tier_queue import LATE, SHARES, TOTAL_SHARES, TierQueue
from tessella_p2p.wire.messages import Tier

TIERS = st.sampled_from(list(SHARES))
ACTIONS = st.lists(st.tuples(st.sampled_from(["put", "put", "take"]), TIERS), max_size=120)


def take_all(queue: TierQueue[str]) -> list[str]:
    taken = []
    while (item := queue.take()) is not None:
        taken.append(item)
    return taken


@given(st.lists(TIERS, max_size=60))
def test_everybody_is_taken_once_and_each_tier_in_order(tiers: list[Tier]) -> None:
    queue: TierQueue[tuple[Tier, int]] = TierQueue(100)
    for number, tier in enumerate(tiers):
        queue.put((tier, number), tier)
    taken = [item for _ in tiers if (item := queue.take()) is not None]
    assert queue.take() is None
    for tier in SHARES:
        assert [each for each in taken if each[0] == tier] == [(t, n) for n, t in enumerate(tiers) if t == tier]


def test_places_are_shared_by_weight_while_all_tiers_wait() -> None:
    queue: TierQueue[Tier] = TierQueue(1000)
    for tier in SHARES:
        for _ in range(1000):
            queue.put(tier, tier)
    taken = [queue.take() for _ in range(10 * TOTAL_SHARES)]
    for tier, share in SHARES.items():
        assert abs(taken.count(tier) - 10 * share) <= 1


@pytest.mark.parametrize("tier", SHARES)
def test_who_waits_alone_goes_at_once(tier: Tier) -> None:
    queue: TierQueue[Tier] = TierQueue(10)
    for _ in range(5):
        queue.put(tier, tier)
        assert queue.take() == tier


def test_of_two_that_came_together_the_higher_tier_goes_first() -> None:
    queue: TierQueue[str] = TierQueue(10)
    backwards: list[Tier] = ["Leech", "Standard", "VIP"]
    for tier in backwards:
        queue.put(tier, tier)
    assert take_all(queue) == list(SHARES)


@given(before=ACTIONS, ahead=st.integers(0, 20), tier=TIERS)
def test_nobody_starves_however_many_of_the_other_tiers_keep_coming(
    before: list[tuple[str, Tier]], ahead: int, tier: Tier
) -> None:
    queue: TierQueue[str] = TierQueue(10_000)
    for action, other in before:
        if action == "put":
            queue.put("history", other)
        else:
            queue.take()
    for _ in range(ahead):
        queue.put("ahead", tier)
    place = queue.num_waiting(tier)
    queue.put("mine", tier)
    most = TOTAL_SHARES // SHARES[tier] * (place + 1) + LATE
    for _ in range(most):
        for other in SHARES:
            queue.put("later", other)
        if queue.take() == "mine":
            return
    raise AssertionError(f"a {tier} behind {place} others was not taken within {most} takes")


@given(ACTIONS, TIERS)
def test_a_tier_that_was_away_has_saved_nothing_up(actions: list[tuple[str, Tier]], tier: Tier) -> None:
    queue: TierQueue[Tier] = TierQueue(10_000)
    rest: list[Tier] = [other for other in SHARES if other != tier]
    for _, other in actions:
        queue.put(other, other)
        queue.take()
    for _ in range(200):
        for each in SHARES:
            queue.put(each, each)
    window = [queue.take() for _ in range(2 * TOTAL_SHARES)]
    for other in rest:
        assert window.count(other) >= SHARES[other] - 1


@given(ACTIONS, st.integers(1, 5))
def test_what_is_put_back_in_reverse_comes_out_as_if_it_had_not_been_taken(
    actions: list[tuple[str, Tier]], count: int
) -> None:
    queue: TierQueue[tuple[Tier, int]] = TierQueue(10_000)
    untouched: TierQueue[tuple[Tier, int]] = TierQueue(10_000)
    for number, (action, tier) in enumerate(actions):
        for each in (queue, untouched):
            if action == "put":
                each.put((tier, number), tier)
            else:
                each.take()
    taken = [item for _ in range(count) if (item := queue.take()) is not None]
    for item in reversed(taken):
        queue.put_back(item, item[0])
    left = [untouched.take() for _ in range(len(untouched))]
    assert [queue.take() for _ in range(len(queue))] == left


def test_a_leech_that_was_taken_and_put_back_does_not_get_before_a_vip_that_came_meanwhile() -> None:
    queue: TierQueue[str] = TierQueue(10)
    queue.put("leech", "Leech")
    for _ in range(5):
        assert queue.take() == "leech"
        queue.put_back("leech", "Leech")
    queue.put("vip", "VIP")
    queue.put("standard", "Standard")
    assert take_all(queue) == ["vip", "standard", "leech"]


@given(st.lists(st.tuples(TIERS, st.booleans()), min_size=1, max_size=60))
def test_nobody_starves_where_places_are_too_small_again_and_again(others: list[tuple[Tier, bool]]) -> None:
    queue: TierQueue[tuple[str, Tier]] = TierQueue(10_000)
    queue.put(("mine", "Leech"), "Leech")
    served = 0
    for number in range(10 * TOTAL_SHARES):
        tier, fits = others[number % len(others)]
        queue.put(("other", tier), tier)
        taken = queue.take()
        assert taken is not None
        if not fits and number % 7:
            queue.put_back(taken, taken[1])
            continue
        served += 1
        if taken[0] == "mine":
            return
        assert served <= TOTAL_SHARES + LATE


def test_a_crowd_of_one_tier_takes_no_room_of_another() -> None:
    queue: TierQueue[str] = TierQueue(3)
    for _ in range(3):
        queue.put("a leech", "Leech")
    with pytest.raises(Overloaded, match="3 of tier Leech"):
        queue.put("one too many", "Leech")
    queue.put("a VIP", "VIP")
    assert queue.take() == "a VIP"
    assert len(queue) == queue.num_waiting("Leech") == 3


def test_who_leaves_the_queue_is_not_taken() -> None:
    queue: TierQueue[str] = TierQueue(3)
    queue.put("first", "Leech")
    queue.put("second", "Leech")
    assert queue.drop("first")
    assert not queue.drop("first")
    assert take_all(queue) == ["second"]
