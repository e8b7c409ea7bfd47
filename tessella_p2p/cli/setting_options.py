"""Flags out of settings: each field of a configuration becomes the options that its definition names."""

from __future__ import annotations

import math
import os
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.node.config import NOT_SUPPORTED, ConfigT, NodeConfig, RoleConfig, load_config
from tessella_p2p.node.settings import Given, flags_of, spelling_of, variables_of

_MB_PER_GB = 1024
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def setting_options(kind: type[RoleConfig]) -> Callable[[CommandT], CommandT]:
    """A decorator that adds ``--config`` and an option for each setting of ``kind`` to a click command."""

    def add(command: CommandT) -> CommandT:
        for name, field in reversed(kind.model_fields.items()):
            if flags_of(name, field):
                command = _option(name, field)(command)
        if kind is NodeConfig:
            help_text = "The same claim in GB: 2.0 is --vram-mb 2048."
            command = click.option("--vram-gb", type=float, metavar="GB", help=help_text)(command)
        return click.option(
            "-c",
            "--config",
            "config_file",
            type=click.Path(path_type=Path, dir_okay=False),
            envvar="TESSELLA_CONFIG",
            show_envvar=True,
            help="A TOML file. A flag wins over the environment, the environment over the file.",
        )(command)

    return add


def configured(
    kind: type[ConfigT],
    config_file: Path | None,
    typed: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
) -> ConfigT:
    """The configuration that the typed options, the environment and the file give together.

    Raises:
        ConfigurationError: says where the wrong value was given, and the rule that it breaks.
    """
    return load_config(kind, flags=given_flags(kind, typed), environ=environ, file=config_file)


def given_flags(kind: type[RoleConfig], typed: Mapping[str, Any]) -> dict[str, Given]:
    """The options that were typed, by setting.

    Raises:
        ConfigurationError: one setting is given in two ways.
    """
    flags: dict[str, Given] = {}
    for name, field in kind.model_fields.items():
        value = typed.get(name)
        if value is None or value == ():
            continue
        if isinstance(value, tuple):
            value = ",".join(value)  # read as a variable is
        flags[name] = Given(value, "/".join(flags_of(name, field)))
    claim_gb = typed.get("vram_gb")
    if claim_gb is not None:
        if "vram_mb" in flags:
            raise ConfigurationError("--vram-gb and --vram-mb are the same setting: give one of them")
        if not math.isfinite(claim_gb):
            raise ConfigurationError(f"--vram-gb {claim_gb}: a number of GB is expected")
        flags["vram_mb"] = Given(round(claim_gb * _MB_PER_GB), f"--vram-gb {claim_gb:g}, in MB")
    return flags


def _option(name: str, field: FieldInfo) -> Callable[[CommandT], CommandT]:
    own, *aliases = flags_of(name, field)
    plain = _without_none(field.annotation)
    spelling = spelling_of(field)
    common: dict[str, Any] = {"default": None, "hidden": spelling.hidden, "help": _help(name, field)}
    if plain is bool:
        form = own if spelling.hidden else f"{own}/--no-{own.removeprefix('--')}"
        return click.option(form, name, is_flag=True, **common)
    metavar = "|".join(str(choice) for choice in get_args(plain)) if get_origin(plain) is Literal else _metavar(plain)
    return click.option(own, *aliases, name, metavar=metavar, multiple=get_origin(plain) is tuple, **common)


def _without_none(annotation: Any) -> Any:
    """The type of ``Annotated[T, ...] | None``: ``T``."""
    if get_origin(annotation) in (Union, types.UnionType):
        return _without_none(next(part for part in get_args(annotation) if part is not type(None)))
    return _without_none(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def _metavar(annotation: Any) -> str:
    return {int: "N", float: "SECONDS", Path: "PATH"}.get(annotation, "VALUE")


def _help(name: str, field: FieldInfo) -> str:
    description = field.description or ""
    if name in NOT_SUPPORTED:
        description += " (not supported yet)"
    notes = [*variables_of(name, field)[:1]]
    if spelling_of(field).only is None and (section := spelling_of(field).sections[0]):
        notes.append(f"[{section}]")
    if field.default not in (PydanticUndefined, None, (), False):
        default = ("on" if field.default else "off") if isinstance(field.default, bool) else field.default
        notes.append(f"default {default}")
    return f"{description[:1].upper()}{description[1:]}. ({'; '.join(notes)})"
