"""A conversation on disk: what ``chat --session-file`` goes on with.

The file holds the messages alone. Sent again as they are, they make the same leading tokens, so every stage finds what it computed for
them in its prefix cache, as long as it keeps it; a file that a stage has forgotten costs time and nothing else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.limits import MAX_CHAT_MESSAGES, MAX_SESSION_FILE_BYTES, MIB
from tessella_p2p.cli.asking import Turn
from tessella_p2p.cli.private_file import write_private


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said so far, and to which model; None where it has not been said to any."""

    model: str | None = None
    turns: tuple[Turn, ...] = ()


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "user", "assistant"]
    content: str


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: Literal[1]
    model: str | None = None
    messages: Annotated[list[_Message], Field(max_length=MAX_CHAT_MESSAGES)]


def load_session(path: Path) -> Conversation:
    """The conversation in a file; an empty one where there is no file yet.

    Raises:
        ConfigurationError: it cannot be read, is too long, or is no conversation; says what to do.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SESSION_FILE_BYTES + 1)
    except FileNotFoundError:
        return Conversation()
    except OSError as error:
        raise ConfigurationError(f"{path}: the session file cannot be read: {error.strerror}") from error
    if len(data) > MAX_SESSION_FILE_BYTES:
        raise ConfigurationError(f"{path}: a session file of over {MAX_SESSION_FILE_BYTES // MIB} MiB; begin a new one")
    try:
        content = _Content.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ConfigurationError(
            f"{path}: no session file: {where and where + ': '}{first['msg']}; name another file, or move this one away"
        ) from None
    return Conversation(content.model, tuple(Turn(each.role, each.content) for each in content.messages))


def check_place(path: Path) -> None:
    """Find out whether a conversation can be kept in a file before an answer is asked for.

    Raises:
        ConfigurationError: its folder is not there, or may not be written.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigurationError(f"{path}: the session file cannot be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"{path}: the session file cannot be written: {folder} may not be written by this user"
        )


def save_session(path: Path, conversation: Conversation) -> None:
    """Write a conversation, for its owner alone; the file is the old one or the new one, never a part.

    Raises:
        ConfigurationError: it cannot be written, or is too long.
    """
    messages = [_Message(role=turn.role, content=turn.content) for turn in conversation.turns]
    content = _Content.model_construct(version=1, model=conversation.model, messages=messages)
    data = content.model_dump_json(indent=1).encode() + b"\n"
    if len(data) > MAX_SESSION_FILE_BYTES or len(messages) > MAX_CHAT_MESSAGES:
        raise ConfigurationError(f"{path}: the conversation has become too long for a session file; begin a new one")
    try:
        write_private(path, data)
    except OSError as error:
        raise ConfigurationError(f"{path}: the session file cannot be written: {error.strerror}") from error
