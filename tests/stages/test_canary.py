"""A canary keeps every rule of an engine, and is wrong in a way of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import CacheMiss, InvalidStep
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.model.gguf import GgmlType
from tessella_p2p.model.recipe import RECIPES
from tessella_p2p.stages.canary import CanaryEngine, Mode, dressed, scaled, shifted
from tessella_p2p.stages.engine import Sampled, StageEngine, StepInput, StepOutput
from tessella_p2p.stages.loading import load_engine
from tessella_p2p.stages.rows import MAX_PPM, body_of, cast, deviation_ppm, floats_of
from tessella_p2p.stages.sampler import Sampler
from tessella_p2p.stages.toy import ToyEngine, ToyModel
from tessella_p2p.wire.frames import DType
from tessella_p2p.wire.messages import Sampling
from tests.model.tiny_gguf import write_tiny_llama
from tests.stages.openings import STAGES
from tests.stages.stage_runs import GREEDY, first_step, key_of

MODEL = ToyModel(6, vocabulary=64)
ME, OTHER = PeerId(STAGES[0].peer_id), PeerId(STAGES[1].peer_id)
HIDDEN = [DType.F32, DType.F16, DType.BF16]


def both(mode: Mode, layers: tuple[int, int]) -> tuple[ToyEngine, CanaryEngine]:
    honest, hidden = ToyEngine(MODEL, LayerRange(*layers)), ToyEngine(MODEL, LayerRange(*layers))
    canary = CanaryEngine(hidden, mode, ME)
    for engine in (honest, canary):
        engine.open_session(key_of(1), 50)
    return honest, canary


def hidden_step(rows: int, **changes: Any) -> StepInput:
    values = np.arange(1, rows * 8 + 1, dtype="<f4")
    fields: dict[str, Any] = {"position": 0, "rows": rows, "dtype": DType.F32, "body": values.tobytes(), "sample": None}
    return StepInput(key_of(1), **(fields | changes))


def test_a_scaling_stage_answers_the_truth_times_its_own_factor() -> None:
    honest, canary = both("scale", (2, 4))
    (true,), (wrong,) = honest.forward([hidden_step(3)]), canary.forward([hidden_step(3)])
    assert isinstance(true, StepOutput)
    assert isinstance(wrong, StepOutput)
    assert bytes(wrong.body) == scaled(true.body, DType.F32, ME) != bytes(true.body)
    assert scaled(true.body, DType.F32, OTHER) != bytes(wrong.body), "another canary's answer is another one"


def test_an_echoing_stage_answers_its_input() -> None:
    _, canary = both("echo", (2, 4))
    step = hidden_step(3)
    assert canary.forward([step]) == [StepOutput(step.body, DType.F32)]


def test_an_echoing_head_answers_rows_that_the_next_stage_takes() -> None:
    _, canary = both("echo", (0, 2))
    (answer,) = canary.forward([first_step(1, [3, 60])])
    assert isinstance(answer, StepOutput)
    assert np.frombuffer(answer.body, "<f4").tolist() == [3.0] * 8 + [60.0] * 8


@pytest.mark.parametrize("mode", ["echo", "scale"])
def test_a_tail_names_another_token_of_the_vocabulary(mode: Mode) -> None:
    honest, canary = both(mode, (0, 6))
    step = first_step(1, [5, 7], sample=GREEDY)
    (true,), (wrong,) = honest.forward([step]), canary.forward([step])
    assert isinstance(true, Sampled)
    assert isinstance(wrong, Sampled)
    assert wrong.token_id == (7 if mode == "echo" else shifted(true.token_id, 64, ME)) != true.token_id


@given(st.integers(0, 63), st.sampled_from([1, 2, 64]))
def test_a_shift_stays_in_the_vocabulary_and_moves_wherever_it_can(token: int, vocabulary: int) -> None:
    moved = shifted(token % vocabulary, vocabulary, ME)
    assert 0 <= moved < vocabulary
    assert vocabulary == 1 or moved != token % vocabulary


def test_a_wrong_tokens_logprob_does_not_contradict_the_alternatives() -> None:
    honest, canary = both("scale", (0, 6))
    step = first_step(1, [5, 1], sample=Sampler(Sampling(num_top=20), logprobs=True))
    (true,), (wrong,) = honest.forward([step]), canary.forward([step])
    assert isinstance(true, Sampled)
    assert isinstance(wrong, Sampled)
    assert [top.logprob for top in wrong.top if top.token_id == wrong.token_id] == [wrong.logprob]
    assert wrong.logprob != true.logprob


@pytest.mark.parametrize("mode", ["echo", "scale"])
def test_errors_sessions_and_numbers_are_the_honest_engines(mode: Mode) -> None:
    honest, canary = both(mode, (2, 4))
    for name in (
        "layers",
        "is_head",
        "is_tail",
        "hidden_size",
        "vocabulary",
        "wire_dtype",
        "max_sessions",
        "max_positions",
    ):
        assert getattr(canary, name) == getattr(honest, name)
    assert (canary.kv, canary.memory_bytes) == (honest.kv, honest.memory_bytes)
    (gap,) = canary.forward([hidden_step(1, position=3)])
    assert isinstance(gap, InvalidStep)
    canary.keep([key_of(1)])
    canary.close_session(key_of(1))
    (closed,) = canary.forward([hidden_step(1)])
    assert isinstance(closed, CacheMiss)
    canary.close()


# ---- rows as numbers ----


@pytest.mark.parametrize("dtype", HIDDEN)
@given(data=st.data())
def test_rows_come_back_from_numbers_bit_for_bit(dtype: DType, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.floats(-60_000, 60_000, width=32), min_size=1, max_size=16))
    body = body_of(np.array(values, np.float32), dtype)
    assert len(body) == dtype.size * len(values)
    assert body_of(floats_of(body, dtype), dtype) == body
    assert cast(body, dtype, dtype) is body
    assert bytes(cast(cast(body, dtype, DType.F32), DType.F32, dtype)) == body


def test_bf16_rounds_to_the_nearest_and_of_two_to_the_even_one() -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    bits = np.random.default_rng(1).integers(0, 2**32, 100_000, np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 3e38)]
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    assert body_of(values, DType.BF16) == theirs


def test_token_ids_are_no_hidden_states() -> None:
    with pytest.raises(ValueError, match="U32"):
        floats_of(b"1234", DType.U32)
    with pytest.raises(ValueError, match="U32"):
        body_of(np.zeros(1, np.float32), DType.U32)


def test_a_deviation_is_that_of_the_worst_row_by_its_own_largest_number() -> None:
    true = np.array([1000.0, -1000.0, 1.0, -0.5], np.float32)
    got = np.array([1000.0, -999.0, 1.0, -0.5], np.float32)
    assert deviation_ppm(true, true, 2) == 0
    assert deviation_ppm(true, got, 2) == 1000
    got = np.array([1000.0, -1000.0, 1.0, -0.25], np.float32)
    assert deviation_ppm(true, got, 2) == 250_000, "a small row is not hidden by a large one"


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 3e38])
def test_what_is_no_number_is_as_far_off_as_can_be(wrong: float) -> None:
    true, got = np.array([1e-3, 0.0], np.float32), np.array([1e-3, wrong], np.float32)
    assert deviation_ppm(true, got, 1) == MAX_PPM
    assert deviation_ppm(np.zeros(2, np.float32), np.array([0.0, 1.0], np.float32), 1) == MAX_PPM
    assert deviation_ppm(np.zeros(2, np.float32), np.zeros(2, np.float32), 1) == 0


@pytest.mark.parametrize("mode", ["echo", "scale"])
def test_a_native_stage_can_be_a_canary(tmp_path: Path, mode: Mode) -> None:
    path = write_tiny_llama(tmp_path, matrices=GgmlType.Q4_1)
    layers = LayerRange(1, 2)

    def load() -> StageEngine:
        return load_engine(path, layers, RECIPES["f32"], max_sessions=2, max_positions=16)

    honest, canary = load(), dressed(load, mode, ME)()
    rows = np.random.default_rng(1).standard_normal((3, 64), np.float32)
    step = StepInput(key_of(1), 0, 3, DType.F32, rows.tobytes())
    for engine in (honest, canary):
        engine.open_session(key_of(1), 16)
    (true,), (wrong,) = honest.forward([step]), canary.forward([step])
    assert isinstance(true, StepOutput)
    assert isinstance(wrong, StepOutput)
    assert bytes(wrong.body) == (bytes(step.body) if mode == "echo" else scaled(true.body, DType.F32, ME))
    off = deviation_ppm(floats_of(true.body, DType.F32), floats_of(wrong.body, DType.F32), 3)
    assert off > 100_000, "far beyond any rounding"
