"""From a body's bytes to a checked object, or to the error that names the field at fault; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from tessella_p2p.base.errors import InvalidRequest

_ECHOED_CHARS = 64
"""How much of an unknown field's name an error repeats."""

_Model = TypeVar("_Model", bound=BaseModel)


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object that ``body`` is.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        value = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise InvalidRequest(f"the body is no JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def supported(
    fields: Mapping[str, Any],
    model: type[BaseModel],
    not_yet: Mapping[str, tuple[Any, ...]],
    without_effect: frozenset[str],
    where: str = "",
) -> dict[str, Any]:
    """``fields`` without those that change nothing.

    Args:
        fields: as they came.
        model: what has the fields that are understood.
        not_yet: known fields that are not supported, with the values (beside null) that mean the same as leaving the field out.
        without_effect: known fields that do not change what is answered.
        where: stands before a field's name in errors.

    Raises:
        InvalidRequest: for the first field that would be ignored otherwise.
    """
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in model.model_fields:
            kept[name] = value
        elif name in not_yet:
            if value is not None and not any(_same(value, neutral) for neutral in not_yet[name]):
                raise InvalidRequest(f"{where}{name} is not supported by this node yet; leave it out", f"{where}{name}")
        elif name not in without_effect:
            param = f"{where}{name[:_ECHOED_CHARS]}"
            raise InvalidRequest(f"unknown parameter: {param}", param)
    return kept


def each_supported(
    fields: Mapping[str, Any],
    name: str,
    most: int,
    model: type[BaseModel],
    not_yet: Mapping[str, tuple[Any, ...]],
    without_effect: frozenset[str],
) -> dict[str, Any]:
    """``fields``, where each object in the list ``name`` is without those fields that change nothing; see `supported`.

    One element over the ``most`` that are accepted is kept, so that validation finds the list too long; what is no list or no object
    is left for it as well.

    Raises:
        InvalidRequest: for the first field of an element that would be ignored otherwise.
    """
    elements = fields.get(name)
    if not isinstance(elements, list):
        return {**fields}
    kept = [
        supported(element, model, not_yet, without_effect, f"{name}[{index}].")
        if isinstance(element, dict)
        else element
        for index, element in enumerate(elements[: most + 1])
    ]
    return {**fields, name: kept}


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells ``true`` from ``1``, as JSON does."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def validated(model: type[_Model], fields: Mapping[str, Any]) -> _Model:
    """``fields`` as a ``model``.

    Raises:
        InvalidRequest: names the first field at fault.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_context=False, include_input=False)[0]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]).lstrip(".")
    raise InvalidRequest(f"{param}: {first['msg']}", param)
