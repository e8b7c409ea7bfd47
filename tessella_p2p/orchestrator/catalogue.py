"""The models that may be served: the one list that every part of an orchestrator reads (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from tessella_p2p.base.errors import Overloaded, UnknownModel
from tessella_p2p.base.limits import MAX_SERVED_MODELS
from tessella_p2p.orchestrator.terms import ServedModel


class Catalogue:
    """Served models by manifest root; a model id has one root at a time, though workers of an older one may be left.

    Args:
        models: those of the start.
    """

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._by_root = {model.manifest_root: model for model in models}
        self._by_name = {model.model_id: model for model in self._by_root.values()}

    def models(self) -> tuple[ServedModel, ...]:
        """The newest manifest of each model, in the order in which the models came."""
        return tuple(self._by_name.values())

    def find(self, manifest_root: bytes) -> ServedModel | None:
        """The model of a root; None where it is not served here."""
        return self._by_root.get(manifest_root)

    def by_root(self, manifest_root: bytes) -> ServedModel:
        """The model of a root.

        Raises:
            UnknownModel: it is not served here.
        """
        model = self._by_root.get(manifest_root)
        if model is None:
            served = ", ".join(self._by_name)
            raise UnknownModel(f"manifest {manifest_root.hex()[:16]}… is not served here; served: {served}")
        return model

    def by_name(self, model_id: str) -> ServedModel:
        """The newest manifest of a model.

        Raises:
            UnknownModel: it is not served here.
        """
        model = self._by_name.get(model_id)
        if model is None:
            raise UnknownModel(f"{model_id} is not served here; served: {', '.join(self._by_name)}")
        return model

    def publish(self, model: ServedModel) -> None:
        """Serve ``model``, in place of what its name meant before.

        Raises:
            Overloaded: `MAX_SERVED_MODELS` are served.
        """
        if model.manifest_root not in self._by_root and len(self._by_root) >= MAX_SERVED_MODELS:
            raise Overloaded(f"{MAX_SERVED_MODELS} manifests are served already")
        self._by_root[model.manifest_root] = self._by_name[model.model_id] = model
