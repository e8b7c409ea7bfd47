"""The file of API keys: what is refused, how it is replaced, and how a running node follows it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.bridge.api_keys import ApiKey, ApiKeys, KeyLimits, new_key
from tessella_p2p.node.api_key_file import changing, follow_keys, path_in, read_keys

NOW = 1_800_000_000_000


def a_key(label: str = "alice") -> ApiKey:
    limits = KeyLimits("Standard", 60, 10_000, 4)
    return new_key(os.urandom, label=label, now_ms=NOW, expires=NOW + 1, limits=limits, delegation=b"sealed")[1]


def write(path: Path, *keys: ApiKey) -> None:
    with changing(path) as put:
        put(ApiKeys(keys))


def test_what_is_written_is_read_and_others_cannot_read_it(tmp_path: Path) -> None:
    path = path_in(tmp_path / "made")
    assert len(read_keys(path)) == 0
    plain = new_key(os.urandom, label="", now_ms=NOW)[1]
    keys = (a_key(), plain, a_key("ünïcode ⚷"))
    write(path, *keys)
    assert tuple(read_keys(path)) == keys
    assert path.stat().st_mode & 0o777 == 0o600
    assert not list(path.parent.glob("*.part"))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_keys_that_others_may_read_or_write_are_refused(tmp_path: Path, mode: int) -> None:
    path = path_in(tmp_path)
    write(path, a_key())
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_keys(path)


def test_a_folder_that_others_may_write_to_has_no_keys_read_or_written(tmp_path: Path) -> None:
    path = path_in(tmp_path)
    write(path, a_key())
    before = path.read_bytes()
    tmp_path.chmod(0o770)
    with pytest.raises(ConfigurationError, match=f"`chmod go-w {tmp_path}`"):
        read_keys(path)
    with pytest.raises(ConfigurationError, match=f"`chmod go-w {tmp_path}`"):
        write(path)
    assert path.read_bytes() == before


def test_a_link_and_a_folder_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "real.json", a_key())
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    (tmp_path / "folder.json").mkdir()
    for name in ("link.json", "folder.json"):
        with pytest.raises(ConfigurationError, match=name):
            read_keys(tmp_path / name)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{", '{"version": 2, "keys": []}', '{"keys": [{}]}', '{"keys": [], "more": 1}'),
        '{"keys": [{"id": "key-000000000000", "label": "", "sha256": "00", "created": 1}]}',
        '{"keys": [{"id": "k", "label": "", "sha256": "' + "0" * 64 + '", "created": 1}]}',
        '{"keys": ['
        + ",".join(['{"id": "key-000000000000", "label": "", "sha256": "' + "0" * 64 + '", "created": 1}'] * 2)
        + "]}",
        '{"keys": [{"id": "key-000000000000", "label": "", "sha256": "'
        + "0" * 64
        + '", "created": 1, "concurrent": 0}]}',
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = path_in(tmp_path)
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"api_keys\.json"):
        read_keys(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes_give_keys_or_a_typed_error(tmp_path: Path, content: bytes) -> None:
    path = path_in(tmp_path)
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError):
        read_keys(path)


async def test_a_running_node_takes_each_change_and_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    path, taken = path_in(tmp_path), list[int]()
    send, receive = trio.open_memory_channel[None](8)

    def replace(keys: ApiKeys) -> None:
        taken.append(len(keys))
        send.send_nowait(None)

    with capture_logs() as logs, trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            # A long pause: here only the signal counts.
            await nursery.start(follow_keys, path, replace, 3600.0)
            await receive.receive()
            write(path, a_key(), a_key("bob"))
            os.kill(os.getpid(), signal.SIGHUP)
            await receive.receive()
            path.write_text("junk")
            os.kill(os.getpid(), signal.SIGHUP)
            while not any(line["event"] == "the API keys are not reloaded" for line in logs):
                await trio.lowlevel.checkpoint()
            path.unlink()
            os.kill(os.getpid(), signal.SIGHUP)
            await receive.receive()
            nursery.cancel_scope.cancel()
    assert taken == [0, 2, 0]
    assert logs[0]["event"].startswith("there is no API key")


async def test_without_a_signal_a_change_is_seen_at_the_next_look_and_nothing_is_read_before(tmp_path: Path) -> None:
    path, taken = path_in(tmp_path), list[int]()
    write(path, a_key())
    changed = trio.Event()

    def replace(keys: ApiKeys) -> None:
        taken.append(len(keys))
        if len(taken) == 2:
            changed.set()

    with capture_logs(), trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(follow_keys, path, replace, 0.001)
            write(path)
            await changed.wait()
            nursery.cancel_scope.cancel()
    assert taken == [1, 0]


async def test_keys_that_were_not_readable_are_taken_once_they_are(tmp_path: Path) -> None:
    path, taken = path_in(tmp_path), list[int]()
    write(path, a_key())
    two = trio.Event()

    def replace(keys: ApiKeys) -> None:
        taken.append(len(keys))
        if len(taken) == 2:
            two.set()

    with capture_logs() as logs, trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(follow_keys, path, replace, 0.001)
            path.chmod(0o644)
            while not any(line["event"] == "the API keys are not reloaded" for line in logs):
                await trio.lowlevel.checkpoint()
            path.chmod(0o600)  # its content is as old as before
            await two.wait()
            nursery.cancel_scope.cancel()
    assert taken == [1, 1]


async def test_a_node_does_not_start_with_a_damaged_file(tmp_path: Path) -> None:
    path_in(tmp_path).write_text("junk")
    path_in(tmp_path).chmod(0o600)
    with pytest.raises(ConfigurationError):
        await follow_keys(path_in(tmp_path), lambda _: None)
