"""A reputation moves with verdicts, decays to a clean slate, and is the same integers everywhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.limits import REPUTATION_HALF_LIFE_S
from tessella_p2p.ledger.reputation import (
    BEST,
    CLEAN_SLATE,
    COPIED,
    FAILED,
    PASSED,
    SLASHED,
    WORST,
    Reputation,
    Verdict,
    at_time,
    decayed,
    judged,
    slashed,
)

HALF_LIFE = round(REPUTATION_HALF_LIFE_S * 1000)
NOW = 1_800_000_000_000

scores = st.integers(WORST, BEST)
times = st.integers(0, 40 * HALF_LIFE)
verdicts = st.sampled_from(("passed", "failed", "inconclusive", "copied"))


def test_the_distance_from_a_clean_slate_halves_in_each_half_life() -> None:
    for halves, left in enumerate((1000, 500, 250, 125)):
        assert decayed(WORST, NOW, NOW + halves * HALF_LIFE) == CLEAN_SLATE - left
    assert decayed(WORST, NOW, NOW + HALF_LIFE // 2) == CLEAN_SLATE - 750
    assert decayed(BEST, NOW, NOW + HALF_LIFE) == CLEAN_SLATE + 250
    assert decayed(WORST, NOW, NOW + 20 * HALF_LIFE) == CLEAN_SLATE
    assert decayed(WORST, NOW, NOW - 1) == WORST


@given(scores, times, times)
def test_time_only_brings_a_score_nearer_to_a_clean_slate(score: int, first: int, second: int) -> None:
    early, late = sorted((first, second))
    distances = [abs(decayed(score, NOW, NOW + after) - CLEAN_SLATE) for after in (0, early, late)]
    assert distances == sorted(distances, reverse=True)
    assert (decayed(score, NOW, NOW + late) - CLEAN_SLATE) * (score - CLEAN_SLATE) >= 0


@given(st.lists(st.tuples(st.one_of(verdicts, st.none()), times), max_size=30))
def test_a_score_stays_within_its_bounds_and_the_counters_never_decay(
    events: list[tuple[Verdict | None, int]],
) -> None:
    reputation, at = Reputation(), NOW
    for verdict, later in events:
        at += later
        reputation = slashed(reputation, at) if verdict is None else judged(reputation, verdict, at)
        assert WORST <= reputation.score <= BEST
        assert reputation.at == at
    said = [verdict for verdict, _ in events]
    assert reputation.audits_passed == said.count("passed")
    assert reputation.audits_failed == said.count("failed") + said.count("copied")
    assert reputation.copies == said.count("copied")
    assert reputation.inconclusive == said.count("inconclusive")
    assert reputation.slashes == said.count(None)


def test_what_each_event_does() -> None:
    clean = Reputation(at=NOW)
    assert judged(clean, "passed", NOW).score == CLEAN_SLATE + PASSED
    assert judged(clean, "failed", NOW).score == CLEAN_SLATE + FAILED
    assert judged(clean, "copied", NOW).score == CLEAN_SLATE + COPIED
    assert judged(clean, "inconclusive", NOW).score == CLEAN_SLATE
    assert slashed(clean, NOW).score == CLEAN_SLATE + SLASHED


def test_an_event_that_comes_late_is_counted_at_the_time_of_the_last_one() -> None:
    late = judged(judged(Reputation(), "failed", NOW), "failed", NOW - HALF_LIFE)
    assert (late.score, late.at) == (CLEAN_SLATE + 2 * FAILED, NOW)
    assert at_time(late, NOW - 1).at == NOW
