"""How far two recipes may be apart: measured, by pair (pure).

Recipes of one drift class give the same bits, and are compared by their digests. Others give nearly the same numbers; how nearly is
data: `Tolerances` holds what was measured for a pair, and says nothing of a pair that nobody measured. A lie that is smaller than the
tolerance cannot be told from rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.limits import MAX_TOLERANCES
from tessella_p2p.model.recipe import base_name

MARGIN: Final = 4
"""The tolerance is so many times the largest deviation that was measured: no honest worker is to be taken for a liar."""

Pair = frozenset[str]


class _Entry(BaseModel):
    """One ``[[pair]]`` of a file: the largest deviation measured, in millionths of the largest magnitude of an output row."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    recipes: Annotated[list[Annotated[str, Field(min_length=1, max_length=128)]], Field(min_length=2, max_length=2)]
    measured_ppm: Annotated[int, Field(ge=0, le=1_000_000)]


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pair: Annotated[list[_Entry], Field(max_length=MAX_TOLERANCES)] = []


class Tolerances:
    """Tolerances by pair of recipes.

    Args:
        measured_ppm: the largest deviations; a name is a published recipe, or a recipe's own name for all its classes.
    """

    def __init__(self, measured_ppm: Mapping[Pair, int]) -> None:
        self._measured_ppm = MappingProxyType(dict(measured_ppm))

    @classmethod
    def of_file(cls, content: Mapping[str, object]) -> Self:
        """Those of a parsed TOML file: ``[[pair]]`` with ``recipes = [A, B]`` and ``measured_ppm``.

        Raises:
            ConfigurationError: says which key is wrong.
        """
        try:
            file = _File.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigurationError(f"tolerances: {where}: {first['msg']}") from error
        return cls({frozenset(entry.recipes): entry.measured_ppm for entry in file.pair})

    def between(self, one: str, other: str) -> int | None:
        """The tolerance between two published recipes, in millionths; None where nobody measured the pair.

        What was measured for the two classes goes before what holds for all classes of the two recipes.
        """
        for pair in (frozenset({one, other}), frozenset({base_name(one), base_name(other)})):
            measured = self._measured_ppm.get(pair)
            if measured is not None:
                return max(1, MARGIN * measured)
        return None


NONE_MEASURED: Final = Tolerances({})
"""No pair was measured: audits are bitwise, or are not made."""
