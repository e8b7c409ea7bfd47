"""A scenario of a few seconds, and one observed run of it that several tests look at."""

from __future__ import annotations

from typing import Any

from simulations.scenario import Scenario, parse_scenario


def small(**changes: Any) -> dict[str, Any]:
    """The data of a small churn: six nodes, two of them crash and return."""
    data: dict[str, Any] = {
        "name": "small",
        "nodes": 6,
        "duration_s": 40.0,
        "lookups_per_s": 0.5,
        "mesh": {"layers": 6, "min_stages": 3, "bootstraps": 2, "dead_bootstraps": 1, "join_within_s": 3.0},
        "network": {"loss": 0.01},
        "load": {"from_s": 8.0, "until_s": 28.0, "per_s": 1.0, "max_tokens": [4, 16]},
        "churn": [{"share": 0.3, "from_s": 10.0, "until_s": 22.0, "down_s": [4.0, 8.0]}],
        "bounds": {"recovery_s": 16.0},
    }
    data["mesh"]["checkpoint_s"] = 2.0
    return data | changes


def small_scenario(**changes: Any) -> Scenario:
    """`small`, validated."""
    return parse_scenario(small(**changes), "small.toml")
