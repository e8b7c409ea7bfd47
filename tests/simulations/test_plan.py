"""Plans: what happens when, drawn from the seed alone."""

from __future__ import annotations

import random
from statistics import mean

from hypothesis import given, settings
from hypothesis import strategies as st

from simulations.plan import FaultKind, join_times, plan_faults, plan_requests
from simulations.scenario import LoadTable, Scenario, parse_scenario
from tests.simulations.small_runs import small

DOWN = (FaultKind.CRASH, FaultKind.LEAVE, FaultKind.FREEZE)
UP = (FaultKind.RETURN, FaultKind.THAW)


def stormy(nodes: int, churn: float, frozen: float, graceful: float) -> Scenario:
    return parse_scenario(
        small(
            nodes=nodes,
            duration_s=100.0,
            churn=[
                {"share": churn, "from_s": 10.0, "until_s": 40.0, "down_s": [1.0, 9.0], "graceful": graceful},
                {"share": churn, "from_s": 30.0, "until_s": 60.0, "down_s": [0.0, 30.0]},
            ],
            freezes=[{"share": frozen, "from_s": 20.0, "until_s": 50.0}],
            partitions=[{"share": 0.5, "from_s": 5.0, "until_s": 70.0}],
            outages=[{"from_s": 1.0, "until_s": 30.0}],
        ),
        "stormy.toml",
    )


@given(st.integers(3, 40), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_whoever_goes_down_is_up_before_and_comes_back_in_its_window(
    nodes: int, churn: float, frozen: float, graceful: float, seed: int
) -> None:
    scenario = stormy(nodes, churn, frozen, graceful)
    faults = plan_faults(scenario, random.Random(seed))
    assert faults == plan_faults(scenario, random.Random(seed))
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    down: set[int] = set()
    for fault in faults:
        assert fault.at_s <= scenario.faults_end_s
        if fault.kind in DOWN:
            assert not down & set(fault.nodes)
            down |= set(fault.nodes)
        elif fault.kind in UP:
            assert set(fault.nodes) <= down
            down -= set(fault.nodes)
    assert not down


def test_a_tenth_of_a_hundred_is_ten() -> None:
    scenario = parse_scenario(
        small(nodes=100, churn=[{"share": 0.1, "from_s": 10.0, "until_s": 24.0, "down_s": [5.0, 9.0]}]), "t.toml"
    )
    faults = plan_faults(scenario, random.Random(1))
    crashed = [node for fault in faults if fault.kind is FaultKind.CRASH for node in fault.nodes]
    assert len(crashed) == len(set(crashed)) == 10


def test_nodes_join_in_their_window() -> None:
    times = join_times(parse_scenario(small(), "t.toml"), random.Random(1))
    assert len(times) == 6
    assert all(0 <= time <= 3.0 for time in times)


def load(shape: str, per_s: float = 5.0, until_s: float = 600.0) -> LoadTable:
    return LoadTable.model_validate({"from_s": 0.0, "until_s": until_s, "per_s": per_s, "shape": shape})


def test_every_shape_has_the_same_mean_rate() -> None:
    for shape in ("steady", "bursts", "waves"):
        requests = plan_requests(load(shape), 1024, random.Random(3))
        assert 0.85 * 3000 < len(requests) < 1.15 * 3000, shape
        assert [request.number for request in requests] == list(range(len(requests)))
        assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)


def test_bursts_come_together_and_waves_swing() -> None:
    bursts = plan_requests(load("bursts"), 1024, random.Random(3))
    assert len({request.at_s for request in bursts}) == len(bursts) / 5
    waves = plan_requests(load("waves"), 1024, random.Random(3))
    high = sum(request.at_s % 60 < 30 for request in waves)
    assert high > 2 * (len(waves) - high)


def test_requests_stay_within_what_the_scenario_says() -> None:
    table = LoadTable(from_s=5.0, until_s=400.0, per_s=5.0, prompt_tokens=(2, 9), max_tokens=(3, 7), abandoned=0.5)
    requests = plan_requests(table, 64, random.Random(1))
    for request in requests:
        assert 5.0 <= request.at_s < 400.0
        assert 2 <= len(request.prompt) <= 9
        assert all(0 <= token < 64 for token in request.prompt)
        assert 3 <= request.max_tokens <= 7
        assert request.leaves_after is None or 0 <= request.leaves_after < request.max_tokens
    assert 0.4 < mean(request.leaves_after is not None for request in requests) < 0.6
    assert 0.15 < mean(request.temperature > 0 for request in requests) < 0.35
