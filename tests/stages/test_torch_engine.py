"""The torch engine on small models: right numbers, its own tensors only, and hostile steps that hurt nobody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tessella_p2p.base.errors import (
    ArtifactError,
    CacheMiss,
    ConfigurationError,
    InvalidStep,
    NotCertified,
    Overloaded,
    PromptTooLong,
)
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.model.config import ModelConfig
from tessella_p2p.model.gguf import GgmlType, GgufFile
from tessella_p2p.model.recipe import RECIPES
from tessella_p2p.stages import torch_device, torch_engine, torch_linear
from tessella_p2p.stages.engine import Sampled, StageEngine, StepInput, StepOutput
from tessella_p2p.stages.loading import load_engine, published_name
from tessella_p2p.stages.torch_weights import load_weights
from tessella_p2p.wire.frames import DType
from tests.model.tiny_gguf import VOCABULARY, Stored, build, tiny_llama, write_tiny_llama
from tests.model.tiny_gguf import floats as tiny_floats
from tests.stages.reference_llama import ReferenceLlama
from tests.stages.stage_runs import (
    GREEDY,
    alone,
    first_step,
    ids_body,
    key_of,
    mixed,
    play,
    random_prompts,
)

WHOLE = LayerRange(0, 3)
TORCH = [name for name, recipe in RECIPES.items() if recipe.engine == "torch"]
PROMPT = random_prompts([150], VOCABULARY)[0]
Load = Callable[[LayerRange], StageEngine]


@pytest.fixture(params=TORCH)
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Load:
    """Loads ranges of a tiny model in each recipe."""
    recipe = RECIPES[request.param]
    path = write_tiny_llama(tmp_path, matrices=GgmlType.Q4_1)
    return lambda layers: load_engine(path, layers, recipe, max_sessions=4, max_positions=256)


def floats(engine: StageEngine, rows: bytes) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    if engine.wire_dtype is DType.F32:
        return np.frombuffer(rows, "<f4").reshape(-1, engine.hidden_size)
    if engine.wire_dtype is DType.F16:
        return np.frombuffer(rows, "<f2").astype(np.float32).reshape(-1, engine.hidden_size)
    wide = np.frombuffer(rows, "<u2").astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32).reshape(-1, engine.hidden_size)


def hidden_body(engine: StageEngine, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bytes:
    """Rows in the engine's wire dtype, rounded towards zero."""
    if engine.wire_dtype is DType.F32:
        return values.astype("<f4").tobytes()
    if engine.wire_dtype is DType.F16:
        return values.astype("<f2").tobytes()
    return (values.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2").tobytes()


@pytest.mark.parametrize("matrices", [GgmlType.F32, GgmlType.Q4_1])
@pytest.mark.parametrize("tied", [True, False])
def test_f32_is_the_reference_within_float32(tmp_path: Path, matrices: GgmlType, tied: bool) -> None:
    metadata, tensors = tiny_llama(matrices=matrices, tied=tied)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(build(metadata, tensors))
    reference = ReferenceLlama(metadata, tensors)
    head = load_engine(path, LayerRange(0, 2), RECIPES["torch-f32"])
    rows = floats(head, play([head], {0: PROMPT}, alone({0: PROMPT}, 37)).rows[0])
    assert np.abs(rows - reference.hidden(PROMPT, 2)).max() < 2e-4
    tokens = play([load_engine(path, WHOLE, RECIPES["torch-f32"])], {0: PROMPT}, alone({0: PROMPT}, 1)).tokens
    logits = reference.logits(PROMPT)
    for position in range(1, len(PROMPT) + 1):
        row = logits[position - 1]
        assert row[tokens[0, position]] > row.max() - 1e-3


def test_int4_stays_close_to_the_reference(tmp_path: Path) -> None:
    metadata, tensors = tiny_llama(matrices=GgmlType.Q4_1)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(build(metadata, tensors))
    engine = load_engine(path, LayerRange(0, 2), RECIPES["torch-int4"])
    rows = floats(engine, play([engine], {0: PROMPT}, alone({0: PROMPT}, 37)).rows[0])
    expected = ReferenceLlama(metadata, tensors).hidden(PROMPT, 2)
    error = np.sqrt(((rows - expected) ** 2).mean() / (expected**2).mean())
    assert error < 0.03  # bfloat16 has 8 bits; a swapped nibble, scale or head gives over 0.5


@pytest.mark.parametrize("seed", range(2))
def test_any_schedule_and_split_gives_the_same_bits(load: Load, seed: int) -> None:
    prompts = random_prompts([1, 40, 150, 7], VOCABULARY, seed)
    whole, head = load(WHOLE), load(LayerRange(0, 2))
    rows = play([head], prompts, alone(prompts, 256)).rows
    tokens = play([whole], prompts, alone(prompts, 1)).tokens
    assert play([head], prompts, mixed(prompts, seed)).rows == rows
    chain = [load(LayerRange(start, start + 1)) for start in range(3)]
    assert play(chain, prompts, mixed(prompts, seed + 1)).tokens.items() <= tokens.items()
    assert play(chain[:2], prompts, mixed(prompts, seed + 2)).rows == rows


def test_a_stage_reads_its_own_tensors_and_no_others(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path, matrices=GgmlType.Q4_1)
    for recipe in map(RECIPES.__getitem__, TORCH):
        for layers in (LayerRange(0, 1), LayerRange(1, 2), LayerRange(1, 3), WHOLE):
            with GgufFile.open(path) as file:
                config = ModelConfig.from_gguf(file)
                load_weights(file, config, layers, recipe, torch.device("cpu"))
                sizes = {name: file.tensors[name].size_bytes for name in config.tensor_shapes(layers)}
                assert file.bytes_read == sizes


def test_a_middle_stage_loads_from_a_file_whose_other_tensors_are_zeros(tmp_path: Path) -> None:
    metadata, tensors = tiny_llama(matrices=GgmlType.Q4_1)
    middle = {
        name: stored if name.startswith("blk.1.") else Stored(stored.shape, stored.kind, bytes(len(stored.raw)))
        for name, stored in tensors.items()
    }
    bodies = []
    for name, content in (("whole", tensors), ("sparse", middle)):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(build(metadata, content))
        engine = load_engine(path, LayerRange(1, 2), RECIPES["torch-f32"])
        engine.open_session(key_of(1), 8)
        body = hidden_body(engine, np.linspace(-1, 1, 3 * 64, dtype=np.float32))
        (answer,) = engine.forward([StepInput(key_of(1), 0, 3, DType.F32, body)])
        assert isinstance(answer, StepOutput)
        bodies.append(bytes(answer.body))
    assert bodies[0] == bodies[1]


# ---- hostile steps ----


def bad_bodies(engine: StageEngine) -> dict[str, StepInput]:
    """Steps that a stage behind the head must refuse, each for session 2 at position 0."""
    size, key = engine.hidden_size, key_of(2)
    rows = np.ones((2, size), np.float32)
    good = hidden_body(engine, rows)
    spoiled = {}
    for name, value in (("nan", np.nan), ("inf", np.inf), ("minus inf", -np.inf)):
        bad = rows.copy()
        bad[1, size // 2] = value
        spoiled[name] = StepInput(key, 0, 2, engine.wire_dtype, hidden_body(engine, bad))
    other = DType.F16 if engine.wire_dtype is DType.BF16 else DType.BF16
    return {
        **spoiled,
        "token ids": first_step(2, [1, 2]),
        "another dtype": StepInput(key, 0, 2, other, good),
        "too few bytes": StepInput(key, 0, 2, engine.wire_dtype, good[:-1]),
        "too many bytes": StepInput(key, 0, 2, engine.wire_dtype, good + good),
        "no rows": StepInput(key, 0, 0, engine.wire_dtype, b""),
        "negative rows": StepInput(key, 0, -1, engine.wire_dtype, good),
        "a gap": StepInput(key, 1, 2, engine.wire_dtype, good),
    }


def test_a_spoiled_step_is_refused_and_its_neighbours_bits_stay(load: Load) -> None:
    engine = load(LayerRange(1, 2))
    body = hidden_body(engine, np.linspace(-1, 1, 2 * engine.hidden_size, dtype=np.float32))

    def good(session: int) -> StepInput:
        return StepInput(key_of(session), 0, 2, engine.wire_dtype, body)

    for session in (1, 2):
        engine.open_session(key_of(session), 64)
    (expected,) = engine.forward([good(1)])
    assert isinstance(expected, StepOutput)
    for name, bad in bad_bodies(engine).items():
        engine.close_session(key_of(1))
        engine.open_session(key_of(1), 64)
        refused, answer = engine.forward([bad, good(1)])
        assert isinstance(refused, InvalidStep), name
        assert isinstance(answer, StepOutput), name
        assert bytes(answer.body) == bytes(expected.body), name
    (after,) = engine.forward([good(2)])
    assert isinstance(after, StepOutput)
    assert bytes(after.body) == bytes(expected.body)


def test_finite_rows_that_overflow_leave_nothing_behind(tmp_path: Path) -> None:
    """Finite numbers may become infinities inside: the session gets an error, and its slot stays clean."""
    metadata, tensors = tiny_llama()
    tensors["blk.1.attn_v.weight"] = tiny_floats(np.full((32, 64), 3e38, np.float32))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(build(metadata, tensors))
    engine = load_engine(path, LayerRange(1, 2), RECIPES["torch-f32"], max_sessions=1)
    engine.open_session(key_of(1), 8)
    zeros = StepInput(key_of(1), 0, 2, DType.F32, bytes(512))  # the only rows that such values leave finite
    (refused,) = engine.forward([StepInput(key_of(1), 0, 3, DType.F32, np.ones(192, "<f4").tobytes())])
    assert isinstance(refused, InvalidStep)
    (after,) = engine.forward([zeros])
    assert isinstance(after, StepOutput)
    assert bytes(after.body) == bytes(512)


def test_a_freed_slot_hands_nothing_on(load: Load) -> None:
    """Even a slot full of NaN, as a crash in the middle of a turn may leave it, is clean for its next session."""
    engine = load(WHOLE)
    fresh = play([engine], {0: PROMPT}, alone({0: PROMPT}, 9)).tokens
    sessions = [key_of(session) for session in range(10, 14)]
    for key in sessions:
        engine.open_session(key, 256)
        engine.forward([StepInput(key, 0, 200, DType.U32, ids_body([5] * 200))])
    with torch.inference_mode():
        for layer in engine._arena.layers:  # type: ignore[attr-defined]
            layer[:, :, :, :200] = float("nan")
    for key in sessions:
        engine.close_session(key)
    assert play([engine], {0: PROMPT}, alone({0: PROMPT}, 9)).tokens == fresh


def test_token_ids_out_of_the_vocabulary_are_refused(load: Load) -> None:
    engine = load(LayerRange(0, 1))
    engine.open_session(key_of(1), 8)
    for token in (VOCABULARY, 2**31, 2**32 - 1):
        (answer,) = engine.forward([first_step(1, [0, token])])
        assert isinstance(answer, InvalidStep)
        assert str(token) in str(answer)
    (answer,) = engine.forward([first_step(1, [0, VOCABULARY - 1])])
    assert isinstance(answer, StepOutput)


def test_sessions_are_isolated_bounded_and_in_order(load: Load) -> None:
    engine = load(WHOLE)
    with pytest.raises(PromptTooLong):
        engine.open_session(key_of(1), 257)
    for session in range(4):
        engine.open_session(key_of(session), 4)
    with pytest.raises(Overloaded):
        engine.open_session(key_of(9), 4)
    answers = engine.forward(
        [
            first_step(1, [1, 2], sample=GREEDY),
            first_step(9, [1]),
            first_step(2, [1] * 5),
            first_step(1, [3], position=2),
        ]
    )
    assert [type(answer) for answer in answers] == [Sampled, CacheMiss, PromptTooLong, InvalidStep]
    (replayed,) = engine.forward([first_step(1, [1, 2], sample=GREEDY)])
    assert isinstance(replayed, InvalidStep)
    assert engine.forward([first_step(1, [3], position=2)]) == [None]


def test_a_stage_says_what_it_is(load: Load) -> None:
    engines = [load(LayerRange(start, start + 1)) for start in range(3)]
    assert [(engine.is_head, engine.is_tail) for engine in engines] == [(True, False), (False, False), (False, True)]
    kv_bytes = 2 * 4 * 2 * 256 * 16 * 4
    assert all(engine.memory_bytes > kv_bytes for engine in engines)
    assert engines[0].hidden_size == 64
    assert engines[0].max_positions == 256


def test_a_stage_says_how_much_of_its_kv_is_used(load: Load) -> None:
    engine = load(WHOLE)
    before = engine.kv
    assert before.pages_total * before.page_bytes == 2 * 3 * 4 * 2 * 256 * 16 * 4
    assert before.pages_used == 0
    for session, rows in ((1, 1), (2, before.page_positions + 1)):
        engine.open_session(key_of(session), 200, b"a scope")
        engine.forward([first_step(session, [1] * rows)])
    assert engine.kv.pages_used == 3
    engine.close_session(key_of(2))
    assert engine.kv.pages_used == 1
    engine.close()


def test_everything_of_a_step_is_on_the_stages_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's device without data refuses to mix with the CPU, as a GPU does."""
    meta = torch.device("meta")
    monkeypatch.setattr(torch_engine, "torch_device", lambda recipe, name: meta)
    path = write_tiny_llama(tmp_path, matrices=GgmlType.Q4_1)
    for name in ("torch-f32", "torch-f16", "torch-bf16"):
        engine = torch_engine.TorchEngine.load(
            path, WHOLE, RECIPES[name], device="meta", threads=1, max_sessions=4, max_positions=256
        )
        works: list[torch_engine._Work] = []
        with torch.inference_mode():
            for session, rows in enumerate([120, 1, 1]):
                engine.open_session(key_of(session), 200)
                work = engine._admit(session, first_step(session, [1] * rows), works)
                assert isinstance(work, torch_engine._Work)
                works.append(work)
            hidden = engine._hidden_states(works)
            tail = engine._weights.tail
            assert tail is not None
            assert (hidden.device, hidden.shape) == (meta, (122, 64))
            assert tail.output.apply(engine._norm(hidden, tail.norm)).device == meta


def test_a_drift_class_names_the_build_and_what_it_computes() -> None:
    classes = {name: torch_device.drift_class(RECIPES[name]) for name in TORCH}
    start = f"{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}-".lower()
    assert all(drift_class.startswith(start) for drift_class in classes.values())
    assert len({drift_class.rpartition("-")[2] for drift_class in classes.values()}) == len(TORCH)
    for name in TORCH:
        assert published_name(RECIPES[name]) == f"{name}@{classes[name]}"
        torch_device.drift_class.cache_clear()
        assert torch_device.drift_class(RECIPES[name]) == classes[name]
    assert published_name(RECIPES["f32"]) == "f32"


def test_the_probe_tells_other_kernels_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES["torch-f32"]
    before = torch_device.drift_class(recipe)
    monkeypatch.setattr(torch_linear, "MAX_BLOCK", 384)  # the same products, added up in another order
    torch_device.drift_class.cache_clear()
    assert torch_device.drift_class(recipe) != before
    torch_device.drift_class.cache_clear()


@pytest.mark.parametrize(
    ("recipe", "device", "error"),
    [
        ("torch-f32", "abacus", ConfigurationError),
        ("torch-f32", "meta", ConfigurationError),
        ("torch-f32", "cuda:99", ConfigurationError),
        ("torch-int4", "cuda", NotCertified),
        ("f32", "cuda", NotCertified),
    ],
)
def test_a_device_that_is_not_there_or_lacks_the_recipe_is_refused(
    tmp_path: Path, recipe: str, device: str, error: type[Exception]
) -> None:
    path = write_tiny_llama(tmp_path)
    with pytest.raises(error, match=device):
        load_engine(path, WHOLE, RECIPES[recipe], device=device)
    with pytest.raises(error, match=device):
        published_name(RECIPES[recipe], device)


def test_a_weight_that_half_precision_cannot_hold_is_refused(tmp_path: Path) -> None:
    metadata, tensors = tiny_llama()
    tensors["blk.1.attn_v.weight"] = tiny_floats(np.full((32, 64), 1e6, np.float32))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(build(metadata, tensors))
    with pytest.raises(NotCertified, match="f16"):
        load_engine(path, WHOLE, RECIPES["torch-f16"])


@pytest.mark.parametrize(("name", "most"), [("torch-f16", 0.004), ("torch-bf16", 0.03)])
def test_half_precision_stays_close_to_the_reference(tmp_path: Path, name: str, most: float) -> None:
    metadata, tensors = tiny_llama(matrices=GgmlType.Q4_1)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(build(metadata, tensors))
    engine = load_engine(path, LayerRange(0, 2), RECIPES[name])
    rows = floats(engine, play([engine], {0: PROMPT}, alone({0: PROMPT}, 37)).rows[0])
    expected = ReferenceLlama(metadata, tensors).hidden(PROMPT, 2)
    assert np.sqrt(((rows - expected) ** 2).mean() / (expected**2).mean()) < most


def test_the_models_context_bounds_the_positions(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    assert load_engine(path, WHOLE, RECIPES["torch-f32"]).max_positions == 512


def test_what_cannot_be_loaded_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    with pytest.raises(ArtifactError, match="2–4"):
        load_engine(path, LayerRange(2, 4), RECIPES["torch-f32"])
    for threads, sessions, positions in ((0, 1, 1), (1, 0, 1), (1, 10**6, 1), (1, 1, 0)):
        with pytest.raises(ConfigurationError):
            load_engine(
                path,
                WHOLE,
                RECIPES["torch-f32"],
                threads=threads,
                max_sessions=sessions,
                max_positions=positions,
            )
    metadata, tensors = tiny_llama(metadata={"general.architecture": "mamba"})
    path.write_bytes(build(metadata, tensors))
    with pytest.raises(NotCertified, match="mamba"):
        load_engine(path, WHOLE, RECIPES["torch-f32"])
