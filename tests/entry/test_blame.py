"""A failure counts against the peer that is named, a little against who may have made it up, and fades."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_BLAMED_PEERS
from tessella_p2p.entry.blame import ACCUSED, FADE_S, FULL, SUSPECTED, Blame

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def test_the_accused_counts_most_and_each_teller_of_the_story_a_little() -> None:
    blame = Blame()
    blame.note(C, [A, B, C], 0.0)
    assert blame.penalties(0.0) == {A: SUSPECTED, B: SUSPECTED, C: ACCUSED}
    assert dict(blame.failures) == {C: 1}


def test_a_full_peer_comes_after_others_and_is_not_counted_as_failing() -> None:
    blame = Blame()
    blame.note(B, [A, B], 0.0, is_failure=False)
    assert blame.penalties(0.0) == {A: SUSPECTED, B: FULL}
    assert SUSPECTED < FULL < ACCUSED
    assert not blame.failures


def test_penalties_fade() -> None:
    blame = Blame()
    blame.note(A, [], 10.0)
    assert blame.penalties(10.0 + FADE_S / 2) == {A: pytest.approx(ACCUSED / 2)}
    assert blame.penalties(10.0 + FADE_S) == {}


def test_nobody_is_accused_where_nobody_is_known() -> None:
    blame = Blame()
    blame.note(None, [A, B], 0.0)
    assert blame.penalties(0.0) == {A: SUSPECTED, B: SUSPECTED}
    assert not blame.failures


def test_a_stage_that_accuses_one_honest_peer_after_another_ends_up_behind_each_of_them() -> None:
    blame, honest = Blame(), [PeerId(f"honest {i}") for i in range(12)]
    for number, accused in enumerate(honest):
        blame.note(accused, [A, accused], number * 1.0)
    now = len(honest) * 1.0
    penalties = blame.penalties(now)
    assert penalties[A] > sum(penalties[peer] for peer in honest) / len(honest)


@given(st.lists(st.tuples(st.sampled_from([A, B, C, None]), st.lists(st.sampled_from([A, B, C])), st.floats(0, 5))))
def test_penalties_are_bounded_and_never_negative(
    events: list[tuple[PeerId | None, list[PeerId], float]],
) -> None:
    blame, now = Blame(), 0.0
    for accused, suspects, later_s in events:
        now += later_s
        blame.note(accused, suspects, now)
        assert all(0.0 < penalty <= 1000.0 for penalty in blame.penalties(now).values())


def test_so_many_peers_are_remembered_and_no_more() -> None:
    blame = Blame()
    for number in range(MAX_BLAMED_PEERS + 10):
        blame.note(PeerId(str(number)), [PeerId(f"suspect {number}")], 0.0)
    assert len(blame.failures) == MAX_BLAMED_PEERS
    assert len(blame.penalties(0.0)) == MAX_BLAMED_PEERS
    assert PeerId("0") not in blame.failures
