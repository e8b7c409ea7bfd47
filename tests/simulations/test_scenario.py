"""Scenarios: what a file may say, and what is said about one that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulations.scenario import load_scenario, parse_scenario, scenario_names
from tessella_p2p.base.errors import ConfigurationError
from tests.simulations.small_runs import small


def test_every_scenario_of_the_project_is_valid_and_named_as_its_file() -> None:
    names = scenario_names()
    assert {"churn", "outage", "partition", "liars"} <= set(names)
    for name in names:
        scenario = load_scenario(name)
        assert scenario.name == name
        assert scenario.description


def test_the_churn_is_a_hundred_nodes_of_which_a_tenth_goes_and_returns() -> None:
    scenario = load_scenario("churn")
    assert scenario.nodes == 100
    assert [churn.share for churn in scenario.churn] == [0.1]


def test_nodes_and_seed_can_be_given_in_place_of_the_files(tmp_path: Path) -> None:
    scenario = load_scenario("churn", nodes=20, seed=7)
    assert (scenario.nodes, scenario.seed) == (20, 7)
    with pytest.raises(ConfigurationError, match=r"churn\.toml: .*mesh\.min_stages"):
        load_scenario("churn", nodes=2)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"nodes": 0}, "nodes: "),
    ({"nodes": "six"}, "nodes: "),
    ({"nodes": True}, "nodes: "),
    ({"speed": 3}, "speed: there is no such key"),
    ({"mesh": {"layers": 6, "colour": "red"}}, "mesh.colour: there is no such key"),
    ({"network": {"loss": 0.9}}, "network.loss: "),
    ({"network": {"latency_ms": float("nan")}}, "network.latency_ms: "),
    ({"load": {"from_s": 8.0}}, "load.until_s: this key is needed"),
    ({"load": {"from_s": 8.0, "until_s": 3.0}}, "load: from_s"),
    ({"load": {"from_s": 8.0, "until_s": 99.0}}, "load.until_s: "),
    ({"load": {"from_s": 8.0, "until_s": 9.0, "shape": "round"}}, "load.shape: "),
    ({"load": {"from_s": 8.0, "until_s": 9.0, "max_tokens": [9, 2]}}, "load.max_tokens: "),
    ({"churn": [{"share": 1.5, "from_s": 1.0, "until_s": 9.0}]}, "churn.0.share: "),
    ({"churn": [{"share": 0.1, "from_s": 10.0, "until_s": 12.0}]}, "churn.0.down_s: "),
    ({"outages": [{"from_s": 1.0, "until_s": 9.0}, {"from_s": 5.0, "until_s": 20.0}]}, "outages: "),
    ({"partitions": [{"share": 0.5, "from_s": 1.0, "until_s": 39.0}]}, "duration_s: "),
    ({"liars": {"count": 1, "kinds": []}}, "liars.kinds"),
    ({"liars": {"count": 1, "kinds": ["modest"]}}, "liars.kinds.0: "),
    ({"mesh": {"layers": 3, "min_stages": 5}}, "mesh.min_stages: "),
    ({"bounds": {"recovery_s": -1.0}}, "bounds.recovery_s: "),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[words for _, words in WRONG])
def test_what_is_wrong_is_named_by_file_and_key(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_scenario(small(**change), "my.toml")
    assert f"my.toml: {words}" in str(caught.value)


def test_every_wrong_key_is_named() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_scenario(small(nodes=0, seed=-1, speed=1), "my.toml")
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["nodes", "seed", "speed"]


def test_files_that_are_no_scenario_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no scenario 'chrun'; there are churn"):
        load_scenario("chrun")
    with pytest.raises(ConfigurationError, match=r"absent\.toml: there is no such file"):
        load_scenario(str(tmp_path / "absent.toml"))
    damaged = tmp_path / "damaged.toml"
    damaged.write_text("nodes = = 3\n")
    with pytest.raises(ConfigurationError, match=r"damaged\.toml: no TOML: .*line 1"):
        load_scenario(str(damaged))
    damaged.write_bytes(b"name = '\xff'\n")
    with pytest.raises(ConfigurationError, match=r"damaged\.toml: it cannot be read"):
        load_scenario(str(damaged))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_scenario(str(tmp_path) + "/.")
