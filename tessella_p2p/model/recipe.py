"""Recipes: one arithmetic form each, for every row of every session, whatever batch, chunk or split it ran in.

Two stages may share a route only if they give the same bits, so a recipe's name carries its drift class. The native engine adds in one
order on every machine (a self-test at load proves it): the names of its recipes are the classes. Torch's kernels differ between builds,
instruction sets and devices, so what a node registers, publishes and is paid under is the recipe's *published* name:
``torch-f32@2.13.0-avx2-5ca1ab1e`` is recipe ``torch-f32`` in class ``2.13.0-avx2-5ca1ab1e``. Leases, records, tickets and proofs
compare published names; what a recipe costs depends on the part before the ``@`` alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from tessella_p2p.base.errors import NotCertified
from tessella_p2p.base.limits import MAX_DRIFT_CLASS_CHARS
from tessella_p2p.wire.frames import DType

EngineName = Literal["native", "torch"]
Weight = Literal["stored", "q8_0", "q4_0", "f32", "f16", "bf16", "int4"]

_CLASS = re.compile(rf"[a-z0-9][a-z0-9.+_-]{{0,{MAX_DRIFT_CLASS_CHARS - 1}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How numbers are stored and computed. Two stages may share a route only with equal published names.

    Attributes:
        name: as a configuration gives it.
        weight: how matrices are kept in memory. ``stored`` keeps the artifact's own blocks; ``q8_0`` and ``q4_0`` quantise at load;
            ``int4`` keeps stored 4-bit blocks and makes the rest int8; the others are plain numbers.
        activation: dtype of the residual stream, which is also what travels between stages.
        compute: dtype in which products accumulate.
        kv: dtype of the cached keys and values.
        engine: the implementation of `StageEngine`.
        architecture: the model family that it is certified for.
    """

    name: str
    weight: Weight
    activation: DType
    compute: DType
    kv: DType
    engine: EngineName
    architecture: str = "llama"

    @property
    def wire_dtype(self) -> DType:
        """Dtype of the hidden states that a hop carries."""
        return self.activation

    @property
    def has_one_class(self) -> bool:
        """Whether every machine computes the same bits."""
        return self.engine == "native"

    @property
    def is_cpu_only(self) -> bool:
        """Whether no other device has its kernels."""
        return self.engine == "native" or self.weight == "int4"

    def check_device(self, device: str) -> None:
        """Refuse a device that has no kernels for the recipe.

        Raises:
            NotCertified: says which recipes it has.
        """
        if self.is_cpu_only and device not in ("cpu", "auto"):
            others = ", ".join(name for name, recipe in RECIPES.items() if not recipe.is_cpu_only)
            raise NotCertified(f"recipe {self.name!r} is computed on the CPU alone; on {device} there are: {others}")

    def check_architecture(self, architecture: str) -> None:
        """Refuse a model of another family.

        Raises:
            NotCertified: says which the recipe is for.
        """
        if architecture != self.architecture:
            raise NotCertified(f"recipe {self.name!r} is for {self.architecture}, not for {architecture}")

    def published(self, drift_class: str) -> str:
        """The name in records, leases, tickets and proofs.

        Args:
            drift_class: of the engine on this machine; a recipe that has one class ignores it.

        Raises:
            NotCertified: ``drift_class`` is no class: lower-case letters, digits and ``. + _ -`` are accepted.
        """
        if self.has_one_class:
            return self.name
        if not _CLASS.fullmatch(drift_class):
            raise NotCertified(f"{drift_class!r} names no drift class")
        return f"{self.name}@{drift_class}"


def _native(name: str, weight: Weight) -> Recipe:
    return Recipe(name, weight, DType.F32, DType.F32, DType.F32, "native")


def _torch(weight: Weight, activation: DType) -> Recipe:
    return Recipe(f"torch-{weight}", weight, activation, DType.F32, DType.F32, "torch")


RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            _native("f32", "stored"),
            _native("q8_0", "q8_0"),
            _native("q4_0", "q4_0"),
            _torch("f32", DType.F32),
            _torch("f16", DType.F16),
            _torch("bf16", DType.BF16),
            _torch("int4", DType.BF16),
        )
    }
)

RecipeName = Literal["f32", "q8_0", "q4_0", "torch-f32", "torch-f16", "torch-bf16", "torch-int4"]
"""The keys of `RECIPES`, for whoever types one."""

DEFAULT_RECIPE: Final = "f32"
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


def base_name(published: str) -> str:
    """The recipe's own name in a published one; a name with a class that it cannot have comes back whole, and so is no recipe's."""
    name, separator, drift_class = published.partition("@")
    if not separator:
        return name
    recipe = RECIPES.get(name)
    if (recipe is not None and recipe.has_one_class) or not _CLASS.fullmatch(drift_class):
        return published
    return name


def by_preference(recipes: Iterable[str], published: Iterable[str]) -> list[str]:
    """Those of ``published`` that are of ``recipes``: in their order, then by drift class. A route is of one of them."""
    seen = sorted(set(published))
    return [name for recipe in recipes for name in seen if base_name(name) == recipe]
