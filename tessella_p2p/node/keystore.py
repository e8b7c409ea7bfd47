"""The key file: a node's identity on disk, created once and never replaced (shell).

A key file holds the libp2p protobuf of one Ed25519 key (68 bytes), readable by its owner alone. A lost key is a lost identity and
its balance, so whatever is wrong with a file, it is refused with the way to mend it, and nobody writes over it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from tessella_p2p.base.errors import KeyFileError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.wire.keys import SEED_BYTES, NodeKey

KEY_FILE_BYTES = 68
_FILE_MODE = 0o600
_FOLDER_MODE = 0o700
_NEW_IDENTITY = "or move it away and run `tessella-p2p keys generate` to become a new peer with a new balance"


def load_key(path: Path) -> NodeKey:
    """The key in ``path``.

    Raises:
        KeyFileError: it is missing, a link, no regular file, somebody else's, readable by others, or damaged; says how to mend it.
    """
    descriptor = _open(path)
    try:
        return _read(path, descriptor)
    finally:
        os.close(descriptor)


def generate_key(path: Path) -> NodeKey:
    """Create a new key in ``path``, durable on disk before this returns.

    The file appears complete or not at all; of several processes that do this at once, one wins and the others are refused.

    Raises:
        KeyFileError: there is a file already, none can be made there, or others may write to its folder.
    """
    key = NodeKey(secrets.token_bytes(SEED_BYTES))
    try:
        _make_folder(path.parent)
        check_folder(path)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        _write(path, key.to_protobuf())
    except FileExistsError:
        raise KeyFileError(
            f"{path} exists: a key is never replaced; name another path with --keypair-path, {_NEW_IDENTITY}"
        ) from None
    except OSError as error:
        raise KeyFileError(f"{path}: no key file can be made there: {error.strerror}") from error
    return key


def load_or_generate_key(path: Path) -> NodeKey:
    """The key in ``path``, made first where there is no file.

    Raises:
        KeyFileError: as `load_key` and `generate_key` do, but for a file that somebody else made meanwhile.
    """
    if not os.path.lexists(path):
        try:
            return generate_key(path)
        except KeyFileError:
            if not os.path.lexists(path):
                raise
    return load_key(path)


@contextmanager
def held_key(path: Path) -> Iterator[NodeKey]:
    """The key in ``path`` (made first where there is none), held by this process alone while the context lasts.

    Two nodes with one identity would fence each other's sequence numbers and journals, so the second one is refused: by a lock on
    the file, and by one on the peer id, for a copy of the file. The kernel lets go of both when the process ends, however it ends.

    Raises:
        KeyFileError: as `load_or_generate_key`, or the key is in use.
    """
    load_or_generate_key(path)
    descriptor = _open(path)
    try:
        key = _read(path, descriptor)
        _lock(descriptor, path, key.peer_id)
        identity = _open_identity_lock(key.peer_id)
        try:
            _lock(identity, path, key.peer_id)
            yield key
        finally:
            os.close(identity)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        # O_NONBLOCK: a named pipe must not hold a node up
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise KeyFileError(
            f"{path}: there is no key file; run `tessella-p2p keys generate --keypair-path {path}`"
        ) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise KeyFileError(f"{path} is a symbolic link: name the key file itself") from None
        raise KeyFileError(f"{path}: the key file cannot be read: {error.strerror}") from error


def _read(path: Path, descriptor: int) -> NodeKey:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise KeyFileError(f"{path} is no regular file: name the key file itself")
    if found.st_uid != os.geteuid():
        raise KeyFileError(
            f"{path} belongs to user {found.st_uid}, this process runs as {os.geteuid()}: "
            f"run it as the owner, or `chown {os.geteuid()} {path}`"
        )
    if found.st_mode & 0o077:
        raise KeyFileError(
            f"{path} may be read or written by others (mode {stat.S_IMODE(found.st_mode):04o}): `chmod 600 {path}`, "
            "and take the key for known to whoever has an account here"
        )
    check_folder(path)
    try:
        data = os.read(descriptor, KEY_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"{path}: the key file cannot be read: {error.strerror}") from error
    if len(data) != KEY_FILE_BYTES:
        much = f"{len(data)}" if len(data) < KEY_FILE_BYTES else f"over {KEY_FILE_BYTES}"
        _refuse_content(path, f"it holds {much} bytes, a key file {KEY_FILE_BYTES}")
    try:
        return NodeKey.from_protobuf(data)
    except KeyFileError as error:
        _refuse_content(path, str(error))


def _refuse_content(path: Path, reason: str) -> NoReturn:
    raise KeyFileError(f"{path} is damaged: {reason}; bring it back from a backup, {_NEW_IDENTITY}")


def check_folder(path: Path) -> None:
    """Whoever may write to the folder of ``path`` may put another file in its place, or an older one back.

    Raises:
        KeyFileError: others may; says how to mend it.
        OSError: there is no folder, or nothing can be said of it.
    """
    folder = path.absolute().parent
    mode = folder.stat().st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise KeyFileError(f"{folder}, the folder of {path.name}, may be written by others: `chmod go-w {folder}`")


def _make_folder(folder: Path) -> None:
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    for part in reversed(missing):
        part.mkdir(mode=_FOLDER_MODE, exist_ok=True)


def _write(path: Path, content: bytes) -> None:
    """Write a new file that is complete as soon as it has its name: a hard link fails where the name is taken."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), _FILE_MODE)  # whatever the umask is
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _open_identity_lock(peer_id: PeerId) -> int:
    folder = Path(tempfile.gettempdir()) / f"tessella-{os.geteuid()}"
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=_FOLDER_MODE)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise KeyFileError(f"{folder} is not a folder of this user's own, so no lock can stand there: remove it")
        return os.open(folder / f"{peer_id}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
    except OSError as error:
        raise KeyFileError(
            f"{folder}: no lock for {peer_id} can be made there: {error.strerror}; set TMPDIR"
        ) from error


def _lock(descriptor: int, path: Path, peer_id: PeerId) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise KeyFileError(
            f"{path}: another process of this machine is {peer_id} already; stop it, or give this node its own key "
            "with --keypair-path"
        ) from None
    except OSError as error:
        raise KeyFileError(f"{path}: the key file cannot be locked: {error.strerror}") from error
