"""One observed run for all the tests that change something in it."""

from __future__ import annotations

import copy

import pytest

from simulations.observations import Observations
from simulations.runner import observe
from tests.simulations.small_runs import small_scenario


@pytest.fixture(scope="session")
def honest_run() -> Observations:
    """What was seen of the small churn; nobody changes it."""
    return observe(small_scenario())


@pytest.fixture
def seen(honest_run: Observations) -> Observations:
    """A copy to be changed."""
    return copy.deepcopy(honest_run)
