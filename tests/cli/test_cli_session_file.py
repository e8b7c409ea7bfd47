"""A conversation on disk: what is written is read, whole or not at all, and nothing else is taken for one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.limits import MAX_CHAT_MESSAGES, MAX_SESSION_FILE_BYTES
from tessella_p2p.cli.asking import Turn
from tessella_p2p.cli.session_file import Conversation, check_place, load_session, save_session
from tessella_p2p.cli.talk import begun

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
TURNS = st.lists(st.builds(Turn, st.sampled_from(["system", "user", "assistant"]), TEXTS), max_size=6)


@given(model=st.none() | TEXTS, turns=TURNS)
def test_what_is_kept_comes_back(
    tmp_path_factory: pytest.TempPathFactory, model: str | None, turns: list[Turn]
) -> None:
    path = tmp_path_factory.mktemp("session") / "s.json"
    conversation = Conversation(model, tuple(turns))
    save_session(path, conversation)
    assert load_session(path) == conversation


def test_no_file_is_an_empty_conversation(tmp_path: Path) -> None:
    assert load_session(tmp_path / "none.json") == Conversation()


def test_the_file_is_its_owners_alone_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"version": 1, "messages": []}')
    path.chmod(0o666)
    save_session(path, Conversation("m", (Turn("user", "hi"),)))
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_conversation_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    save_session(path, Conversation("m", (Turn("user", "hi"),)))
    before = path.read_bytes()
    for long in ((Turn("user", "x" * MAX_SESSION_FILE_BYTES),), (Turn("user", "x"),) * (MAX_CHAT_MESSAGES + 1)):
        with pytest.raises(ConfigurationError, match="too long"):
            save_session(path, Conversation("m", long))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written: No such file"):
        save_session(tmp_path / "none" / "s.json", Conversation())
    with pytest.raises(ConfigurationError, match="cannot be read: Is a directory"):
        load_session(tmp_path)


def test_a_file_that_cannot_be_kept_is_said_before_anything_is_asked(tmp_path: Path) -> None:
    check_place(tmp_path / "s.json")
    with pytest.raises(ConfigurationError, match="there is no folder"):
        begun(tmp_path / "none" / "s.json")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if not os.access(locked, os.W_OK):  # nothing is locked to root
        with pytest.raises(ConfigurationError, match="may not be written by this user"):
            begun(locked / "s.json")


GOOD: dict[str, Any] = {"version": 1, "model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b" " * (MAX_SESSION_FILE_BYTES + 1),
        *(
            json.dumps(GOOD | change).encode()
            for change in (
                {"version": 2},
                {"version": "1"},
                {"model": 3},
                {"messages": None},
                {"messages": [{"role": "tool", "content": "x"}]},
                {"messages": [{"role": "user", "content": None}]},
                {"messages": [{"role": "user", "content": "x", "more": 1}]},
                {"messages": GOOD["messages"] * (MAX_CHAT_MESSAGES + 1)},
                {"surprise": True},
            )
        ),
    ],
)
def test_what_is_no_session_file_is_refused_by_name_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"s\.json: "):
        load_session(path)
    assert path.read_bytes() == content
