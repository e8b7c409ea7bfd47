"""What the terminal UI was told last time: ``ui.toml`` beside the client's file (shell: it reads and writes it).

What a flag or a variable says is never written here, so that a script's values do not stay.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import tomlkit
from tomlkit.exceptions import TOMLKitError

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.cli.client_file import default_client_file
from tessella_p2p.cli.private_file import write_private

_MAX_BYTES = 64 * 1024
_HEAD = (
    "What the terminal UI (`tessella-p2p` without arguments) was told last. Flags and variables win over this file; "
    "without it, everything is asked again."
)


@dataclass(frozen=True, slots=True)
class Remembered:
    """What the file says; None where it says nothing.

    Attributes:
        api_url: the node that was attached to.
        api_key: what ``api_url`` asks for, or this machine's node where a mesh was joined; it is sent nowhere else.
        mesh: the orchestrator's address with its pin, of the mesh that was joined.
        operator: the peer id of the orchestrator that the node follows.
        model_id: the model that was asked last.
    """

    api_url: str | None = None
    api_key: str | None = None
    mesh: str | None = None
    operator: str | None = None
    model_id: str | None = None


_KEYS = tuple(field.name for field in fields(Remembered))


def default_path(environ: Mapping[str, str]) -> Path:
    """``~/.config/tessella/ui.toml``; ``TESSELLA_CONFIG_DIR`` moves the folder."""
    return default_client_file(environ).with_name("ui.toml")


def read_remembered(path: Path) -> Remembered:
    """What a file says; nothing where there is none.

    Raises:
        ConfigurationError: it cannot be read, is none that this program wrote, or holds an API key that others may read.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return Remembered()
    except OSError as error:
        raise ConfigurationError(f"{path}: the file cannot be read: {error.strerror}") from error
    what_to_do = "mend it, or delete it to be asked again"
    if len(data) > _MAX_BYTES:
        raise ConfigurationError(f"{path}: a file of over {_MAX_BYTES} bytes is refused; {what_to_do}")
    try:
        values = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path}: no TOML: {error}; {what_to_do}") from error
    for key, value in values.items():
        if key not in _KEYS or not isinstance(value, str) or not value:
            raise ConfigurationError(f"{path}: {key}: known are {', '.join(_KEYS)}, each a text; {what_to_do}")
    if "api_key" in values and mode & 0o077:
        raise ConfigurationError(f"{path}: others may read or write the file that holds an API key: `chmod 600 {path}`")
    return Remembered(**{key: str(value) for key, value in values.items()})


def remember(path: Path, remembered: Remembered) -> None:
    """Write the file, for its owner alone; it is the old one or the new one, never a part. Its owner's comments stay.

    Raises:
        ConfigurationError: it cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, _updated(path, remembered).encode())
    except OSError as error:
        raise ConfigurationError(f"{path}: it cannot be written: {error.strerror}") from error
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: no TOML any more, and left as it is: {error}") from error


def _updated(path: Path, remembered: Remembered) -> str:
    try:
        document = tomlkit.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        document = tomlkit.document()
        document.add(tomlkit.comment(_HEAD))
        document.add(tomlkit.nl())
    for key, value in asdict(remembered).items():
        if value is None:
            document.pop(key, None)
        else:
            document[key] = value
    return tomlkit.dumps(document)
