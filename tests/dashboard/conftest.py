"""One browser for all the tests that look at pages."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.dashboard.dashboard_world import BrowserThread, a_browser


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    """What was logged during the test."""
    with capture_logs() as entries:
        yield entries


@pytest.fixture(scope="session")
def browser() -> Iterator[BrowserThread]:
    """A Chromium, where this machine has one."""
    with a_browser() as browser:
        yield browser
