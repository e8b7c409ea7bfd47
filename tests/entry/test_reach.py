"""Whether the orchestrator is there, and for how long an entry goes on without it."""

from __future__ import annotations

import pytest

from tessella_p2p.base.errors import OrchestratorUnreachable
from tessella_p2p.entry.reach import Reach


def reach_of(grace_s: float) -> tuple[Reach, list[bool]]:
    told: list[bool] = []
    return Reach(100.0, grace_s, told.append), told


def test_only_changes_are_told() -> None:
    reach, told = reach_of(60.0)
    reach.reached(101.0)
    reach.lost()
    reach.lost()
    reach.reached(105.0)
    reach.reached(106.0)
    assert told == [False, True]


def test_an_outage_counts_from_the_last_answer_on() -> None:
    reach, _ = reach_of(60.0)
    reach.reached(200.0)
    assert reach.outage_s(230.0) == 0.0
    reach.lost()
    assert reach.outage_s(230.0) == 30.0
    reach.reached(231.0)
    assert reach.outage_s(240.0) == 0.0


def test_requests_are_served_within_the_grace_and_refused_with_its_name_after_it() -> None:
    reach, _ = reach_of(60.0)
    reach.check(1e9)  # nothing was missed
    reach.lost()
    reach.check(160.0)
    with pytest.raises(OrchestratorUnreachable, match=r"for 61 s; .* outage_grace_secs = 60") as caught:
        reach.check(161.0)
    assert caught.value.http_status == 503
    reach.reached(162.0)
    reach.check(163.0)


def test_no_grace_means_none() -> None:
    reach, _ = reach_of(0.0)
    reach.check(100.5)
    reach.lost()
    with pytest.raises(OrchestratorUnreachable):
        reach.check(100.5)
