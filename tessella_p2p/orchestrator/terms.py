"""What the orchestrator knows of a model: sizes and costs, as measured data, never as constants in code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tessella_p2p.base.errors import ConfigurationError, UnknownModel
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import MAX_MODEL_LAYERS
from tessella_p2p.model.recipe import base_name

ANY_DEVICE = "*"


@dataclass(frozen=True, slots=True)
class ModelTerms:
    """Sizes (MB) and relative costs of one model under one recipe on one device.

    Attributes:
        total_layers: layers of the whole model.
        layer_mb: weights of one layer.
        kv_mb: KV cache of one layer, for all the sessions that a stage may hold.
        embedding_mb: the token embedding, which the range at layer 0 also loads.
        head_mb: norm and LM head (a tied embedding too), which the last range also loads.
        overhead_mb: what a worker needs whatever it holds: its process and the buffers of one turn.
        usable_pct: how much of a claim weights and cache may fill.
        min_mb: claims below it are refused.
        layer_cost, embedding_cost, head_cost: measured time of each part, in any unit; only ratios count.

    Raises:
        ConfigurationError: a figure that makes no sense; it is named.
    """

    total_layers: int
    layer_mb: int
    kv_mb: int
    embedding_mb: int
    head_mb: int
    overhead_mb: int = 0
    usable_pct: int = 90
    min_mb: int = 1
    layer_cost: int = 1
    embedding_cost: int = 0
    head_cost: int = 0

    def __post_init__(self) -> None:
        low = {"total_layers": 1, "usable_pct": 1, "layer_cost": 1}
        for name in self.__slots__:
            if getattr(self, name) < low.get(name, 0):
                raise ConfigurationError(f"model terms: {name} is {getattr(self, name)}; at least {low.get(name, 0)}")
        if self.usable_pct > 100 or self.total_layers > MAX_MODEL_LAYERS or self.layer_mb + self.kv_mb < 1:
            raise ConfigurationError("model terms: usable_pct over 100, too many layers, or a layer without a size")

    @property
    def mem_per_layer_mb(self) -> int:
        """Weights and cache of one layer."""
        return self.layer_mb + self.kv_mb

    def global_tensor_mb(self, layers: LayerRange) -> int:
        """What a range loads beside its layers: the embedding at layer 0, the head at the end."""
        return (self.embedding_mb if layers.start == 0 else 0) + (
            self.head_mb if layers.end == self.total_layers else 0
        )

    def claim_mb(self, layers: LayerRange) -> int:
        """The smallest claim that ``layers`` fit into (manual, section 03), in integer arithmetic."""
        used_mb = self.overhead_mb + len(layers) * self.mem_per_layer_mb + self.global_tensor_mb(layers)
        return max(self.min_mb, -(-used_mb * 100 // self.usable_pct))

    def cost(self, layers: LayerRange) -> int:
        """The relative time of one step over ``layers``."""
        return (
            len(layers) * self.layer_cost
            + (self.embedding_cost if layers.start == 0 else 0)
            + (self.head_cost if layers.end == self.total_layers else 0)
        )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the orchestrator lets workers serve.

    Attributes:
        model_id: its name.
        manifest_root: hash over its manifest; what leases, tickets and proofs name it by.
        contract_hash: the parameter contract that a worker's manifest must have.
        total_layers: layers of the whole model.
        terms: by (recipe, device), whatever the drift class; `ANY_DEVICE` stands for every device that is not listed.

    Raises:
        ConfigurationError: terms of a model with another number of layers.
    """

    model_id: str
    manifest_root: bytes
    contract_hash: bytes
    total_layers: int
    terms: Mapping[tuple[str, str], ModelTerms]

    def __post_init__(self) -> None:
        if not self.terms or any(terms.total_layers != self.total_layers for terms in self.terms.values()):
            raise ConfigurationError(f"{self.model_id}: terms are needed, each of {self.total_layers} layers")

    def with_least_claim(self, min_mb: int) -> ServedModel:
        """The same model, of which no claim below ``min_mb`` holds a layer."""
        if all(terms.min_mb >= min_mb for terms in self.terms.values()):
            return self
        raised = {place: replace(terms, min_mb=max(terms.min_mb, min_mb)) for place, terms in self.terms.items()}
        return replace(self, terms=raised)

    @property
    def recipes(self) -> tuple[str, ...]:
        """The recipes that there are terms for, in order."""
        return tuple(sorted({recipe for recipe, _ in self.terms}))

    def serves(self, recipe: str) -> bool:
        """Whether there are terms for a published recipe, on some device."""
        return base_name(recipe) in self.recipes

    def terms_for(self, recipe: str, device: str) -> ModelTerms:
        """The terms of a published recipe on a device.

        Raises:
            UnknownModel: when there are none.
        """
        base = base_name(recipe)
        terms = self.terms.get((base, device)) or self.terms.get((base, ANY_DEVICE))
        if terms is None:
            raise UnknownModel(
                f"{self.model_id} is not served with recipe {recipe} on {device}; recipes here: {', '.join(self.recipes)}"
            )
        return terms
