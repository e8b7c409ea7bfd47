"""Tickets that are held for an outage: what fits, what is spent first, what is replaced."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.limits import CLOCK_SKEW_MS, HELD_TICKET_LEFT_S
from tessella_p2p.entry.tickets import HeldTicket, TicketReserve

NOW = 1_800_000_000_000
HOUR_MS = 3_600_000
SOON_MS = int(HELD_TICKET_LEFT_S * 1000)


def ticket(name: str, *, left_ms: int = HOUR_MS, recipe: str = "f32", positions: int = 100) -> HeldTicket:
    return HeldTicket(name, recipe, positions, "Standard", NOW + left_ms, name.encode())


def test_each_ticket_is_spent_once_and_the_one_that_is_over_first_goes_first() -> None:
    reserve = TicketReserve(3)
    for name, left_ms in (("late", HOUR_MS), ("soon", HOUR_MS // 2), ("middle", HOUR_MS - 1)):
        reserve.put(ticket(name, left_ms=left_ms))
    spent = [reserve.take("f32", 100, NOW) for _ in range(4)]
    assert [each and each.request_id for each in spent] == ["soon", "middle", "late", None]


def test_a_ticket_for_another_recipe_or_fewer_positions_is_not_spent() -> None:
    reserve = TicketReserve(3)
    reserve.put(ticket("other", recipe="q8_0"))
    reserve.put(ticket("short", positions=99))
    assert reserve.take("f32", 100, NOW) is None
    short = reserve.take("f32", 99, NOW)
    assert short is not None
    assert short.request_id == "short"
    assert len(reserve) == 1


def test_a_ticket_that_a_stage_may_find_expired_is_not_spent() -> None:
    reserve = TicketReserve(3)
    reserve.put(ticket("over", left_ms=CLOCK_SKEW_MS))
    reserve.put(ticket("nearly", left_ms=CLOCK_SKEW_MS + 1))
    nearly = reserve.take("f32", 1, NOW)
    assert nearly is not None
    assert nearly.request_id == "nearly"
    assert reserve.take("f32", 1, NOW) is None


def test_what_is_over_soon_is_lacking_and_is_replaced_before_it_is_over() -> None:
    reserve = TicketReserve(2)
    assert reserve.lacking("f32", 100, NOW) == 2
    reserve.put(ticket("first", left_ms=SOON_MS + CLOCK_SKEW_MS))
    reserve.put(ticket("second"))
    assert reserve.lacking("f32", 100, NOW) == 1
    assert reserve.take("f32", 100, NOW) is not None, "it is good until it is replaced"
    reserve.put(ticket("first", left_ms=SOON_MS))
    reserve.put(ticket("third"))
    assert reserve.lacking("f32", 100, NOW) == 0
    assert [each.request_id for each in (reserve.take("f32", 1, NOW), reserve.take("f32", 1, NOW)) if each] == [
        "second",
        "third",
    ]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 2 * HOUR_MS), st.sampled_from(["f32", "q8_0"])),
            st.tuples(st.just("take"), st.integers(0, 2 * HOUR_MS), st.sampled_from(["f32", "q8_0"])),
        ),
        max_size=60,
    ),
    st.integers(1, 5),
)
def test_never_more_than_its_size_never_one_twice_and_only_what_fits(
    actions: list[tuple[str, int, str]], size: int
) -> None:
    reserve, spent, put = TicketReserve(size), list[str](), 0
    for action, time_ms, recipe in actions:
        if action == "put":
            put += 1
            reserve.put(ticket(f"t{put}", left_ms=time_ms, recipe=recipe))
        else:
            taken = reserve.take(recipe, 100, NOW + time_ms)
            if taken is not None:
                assert taken.recipe == recipe
                assert taken.open_before > NOW + time_ms + CLOCK_SKEW_MS
                spent.append(taken.request_id)
        assert len(reserve) <= size
        assert 0 <= reserve.lacking(recipe, 100, NOW) <= size
    assert len(spent) == len(set(spent))
