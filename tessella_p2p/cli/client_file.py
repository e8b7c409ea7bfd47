"""The client's own configuration file: which node is asked, for which model, with which API key. Imports nothing heavy."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tessella_p2p.base.errors import ConfigurationError

VARIABLE = "TESSELLA_CLIENT_CONFIG"
_MAX_BYTES = 64 * 1024
_KEYS = ("api_url", "model_id", "api_key")


@dataclass(frozen=True, slots=True)
class ClientFile:
    """What the file says; None where it says nothing."""

    api_url: str | None = None
    model_id: str | None = None
    api_key: str | None = None


def default_client_file(environ: Mapping[str, str]) -> Path:
    """``~/.config/tessella/client.toml``; ``TESSELLA_CONFIG_DIR`` moves the folder."""
    return Path(environ.get("TESSELLA_CONFIG_DIR") or "~/.config/tessella").expanduser() / "client.toml"


def read_client_file(path: Path | None, environ: Mapping[str, str]) -> ClientFile:
    """What a file says: the one that was named, or the default one, which need not be there.

    Raises:
        ConfigurationError: it cannot be read, is no TOML, has a key that nobody knows, or holds an API key that others may read.
    """
    chosen = (path or default_client_file(environ)).expanduser()
    try:
        with chosen.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        if path is None:
            return ClientFile()
        raise ConfigurationError(
            f"{chosen}: there is no such file; `tessella-p2p -c {chosen} init` writes one"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{chosen}: the configuration file cannot be read: {error.strerror}") from error
    values = _parsed(data, chosen)
    for key, value in values.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_KEYS)}"
            raise ConfigurationError(f"{chosen}: {key}: unknown key of a client's file; {hint}")
        if not isinstance(value, str) or not value:
            raise ConfigurationError(f"{chosen}: {key}: a text is expected")
    if "api_key" in values and mode & 0o077:
        raise ConfigurationError(
            f"{chosen}: api_key: others may read or write the file that holds it: `chmod 600 {chosen}`"
        )
    return ClientFile(**{key: str(value) for key, value in values.items()})


def _parsed(data: bytes, path: Path) -> dict[str, object]:
    import tomllib  # only where there is a file

    if len(data) > _MAX_BYTES:
        raise ConfigurationError(f"{path}: a client's file of over {_MAX_BYTES} bytes is refused")
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path}: no TOML: {error}") from error
