"""A daemon leaves when it is told to, and says where it is once it is up."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import wait_all_tasks_blocked

from tessella_p2p.node.lifetime import outlive_hangups, until_told, write_ready_file


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_wait(number: signal.Signals) -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:

            async def wait(task_status: trio.TaskStatus[None]) -> None:
                await until_told(exit_with_stdin=False, task_status=task_status)
                nursery.cancel_scope.cancel()

            await nursery.start(wait)
            os.kill(os.getpid(), number)
            await trio.sleep_forever()


async def test_a_reload_of_what_has_nothing_to_read_again_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr(os, "isatty", lambda _: False)
    with capture_logs() as logs, trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outlive_hangups)
            await wait_all_tasks_blocked()
            for number in (1, 2):
                os.kill(os.getpid(), signal.SIGHUP)
                while len(logs) < number:
                    await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    assert {line["event"] for line in logs} == {"nothing to read again"}
    assert signal.getsignal(signal.SIGHUP) == before


async def test_a_terminal_that_is_closed_ends_what_runs_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 0)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have had it ignored
    try:
        await outlive_hangups()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("kind", ["ended pipe", "empty file", "closed"])
async def test_the_end_of_standard_input_ends_the_wait_whatever_it_is(kind: str, tmp_path: Path) -> None:
    saved = os.dup(0)
    try:
        if kind == "ended pipe":
            reading, writing = os.pipe()
            os.close(writing)
            os.dup2(reading, 0)
            os.close(reading)
        elif kind == "empty file":
            (tmp_path / "empty").touch()
            file = os.open(tmp_path / "empty", os.O_RDONLY)
            os.dup2(file, 0)
            os.close(file)
        else:
            os.close(0)
        with trio.fail_after(60):
            await until_told(exit_with_stdin=True)
    finally:
        os.dup2(saved, 0)
        os.close(saved)


def test_whoever_sees_the_ready_file_sees_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    write_ready_file(path, {"pid": 1})
    write_ready_file(path, {"pid": 2})
    assert json.loads(path.read_text()) == {"pid": 2}
    assert list(tmp_path.iterdir()) == [path]
    write_ready_file(None, {"pid": 3})
