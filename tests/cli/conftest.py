"""The server that some tests run beside a command logs in the same process: not to the command's output."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs


@pytest.fixture(autouse=True)
def _logs_aside() -> Iterator[None]:
    with capture_logs():
        yield
