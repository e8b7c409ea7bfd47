"""Recipes, and the names under which machines publish them."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import NotCertified
from tessella_p2p.base.limits import MAX_DRIFT_CLASS_CHARS
from tessella_p2p.model.recipe import DEFAULT_RECIPE, RECIPES, RecipeName, base_name, by_preference, recipe_named
from tessella_p2p.wire.frames import DType

CLASSES = ["2.13.0-avx2-1f0c8a27", "2.13.0+cpu-avx512-00000000", "2.13.0+cu128-cuda-sm90x132-deadbeef", "a"]
NO_CLASSES = ["", "-avx2", "AVX2", "a b", "a@b", "a/b", "é", "a" * (MAX_DRIFT_CLASS_CHARS + 1), "a\n"]
NATIVE = [recipe for recipe in RECIPES.values() if recipe.engine == "native"]
TORCH = [recipe for recipe in RECIPES.values() if recipe.engine == "torch"]


def test_recipes_are_named_and_an_unknown_one_is_refused() -> None:
    assert all(recipe_named(name) is recipe and recipe.name == name for name, recipe in RECIPES.items())
    assert set(get_args(RecipeName)) == set(RECIPES)
    assert DEFAULT_RECIPE in RECIPES
    with pytest.raises(NotCertified, match="'int3'"):
        recipe_named("int3")


def test_native_recipes_carry_float32_and_have_one_class() -> None:
    for recipe in NATIVE:
        assert recipe.wire_dtype is DType.F32
        assert recipe.published("whatever it is") == recipe.name


@pytest.mark.parametrize("drift_class", CLASSES)
def test_a_torch_recipe_is_published_with_its_class(drift_class: str) -> None:
    for recipe in TORCH:
        published = recipe.published(drift_class)
        assert published == f"{recipe.name}@{drift_class}"
        assert base_name(published) == recipe.name
    assert base_name(TORCH[0].name) == TORCH[0].name


@pytest.mark.parametrize("drift_class", NO_CLASSES)
def test_what_is_no_class_is_neither_published_nor_taken(drift_class: str) -> None:
    with pytest.raises(NotCertified):
        TORCH[0].published(drift_class)
    assert base_name(f"{TORCH[0].name}@{drift_class}") not in RECIPES


def test_a_native_recipe_with_a_class_is_no_recipe() -> None:
    assert all(base_name(f"{recipe.name}@{CLASSES[0]}") not in RECIPES for recipe in NATIVE)


@given(st.text(max_size=200))
def test_any_name_has_a_base(name: str) -> None:
    assert name.startswith(base_name(name))


def test_published_names_come_in_the_order_of_the_recipes() -> None:
    seen = ["q8_0", "torch-f32@b", "f32@b", "torch-f32@a", "torch-f32@b", "torch-f32", "other@a", "torch-f32@"]
    assert by_preference(["torch-f32", "q8_0", "f32"], seen) == ["torch-f32", "torch-f32@a", "torch-f32@b", "q8_0"]


def test_four_bits_and_the_native_engine_are_the_cpus() -> None:
    assert {recipe.name for recipe in RECIPES.values() if not recipe.is_cpu_only} == {
        "torch-f32",
        "torch-f16",
        "torch-bf16",
    }
    for recipe in RECIPES.values():
        recipe.check_device("cpu")
        recipe.check_device("auto")
    for recipe in (*NATIVE, RECIPES["torch-int4"]):
        for device in ("cuda", "cuda:1", "mps"):
            with pytest.raises(NotCertified, match="torch-f16"):
                recipe.check_device(device)
