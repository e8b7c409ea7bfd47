"""Many reporters make a suspect, one does not, and little follows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import SUSPECT_REPORTERS, SUSPECT_SHARE, SUSPECT_WINDOW_S
from tessella_p2p.orchestrator.suspicion import Suspicion

MEMBERS = [PeerId(f"worker {number}") for number in range(2 * SUSPECT_SHARE)]


def reported(by: int, *, failed: PeerId = MEMBERS[0], at: float = 0.0, every: float = 1.0) -> Suspicion:
    suspicion = Suspicion()
    for number in range(by):
        suspicion.report(failed, MEMBERS[1 + number], at + number * every)
    return suspicion


def test_several_workers_within_the_window_make_a_suspect() -> None:
    assert reported(SUSPECT_REPORTERS - 1).suspects(MEMBERS, 5.0) == ()
    assert reported(SUSPECT_REPORTERS).suspects(MEMBERS, 5.0) == (MEMBERS[0],)


def test_one_worker_that_reports_for_ever_makes_none() -> None:
    suspicion = Suspicion()
    for second in range(1000):
        suspicion.report(MEMBERS[0], MEMBERS[1], float(second))
    assert suspicion.suspects(MEMBERS, 1000.0) == ()


def test_a_suspicion_ends_by_itself_and_slow_reports_make_none() -> None:
    suspicion = reported(SUSPECT_REPORTERS)
    assert suspicion.suspects(MEMBERS, SUSPECT_WINDOW_S - 1.0)
    assert not suspicion.suspects(MEMBERS, SUSPECT_WINDOW_S + SUSPECT_REPORTERS)
    assert not reported(SUSPECT_REPORTERS, every=SUSPECT_WINDOW_S).suspects(MEMBERS, SUSPECT_WINDOW_S)


def test_a_small_mesh_has_no_suspects() -> None:
    assert reported(SUSPECT_REPORTERS).suspects(MEMBERS[: SUSPECT_SHARE - 1], 5.0) == ()


@given(st.lists(st.tuples(st.sampled_from(MEMBERS), st.sampled_from(MEMBERS), st.floats(0, 1000)), max_size=200))
def test_whatever_is_reported_a_small_share_is_suspected(reports: list[tuple[PeerId, PeerId, float]]) -> None:
    suspicion = Suspicion()
    for failed, by, at in sorted(reports, key=lambda report: report[2]):
        suspicion.report(failed, by, at)
    suspects = suspicion.suspects(MEMBERS, 1000.0)
    assert len(suspects) <= len(MEMBERS) // SUSPECT_SHARE
    for suspect in suspects:
        assert len({by for failed, by, at in reports if failed == suspect and at > 1000.0 - SUSPECT_WINDOW_S}) >= 3
