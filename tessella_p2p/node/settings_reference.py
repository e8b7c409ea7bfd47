"""Every setting of every role as data, read off the definitions that also read the flags, the environment and the files (pure)."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tessella_p2p.base.ids import LayerRange
from tessella_p2p.node.config import NOT_SUPPORTED, NodeConfig, RoleConfig
from tessella_p2p.node.settings import Form, flags_of, spelling_of, variables_of

_KINDS = {
    bool: "on or off",
    int: "whole number",
    float: "number",
    Path: "path",
    LayerRange: "START,END",
    SecretStr: "secret text",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, in the words of the reference page.

    Attributes:
        flags, variables: all of its spellings, its own first; empty where it may not be given so.
        key: its TOML key with its section, ``[worker] vram_mb``; empty where no file may hold it.
        default: as one would write it; ``none`` where there is none, ``required`` where one has to be given.
        rule: what is accepted.
    """

    name: str
    description: str
    flags: tuple[str, ...]
    variables: tuple[str, ...]
    key: str
    default: str
    rule: str


def settings_of(kind: type[RoleConfig]) -> tuple[Setting, ...]:
    """The settings of one role, in the order of their definition; without those that only one process tells another."""
    not_supported = NOT_SUPPORTED if kind is NodeConfig else {}
    return tuple(
        _setting(name, field, not_supported.get(name))
        for name, field in kind.model_fields.items()
        if not spelling_of(field).hidden
    )


def _setting(name: str, field: FieldInfo, not_supported: tuple[object, str] | None) -> Setting:
    spelling = spelling_of(field)
    in_file = spelling.only in (None, "secret")
    section = spelling.sections[0]
    return Setting(
        name=name,
        description=field.description or "",
        flags=flags_of(name, field),
        variables=variables_of(name, field),
        key="" if not in_file else f"[{section}] {name}" if section else name,
        default=_default(name, field),
        rule=_rule(field) if not_supported is None else _rule_of_unsupported(*not_supported),
    )


def _default(name: str, field: FieldInfo) -> str:
    if name == "keypair_path":
        return "~/.config/tessella/<role>.key"
    if field.default_factory is not None:
        return "a folder of this user, see OPERATIONS.md"
    if field.default is PydanticUndefined:
        return "required"
    return _written(field.default)


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in (None, ()):
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rule(field: FieldInfo) -> str:
    return ", ".join(dict.fromkeys(_rules(field.annotation, tuple(field.metadata))))


def _rule_of_unsupported(neutral: object, instead: str) -> str:
    accepted = "nothing yet" if neutral in (None, ()) else f"{_written(neutral)} alone"
    return f"{accepted}: {instead}"


def _rules(annotation: Any, metadata: tuple[Any, ...]) -> Iterator[str]:
    """What is accepted, outermost type first; bounds after the type that they bound."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        inner = next(part for part in get_args(annotation) if part is not type(None))
        yield from _rules(inner, metadata)
        return
    if hasattr(annotation, "__metadata__"):
        yield from _rules(get_args(annotation)[0], (*annotation.__metadata__, *metadata))
        return
    if origin is Literal:
        yield " or ".join(str(choice) for choice in get_args(annotation))
        return
    if origin is tuple:
        entries = ", ".join(_rules(get_args(annotation)[0], ()))
        yield f"a list, or one text with commas; each {entries}"
        yield from _bounds(metadata, "entries")
        return
    form = next((item.words for item in metadata if isinstance(item, Form)), None)
    yield form or _KINDS.get(annotation, "text")
    yield from _bounds(metadata, "characters")


def _bounds(metadata: tuple[Any, ...], unit: str) -> Iterator[str]:
    for constraint in _constraints(metadata):
        match constraint:
            case annotated_types.Ge(ge=least):
                yield f"at least {least}"
            case annotated_types.Gt(gt=least):
                yield f"over {least}"
            case annotated_types.Le(le=most):
                yield f"at most {most}"
            case annotated_types.Lt(lt=most):
                yield f"below {most}"
            case annotated_types.MaxLen(max_length=most):
                yield f"at most {most} {unit}"
            case _:
                pass


def _constraints(metadata: tuple[Any, ...]) -> Iterator[object]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _constraints(tuple(item.metadata))
        else:
            yield item
