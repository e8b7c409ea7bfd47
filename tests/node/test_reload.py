"""SIGHUP: what takes effect, what waits for a restart, and what a wrong configuration changes: nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.node.config import OrchestratorConfig
from tessella_p2p.node.reload import RELOADED, changed, reload_on_hangup

PLAIN = OrchestratorConfig(keypair_path=Path("/somewhere/orchestrator.key"))


def _with(**changes: object) -> OrchestratorConfig:
    return OrchestratorConfig.model_validate({**PLAIN.model_dump(exclude_unset=True), **changes})


def test_what_takes_effect_is_told_from_what_waits() -> None:
    assert set(OrchestratorConfig.model_fields) >= set(RELOADED)
    assert changed(PLAIN, PLAIN) == ((), ())
    newer = _with(log_level="debug", p2p_port=3, admin_token="a-token-that-nobody-guesses")
    assert changed(PLAIN, newer) == (("log_level", "admin_token"), ("p2p_port",))


@pytest.fixture
def logs() -> Iterator[list[dict[str, object]]]:
    with capture_logs() as captured:
        yield captured  # type: ignore[misc]


async def test_each_hangup_reads_the_configuration_again_and_a_wrong_one_changes_nothing(
    logs: list[dict[str, object]],
) -> None:
    answers: list[OrchestratorConfig | ConfigurationError] = [
        _with(log_level="debug", p2p_port=3),
        ConfigurationError("orchestrator.toml: allow: no peer id"),
        _with(log_level="warning", p2p_port=3),
    ]
    reloaded: list[OrchestratorConfig] = []
    asked, asking = trio.open_memory_channel[None](len(answers))

    async def reload() -> OrchestratorConfig:
        await asked.send(None)
        answer = answers.pop(0)
        if isinstance(answer, ConfigurationError):
            raise answer
        reloaded.append(answer)
        return answer

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(reload_on_hangup, PLAIN, reload)
            for _ in range(len(answers)):
                os.kill(os.getpid(), signal.SIGHUP)
                await asking.receive()
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert [config.log_level for config in reloaded] == ["debug", "warning"]
    assert [(line["event"], line.get("changed") or line.get("settings") or line.get("code")) for line in logs] == [
        ("configuration reloaded", ("log_level",)),
        ("these settings take effect at the next start", ("p2p_port",)),
        ("the configuration is not reloaded", "configuration_error"),
        ("configuration reloaded", ("log_level",)),
        ("these settings take effect at the next start", ("p2p_port",)),
    ]
