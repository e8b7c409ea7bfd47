"""One browser for all the tests that look at pages."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.dashboard.dashboard_world import BrowserThread, browser_path


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    """What was logged during the test."""
    with capture_logs() as entries:
        yield entries


@pytest.fixture(scope="session")
def browser() -> Iterator[BrowserThread]:
    """A Chromium, where this machine has one."""
    path = browser_path()
    if path is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium), so nobody looks at the pages")
    with BrowserThread(path) as browser:
        yield browser
