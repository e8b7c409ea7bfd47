"""The models that may be served: the one list that every part of an orchestrator reads (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from tessella_p2p.base.errors import Overloaded, UnknownModel
from tessella_p2p.base.limits import MAX_SERVED_MODELS
from tessella_p2p.orchestrator.terms import ServedModel


class Catalogue:
    """Served models by manifest root; a model id has one root at a time, though workers of an older one may be left.

    Args:
        models: those of the start.
        min_claim_mb: the operator's least claim, which raises every model's own.
    """

    def __init__(self, models: Iterable[ServedModel], *, min_claim_mb: int = 0) -> None:
        self._min_claim_mb = min_claim_mb
        self._by_root = {model.manifest_root: model.with_least_claim(min_claim_mb) for model in models}
        self._by_name = {model.model_id: model for model in self._by_root.values()}
        self._layers = {root: model.total_layers for root, model in self._by_root.items()}

    @property
    def total_layers(self) -> Mapping[bytes, int]:
        """The layers of each root, also of one that was retired: its proofs settle later. A view that follows what is published."""
        return MappingProxyType(self._layers)

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

    def is_current(self, manifest_root: bytes) -> bool:
        """Whether a root is the newest of its model: what a worker that registers has to have."""
        model = self._by_root.get(manifest_root)
        return model is not None and self._by_name[model.model_id].manifest_root == manifest_root

    def room_for(self, model: ServedModel, in_use: Collection[bytes]) -> bytes | None:
        """The root that `publish` has to retire for ``model``: the oldest that is neither the newest of a name nor in use.

        Args:
            model: what is to be published.
            in_use: roots that workers hold.

        Returns:
            None where there is room.

        Raises:
            Overloaded: `MAX_SERVED_MODELS` are served, and none of them can go.
        """
        if model.manifest_root in self._by_root or len(self._by_root) < MAX_SERVED_MODELS:
            return None
        needed = {one.manifest_root for name, one in self._by_name.items() if name != model.model_id} | {*in_use}
        for root in self._by_root:
            if root not in needed:
                return root
        raise Overloaded(
            f"{MAX_SERVED_MODELS} manifests are served already, and each is in use: serve fewer models, "
            "or wait until the workers of an older manifest have left"
        )

    def publish(self, model: ServedModel, retired: bytes | None = None) -> None:
        """Serve ``model``, in place of what its name meant before, and no longer serve ``retired`` (see `room_for`)."""
        if retired is not None:
            del self._by_root[retired]  # as the newest of a name only where this one has the same
        model = model.with_least_claim(self._min_claim_mb)
        self._by_root[model.manifest_root] = self._by_name[model.model_id] = model
        self._layers[model.manifest_root] = model.total_layers
