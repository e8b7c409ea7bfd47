"""Vectors: what they are by an independent computation, and that neither stages, chunks, batches nor caches show in a bit of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tessella_p2p.base.errors import CacheMiss, InvalidStep, RemoteProtocolError
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.model.recipe import RECIPES
from tessella_p2p.stages.canary import CanaryEngine, turned
from tessella_p2p.stages.engine import Sampled, StageEngine, StepInput, StepOutput
from tessella_p2p.stages.loading import load_engine
from tessella_p2p.stages.native_engine import NativeEngine
from tessella_p2p.stages.pooling import Pool, Pooled, parse_pooled
from tessella_p2p.stages.toy import ToyEngine, ToyModel
from tessella_p2p.wire.frames import DType
from tests.model.tiny_gguf import VOCABULARY, build, tiny_llama
from tests.stages.reference_llama import ReferenceLlama
from tests.stages.stage_runs import GREEDY, first_step, ids_body, key_of, through

WIDTH = 8
PEER = PeerId("a canary")
IDS = [(7 * position + 3) % VOCABULARY for position in range(150)]  # more than two pages of KV

rows_of_floats = arrays.arrays(np.float32, (12, WIDTH), elements=st.floats(-(2.0**100), 2.0**100, width=32))


def pooled_in(rows: npt.NDArray[np.float32], cuts: Sequence[int]) -> bytes:
    pool = Pool(rows.shape[1])
    for start, end in pairwise([0, *cuts, len(rows)]):
        if start < end:
            pool.add(rows[start:end].tobytes())
    return bytes(pool.pooled().body)


@given(rows=rows_of_floats, cuts=st.lists(st.integers(0, 12), max_size=4).map(sorted))
def test_the_vector_is_the_mean_made_1_long_in_any_pieces(rows: npt.NDArray[np.float32], cuts: list[int]) -> None:
    mean = rows.astype(np.float64).mean(axis=0)
    if not np.linalg.norm(mean) > 0:
        with pytest.raises(InvalidStep):
            pooled_in(rows, cuts)
        return
    found = pooled_in(rows, cuts)
    assert found == pooled_in(rows, [])
    largest = np.abs(rows).max()
    if np.linalg.norm(mean) > 1e-6 * largest:  # else rounding of the sum decides
        assert np.frombuffer(found, "<f4") == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)
    assert parse_pooled(found).vector == Pooled(found).vector


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -math.inf])
def test_rows_without_a_direction_have_no_vector(value: float) -> None:
    with pytest.raises(InvalidStep):
        pooled_in(np.full((3, WIDTH), value, np.float32), [])


@given(st.binary(min_size=4 * WIDTH, max_size=4 * WIDTH))
def test_any_bytes_are_a_vector_1_long_or_a_peers_fault(body: bytes) -> None:
    try:
        vector = parse_pooled(body).vector
    except RemoteProtocolError:
        return
    assert math.hypot(*vector) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("numbers", [[0.0] * WIDTH, [1.0] * WIDTH, [math.nan] + [0.0] * 7, [math.inf] + [0.0] * 7])
def test_a_vector_that_no_honest_tail_sends_is_refused(numbers: list[float]) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_pooled(np.array(numbers, "<f4").tobytes())


def embed(
    engines: Sequence[StageEngine], ids: Sequence[int], chunk: int, session: int = 1, scope: bytes = b""
) -> bytes:
    """The vector of ``ids`` in chunks, through all stages."""
    pool = Pool(engines[0].hidden_size)
    for engine in engines:
        engine.open_session(key_of(session), len(ids), scope)
    answer: object = None
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        step = StepInput(key_of(session), start, len(part), DType.U32, ids_body(part), normed=True)
        (answer,) = through(engines, [step])
        answer = pool.fold(answer, draws=start + chunk >= len(ids))
        assert (answer is None) == (start + chunk < len(ids))
    for engine in engines:
        engine.close_session(key_of(session))
    assert isinstance(answer, Pooled)
    return bytes(answer.body)


@pytest.fixture(scope="module")
def reference() -> ReferenceLlama:
    return ReferenceLlama(*tiny_llama())


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    path.write_bytes(build(*tiny_llama()))
    return path


def chain(path: Path, recipe: str, cuts: Sequence[int]) -> list[StageEngine]:
    return [
        load_engine(path, LayerRange(*layers), RECIPES[recipe], threads=1, max_positions=256)
        for layers in pairwise(cuts)
    ]


@pytest.fixture(scope="module", params=["f32", "torch-f32"])
def chains(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[list[list[StageEngine]]]:
    found = [chain(tiny_path, request.param, cuts) for cuts in ((0, 3), (0, 1, 3), (0, 1, 2, 3))]
    yield found
    for engines in found:
        for engine in engines:
            engine.close()


def test_a_vector_is_that_of_the_papers_model(chains: list[list[StageEngine]], reference: ReferenceLlama) -> None:
    mean = reference.normed(IDS).mean(axis=0)
    found = np.frombuffer(embed(chains[0], IDS, len(IDS)), "<f4")
    assert found == pytest.approx(mean / np.linalg.norm(mean), abs=2e-6)


def test_stages_and_chunks_leave_no_trace(chains: list[list[StageEngine]]) -> None:
    whole = embed(chains[0], IDS, len(IDS))
    assert {embed(engines, IDS, chunk) for engines in chains for chunk in (1, 7, 64, 128)} == {whole}


def test_a_cached_prefix_leaves_no_trace(chains: list[list[StageEngine]]) -> None:
    engines = chains[1]
    alone = embed(engines, IDS, 64)
    for chunk in (64, len(IDS)):
        assert embed(engines, IDS, chunk, scope=b"a requester") == alone
    head, tail = engines
    assert (head.kv.prefix_positions_hit > 0) == isinstance(head, NativeEngine), "torch has no prefix cache"
    assert tail.kv.prefix_positions_hit == 0, "a mean takes every row of the tail"


def test_draws_of_others_in_a_batch_leave_no_trace(chains: list[list[StageEngine]]) -> None:
    (engine,) = chains[0]
    alone = embed(chains[0], IDS, len(IDS))
    for session in (1, 2):
        engine.open_session(key_of(session), 200)
    steps = [
        first_step(2, [5, 6, 7], sample=GREEDY),
        StepInput(key_of(1), 0, len(IDS), DType.U32, ids_body(IDS), normed=True),
    ]
    drawn, rows = engine.forward(steps)
    for session in (1, 2):
        engine.close_session(key_of(session))
    assert isinstance(drawn, Sampled)
    assert isinstance(rows, StepOutput)
    pool = Pool(engine.hidden_size)
    pool.add(rows.body)
    assert pool.pooled().body == alone


@pytest.mark.parametrize("recipe", ["q4_0", "torch-bf16"])
def test_other_recipes_are_near(tiny_path: Path, reference: ReferenceLlama, recipe: str) -> None:
    mean = reference.normed(IDS[:40]).mean(axis=0)
    (engine,) = chain(tiny_path, recipe, (0, 3))
    found = np.frombuffer(embed([engine], IDS[:40], 40), "<f4").astype(np.float64)
    engine.close()
    assert found @ mean / np.linalg.norm(mean) > 0.95


def test_a_real_models_vectors_are_the_same_in_two_stages(smollm2_path: Path) -> None:
    ids = [int(number) for number in np.random.default_rng(1).integers(0, 49152, 70)]
    whole, halves = chain(smollm2_path, "q8_0", (0, 30)), chain(smollm2_path, "q8_0", (0, 17, 30))
    assert embed(whole, ids, 70) == embed(halves, ids, 32)


def toys(*cuts: int) -> list[ToyEngine]:
    return [ToyEngine(ToyModel(6), LayerRange(*layers), max_positions=256) for layers in pairwise(cuts)]


def test_a_toy_has_vectors_too() -> None:
    whole = embed(toys(0, 6), IDS, len(IDS))
    assert embed(toys(0, 2, 5, 6), IDS, 13) == embed(toys(0, 6), IDS, 64, scope=b"x") == whole
    assert embed(toys(0, 6), IDS[:-1], 64) != whole


def test_a_canarys_vector_is_wrong_in_a_way_of_its_own() -> None:
    true = embed(toys(0, 6), IDS, 50)
    wrong = embed([CanaryEngine(toys(0, 6)[0], "scale", PEER)], IDS, 50)
    assert wrong == turned(true, WIDTH, PEER) != true
    parse_pooled(wrong)
    parse_pooled(embed([CanaryEngine(toys(0, 6)[0], "echo", PEER)], IDS, 50))


def test_an_error_is_passed_on() -> None:
    error = CacheMiss("gone")
    assert Pool(WIDTH).fold(error, draws=True) is error
    assert isinstance(Pool(WIDTH).fold(StepOutput(bytes(4 * WIDTH), DType.F32), draws=True), InvalidStep)
