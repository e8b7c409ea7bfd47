"""Model configurations from GGUF headers: what is certified, and the refusal of everything else by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessella_p2p.base.errors import ArtifactError, NotCertified
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.model.config import ModelConfig
from tessella_p2p.model.gguf import GgufFile
from tests.model.tiny_gguf import Stored, build, floats, tiny_llama


def config_of(folder: Path, metadata: dict[str, object], tensors: dict[str, Stored]) -> ModelConfig:
    path = folder / "tiny.gguf"
    path.write_bytes(build(metadata, tensors))
    with GgufFile.open(path) as file:
        return ModelConfig.from_gguf(file)


def test_the_real_model(smollm2_path: Path) -> None:
    with GgufFile.open(smollm2_path) as file:
        config = ModelConfig.from_gguf(file)
    assert (config.architecture, config.layers, config.hidden, config.ffn) == ("llama", 30, 576, 1536)
    assert (config.heads, config.kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocabulary, config.context_length, config.rope_theta) == (49152, 8192, 100000.0)
    assert config.rms_eps == pytest.approx(1e-5)
    assert config.tied_embedding


@pytest.mark.parametrize("tied", [True, False])
def test_ranges_own_disjoint_tensors_except_a_tied_embedding(tmp_path: Path, tied: bool) -> None:
    metadata, tensors = tiny_llama(tied=tied)
    config = config_of(tmp_path, metadata, tensors)
    assert config.tied_embedding is tied
    parts = [set(config.tensor_shapes(LayerRange(*layers))) for layers in ((0, 1), (1, 2), (2, 3))]
    assert set().union(*parts) == set(tensors) == set(config.tensor_shapes(config.all_layers))
    assert parts[0] & parts[2] == ({"token_embd.weight"} if tied else set())
    assert not parts[1] & (parts[0] | parts[2])
    assert all(name.startswith("blk.1.") for name in parts[1])


def test_a_range_beyond_the_model_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, *tiny_llama())
    with pytest.raises(ArtifactError, match="2–4"):
        config.tensor_shapes(LayerRange(2, 4))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"general.architecture": "qwen2"}, "'qwen2'"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ({"llama.rope.scaling.factor": 2.0}, "rope.scaling.factor"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.sliding_window": 128}, "sliding_window"),
        ({"llama.logit_scale": 0.125}, "logit_scale"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"llama.attention.head_count_kv": (2, 2, 1)}, "differs from layer to layer"),
    ],
)
def test_what_no_test_certifies_is_refused_by_name(tmp_path: Path, changes: dict[str, object], match: str) -> None:
    metadata, tensors = tiny_llama(metadata=changes)
    with pytest.raises(NotCertified, match=match):
        config_of(tmp_path, metadata, tensors)


def test_neutral_values_of_such_settings_are_accepted(tmp_path: Path) -> None:
    neutral = {"llama.rope.scaling.type": "none", "llama.expert_count": 0, "llama.rope.dimension_count": 16}
    assert config_of(tmp_path, *tiny_llama(metadata=neutral)).head_dim == 16


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight", "blk.3.attn_norm.weight"])
def test_a_tensor_that_the_architecture_does_not_have_is_refused(tmp_path: Path, name: str) -> None:
    metadata, tensors = tiny_llama()
    tensors[name] = floats(np.zeros(64, np.float32))
    with pytest.raises(NotCertified, match=name.replace(".", r"\.")):
        config_of(tmp_path, metadata, tensors)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"llama.block_count": 0}, "block_count"),
        ({"llama.block_count": 1 << 20}, "block_count"),
        ({"llama.block_count": "3"}, "block_count"),
        ({"llama.block_count": 4}, r"no tensor 'blk\.3"),
        ({"llama.embedding_length": 32}, "shape"),
        ({"llama.attention.head_count": 3}, "share"),
        ({"llama.attention.head_count": 65}, "head_count"),
        ({"llama.attention.key_length": 15}, "halves"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
        ({"llama.rope.freq_base": -1.0}, "freq_base"),
        ({"llama.context_length": True}, "context_length"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, object], match: str) -> None:
    metadata, tensors = tiny_llama(metadata=changes)
    with pytest.raises(ArtifactError, match=match):
        config_of(tmp_path, metadata, tensors)


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_up.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    metadata, tensors = tiny_llama()
    del tensors[name]
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        config_of(tmp_path, metadata, tensors)
