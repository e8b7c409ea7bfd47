"""The file of measured terms: what the operator says a model costs, by recipe and device (pure).

    [[terms]]
    model_id = "smollm2-135m-instruct"
    recipe = "f32"
    device = "cpu"
    layer_mb = 5
    ...

``tessella-p2p models terms`` writes such a table. What a file does not say is computed from the artifact (``model_terms``). Costs may
be in any unit, but in one: those of different devices are compared where workers are moved.
"""

from __future__ import annotations

import tomllib
from typing import Annotated

from pydantic import Field, ValidationError

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.limits import MAX_SERVED_MODELS, MAX_TERMS
from tessella_p2p.model.recipe import base_name
from tessella_p2p.orchestrator.terms import ModelTerms
from tessella_p2p.wire.envelope import Message
from tessella_p2p.wire.messages import Name, TermsEntry


class MeasuredTerms(TermsEntry):
    """One table of the file."""

    model_id: Name


class _File(Message):
    terms: Annotated[tuple[MeasuredTerms, ...], Field(max_length=MAX_SERVED_MODELS * MAX_TERMS)] = ()


def parse_terms(text: str, model_id: str, total_layers: int) -> dict[tuple[str, str], ModelTerms]:
    """What a file says of one model, by (recipe, device).

    Raises:
        ConfigurationError: no TOML, an unknown key, a value out of range, or two tables for one pair; it says which.
    """
    try:
        data = tomllib.loads(text)
        tables = data.get("terms")
        given = {**data, "terms": tuple(tables)} if isinstance(tables, list) else data
        entries = _File.model_validate(given).terms
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"no TOML: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{where}: {first['msg']}") from error
    found: dict[tuple[str, str], ModelTerms] = {}
    for entry in entries:
        if entry.model_id != model_id:
            continue
        place = (entry.recipe, entry.device)
        if place in found or base_name(entry.recipe) != entry.recipe:
            raise ConfigurationError(
                f"{model_id}: terms of recipe {entry.recipe} on {entry.device}: one table for a recipe"
            )
        figures = entry.model_dump(exclude={"model_id", "recipe", "device"})
        found[place] = ModelTerms(total_layers=total_layers, **figures)
    return found


def format_terms(model_id: str, recipe: str, device: str, terms: ModelTerms) -> str:
    """The table of one pair of recipe and device."""
    names = [name for name in TermsEntry.model_fields if name not in ("recipe", "device")]
    lines = [f'model_id = "{model_id}"', f'recipe = "{recipe}"', f'device = "{device}"']
    return "\n".join(["[[terms]]", *lines, *(f"{name} = {getattr(terms, name)}" for name in names)]) + "\n"
