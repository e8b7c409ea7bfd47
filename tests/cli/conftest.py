"""What keeps the tests of the commands apart from the machine that they run on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs


@pytest.fixture(autouse=True)
def _no_file_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands look for files and keys in the user's folder unless they are told another one."""
    monkeypatch.setenv("TESSELLA_CONFIG_DIR", str(tmp_path / "config"))


@pytest.fixture(autouse=True)
def _logs_aside() -> Iterator[None]:
    """The server that some tests run beside a command logs in the same process: not to the command's output."""
    with capture_logs():
        yield
