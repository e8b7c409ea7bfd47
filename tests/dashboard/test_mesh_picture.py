"""The picture of the mesh: what is drawn of whatever the node knows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import Overloaded
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import (
    MAX_PICTURED_ENDED,
    MAX_PICTURED_FLIGHTS,
    MAX_PICTURED_RECIPES,
    MAX_PICTURED_STAGES,
    PICTURED_RATE_S,
)
from tessella_p2p.bridge.mesh_picture import Flight, flight_of, flights_json, mesh_json, token_rates
from tessella_p2p.bridge.node_view import PeerStatus, PeerView
from tessella_p2p.entry.api import Caller
from tessella_p2p.entry.requests import RequestBook
from tests.dashboard.dashboard_world import (
    HOLED_MESH,
    MODEL,
    OWN,
    OWN_ID,
    RECIPE,
    ROUTE,
    TAIL,
    TOTAL_LAYERS,
    WHOLE_MESH,
    PaperNode,
    fly,
    peer,
)

NOW_MS = 1_800_000_000_000
STATUSES: tuple[PeerStatus, ...] = ("PendingLoad", "Healthy", "Draining", "Saturated", "Stale", "Offline")


def picture(*stages: PeerView, flights: tuple[Flight, ...] = (), models: tuple[str, ...] = (MODEL,)) -> dict:  # type: ignore[type-arg]
    node = PaperNode(stages=stages)
    mesh = mesh_json(node.status(), node.peers(None), models, flights, NOW_MS)
    return {**mesh, **flights_json(flights, Caller())}


def flight(**changes: object) -> Flight:
    standard = Flight("req-1", "", "Standard", "answering", 10, 0, 3.0, ROUTE, 2.0, 1.0)
    return replace(standard, **changes)  # type: ignore[arg-type]


def test_a_whole_mesh_has_no_hole_and_says_how_often_each_stretch_is_held() -> None:
    (coverage,) = picture(*WHOLE_MESH)["coverage"]
    assert (coverage["health"], coverage["holes"], coverage["num_stages"]) == ("healthy", [], 5)
    assert coverage["segments"] == [
        {"layers": (0, 12), "replicas": 2},
        {"layers": (12, 22), "replicas": 2},
        {"layers": (22, 30), "replicas": 2},
    ]


def test_offline_silent_draining_and_canary_stages_fill_no_hole() -> None:
    for status in ("Offline", "Stale", "Draining", "PendingLoad"):
        assert picture(OWN, TAIL, peer("x", 12, 22, status))["coverage"][0]["holes"] == [(12, 22)]
    assert picture(OWN, TAIL, peer("x", 12, 22, canary=True))["coverage"][0]["holes"] == [(12, 22)]
    assert picture(OWN, TAIL, peer("x", 12, 22, "Saturated"))["coverage"][0]["holes"] == []


def test_recipes_are_covered_apart_since_no_route_mixes_them() -> None:
    first, second = picture(*HOLED_MESH, peer("x", 12, 22, recipe="other"))["coverage"]
    assert (first["recipe"], first["holes"]) == (RECIPE, [(12, 22)])
    assert (second["recipe"], second["holes"]) == ("other", [(0, 12), (22, 30)])


def test_stages_of_another_model_are_not_drawn() -> None:
    assert picture(replace(TAIL, model_id="another"))["stages"] == []


def test_this_node_is_drawn_before_its_own_record_has_come_round() -> None:
    status = replace(PaperNode().status(), layer_ranges=(LayerRange(0, 12),))
    (stage,) = mesh_json(status, [], [], [], NOW_MS)["stages"]
    assert (stage["peer_id"], stage["own"], stage["status"]) == (OWN_ID, True, "Healthy")


def test_a_node_that_knows_no_layers_draws_none() -> None:
    status = replace(PaperNode().status(), total_layers=None, model=None)
    drawn = mesh_json(status, [], [], [], NOW_MS)
    assert (drawn["coverage"], drawn["model"]["total_layers"]) == ([], 0)


def test_without_a_readiness_the_list_of_models_says_it() -> None:
    status = replace(PaperNode().status(), readiness=None)
    assert mesh_json(status, [], [MODEL], [], NOW_MS)["model"]["readiness"]["state"] == "ready"
    assert mesh_json(status, [], [], [], NOW_MS)["model"]["readiness"]["state"] == "unproven"


def test_a_request_tells_its_way_and_its_counts() -> None:
    book = RequestBook()
    fly(book, "req-1", NOW_MS, age_s=3.0, tokens=51, per_s=25.0, reroutes=1)
    (record,) = book.in_flight()
    found = flight_of(record, NOW_MS)
    assert (found.request_id, found.state, found.num_tokens, found.reroutes) == ("req-1", "answering", 51, 1)
    assert found.route == ROUTE
    assert found.first_token_age_s == pytest.approx(2.7)
    assert found.last_token_age_s == pytest.approx(0.7)
    (drawn,) = picture(*WHOLE_MESH, flights=(found,))["flights"]
    assert drawn["tokens_per_s"] == 25.0
    assert drawn["route"][0] == {
        "peer_id": ROUTE[0].peer_id,
        "layers": (0, 12),
        "hop_ms": 3.21,
        "compute_ms": pytest.approx(2.81),
    }


def test_a_request_goes_from_waiting_over_reading_and_answering_to_its_end() -> None:
    book = RequestBook()
    states: list[str] = []
    trail = book.begin("req-1", "answer", MODEL, Caller(), now=0.0, now_unix_ms=NOW_MS)

    def look() -> None:
        states.append(flight_of(trail.snapshot(), NOW_MS).state)

    look()
    trail.placed(0.1)
    look()
    trail.opened(0, tuple, 0.15)
    trail.token(0.2)
    look()
    trail.fail(Overloaded("full"), 0.3)
    (record,) = book.recent()
    ended = flight_of(record, NOW_MS)
    assert (*states, ended.state, ended.end) == ("waiting", "reading", "answering", "ended", "overloaded")


def test_another_callers_request_is_shown_without_its_name() -> None:
    book = RequestBook()
    fly(book, "req-1", NOW_MS, age_s=3.0, tokens=1, caller=Caller("key-1"))
    flights = [flight_of(record, NOW_MS) for record in book.in_flight()]
    for caller, shown in ((Caller("key-1"), "req-1"), (Caller("key-2"), None), (Caller(), None)):
        (told,) = flights_json(flights, caller)["flights"]
        assert told["request_id"] == shown


def test_tokens_are_spread_between_the_first_and_the_newest_one() -> None:
    rates = token_rates([flight(num_tokens=40, first_token_age_s=3.5, last_token_age_s=1.5)], 6)
    assert rates == [0.0, 10.0, 20.0, 10.0, 0.0, 0.0]


def test_a_single_token_counts_in_its_second() -> None:
    assert token_rates([flight(num_tokens=1, first_token_age_s=1.2, last_token_age_s=1.2)], 3) == [0.0, 1.0, 0.0]


def test_a_clock_that_was_set_back_draws_tokens_now() -> None:
    assert token_rates([flight(num_tokens=4, first_token_age_s=-9.0, last_token_age_s=-10.0)], 2) == [4.0, 0.0]


ages = st.floats(-5, 2 * PICTURED_RATE_S, allow_nan=False)


@given(st.lists(st.tuples(ages, st.floats(0, 60), st.integers(0, 500)), max_size=20))
def test_the_seconds_together_hold_the_tokens_that_fell_into_them(given: list[tuple[float, float, int]]) -> None:
    flights = [
        flight(num_tokens=tokens, first_token_age_s=last + span, last_token_age_s=last) for last, span, tokens in given
    ]
    whole = token_rates(flights, 3 * PICTURED_RATE_S)
    assert sum(whole) == pytest.approx(sum(tokens for _, _, tokens in given))
    assert token_rates(flights) == whole[:PICTURED_RATE_S]


stages = st.builds(
    lambda name, start, length, status, recipe, canary: peer(
        name, start, start + length, status, recipe, canary=canary
    ),
    st.text(max_size=8),
    st.integers(0, TOTAL_LAYERS + 4),
    st.integers(1, TOTAL_LAYERS),
    st.sampled_from(STATUSES),
    st.sampled_from([RECIPE, "other", "", "<b>"]),
    st.booleans(),
)


@given(st.lists(stages, max_size=40))
def test_segments_cover_every_layer_once_and_are_empty_in_holes_alone(given: list[PeerView]) -> None:
    for coverage in picture(*given)["coverage"]:
        held = [segment["replicas"] for segment in coverage["segments"] for _ in range(*segment["layers"])]
        assert len(held) == TOTAL_LAYERS
        uncovered = {layer for start, end in coverage["holes"] for layer in range(start, end)}
        assert {layer for layer, replicas in enumerate(held) if not replicas} <= uncovered
        assert (coverage["health"] == "healthy") == (not uncovered)


def test_a_picture_is_bounded_and_keeps_what_serves() -> None:
    crowd = [peer(f"s{i:04}", 0, 12, "Offline", recipe=f"r{i}") for i in range(2 * MAX_PICTURED_STAGES)]
    crowd += [peer(f"h{i:04}", 0, 30, recipe=f"r{i}") for i in range(MAX_PICTURED_STAGES)]
    flights = [flight(request_id=f"req-{i}") for i in range(100)]
    flights += [flight(request_id=f"old-{i}", end="stop") for i in range(100)]
    drawn = picture(*crowd, flights=tuple(flights))
    assert len(drawn["stages"]) == MAX_PICTURED_STAGES
    assert {stage["status"] for stage in drawn["stages"]} == {"Healthy"}
    assert drawn["num_stages"] == 3 * MAX_PICTURED_STAGES
    assert len(drawn["coverage"]) == MAX_PICTURED_RECIPES
    assert (len(drawn["flights"]), drawn["num_flights"]) == (MAX_PICTURED_FLIGHTS, 100)
    assert len(drawn["ended"]) == MAX_PICTURED_ENDED
    assert len(drawn["tokens_per_s"]["history"]) == PICTURED_RATE_S


def test_a_peer_that_says_it_goes_beyond_the_model_is_drawn_and_covers_nothing() -> None:
    drawn = picture(peer("x", 0, TOTAL_LAYERS + 1))
    assert drawn["coverage"][0]["holes"] == [(0, TOTAL_LAYERS)]
    assert drawn["stages"][0]["peer_id"] == PeerId(peer("x", 0, 1).peer_id)
