"""How a setting is spelled and where its value comes from: one definition gives the flag, the variable and the TOML key.

A `Settings` class is a pydantic model; each field is one setting. A field ``vram_mb`` is the flag ``--vram-mb``, the variable
``TESSELLA_VRAM_MB`` and the TOML key ``vram_mb``; a `Spelling` in its annotation adds a section, aliases, or takes a way away. A flag
wins over the environment, the environment over the file, the file over the default. Whatever is wrong, the error names the place
where it was given. Pure but for `load` and `read_toml`, which look at the file: the environment is an argument.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.limits import MIB

PREFIX = "TESSELLA_"
OTHER_VARIABLES = frozenset(
    {"TESSELLA_CONFIG", "TESSELLA_CONFIG_DIR", "TESSELLA_API_URL", "TESSELLA_API_KEY", "TESSELLA_CLIENT_CONFIG"}
)
"""Variables of the command line that are no setting of a daemon."""
MAX_CONFIG_BYTES = 1 * MIB
_MAX_SHOWN_CHARS = 80
_MAX_NAMED = 8
"""Names that an error lists where none is near."""
_SECRETS = ("environment", "secret")
"""Ways to give what is never a flag, because everybody on the machine sees a process's flags, and what no error repeats."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """Where a setting may be given, other than under its own name.

    Attributes:
        sections: the TOML tables that the key may stand in; ``""`` is the top level. The first one is documented.
        flags: further flags.
        variables: further environment variables.
        only: the one way to give it: ``flag`` for what belongs to one start, ``environment`` for a secret; ``secret`` for one that
            may stand in a file as well, which nobody else may read then.
        hidden: left out of ``--help``.
    """

    sections: tuple[str, ...] = ("",)
    flags: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    only: str | None = None
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """What a setting's text has to look like, in words, where its validator is code: for the reference page."""

    words: str


@dataclass(frozen=True, slots=True)
class Given:
    """A value before validation, and where it was given: ``worker.toml: [worker] vram_mb``."""

    value: object
    place: str


class Settings(BaseModel):
    """Base of every configuration: frozen, and no key passes unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


SettingsT = TypeVar("SettingsT", bound=Settings)


def spelling_of(field: FieldInfo) -> Spelling:
    """The field's `Spelling`, or the plain one."""
    return next((item for item in field.metadata if isinstance(item, Spelling)), Spelling())


def flags_of(name: str, field: FieldInfo) -> tuple[str, ...]:
    """The flags of a setting, its own first; none where it may not be a flag."""
    spelling = spelling_of(field)
    if spelling.only in _SECRETS:
        return ()
    return (f"--{name.replace('_', '-')}", *spelling.flags)


def variables_of(name: str, field: FieldInfo) -> tuple[str, ...]:
    """The environment variables of a setting, the first one that is set wins; none where it may not be one."""
    spelling = spelling_of(field)
    if spelling.only == "flag":
        return ()
    return (
        (*spelling.variables, PREFIX + name.upper()) if spelling.only else (PREFIX + name.upper(), *spelling.variables)
    )


def load(
    kind: type[SettingsT],
    *,
    flags: Mapping[str, Given],
    environ: Mapping[str, str],
    file: Path | None,
    defaults: Mapping[str, Given],
    known_variables: Iterable[str] = (),
) -> SettingsT:
    """The configuration that flags, environment and file give together.

    Args:
        kind: the settings there are.
        flags: by setting; only those that were typed.
        environ: the process environment.
        file: a TOML file, or None.
        defaults: of settings whose default depends on the environment.
        known_variables: ``TESSELLA_`` variables that belong to somebody else.

    Raises:
        ConfigurationError: says where the wrong value was given, and the rule that it breaks.
    """
    given = dict(defaults)
    if file is not None:
        of_file = from_toml(kind, read_toml(file), str(file))
        _check_kept_secret(kind, of_file, file)
        given |= of_file
    given |= from_environment(kind, environ, known_variables)
    given |= flags
    try:
        return kind.model_validate({name: item.value for name, item in given.items()})
    except ValidationError as error:
        raise ConfigurationError("\n".join(_explain(kind, error, given))) from None  # pydantic's text repeats values


def read_toml(path: Path) -> dict[str, object]:
    """The content of a TOML file.

    Raises:
        ConfigurationError: it is missing, unreadable, over 1 MiB, or no TOML.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise ConfigurationError(f"{path}: a configuration of over {MAX_CONFIG_BYTES} bytes is refused")
        return tomllib.loads(content.decode("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: the configuration file cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path}: no TOML: {error}") from error


def _check_kept_secret(kind: type[Settings], given: Mapping[str, Given], file: Path) -> None:
    secrets = [name for name in given if spelling_of(kind.model_fields[name]).only == "secret"]
    if secrets and file.stat().st_mode & 0o077:
        raise ConfigurationError(
            f"{given[secrets[0]].place}: others may read or write the file that holds it: `chmod 600 {file}`, and choose another one"
        )


def from_toml(kind: type[Settings], content: Mapping[str, object], place: str) -> dict[str, Given]:
    """The settings of ``kind`` in a parsed file.

    Raises:
        ConfigurationError: an unknown section or key (with the nearest known one), or one that stands in the wrong place.
    """
    sections = {section for field in kind.model_fields.values() for section in spelling_of(field).sections}
    tables: dict[str, Mapping[str, object]] = {"": {k: v for k, v in content.items() if not isinstance(v, dict)}}
    for name, table in content.items():
        if isinstance(table, dict):
            if name not in sections:
                raise ConfigurationError(f"{place}: unknown section [{name}]{_hint(name, sections - {''}, '[{}]')}")
            tables[name] = table
    given: dict[str, Given] = {}
    for section, table in tables.items():
        for key, value in table.items():
            where = f"{place}: {_toml_name(section, key)}"
            field = kind.model_fields.get(key)
            if field is None:
                raise ConfigurationError(f"{where}: unknown key{_hint(key, kind.model_fields, '{}')}")
            if spelling_of(field).only not in (None, "secret"):
                raise ConfigurationError(f"{where}: no key of a file; {_ways(key, field)}")
            if section not in spelling_of(field).sections:
                home = _toml_name(spelling_of(field).sections[0], key)
                raise ConfigurationError(f"{where}: this key belongs to {home or 'the top level'}")
            if key in given:
                raise ConfigurationError(f"{where}: given before as {given[key].place}; keep one")
            given[key] = Given(value, where)
    return given


def from_environment(
    kind: type[Settings], environ: Mapping[str, str], known_variables: Iterable[str] = ()
) -> dict[str, Given]:
    """The settings of ``kind`` in the environment; an empty variable counts as unset.

    Raises:
        ConfigurationError: a ``TESSELLA_`` variable that nobody knows (with the nearest known one), or two variables of one
            setting that differ.
    """
    given: dict[str, Given] = {}
    known = {*known_variables, *OTHER_VARIABLES}
    for name, field in kind.model_fields.items():
        for variable in variables_of(name, field):
            known.add(variable)
            if not environ.get(variable):
                continue
            item = Given(environ[variable], variable)
            if name in given and given[name].value != item.value:
                raise ConfigurationError(f"{given[name].place} and {variable} are set and differ; unset one of them")
            given.setdefault(name, item)
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            raise ConfigurationError(f"{variable}: unknown environment variable{_hint(variable, known, '{}')}")
    return given


def _toml_name(section: str, key: str) -> str:
    return f"[{section}] {key}" if section else key


def _hint(word: str, known: Iterable[str], form: str) -> str:
    names = [form.format(name) for name in sorted(known)]
    near = difflib.get_close_matches(word, names, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; known: {', '.join(names)}" if len(names) <= _MAX_NAMED else ""


def _explain(kind: type[Settings], error: ValidationError, given: Mapping[str, Given]) -> list[str]:
    """A line for each thing that is wrong: where it was given, what was given, the rule."""
    lines: list[str] = []
    for item in error.errors(include_url=False, include_input=False):
        cause = item.get("ctx", {}).get("error")
        rule = str(cause) if cause is not None else item["msg"]
        name = str(item["loc"][0]) if item["loc"] else ""
        field = kind.model_fields.get(name)
        if field is None:
            lines.append(rule)
        elif item["type"] == "missing":
            lines.append(f"{name} is not set: {field.description}; {_ways(name, field)}")
        else:
            source = given.get(name)
            place = source.place if source else f"{name} (its default)"
            shown = "" if source is None or spelling_of(field).only in _SECRETS else f" = {_shown(source.value)}"
            lines.append(f"{place}{shown}: {rule}")
    return lines


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "…"


def _ways(name: str, field: FieldInfo) -> str:
    flags, variables = flags_of(name, field), variables_of(name, field)
    in_file = spelling_of(field).only in (None, "secret")
    toml = () if not in_file else (f"the TOML key {_toml_name(spelling_of(field).sections[0], name)}",)
    return "give it by " + " or ".join((*flags[:1], *variables[:1], *toml))
