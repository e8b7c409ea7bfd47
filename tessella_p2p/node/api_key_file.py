"""The file of a node's API keys: hashes, limits and delegations, in its data folder, readable by its owner alone (shell).

``tessella-p2p keys api`` writes it, one process at a time; it changes as a whole or not at all. A running node looks every second
whether it has, and at once on SIGHUP. A file that cannot be read keeps the keys that were read last; one that is gone has none.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Literal

import structlog
import trio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tessella_p2p.base.errors import ConfigurationError, InvalidRequest
from tessella_p2p.base.limits import (
    API_KEYS_LOOK_S,
    MAX_API_KEY_FILE_BYTES,
    MAX_API_KEYS,
    MAX_DELEGATION_BYTES,
    MAX_KEY_LABEL_CHARS,
    MAX_REQUESTS_PER_MINUTE,
    MAX_TOKENS_PER_MINUTE,
)
from tessella_p2p.bridge.api_keys import ApiKey, ApiKeys, KeyLimits
from tessella_p2p.node.keystore import check_folder
from tessella_p2p.wire.messages import Tier

log = structlog.get_logger(__name__)

FILE_NAME: Final = "api_keys.json"
_FILE_MODE: Final = 0o600
_HEX_OF_DIGEST: Final = r"^[0-9a-f]{64}$"

Stamp = tuple[int, int, int]
"""What is another one once a file was replaced, written, or made readable: its inode, its time of change in ns, and its size."""


class _Row(BaseModel):
    """One key, as it stands in the file. Times are Unix milliseconds; the delegation is in hex."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: Annotated[str, Field(pattern=r"^key-[0-9a-f]{12}$")]
    label: Annotated[str, Field(max_length=MAX_KEY_LABEL_CHARS)]
    sha256: Annotated[str, Field(pattern=_HEX_OF_DIGEST)]
    created: Annotated[int, Field(ge=0, lt=2**53)]
    expires: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    tier: Tier | None = None
    requests_per_minute: Annotated[int, Field(ge=1, le=MAX_REQUESTS_PER_MINUTE)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=MAX_TOKENS_PER_MINUTE)] | None = None
    concurrent: Annotated[int, Field(ge=1, le=MAX_REQUESTS_PER_MINUTE)] | None = None
    delegation: Annotated[str, Field(max_length=2 * MAX_DELEGATION_BYTES, pattern=r"^([0-9a-f]{2})+$")] | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Literal[1] = 1
    keys: Annotated[list[_Row], Field(max_length=MAX_API_KEYS)] = []


def path_in(data_dir: Path) -> Path:
    """Where a node with this data folder has its keys."""
    return data_dir / FILE_NAME


def read_keys(path: Path) -> ApiKeys:
    """The keys in ``path``; none where there is no file.

    Raises:
        ConfigurationError: it is readable by others, somebody else's, damaged or unreadable, or others may write to its folder and so
            bring back keys that were revoked; says how to mend it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return ApiKeys()
    except OSError as error:
        raise ConfigurationError(f"{path}: the API keys cannot be read: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigurationError(
                f"{path}: the API keys have to be a file of this user's own that nobody else reads or writes: `chmod 600 {path}`"
            )
        check_folder(path)
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_API_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{path}: the API keys cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return _parsed(path, content)


def _parsed(path: Path, content: bytes) -> ApiKeys:
    if len(content) > MAX_API_KEY_FILE_BYTES:
        raise ConfigurationError(f"{path}: over {MAX_API_KEY_FILE_BYTES} bytes of API keys are refused")
    try:
        return ApiKeys(_key_of(row) for row in _File.model_validate_json(content).keys)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(
            f"{path}: damaged: {where}: {first['msg']}; bring it back from a backup, or move it away and make new keys"
        ) from None
    except InvalidRequest as error:
        raise ConfigurationError(f"{path}: {error}") from error


@contextmanager
def changing(path: Path) -> Iterator[Callable[[ApiKeys], None]]:
    """What writes new keys in the place of those in ``path``; no other process changes them while the context lasts.

    Raises:
        ConfigurationError: the folder cannot be made or written, or others may write to it.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(path)
        lock = os.open(
            path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE
        )
    except OSError as error:
        raise ConfigurationError(f"{path}: the API keys cannot be changed: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lambda keys: _write(path, keys)
    finally:
        os.close(lock)


def _write(path: Path, keys: ApiKeys) -> None:
    content = _File(keys=[_row_of(key) for key in keys]).model_dump_json(exclude_none=True, indent=2) + "\n"
    part = path.with_name(f".{path.name}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, _FILE_MODE)  # whatever the umask is, and whatever was left there
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(part, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigurationError(f"{path}: the API keys cannot be written: {error.strerror}") from error


def _key_of(row: _Row) -> ApiKey:
    return ApiKey(
        key_id=row.id,
        label=row.label,
        digest=bytes.fromhex(row.sha256),
        created=row.created,
        expires=row.expires,
        limits=KeyLimits(row.tier, row.requests_per_minute, row.tokens_per_minute, row.concurrent),
        delegation=None if row.delegation is None else bytes.fromhex(row.delegation),
    )


def _row_of(key: ApiKey) -> _Row:
    return _Row(
        id=key.key_id,
        label=key.label,
        sha256=key.digest.hex(),
        created=key.created,
        expires=key.expires,
        tier=key.limits.tier,
        requests_per_minute=key.limits.requests_per_minute,
        tokens_per_minute=key.limits.tokens_per_minute,
        concurrent=key.limits.concurrent,
        delegation=None if key.delegation is None else key.delegation.hex(),
    )


def stamp_of(path: Path) -> Stamp | None:
    """What tells whether the file was replaced; None where there is none."""
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns, found.st_size


async def follow_keys(
    path: Path,
    replace: Callable[[ApiKeys], None],
    look_s: float = API_KEYS_LOOK_S,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Read the keys again whenever they have changed, and at SIGHUP, and give them to ``replace``; until cancelled.

    Started means: they were read once.

    Raises:
        ConfigurationError: as `read_keys`, at the start; later it is logged, and the keys stay as they were.
    """
    seen = stamp_of(path)
    keys = read_keys(path)
    replace(keys)
    if not len(keys):
        log.warning(
            "there is no API key, so nobody may ask this node: `tessella-p2p keys api add` makes one", file=str(path)
        )
    with trio.open_signal_receiver(signal.SIGHUP) as hangups:
        task_status.started()
        while True:
            with trio.move_on_after(look_s) as waited:
                await anext(hangups)
            # A thread for each look would cost more than it waits for; but no answer may stand still while thousands of keys are read.
            if waited.cancelled_caught and stamp_of(path) == seen:
                continue
            seen = stamp_of(path)
            try:
                replace(keys := await trio.to_thread.run_sync(read_keys, path))
            except ConfigurationError as error:
                log.error("the API keys are not reloaded", reason=str(error))
                continue
            log.info("API keys reloaded", keys=len(keys))
