"""The one list of models: newest by name, all by root, and room for new ones."""

from __future__ import annotations

import pytest

from tessella_p2p.base.errors import Overloaded
from tessella_p2p.base.limits import MAX_SERVED_MODELS
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.terms import ANY_DEVICE, ModelTerms, ServedModel

TERMS = ModelTerms(total_layers=4, layer_mb=1, kv_mb=1, embedding_mb=1, head_mb=1)


def model(name: str, version: int) -> ServedModel:
    return ServedModel(name, f"{name} {version}".encode().ljust(32), bytes(32), 4, {("f32", ANY_DEVICE): TERMS})


def put(catalogue: Catalogue, one: ServedModel, in_use: tuple[bytes, ...] = ()) -> None:
    catalogue.publish(one, catalogue.room_for(one, in_use))


def test_a_new_manifest_takes_the_name_and_leaves_the_old_root_known() -> None:
    catalogue = Catalogue([model("a", 1)])
    put(catalogue, model("a", 2))
    assert catalogue.by_name("a") == model("a", 2)
    assert catalogue.models() == (model("a", 2),)
    assert catalogue.by_root(model("a", 1).manifest_root) == model("a", 1)
    assert catalogue.is_current(model("a", 2).manifest_root)
    assert not catalogue.is_current(model("a", 1).manifest_root)
    assert not catalogue.is_current(bytes(32))
    put(catalogue, model("a", 1))
    assert catalogue.is_current(model("a", 1).manifest_root)


def test_the_oldest_that_nobody_needs_makes_room() -> None:
    catalogue = Catalogue([model("a", 0)])
    for version in range(1, MAX_SERVED_MODELS):
        put(catalogue, model("b", version))
    put(catalogue, model("b", 1000), in_use=(model("b", 1).manifest_root,))
    assert catalogue.find(model("b", 2).manifest_root) is None
    assert catalogue.find(model("b", 1).manifest_root) is not None
    assert catalogue.models() == (model("a", 0), model("b", 1000))


def test_the_newest_of_the_same_name_is_the_last_that_may_go() -> None:
    catalogue = Catalogue([model(f"name {number}", 1) for number in range(MAX_SERVED_MODELS)])
    put(catalogue, model("name 5", 2))
    assert catalogue.find(model("name 5", 1).manifest_root) is None
    assert len(catalogue.models()) == MAX_SERVED_MODELS
    assert catalogue.by_name("name 5") == model("name 5", 2)


def test_a_full_catalogue_in_use_takes_nothing_and_stays_as_it_is() -> None:
    models = [model(f"name {number}", 1) for number in range(MAX_SERVED_MODELS)]
    catalogue = Catalogue(models)
    with pytest.raises(Overloaded):
        catalogue.room_for(model("another", 1), ())
    with pytest.raises(Overloaded):
        catalogue.room_for(model("name 5", 2), [one.manifest_root for one in models])
    assert catalogue.models() == tuple(models)
