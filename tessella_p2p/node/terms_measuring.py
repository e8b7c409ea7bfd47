"""How long the parts of a model take on this machine (shell: it loads engines and looks at the clock)."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tessella_p2p.base.ids import LayerRange, SessionId
from tessella_p2p.base.limits import DEFAULT_MAX_POSITIONS, DEFAULT_MAX_SESSIONS
from tessella_p2p.model.artifact import model_id_of
from tessella_p2p.model.config import ModelConfig
from tessella_p2p.model.gguf import GgufFile
from tessella_p2p.model.recipe import RECIPES, Recipe
from tessella_p2p.node.model_terms import model_terms
from tessella_p2p.node.terms_file import format_terms
from tessella_p2p.stages.engine import Sampled, SessionKey, StageEngine, StepInput
from tessella_p2p.stages.loading import load_engine
from tessella_p2p.stages.sampler import Sampler
from tessella_p2p.wire.frames import DType
from tessella_p2p.wire.messages import Sampling

_SESSIONS = 8
"""Rows of a measured turn, each of a session of its own: as a busy stage decodes."""
_TURNS = 40
_WARM_UP = 5
_LAYERS = 4
_TORCH_NAME: Final = {"metal": "mps"}
"""What the manual's name of a device is called where it computes."""


@dataclass(frozen=True, slots=True)
class PartCosts:
    """Nanoseconds of one turn: of a layer, and of what a range at either end does beside its layers."""

    layer: int
    embedding: int
    head: int


def measured_terms(path: Path, recipe_name: str, device: str, threads: int, max_positions: int | None) -> str:
    """The table of ``terms_file`` for one model on this machine: its memory as computed, its costs as measured.

    Raises:
        ArtifactError, NotCertified, ConfigurationError: as `load_engine`.
    """
    recipe = RECIPES[recipe_name]
    recipe.check_device(device)
    with GgufFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        positions = max_positions or min(DEFAULT_MAX_POSITIONS, config.context_length)
        computed = model_terms(
            config,
            file.tensors,
            recipe,
            num_sessions=DEFAULT_MAX_SESSIONS,
            max_positions=positions,
            device=device,
        )
    costs = measure_costs(path, recipe, config.layers, threads=threads, device=_TORCH_NAME.get(device, device))
    terms = replace(computed, layer_cost=costs.layer, embedding_cost=costs.embedding, head_cost=costs.head)
    return format_terms(model_id_of(path), recipe.name, device, terms)


def measure_costs(path: Path, recipe: Recipe, total_layers: int, *, threads: int = 1, device: str = "cpu") -> PartCosts:
    """Time turns over short ranges: a few layers more tell what one takes, and each end what it takes beside that. Blocks for seconds.

    Args:
        path: a GGUF file.
        recipe: the arithmetic.
        total_layers: of the model.
        threads, device: as for `load_engine`.

    Raises:
        ArtifactError, NotCertified, ConfigurationError: as `load_engine`.
    """

    def turn_ns(layers: LayerRange) -> float:
        positions = _WARM_UP + _TURNS
        engine = load_engine(
            path, layers, recipe, threads=threads, max_sessions=_SESSIONS, max_positions=positions, device=device
        )
        try:
            return _turn_ns(engine)
        finally:
            engine.close()

    few = min(_LAYERS, total_layers - 1)
    if few < 2:  # nothing to take the difference of: the whole model is one part
        return PartCosts(max(1, round(turn_ns(LayerRange(0, total_layers)) / total_layers)), 0, 0)
    first, first_few = turn_ns(LayerRange(0, 1)), turn_ns(LayerRange(0, few))
    layer = max(1.0, (first_few - first) / (few - 1))
    last = turn_ns(LayerRange(total_layers - 1, total_layers))
    return PartCosts(round(layer), max(0, round(first - layer)), max(0, round(last - layer)))


def _turn_ns(engine: StageEngine) -> float:
    """The median of turns with one row of each session."""
    sessions = [SessionKey(SessionId(index.to_bytes(16, "big")), 0) for index in range(_SESSIONS)]
    sampler = Sampler(Sampling()) if engine.is_tail else None
    dtype = DType.U32 if engine.is_head else engine.wire_dtype
    body = bytes(4) if engine.is_head else bytes(engine.hidden_size * dtype.size)
    for session in sessions:
        engine.open_session(session, _WARM_UP + _TURNS)
    times: list[int] = []
    for position in range(_WARM_UP + _TURNS):
        batch = [StepInput(session, position, 1, dtype, body, sampler) for session in sessions]
        begun = time.perf_counter_ns()
        answers = engine.forward(batch)
        times.append(time.perf_counter_ns() - begun)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            assert not engine.is_tail or isinstance(answer, Sampled)
    return statistics.median(times[_WARM_UP:])
