"""What several packages' tests share."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.weights.store import default_models_dir, resolve

# A shell starts background jobs with SIGINT ignored, and children inherit that: Ctrl-C could not be tested there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is the machine's affair, which may have other things to do. Without this a test that was held up for 0.2 s
# fails, after Hypothesis has looked for a smaller example that is late, too, for up to five minutes.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that a test runs in this process sets up the log of the process: no later test is to find it so."""
    before = structlog.get_config()
    ours, root = logging.getLogger("tessella_p2p"), logging.getLogger()
    levels, handlers = (ours.level, root.level), root.handlers[:]
    yield
    if structlog.get_config() != before:
        structlog.configure(**before)
        logging.captureWarnings(False)
        root.handlers[:] = handlers
        ours.setLevel(levels[0])
        root.setLevel(levels[1])


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's GGUF, from the store; ``make setup`` pulls it."""
    models_dir = Path(os.environ.get("TESSELLA_MODELS_DIR") or default_models_dir())
    try:
        return resolve("smollm2-135m-instruct", models_dir)
    except ConfigurationError as error:
        pytest.fail(str(error))
