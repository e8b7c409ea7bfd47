"""Recipes: one arithmetic form each, for every row of every session, whatever batch, chunk or split it ran in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tessella_p2p.base.errors import NotCertified
from tessella_p2p.wire.frames import DType


@dataclass(frozen=True, slots=True)
class Recipe:
    """How numbers are stored and computed. Two stages may share a route only with equal recipes.

    Attributes:
        name: as it stands in records, leases and tickets.
        weight: how matrices are kept in memory.
        activation: dtype of the residual stream, which is also what travels between stages.
        compute: dtype in which products accumulate.
        kv: dtype of the cached keys and values.
        quantization: which stored quantisation the weights keep exactly; ``none`` when they are expanded.
        engine: the implementation of `StageEngine`.
        architecture: the model family that it is certified for.
        drift_class: recipes of one class, on one build and instruction set, give the same bits.
    """

    name: str
    weight: str
    activation: DType
    compute: DType
    kv: DType
    quantization: str
    engine: str
    architecture: str
    drift_class: str

    @property
    def wire_dtype(self) -> DType:
        """Dtype of the hidden states that a hop carries."""
        return self.activation


RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            Recipe(
                name="torch-f32",
                weight="f32",
                activation=DType.F32,
                compute=DType.F32,
                kv=DType.F32,
                quantization="none",
                engine="torch",
                architecture="llama",
                drift_class="torch-f32",
            ),
            Recipe(
                name="torch-int4",
                weight="int4",
                activation=DType.BF16,
                compute=DType.F32,
                kv=DType.F32,
                quantization="q4-group32",
                engine="torch",
                architecture="llama",
                drift_class="torch-int4-bf16",
            ),
        )
    }
)


DEFAULT_RECIPE: Final = "torch-int4"
"""What a mesh computes with unless it is told otherwise."""


def recipe_named(name: str) -> Recipe:
    """The recipe ``name``.

    Raises:
        NotCertified: there is no such recipe.
    """
    recipe = RECIPES.get(name)
    if recipe is None:
        raise NotCertified(f"recipe {name!r} is not certified; certified: {', '.join(RECIPES)}")
    return recipe
