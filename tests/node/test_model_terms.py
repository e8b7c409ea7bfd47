"""What the allocator is told of an artifact, against what engines really take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import MIB
from tessella_p2p.model.config import EMBEDDING, ModelConfig
from tessella_p2p.model.gguf import GgmlType, GgufFile, TensorInfo
from tessella_p2p.model.recipe import RECIPES
from tessella_p2p.node.model_terms import OVERHEAD_MB, kept_bytes, model_terms
from tessella_p2p.stages.loading import load_engine
from tests.model.tiny_gguf import write_tiny_llama

LAYERS = LayerRange(0, 3)


def header(tmp_path: Path, kind: GgmlType = GgmlType.Q4_1) -> tuple[Path, ModelConfig, dict[str, TensorInfo]]:
    path = write_tiny_llama(tmp_path, matrices=kind)
    with GgufFile.open(path) as file:
        return path, ModelConfig.from_gguf(file), dict(file.tensors)


@pytest.mark.parametrize(
    ("recipe", "kind", "is_vocabulary", "bytes_per_32"),
    [
        ("f32", GgmlType.Q4_1, False, 20),
        ("f32", GgmlType.Q4_0, False, 20),
        ("f32", GgmlType.Q8_0, False, 34),
        ("f32", GgmlType.F16, False, 64),
        ("f32", GgmlType.Q5_0, False, 34),
        ("f32", GgmlType.Q6_K, False, 64),
        ("q8_0", GgmlType.F32, False, 34),
        ("q8_0", GgmlType.Q4_0, True, 20),
        ("q4_0", GgmlType.F32, False, 20),
        ("q4_0", GgmlType.F32, True, 34),
        ("torch-f32", GgmlType.Q4_1, False, 128),
        ("torch-f16", GgmlType.Q4_1, False, 128),
        ("torch-int4", GgmlType.Q4_1, False, 20),
        ("torch-int4", GgmlType.Q8_0, False, 32),
    ],
)
def test_a_weight_takes_what_the_recipe_keeps(
    tmp_path: Path, recipe: str, kind: GgmlType, is_vocabulary: bool, bytes_per_32: int
) -> None:
    _, config, _ = header(tmp_path)
    name = EMBEDDING if is_vocabulary else "blk.0.ffn_up.weight"
    tensor = TensorInfo(name, (64, 256), kind, 0, 0)
    assert kept_bytes(tensor, RECIPES[recipe], config) == 64 * 256 // 32 * bytes_per_32


def test_half_precision_is_half_as_wide_on_a_gpu(tmp_path: Path) -> None:
    _, config, _ = header(tmp_path)
    tensor = TensorInfo("blk.0.ffn_up.weight", (64, 256), GgmlType.Q4_1, 0, 0)
    assert [kept_bytes(tensor, RECIPES["torch-f16"], config, device) for device in ("cpu", "cuda", "metal")] == [
        64 * 256 * 4,
        64 * 256 * 2,
        64 * 256 * 2,
    ]


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.engine == "torch"])
def test_an_engine_takes_what_its_terms_say(tmp_path: Path, name: str) -> None:
    """All but the rotation tables and int8's scales, which are a few KB here."""
    path, config, tensors = header(tmp_path)
    recipe = RECIPES[name]
    engine = load_engine(path, LAYERS, recipe, max_sessions=1, max_positions=128)
    layers = sum(kept_bytes(tensors[name], recipe, config) for layer in LAYERS for name in config.layer_shapes(layer))
    ends = kept_bytes(tensors[config.output_name], recipe, config) + tensors[EMBEDDING].size_bytes
    kv_bytes = len(LAYERS) * 2 * config.kv_heads * config.head_dim * 4 * 128
    assert layers + ends + kv_bytes == pytest.approx(engine.memory_bytes, rel=0.12)


def test_the_terms_of_a_real_model(smollm2_path: Path) -> None:
    with GgufFile.open(smollm2_path) as file:
        config = ModelConfig.from_gguf(file)
        terms = model_terms(config, file.tensors, RECIPES["f32"], num_sessions=4, max_positions=2048)
        stored = sum(tensor.size_bytes for tensor in file.tensors.values())
    whole = terms.layer_mb * 30 + terms.embedding_mb
    assert 0 <= whole - stored / MIB <= 31  # each is rounded up to a whole MB
    assert terms.kv_mb == 2 * 3 * 64 * 4 * 4 * 2048 // MIB
    assert terms.overhead_mb == OVERHEAD_MB["native"] + 576 * 4 * 4 * 2048 // MIB
    assert 7.5 < terms.head_cost / terms.layer_cost < 8.5  # 28.3 to 3.54 million weights
    assert terms.claim_mb(LayerRange(0, 1)) > terms.overhead_mb
