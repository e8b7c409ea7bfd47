"""What an entry believes of its routes, and for how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import MAX_PROVEN_PATHS
from tessella_p2p.entry.readiness import ModelReadiness, Path, PathStage, Readiness

A, B, C = (
    PathStage(PeerId(name), LayerRange(start, start + 4), "f32") for name, start in [("a", 0), ("b", 4), ("c", 4)]
)
AB: Path = (A, B)
AC: Path = (A, C)
ALL = {A, B, C}
READY_S, RETRY_S = 30.0, 3.0


def readiness() -> Readiness:
    return Readiness(READY_S, RETRY_S)


def test_a_route_that_answered_is_ready_for_a_while_then_old() -> None:
    known = readiness()
    assert known.standing(ALL, 0.0) == "unproven"
    known.prove(AB, 10.0)
    assert known.standing(ALL, 39.9) == "ready"
    assert known.standing(ALL, 40.0) == "old"
    assert known.report(ALL, 50.0) == ModelReadiness("old", 40.0)
    known.prove(AB, 50.0)
    assert known.standing(ALL, 60.0) == "ready"


def test_a_proof_falls_with_a_stage_that_is_gone_or_serves_other_layers() -> None:
    known = readiness()
    known.prove(AB, 0.0)
    assert known.standing({A, C}, 1.0) == "unproven"
    assert known.standing({A, PathStage(B.peer_id, LayerRange(4, 6), "f32")}, 1.0) == "unproven"
    assert known.standing({A, PathStage(B.peer_id, B.layers, "q4")}, 1.0) == "unproven"
    assert known.standing({A, B}, 1.0) == "ready"


def test_a_proof_falls_with_the_failure_of_one_of_its_stages_and_another_route_keeps_its_own() -> None:
    known = readiness()
    known.prove(AB, 0.0)
    known.prove(AC, 0.0)
    known.doubt([B.peer_id])
    assert known.standing(ALL, 1.0) == "ready"
    assert known.standing({A, B}, 1.0) == "unproven"
    known.doubt([A.peer_id])
    assert known.standing(ALL, 1.0) == "unproven"


def test_a_path_that_failed_is_refused_for_a_moment_and_a_new_one_is_not() -> None:
    known = readiness()
    known.fail([AB], "layers 4–8 do not answer", ((4, 8),), 10.0)
    refusal = known.refusal(AB, 11.0)
    assert refusal is not None
    assert (refusal.missing, refusal.retry_after_s, str(refusal)) == (((4, 8),), 2.0, "layers 4–8 do not answer")
    assert known.refusal(AB, 11.0) is not refusal
    assert known.refusal(AC, 11.0) is None
    assert known.refusal(AB, 13.0) is None
    assert known.report(ALL, 11.0) == ModelReadiness("failed", None, ((4, 8),))
    assert known.failures == 1


def test_an_answer_ends_every_refusal() -> None:
    known = readiness()
    known.fail([AB], "no", (), 10.0)
    known.prove(AB, 10.5)
    assert known.refusal(AB, 10.6) is None
    assert known.failures == 0


@given(st.integers(1, MAX_PROVEN_PATHS + 8))
def test_the_routes_that_are_remembered_are_bounded_and_the_newest_stays(number: int) -> None:
    known = readiness()
    paths = [(PathStage(PeerId(str(index)), LayerRange(0, 8), "f32"),) for index in range(number)]
    for at, path in enumerate(paths):
        known.prove(path, float(at))
    assert known.proven_at(set(paths[-1])) == number - 1
    assert sum(known.proven_at(set(path)) is not None for path in paths) == min(number, MAX_PROVEN_PATHS)
