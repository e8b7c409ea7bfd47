"""Configuration files that people edit: written once, with every setting and what it means (shell: it writes them).

What was answered stands in the file; every other setting stands there as a comment with its default, so that nobody has to look up
what could be changed.
"""

from __future__ import annotations

import errno
import os
import secrets
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import tomlkit
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.node.config import NOT_SUPPORTED, ROLES, NodeConfig, RoleConfig, default_key_path
from tessella_p2p.node.settings import spelling_of, variables_of

_WIDTH = 120
_FILE_MODE = 0o600
_FOLDER_MODE = 0o700


def default_config_path(role: str, environ: Mapping[str, str]) -> Path:
    """Where a role's file is looked for when none is named: ``<role>.toml`` beside its key."""
    return default_key_path(role, environ).with_suffix(".toml")


def found_config(role: str, environ: Mapping[str, str]) -> Path | None:
    """The role's file at its default place, or None where there is none."""
    path = default_config_path(role, environ)
    return path if path.exists() else None


def config_text(kind: type[RoleConfig], answers: Mapping[str, object], written_by: str) -> str:
    """A file for one role.

    Args:
        kind: the role.
        answers: values by setting, as the settings have them after validation.
        written_by: who wrote it and when, for its first line.
    """
    sections: dict[str, list[str]] = {}
    for name, field in kind.model_fields.items():
        spelling = spelling_of(field)
        if spelling.only is not None or (kind is NodeConfig and name in NOT_SUPPORTED and name not in answers):
            continue
        lines = sections.setdefault(spelling.sections[0], [])
        lines += [*_entry(name, field, answers), ""]
    role = next(name for name, of_role in ROLES.items() if of_role is kind)
    head = [
        f"# {written_by}",
        *_comment(
            f"Settings of a {role}. A flag wins over the environment, the environment over this file. "
            "A line that is commented out shows a default; `tessella-p2p settings` has the rule of each."
        ),
        "",
    ]
    body = [
        line
        for section in sorted(sections, key=bool)  # the top level has to stand first
        for line in ([f"[{section}]", *sections[section]] if section else sections[section])
    ]
    return "\n".join([*head, *body]).rstrip("\n") + "\n"


def _entry(name: str, field: FieldInfo, answers: Mapping[str, object]) -> Iterator[str]:
    description = field.description or ""
    variables = variables_of(name, field)
    yield from _comment(f"{description[:1].upper()}{description[1:]}. ({variables[0]})")
    if name in answers:
        yield f"{name} = {toml_value(answers[name])}"
        return
    default = field.default_factory() if field.default_factory is not None else field.default  # type: ignore[call-arg]
    has_one = default is not PydanticUndefined and default is not None
    yield f"# {name} = {toml_value(default)}" if has_one else f"# {name} ="


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def toml_value(value: object) -> str:
    """A setting's value as TOML writes it.

    Raises:
        TypeError: a setting of a kind that no file may hold is our own bug.
    """
    if isinstance(value, SecretStr):
        raise TypeError("a secret is not written by this program")
    if isinstance(value, LayerRange):
        value = list(value.as_tuple())
    elif isinstance(value, tuple):
        value = list(value)
    elif isinstance(value, Path):
        value = str(value)
    return tomlkit.item(value).as_string()


def write_config(path: Path, kind: type[RoleConfig], answers: Mapping[str, object], written_by: str) -> None:
    """Write a role's file. It appears complete or not at all, for its owner alone.

    Raises:
        ConfigurationError: there is one already, or none can be written there.
    """
    try:
        new_file(path, config_text(kind, answers, written_by))
    except FileExistsError:
        raise ConfigurationError(f"{path} exists, and is never written over: edit it, or move it away") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: the configuration cannot be written: {error.strerror}") from error


def new_file(path: Path, text: str) -> None:
    """A new text file, complete as soon as it has its name; missing folders are made.

    Raises:
        FileExistsError: the name is taken.
        OSError: as the system says.
    """
    try:
        path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    except FileExistsError as error:  # a file where a folder is needed is another matter than a name that is taken
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from error
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)  # unlike a rename, it never replaces a file
    finally:
        with suppress(FileNotFoundError):
            part.unlink()
